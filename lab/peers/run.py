"""`bench peers` for the axes that shard training steps: our step compared with PyTorch's own, in the same processes, in
alternating rounds. For axis=cp see `attention`."""

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from lab.peers import pipelining
from lab.peers.common import TOLERANCE, CommonOptions, compare, profiles, show_ratios
from lab.peers.implementations import IMPLEMENTATIONS, Step
from ndtrain.arguments import option
from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.data import Batch
from ndtrain.measure.rounds import BlockTimer, ratio, run_rounds
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import BATCH_AXES
from ndtrain.model.flops import parameter_count

PEERS = {
    "one": ("bare", "transformers"),
    "dp": ("ddp",),
    "fsdp": ("fsdp2",),
    "tp": ("dtensor_tp", "dtensor_tp_sp"),
    "pp": ("torch_pipelining",),
}
_SIZES = (  # micro_batch is per rank; with tp and pp, for all ranks together
    "model.hidden_size", "model.intermediate_size", "model.num_hidden_layers", "model.num_attention_heads",
    "model.num_key_value_heads", "model.vocab_size", "train.seq_len", "train.micro_batch",
)  # fmt: skip
SHAPES = {
    "compute": (384, 1024, 4, 6, 6, 4096, 256, 4),
    "comm": (512, 1408, 6, 8, 8, 4096, 32, 1),
    "hidden256": (256, 704, 4, 8, 4, 4096, 128, 2),
    "hidden1024": (1024, 2816, 2, 16, 8, 4096, 512, 2),
    "tiny": (64, 128, 2, 4, 2, 256, 32, 2),
    "pp_compute": (384, 1024, 8, 6, 6, 2048, 256, 2),
    "pp_small": (256, 704, 8, 8, 4, 1024, 32, 1),
    "pp_tiny": (64, 128, 4, 4, 2, 256, 32, 2),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_v")  # the schedules of schedule=all
DISTINCT = 16  # steps before the batches repeat


class Case(NamedTuple):
    """One comparison: a name in `SHAPES` and, with axis=pp, a schedule."""

    shape: str
    schedule: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


@dataclass(frozen=True)
class Options(CommonOptions):
    """Options of `bench peers`, in addition to the common ones."""

    shape: Literal[(*SHAPES, "all")] = option(
        "shape of the model; all: a compute-bound shape, then an overhead-bound one", "all"
    )
    zero: Literal[1, 2, 3] = option("with axis=fsdp: ZeRO stage of ndtrain and FSDP2", 3)
    sequence_parallel: bool = option(
        "with axis=tp: sequence parallelism of ndtrain; there is a peer with it and one without", True
    )
    overlap: bool = option("with axis=tp: overlap communication in ndtrain", False)
    accumulate: int = option("microbatches per step; default: 1, with axis=pp 2 x ranks", 0)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "all"] = option(
        f"with axis=pp: schedule of ndtrain and the peer; all: {', '.join(SCHEDULES)}", "all"
    )
    exposed: bool = option("with axis=dp and axis=fsdp: also measure each rank's work without communication", True)

    @property
    def microbatches(self) -> int:
        return self.accumulate or (2 * self.world if self.axis == "pp" else 1)

    @property
    def resolved(self) -> dict[str, Any]:
        zero = self.zero if self.axis == "fsdp" else None
        return super().resolved | {"accumulate": self.microbatches, "zero": zero}

    @property
    def cases(self) -> list[Case]:
        both = {"tp": ("hidden256", "hidden1024"), "pp": ("pp_compute", "pp_small")}.get(self.axis, ("compute", "comm"))
        shapes = both if self.shape == "all" else (self.shape,)
        return [Case(shape, schedule) for shape in shapes for schedule in self.schedules]

    @property
    def schedules(self) -> tuple[str, ...]:
        if self.axis != "pp":
            return ("",)
        return SCHEDULES if self.schedule == "all" else (self.schedule,)

    @property
    def implementations(self) -> list[str]:
        alone = ["local"] if self.exposed and self.axis in ("dp", "fsdp") else []
        return ["ours", *PEERS[self.axis], *alone]

    def check(self) -> None:
        super().check()
        if self.axis != "fsdp" and self.zero != 3:
            raise ConfigError(f"zero={self.zero}: only axis=fsdp shards: remove zero or set axis=fsdp")
        if self.axis != "tp" and (self.overlap or not self.sequence_parallel):
            raise ConfigError("sequence_parallel and overlap only apply to axis=tp: remove them or set axis=tp")
        if self.axis == "one" and importlib.util.find_spec("transformers") is None:
            raise ConfigError("axis=one compares with transformers, which is not installed: pip install 'ndtrain[hf]'")
        if self.axis != "pp" and self.schedule != "all":
            raise ConfigError(f"schedule={self.schedule}: only axis=pp has a schedule: remove schedule or set axis=pp")
        for case in self.cases:
            kv_heads = config_of(self, case).model.num_key_value_heads
            if self.axis == "tp" and kv_heads % self.world:
                raise ConfigError(
                    f"ranks={self.world}: DTensor cannot split a head, and shape={case} has {kv_heads} key/value "
                    "heads: use fewer ranks"
                )
            if self.axis == "pp":
                pipelining.check(case.schedule, self.world, self.microbatches)


