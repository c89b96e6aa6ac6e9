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
        "runs one training step of a rank on tensors without memory: bytes of state, peak memory and what is alive "
        "then, FLOPs, every collective by axis with its bytes, files and bytes of a checkpoint",
        (
            "recipe=llama3_8b hardware=h100 nodes=4 mesh.tp=8",
            "recipe=llama3_8b hardware=h100 nodes=128 mesh.pp=4 rank=1000 json=rank.json",
            "recipe=llama_small hardware=cpu mesh.fsdp=2",
        ),
    ),
    "program": Plan(
        "prints what a rank launches, runs and waits for in a step, in order: gathers, passes of layers, reductions, "
        "messages between stages, and sums; the list that the executor runs",
        (
            "recipe=llama3_8b hardware=h100 mesh.pp=2 mesh.fsdp=4 rank=4",
            "recipe=llama_small mesh.fsdp=2 hardware=cpu json=program.json",
        ),
    ),
    "table": Plan(
        "predicts step time, tokens/s, MFU and memory of the rows of a CSV file of published measurements, and says "
        "why a row cannot be expressed; other trainers' runs are priced as if ndtrain ran them",
        ("in=published.csv out=predicted.csv",),
    ),
    "fit": Plan(
        "fits the planner's rates to the measurements of such a file, with a cross-validation by source, and tells the "
        "errors of each source",
        ("in=published.csv json=fit.json svg=fit.svg", "in=published.csv fit=false"),
    ),
    "predict": Plan(
        "predicts step time, tokens/s, MFU, HFU and memory of a run on machines that are not at hand, and where the "
        "step's time goes",
        (
            "recipe=llama3_8b hardware=h100 nodes=1 mesh.fsdp=8",
            "recipe=llama3_8b hardware=h100 nodes=16 mesh.tp=8 json=prediction.json svg=waterfall.svg",
        ),
    ),
    "goodput": Plan(
        "the best checkpoint interval, the expected goodput, and the days and cost of a run whose hosts fail, with "
        "synchronous and asynchronous saves and with replicas that may be lost; drawn over GPU counts",
        (
            "recipe=llama3_8b hardware=h100 nodes=16 price=2",
            "recipe=llama3_8b hardware=h100 nodes=16 mesh.dp=16 step_time_s=1.5 svg=goodput.svg",
        ),
    ),
    "calibrate": Plan(
        "measures matmuls, attention, memory, host and links of this machine, and writes a description of it that "
        "hardware= takes",
        ("out=this_machine.yaml", "out=this_machine.yaml dtypes=fp32 ranks=4"),
    ),
    "validate": Plan(
        "runs the steps of some fifty small models on this machine and compares their times with the predictions for "
        "its description",
        ("hardware=this_machine.yaml", "hardware=this_machine.yaml ranks=1,2 json=validation.json"),
    ),
    "search": Plan(
        "finds the fastest legal mesh, zero stage, schedule, recompute, microbatch and kind of cp that fits, among "
        "those that the overrides leave open; says why the next ones lose, and prints their overrides",
        (
            "recipe=llama3_8b hardware=h100 nodes=16",
            "recipe=llama3_8b hardware=h100 nodes=16 mesh.tp=8 schedule=1f1b json=search.json",
            "recipe=llama3_8b hardware=h100 nodes=16 against='mesh.tp=8 mesh.fsdp=16'",
        ),
    ),
    "scaling": Plan(
        "says tokens/s and MFU over numbers of GPUs, at a fixed and at a growing global batch: where fsdp alone is "
        "bound by compute, by communication and by the batch, and from where on tp, cp and pp pay",
        (
            "recipe=llama3_8b hardware=h100 least=8 most=1024",
            "recipe=llama3_8b hardware=h100 train.global_batch=512 json=scaling.json svg=scaling.svg",
        ),
    ),
    "tune": Plan(
        "measures the best candidates of a search, or given ones, for a few steps each on this machine, names the "
        "fastest, and writes what was measured over what was predicted into a description of the hardware",
        (
            "recipe=llama_small hardware=mine.yaml ranks=2 folder=tuning",
            "recipe=llama_small hardware=cpu ranks=2 folder=tuning candidates='mesh.fsdp=2 | mesh.tp=2 | mesh.pp=2'",
        ),
    ),
}
