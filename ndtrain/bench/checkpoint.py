"""Saving and loading a checkpoint against the disk itself: the same bytes written by as many ranks one after the other
to a file each, with fsync, and read again. Both sides take turns; what is read is dropped from the page cache before.

raw / ours is our share of the disk's own speed. Of a save in the background: `stall` is how long it takes to return,
`copy` until the weights may change, which training waits for only if it gets to its next update sooner.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ndtrain import checkpoint
from ndtrain.bench.ranks import run_ranks
from ndtrain.bench.results import results, write
from ndtrain.bench.turns import Turns, ratio, slowest
from ndtrain.checkpoint import Saver, State
from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.model.flops import parameter_count
from ndtrain.parallel.build import build_stages, initialise

BYTES = 12  # a parameter: its fp32 weight and two moments
WIDE = ["model.hidden_size=768", "model.intermediate_size=2048", "model.vocab_size=4096"]
NARROW = ["model.hidden_size=64", "model.intermediate_size=128", "model.vocab_size=512"]
BLOCK = 8 << 20  # bytes of a raw read or write


@dataclass(frozen=True)
class Options:
    """
    Attributes:
        axis: along which the ranks cut the state.
        gigabytes: of the checkpoint, about; megabytes: instead of these.
        folder: where to write, on the disk in question; a temporary one inside it is made and removed.
        out: JSON file for everything measured.
    """

    ranks: int = 1
    axis: Literal["fsdp", "tp", "dp"] = "fsdp"
    gigabytes: int = 1
    megabytes: int = 0
    rounds: int = 5
    folder: str = ""
    out: str = ""

    @property
    def bytes(self) -> int:
        return self.megabytes * 10**6 or self.gigabytes * 10**9

    def check(self) -> None:
        """
        Raises:
            ConfigError: a folder that does not exist.
        """
        for key, place in (("folder", Path(self.folder or ".")), ("out", Path(self.out).parent)):
            if not place.is_dir():
                raise ConfigError(f"{key}={getattr(self, key)}: there is no folder {place}")


def run(options: Options) -> None:
    """Measures, prints and writes `options.out`.

    Raises:
        ConfigError: options that do not go together.
    """
    options.check()
    with tempfile.TemporaryDirectory(dir=options.folder or None, prefix="ndtrain-bench-") as folder:
        found = run_ranks(measure, options.ranks, options, Path(folder))
    show(options, found)
    if options.out:
        write(Path(options.out), results("checkpoint", options, **found))


def config_of(options: Options) -> Config:
    """A model whose checkpoint has about as many bytes as asked for."""
    sizes = NARROW if options.bytes < 3 * 10**8 else WIDE
    make = lambda layers: resolve(
        load_config(
            [
                *sizes,
                f"model.num_hidden_layers={layers}",
                f"mesh.{options.axis}={options.ranks}",
                f"train.global_batch={8 * options.ranks}",
                "checkpoint.keep=99",
            ]
        ),
        options.ranks,
    )
    one, two = (parameter_count(make(n).model) for n in (1, 2))
    return make(max(1, 1 + round((options.bytes / BYTES - one) / (two - one))))


# --------------------------------------------------------------------------------------------------------- measuring


def measure(rank: int, options: Options, folder: Path) -> dict[str, Any]:
    """On one rank: every side's seconds by round, and ratios."""
    bench = Bench(rank, options, folder)
    pairs = [("save", "raw write"), ("load", "raw read")]
    for i in range(options.rounds):
        for ours, raw in pairs:
            for side in (raw, ours) if i % 2 else (ours, raw):  # a drift meets both alike
                bench.turn(side)
        bench.save_in_background()
        bench.clean()
    seconds = {name: [ms / 1e3 for ms in side.block_ms] for name, side in bench.sides.items()}
    ratios = {f"{raw} / {ours}": ratio(bench.sides[raw], bench.sides[ours]) for ours, raw in pairs}
    for name, waited in bench.waited.items():
        seconds[name] = waited
        ratios[f"{name} / save"] = spread([s / t for s, t in zip(waited, seconds["save"], strict=True)])
    return {"bytes": bench.bytes, "seconds": seconds, "ratios": ratios}


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    q1, median, q3 = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "q1": q1, "q3": q3}