def run(options: Options) -> None:
    """Run the comparison; see `common.compare`."""
    compare(options, options.cases, measure, _show)


# ----------------------------------------------------------------------------------------------------------- a rank


class Training:
    """Runs one step per call, on batches that repeat."""

    def __init__(self, step: Step, batches: Sequence[Sequence[Batch]]):
        self._step, self._batches = step, batches
        self.losses: list[float] = []

    def __call__(self) -> None:
        self.losses.append(self._step(self._batches[len(self.losses) % len(self._batches)]))


def measure(rank: int, options: Options, case: Case) -> dict[str, Any]:
    """Build, check and time every implementation. Runs on each rank.

    Raises:
        RuntimeError: their losses differ.
    """
    cfg = config_of(options, case)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    batches = [make_batches(cfg, mesh, step) for step in range(DISTINCT)]
    trainings = {name: Training(IMPLEMENTATIONS[name](cfg, mesh), batches) for name in options.implementations}
    timers = {name: BlockTimer(training) for name, training in trainings.items()}
    run_rounds(timers, options)
    losses = {name: training.losses for name, training in trainings.items()}
    _require_equal_losses({n: losses[n] for n in ("ours", *PEERS[options.axis])}, TOLERANCE[options.precision])
    result = {
        "parameters": parameter_count(cfg.model),
        "config": {"model": asdict(cfg.model), "train": asdict(cfg.train)},
        "sides": {
            name: {"ms_per_step": timer.ms_per_step, "block_ms": timer.block_ms, "losses": list(losses[name])}
            for name, timer in timers.items()
        },
        "ratios": {name: ratio(timers[name], timers["ours"]) for name in PEERS[options.axis]},
    }
    if options.profile:
        result["profile"] = profiles(timers)
    return result


def config_of(options: Options, case: Case) -> Config:
    """Return the resolved configuration that every implementation trains with.

    Raises:
        ConfigError: the number of ranks does not divide the shape.
    """
    sizes = [f"{key}={size}" for key, size in zip(_SIZES, SHAPES[case.shape], strict=True)]
    longest = "model.max_position_embeddings=${train.seq_len}"
    common = ["optim.schedule=constant", f"precision.compute={options.precision}", longest]
    cfg = load_config([*sizes, *common, *([f"schedule={case.schedule}"] if case.schedule else [])])
    for axis in ("dp", "fsdp", "tp", "pp"):
        setattr(cfg.mesh, axis, options.world if options.axis == axis else 1)
    cfg.mesh.zero = options.zero if options.axis == "fsdp" else None
    cfg.tp.sequence_parallel, cfg.tp.overlap = options.sequence_parallel, options.overlap
    replicas = cfg.mesh.dp * cfg.mesh.fsdp
    cfg.train.global_batch = replicas * options.microbatches * cfg.train.micro_batch
    return resolve(cfg, options.world)


def make_batches(cfg: Config, mesh: Mesh, step: int) -> list[Batch]:
    """Return this rank's microbatches of random tokens."""
    t, draw = cfg.train, np.random.default_rng((step, mesh.index(*BATCH_AXES)))
    each = t.global_batch // mesh.size(*BATCH_AXES)
    rows = torch.from_numpy(draw.integers(0, cfg.model.vocab_size, (each, t.seq_len + 1)))
    return [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in rows.split(t.micro_batch)]


def _require_equal_losses(losses: dict[str, list[float]], bound: float) -> None:
    for name, own in losses.items():
        for step, (loss, expected) in enumerate(zip(own, losses["ours"], strict=True), start=1):
            if not abs(loss - expected) <= bound * abs(expected):
                raise RuntimeError(f"not the same work: at step {step} the loss of {name} is {loss}, ours {expected}")


# -------------------------------------------------------------------------------------------------------------- output


def _show(options: Options, case: Case, result: dict[str, Any]) -> None:
    t, figures = result["config"]["train"], result["sides"]
    print(
        f"\n{case}: axis={options.axis} ranks={options.world} {options.precision}"
        + f" zero={options.zero}" * (options.axis == "fsdp")
        + f" sequence_parallel={options.sequence_parallel} overlap={options.overlap}".lower() * (options.axis == "tp")
        + f", {result['parameters'] / 1e6:.1f} M parameters, {t['seq_len']} tokens x {t['micro_batch']} sequences"
        f" x {options.microbatches} microbatches a {'' if options.axis in ('tp', 'pp') else 'rank and '}step;"
        f" {options.rounds} rounds of {options.steps} steps"
    )
    alone = figures.get("local", {}).get("ms_per_step")
    for name, own in figures.items():
        exposed = f"   {1 - alone / own['ms_per_step']:4.0%} more than local" if alone and name != "local" else ""
        loss = f"loss {own['losses'][0]:.5f} -> {own['losses'][-1]:.5f} after {len(own['losses'])} steps"
        print(f"  {name:16} {own['ms_per_step']:9.2f} ms/step   {loss}{exposed}")
    show_ratios(result)
