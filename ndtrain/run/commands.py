"""The commands of `ndtrain`."""

from typing import NamedTuple

COMMANDS = {  # command -> its module
    "train": "ndtrain.train",
    "data": "ndtrain.data",
    "checkpoint": "ndtrain.checkpoint",
    "evaluate": "ndtrain.evaluate",
    "generate": "ndtrain.generate",
    "schedule": "ndtrain.schedule",
    "plan": "ndtrain.plan",
    "bench": "ndtrain.bench",
    "preflight": "ndtrain.preflight",
    "report": "ndtrain.report",
    "torchrun": "ndtrain.run.torchrun",
}
CONFIGURED = ("train", "preflight", "plan", "torchrun")  # the commands that accept a run's overrides


class Plan(NamedTuple):
    """A subcommand of `ndtrain plan`.

    Attributes:
        text: its description in `--help`.
        examples: example arguments, as written after its name.
    """

    text: str
    examples: tuple[str, ...]


PLANS = {  # name -> description; the module is ndtrain.plan.<name>
    "dry": Plan(
        "simulates one training step of a rank without its memory: bytes of state, peak memory and its contents, "
        "FLOPs, every collective by axis with its bytes, files and bytes of a checkpoint",
        (
            "recipe=llama3_8b hardware=h100 nodes=4 mesh.tp=8",
            "recipe=llama3_8b hardware=h100 nodes=128 mesh.pp=4 rank=1000 json=rank.json",
            "recipe=llama_small hardware=cpu mesh.fsdp=2",
        ),
    ),
    "program": Plan(
        "prints the ops of a rank in one training step, in the order in which the executor runs them: gathers, forward "
        "and backward passes, reductions, messages between stages, and sums",
        (
            "recipe=llama3_8b hardware=h100 mesh.pp=2 mesh.fsdp=4 rank=4",
            "recipe=llama_small mesh.fsdp=2 hardware=cpu json=program.json",
        ),
    ),
    "table": Plan(
        "predicts step time, tokens/s, MFU and memory for each row of a CSV file of published measurements, or "
        "names the reason if it cannot; runs of other trainers are predicted as if ndtrain ran them",
        ("in=published.csv out=predicted.csv",),
    ),
    "fit": Plan(
        "fits the planner's rates to the measurements of such a file, cross-validates by source, and prints the errors "
        "of each source",
        ("in=published.csv json=fit.json svg=fit.svg", "in=published.csv fit=false"),
    ),
    "predict": Plan(
        "predicts step time, tokens/s, MFU, HFU and memory of a run without its machines, and breaks down the step "
        "time",
        (
            "recipe=llama3_8b hardware=h100 nodes=1 mesh.fsdp=8",
            "recipe=llama3_8b hardware=h100 nodes=16 mesh.tp=8 json=prediction.json svg=waterfall.svg",
        ),
    ),
    "goodput": Plan(
        "finds the best checkpoint interval, the expected goodput, and the days and cost of a run on hosts that fail, "
        "with synchronous and asynchronous saves and with replicas that may be lost; plots them over GPU counts",
        (
            "recipe=llama3_8b hardware=h100 nodes=16 price=2",
            "recipe=llama3_8b hardware=h100 nodes=16 mesh.dp=16 step_time_s=1.5 svg=goodput.svg",
        ),
    ),
    "calibrate": Plan(
        "measures matmuls, attention, memory, host and links of this machine, and writes a hardware description for "
        "hardware=",
        ("out=this_machine.yaml", "out=this_machine.yaml dtypes=fp32 ranks=4"),
    ),
    "validate": Plan(
        "runs some fifty small models on this machine, and compares their step times with the predictions for its "
        "hardware description",
        ("hardware=this_machine.yaml", "hardware=this_machine.yaml ranks=1,2 json=validation.json"),
    ),
    "search": Plan(
        "finds the fastest mesh, ZeRO stage, schedule, recompute, microbatch and kind of cp that fits in memory, among "
        "the choices that the overrides leave open; explains why the next ones are slower, and prints their overrides",
        (
            "recipe=llama3_8b hardware=h100 nodes=16",
            "recipe=llama3_8b hardware=h100 nodes=16 mesh.tp=8 schedule=1f1b json=search.json",
            "recipe=llama3_8b hardware=h100 nodes=16 against='mesh.tp=8 mesh.fsdp=16'",
        ),
    ),
    "scaling": Plan(
        "predicts tokens/s and MFU over GPU counts, at a fixed and at a growing global batch: where fsdp alone is "
        "bound by compute, communication or the batch, and from which count tp, cp and pp are faster",
        (
            "recipe=llama3_8b hardware=h100 least=8 most=1024",
            "recipe=llama3_8b hardware=h100 train.global_batch=512 json=scaling.json svg=scaling.svg",
        ),
    ),
    "tune": Plan(
        "measures the best candidates of a search, or given ones, for a few steps each on this machine, names the "
        "fastest, and writes the ratios of measured to predicted times into a hardware description",
        (
            "recipe=llama_small hardware=mine.yaml ranks=2 folder=tuning",
            "recipe=llama_small hardware=cpu ranks=2 folder=tuning candidates='mesh.fsdp=2 | mesh.tp=2 | mesh.pp=2'",
        ),
    ),
}