class Bench:
    """A rank's state and the sides that save, load, write and read it."""

    def __init__(self, rank: int, options: Options, folder: Path):
        self.cfg, self.folder = config_of(options), folder
        self.mesh = Mesh(MeshSpec.of(self.cfg.mesh), rank, torch.device("cpu"))
        self.stages = build_stages(self.cfg, self.mesh)
        initialise(self.stages, self.cfg)
        for unit in self.stages.units.units.values():  # moments that no disk finds easier than others
            unit.state["exp_avg"].copy_(unit.master)
            unit.state["exp_avg_sq"].copy_(unit.master)
        self.bytes = parameter_count(self.cfg.model) * BYTES
        self.state = State(step=0, tokens=0, order={})
        self.saver = Saver(folder, self.stages, self.mesh, self.cfg)
        self.cfg.checkpoint.async_save = True
        self.in_background = Saver(folder, self.stages, self.mesh, self.cfg)
        share = -(-self.bytes // options.ranks)
        noise = np.random.default_rng(rank).integers(0, 256, BLOCK, np.uint8)
        self.raw_path, self.raw = folder / f"raw-{rank}", memoryview(np.resize(noise, share))
        work = {"save": self.save, "load": self.load, "raw write": self.raw_write, "raw read": self.raw_read}
        self.sides = {name: Turns(step) for name, step in work.items()}
        self.waited: dict[str, list[float]] = {"stall": [], "copy": []}

    def turn(self, side: str) -> None:
        """One timed turn, on a quiet disk and, to read, with an empty page cache."""
        if "write" in side and self.raw_path.exists():
            self.raw_path.unlink()
        os.sync()
        self._barrier()
        if side in ("load", "raw read"):
            drop_from_cache(self.folder)
        self.sides[side].block(1)

    def save(self) -> None:
        self.state.step += 1
        _ended_well(self.saver.save(self.state))

    def load(self) -> None:
        checkpoint.load(checkpoint.list_checkpoints(self.folder)[0], self.stages, self.mesh)

    def save_in_background(self) -> None:
        """How long that makes training wait."""
        self.state.step += 1
        os.sync()
        self._barrier()
        began = time.perf_counter()
        self.in_background.save(self.state)
        self.waited["stall"].append(slowest(time.perf_counter() - began))
        self.in_background.settle()
        self.waited["copy"].append(slowest(time.perf_counter() - began))
        _ended_well(self.in_background.wait())

    def raw_write(self) -> None:
        with opened(self.raw_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            _each_block(self.raw, partial(os.pwrite, fd))
            os.fsync(fd)

    def raw_read(self) -> None:
        with opened(self.raw_path, os.O_RDONLY) as fd:
            _each_block(self.raw, lambda block, at: os.preadv(fd, [block], at))

    def clean(self) -> None:
        """Removes the round's checkpoints."""
        self._barrier()
        if self.mesh.rank == 0:
            for path in checkpoint.list_checkpoints(self.folder):
                shutil.rmtree(path)
        self._barrier()

    def _barrier(self) -> None:
        if self.mesh.world is not None:
            dist.barrier()


def _ended_well(saves: list[checkpoint.Saved]) -> list[checkpoint.Saved]:
    for saved in saves:
        if saved.error:
            raise RuntimeError(saved.error)
    return saves


def _each_block(whole: memoryview, move: Callable[[memoryview, int], int]) -> None:
    """Moves all of it by calls that may each move less than asked."""
    at = 0
    while at < len(whole):
        at += move(whole[at : at + BLOCK], at)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def drop_from_cache(folder: Path) -> None:
    """The files in it will be read from the disk. They must be on it already."""
    for path in folder.rglob("*"):
        if path.is_file():
            with opened(path, os.O_RDONLY) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def show(options: Options, found: dict[str, Any]) -> None:
    """Prints it."""
    print(f"checkpoint of {found['bytes'] / 1e9:.2f} GB, {options.axis}={options.ranks}, {options.rounds} rounds")
    for name, seconds in found["seconds"].items():
        of = spread(seconds)
        speed = "" if name in ("stall", "copy") else f"   {found['bytes'] / 1e9 / of['median']:.2f} GB/s"
        print(f"  {name:12} {of['median']:7.3f} s   quartiles {of['q1']:.3f} .. {of['q3']:.3f}{speed}")
    for name, r in found["ratios"].items():
        print(f"  {name:18} {r['median']:.4f}   quartiles {r['q1']:.4f} .. {r['q3']:.4f}")
