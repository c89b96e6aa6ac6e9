"""`bench peers`: our step against PyTorch's own, in the same processes, by turns.

The sides take turns in blocks of a few steps, so that whatever else the machine does meets them alike; a block's time
is that of its slowest rank, and each round gives one ratio peer/ours. Above 1 we are faster.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ndtrain.bench.profile import profile
from ndtrain.bench.ranks import run_ranks
from ndtrain.bench.sides import SIDES, Step
from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.cost import parameter_count
from ndtrain.data import Batch
from ndtrain.layout import BATCH_AXES
from ndtrain.mesh import Mesh, MeshSpec
from ndtrain.metrics.peak import cpu_model

PEERS = {"one": ("bare", "transformers"), "dp": ("ddp",), "fsdp": ("fsdp2",)}
SHAPES = {  # micro_batch is per rank
    "compute": [
        "model.hidden_size=384", "model.intermediate_size=1024", "model.num_hidden_layers=4",
        "model.num_attention_heads=6", "model.num_key_value_heads=6", "model.vocab_size=4096",
        "train.seq_len=256", "train.micro_batch=4",
    ],
    "comm": [
        "model.hidden_size=512", "model.intermediate_size=1408", "model.num_hidden_layers=6",
        "model.num_attention_heads=8", "model.num_key_value_heads=8", "model.vocab_size=4096",
        "train.seq_len=32", "train.micro_batch=1",
    ],
    "tiny": [
        "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2",
        "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.vocab_size=256",
        "train.seq_len=32", "train.micro_batch=2",
    ],
}  # fmt: skip
AGREE = {"fp32": 1e-4, "bf16": 2e-2}  # how far losses of equal work may differ, relative
DISTINCT = 16  # steps before the batches repeat


@dataclass(frozen=True)
class Options:
    """Arguments of `bench peers`.

    Attributes:
        ranks: 1 for axis=one, otherwise 2 unless given.
        zero: with axis=fsdp, what ours and FSDP2 keep sharded.
        accumulate: microbatches per step.
        rounds: blocks per side; steps: steps per block.
        exposed: also measure each rank's work without communication.
        profile: show where the time of each side goes.
        out: JSON file for everything measured.
    """

    axis: Literal["one", "dp", "fsdp"]
    ranks: int = 0
    shape: Literal["compute", "comm", "tiny", "all"] = "all"
    precision: Literal["fp32", "bf16"] = "fp32"
    zero: Literal[1, 2, 3] = 3
    accumulate: int = 1
    rounds: int = 10
    steps: int = 2
    warmup: int = 3
    exposed: bool = True
    profile: bool = False
    out: str = ""

    @property
    def world(self) -> int:
        return self.ranks or (1 if self.axis == "one" else 2)

    @property
    def shapes(self) -> list[str]:
        return ["compute", "comm"] if self.shape == "all" else [self.shape]

    @property
    def sides(self) -> list[str]:
        alone = ["local"] if self.exposed and self.world > 1 else []
        return ["ours", *PEERS[self.axis], *alone]


def run(options: Options) -> None:
    """Measures, prints and writes `options.out`.

    Raises:
        ConfigError: options that do not go together.
    """
    _check(options)
    if options.profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the ranks' profilers chat on stderr otherwise
    asked = {k: v for k, v in asdict(options).items() if k != "out"}
    found = {"bench": "peers", **asked, "ranks": options.world, **_surroundings(), "shapes": {}}
    for shape in options.shapes:
        result = run_ranks(measure, options.world, options, shape)
        found["shapes"][shape] = result
        _show(options, shape, result)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


def _check(options: Options) -> None:
    if (options.axis == "one") != (options.world == 1):
        raise ConfigError(
            f"ranks={options.world}: axis=one compares one process, axis=dp and axis=fsdp need at least 2 ranks"
        )
    if options.axis != "fsdp" and options.zero != 3:
        raise ConfigError(f"zero={options.zero}: only axis=fsdp shards; leave zero out or set axis=fsdp")
    if options.axis == "one" and importlib.util.find_spec("transformers") is None:
        raise ConfigError("axis=one compares with transformers, which is not installed: pip install 'ndtrain[hf]'")
    if options.out and not Path(options.out).parent.is_dir():
        raise ConfigError(f"out={options.out}: there is no folder {Path(options.out).parent}")


# ----------------------------------------------------------------------------------------------------------- a rank


class Turns:
    """One side: its losses and the times of its blocks so far."""

    def __init__(self, step: Step, batches: Sequence[Sequence[Batch]]):
        self._step, self._batches = step, batches
        self.losses: list[float] = []
        self.block_ms: list[float] = []  # per step

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.losses.append(self._step(self._batches[len(self.losses) % len(self._batches)]))

    def block(self, n: int) -> None:
        """n steps, timed from when all ranks begin to when the slowest ends."""
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        self.steps(n)
        took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
        self.block_ms.append(took.item() * 1e3 / n)


def measure(rank: int, options: Options, shape: str) -> dict[str, Any]:
    """On one rank: every side built, checked and timed.

    Raises:
        RuntimeError: the sides' losses part.
    """
    cfg = config_of(options, shape)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    batches = [make_batches(cfg, mesh, step) for step in range(DISTINCT)]
    sides = {name: Turns(SIDES[name](cfg, mesh), batches) for name in options.sides}
    for side in sides.values():
        side.steps(options.warmup)
    for i in range(options.rounds):
        names = list(sides)[:: -1 if i % 2 else 1]  # every other round backwards: a drift meets both alike
        for name in names:
            sides[name].block(options.steps)
    _require_equal_losses({n: sides[n].losses for n in ("ours", *PEERS[options.axis])}, AGREE[options.precision])
    result = {
        "parameters": parameter_count(cfg.model),
        "config": {"model": asdict(cfg.model), "train": asdict(cfg.train)},
        "sides": {name: _side(side) for name, side in sides.items()},
        "ratios": {name: _ratio(sides[name], sides["ours"]) for name in PEERS[options.axis]},
    }
    if options.profile:
        result["profile"] = {name: profile(lambda s=side: s.steps(1), steps=3) for name, side in sides.items()}
    return result


def config_of(options: Options, shape: str) -> Config:
    """The resolved config that every side trains by."""
    sizes = {"dp": options.world} if options.axis == "dp" else {"fsdp": options.world}
    cfg = load_config([*SHAPES[shape], "optim.schedule=constant", f"precision.compute={options.precision}"])
    cfg.mesh.dp, cfg.mesh.fsdp, cfg.mesh.zero = sizes.get("dp", 1), sizes.get("fsdp", 1), options.zero
    cfg.train.global_batch = options.world * options.accumulate * cfg.train.micro_batch
    return resolve(cfg, options.world)


def make_batches(cfg: Config, mesh: Mesh, step: int) -> list[Batch]:
    """This rank's microbatches of random tokens."""
    t, draw = cfg.train, np.random.default_rng((step, mesh.index(*BATCH_AXES)))
    each = t.global_batch // mesh.size(*BATCH_AXES)
    rows = torch.from_numpy(draw.integers(0, cfg.model.vocab_size, (each, t.seq_len + 1)))
    return [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in rows.split(t.micro_batch)]


def _require_equal_losses(losses: dict[str, list[float]], bound: float) -> None:
    for name, found in losses.items():
        for step, (loss, expected) in enumerate(zip(found, losses["ours"], strict=True), start=1):
            if not abs(loss - expected) <= bound * abs(expected):
                raise RuntimeError(f"not the same work: at step {step} the loss of {name} is {loss}, ours {expected}")


# ------------------------------------------------------------------------------------------------------ what is said


def _side(side: Turns) -> dict[str, Any]:
    return {"ms_per_step": statistics.median(side.block_ms), "block_ms": side.block_ms, "losses": side.losses}


def _ratio(peer: Turns, own: Turns) -> dict[str, float]:
    """Peer/ours over the rounds; `best` is that of the fastest blocks, which a busy machine disturbs least."""
    by_round = [a / b for a, b in zip(peer.block_ms, own.block_ms, strict=True)]
    q1, median, q3 = np.percentile(by_round, [25, 50, 75]).tolist()
    best = min(peer.block_ms) / min(own.block_ms)
    return {"median": median, "q1": q1, "q3": q3, "min": min(by_round), "max": max(by_round), "best": best}


def _show(options: Options, shape: str, result: dict[str, Any]) -> None:
    t, sides = result["config"]["train"], result["sides"]
    print(
        f"\n{shape}: axis={options.axis} ranks={options.world} {options.precision}"
        + f" zero={options.zero}" * (options.axis == "fsdp")
        + f", {result['parameters'] / 1e6:.1f} M parameters, {t['seq_len']} tokens x {t['micro_batch']} sequences"
        f" x {options.accumulate} microbatches a rank and step; {options.rounds} rounds of {options.steps} steps"
    )
    alone = sides.get("local", {}).get("ms_per_step")
    for name, side in sides.items():
        exposed = f"   {1 - alone / side['ms_per_step']:4.0%} more than local" if alone and name != "local" else ""
        loss = f"loss {side['losses'][0]:.5f} -> {side['losses'][-1]:.5f} after {len(side['losses'])} steps"
        print(f"  {name:12} {side['ms_per_step']:9.2f} ms/step   {loss}{exposed}")
    for name, r in result["ratios"].items():
        print(
            f"  {name + ' / ours':20} {r['median']:.3f}   quartiles {r['q1']:.3f} .. {r['q3']:.3f}"
            f"   range {r['min']:.3f} .. {r['max']:.3f}   of best blocks {r['best']:.3f}"
        )
    for name, lines in result.get("profile", {}).items():
        print(f"\n  where the time of {name} goes (rank 0)", *lines, sep="\n    ")


def _surroundings() -> dict[str, Any]:
    """What a figure depends on beside the options."""
    return {
        "hardware": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "versions": {name: _version(name) for name in ("torch", "transformers", "numpy")},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with `-dirty` where files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git
        return None
