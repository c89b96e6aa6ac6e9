"""`bench checkpoint`: saving and loading a checkpoint, compared with the disk itself.

The baseline writes the same bytes from the same number of ranks, sequentially to one file per rank, with fsync, and
reads them again. It alternates with ours. Files are dropped from the page cache before they are read. raw / ours is our
share of the disk's own speed.

For a save in the background, `stall` is the time until the call returns. `copy` is the time until the weights may
change. Training waits for the copy only if it reaches its next update sooner.
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
from ndtrain.arguments import option
from ndtrain.checkpoint import Saver, State
from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.measure.ranks import run_ranks
from ndtrain.measure.results import require_folder, save
from ndtrain.measure.rounds import BlockTimer, in_round, max_over_ranks, quartiles, ratio
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.flops import parameter_count
from ndtrain.parallel.build import build_stages, initialise

BYTES = 12  # per parameter: its fp32 weight and two moments
WIDE = ["model.hidden_size=768", "model.intermediate_size=2048", "model.vocab_size=4096"]
NARROW = ["model.hidden_size=64", "model.intermediate_size=128", "model.vocab_size=512"]
BLOCK = 8 << 20  # bytes of one raw read or write


@dataclass(frozen=True)
class Options:
    """Options of `bench checkpoint`."""

    ranks: int = option("processes", 1)
    axis: Literal["fsdp", "tp", "dp"] = option("axis along which the ranks shard the state", "fsdp")
    layout: Literal["shared", "host"] = option("checkpoint.layout; host: a file per rank here", "shared")
    gigabytes: int = option("approximate size of the checkpoint", 1)
    megabytes: int = option("approximate size of the checkpoint, instead of gigabytes", 0)
    rounds: int = option("rounds of saving, loading, writing and reading", 5)
    folder: str = option("folder on the disk to measure; a temporary folder is created in it and removed", "")
    out: str = option("JSON file for all results", "")

    @property
    def bytes(self) -> int:
        return self.megabytes * 10**6 or self.gigabytes * 10**9

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: a folder does not exist.
        """
        if not Path(self.folder or ".").is_dir():
            raise ConfigError(f"folder={self.folder}: no such folder: give an existing one")
        require_folder("out", self.out)


def run(options: Options) -> None:
    """Measure, print and write `options.out`.

    Raises:
        ConfigError: options that do not go together.
    """
    options.check()
    with tempfile.TemporaryDirectory(dir=options.folder or None, prefix="ndtrain-bench-") as folder:
        result = run_ranks(measure, options.ranks, options, Path(folder))
    show(options, result)
    save("checkpoint", options, **result)


def config_of(options: Options) -> Config:
    """Return the config of a model whose checkpoint has about the requested number of bytes."""
    sizes = NARROW if options.bytes < 3 * 10**8 else WIDE
    fixed = [*sizes, f"mesh.{options.axis}={options.ranks}", f"train.global_batch={8 * options.ranks}"]
    fixed += [f"checkpoint.layout={options.layout}"]
    make = lambda layers: resolve(
        load_config([*fixed, f"model.num_hidden_layers={layers}", "checkpoint.keep=99"]), options.ranks
    )
    one, two = (parameter_count(make(n).model) for n in (1, 2))
    return make(max(1, 1 + round((options.bytes / BYTES - one) / (two - one))))


# --------------------------------------------------------------------------------------------------------- measuring


def measure(rank: int, options: Options, folder: Path) -> dict[str, Any]:
    """Measure on one rank. Return the seconds of everything timed, by round, and the ratios."""
    bench = Bench(rank, options, folder)
    pairs = [("save", "raw write"), ("load", "raw read")]
    for i in range(options.rounds):
        for pair in pairs:
            for name in in_round(pair, i):
                bench.time(name)
        bench.save_in_background()
        bench.clean()
    seconds = {name: [ms / 1e3 for ms in timer.block_ms] for name, timer in bench.timers.items()}
    ratios = {f"{raw} / {ours}": ratio(bench.timers[raw], bench.timers[ours]) for ours, raw in pairs}
    for name, waited in bench.waited.items():
        seconds[name] = waited
        ratios[f"{name} / save"] = quartiles([s / t for s, t in zip(waited, seconds["save"], strict=True)])
    return {"bytes": bench.bytes, "seconds": seconds, "ratios": ratios}


class Bench:
    """A rank's state, with the timed ways to save, load, write and read it."""

    def __init__(self, rank: int, options: Options, folder: Path):
        self.cfg, self.folder = config_of(options), folder
        self.mesh = Mesh(MeshSpec.of(self.cfg.mesh), rank, torch.device("cpu"))
        self.stages = build_stages(self.cfg, self.mesh)
        initialise(self.stages, self.cfg.run.seed)
        for unit in self.stages.units.units.values():  # not the initial zeros, which a disk might handle faster
            unit.state["exp_avg"].copy_(unit.master)
            unit.state["exp_avg_sq"].copy_(unit.master)
        self.bytes = parameter_count(self.cfg.model) * BYTES
        self.state = State(step=0, tokens=0, order={})
        self.saver = Saver(folder, self.stages, self.mesh, self.cfg)
        in_background = self.cfg.unfrozen()
        in_background.checkpoint.async_save = True
        self.in_background = Saver(folder, self.stages, self.mesh, in_background)
        share = -(-self.bytes // options.ranks)
        noise = np.random.default_rng(rank).integers(0, 256, BLOCK, np.uint8)
        self.raw_path, self.raw = folder / f"raw-{rank}", memoryview(np.resize(noise, share))
        work = {"save": self.save, "load": self.load, "raw write": self.raw_write, "raw read": self.raw_read}
        self.timers = {name: BlockTimer(step) for name, step in work.items()}
        self.waited: dict[str, list[float]] = {"stall": [], "copy": []}

    def time(self, name: str) -> None:
        """Time one operation once, on a quiet disk. Reads begin with an empty page cache."""
        if "write" in name and self.raw_path.exists():
            self.raw_path.unlink()
        os.sync()
        self._barrier()
        if name in ("load", "raw read"):
            drop_from_cache(self.folder)
        self.timers[name].time_block(1)

    def save(self) -> None:
        self.state.step += 1
        _raise_errors(self.saver.save(self.state))

    def load(self) -> None:
        checkpoint.load(checkpoint.list_checkpoints(self.folder)[0], self.stages, self.mesh)

    def save_in_background(self) -> None:
        """Time how long a save in the background makes training wait."""
        self.state.step += 1
        os.sync()
        self._barrier()
        began = time.perf_counter()
        self.in_background.save(self.state)
        self.waited["stall"].append(max_over_ranks(time.perf_counter() - began))
        self.in_background.settle()
        self.waited["copy"].append(max_over_ranks(time.perf_counter() - began))
        _raise_errors(self.in_background.wait())

    def raw_write(self) -> None:
        with opened(self.raw_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            _each_block(self.raw, partial(os.pwrite, fd))
            os.fsync(fd)

    def raw_read(self) -> None:
        with opened(self.raw_path, os.O_RDONLY) as fd:
            _each_block(self.raw, lambda block, at: os.preadv(fd, [block], at))

    def clean(self) -> None:
        """Remove the round's checkpoints."""
        self._barrier()
        if self.mesh.rank == 0:
            for path in checkpoint.list_checkpoints(self.folder):
                shutil.rmtree(path)
        self._barrier()

    def _barrier(self) -> None:
        if self.mesh.world is not None:
            dist.barrier()


def _raise_errors(saves: list[checkpoint.Saved]) -> list[checkpoint.Saved]:
    for saved in saves:
        if saved.error:
            raise RuntimeError(saved.error)
    return saves


def _each_block(whole: memoryview, move: Callable[[memoryview, int], int]) -> None:
    """Read or write all of `whole`. A call of `move` may move less than its block."""
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
    """Drop the folder's files from the page cache. They must be on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            with opened(path, os.O_RDONLY) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def show(options: Options, result: dict[str, Any]) -> None:
    gigabytes = result["bytes"] / 1e9
    sizes = f"{gigabytes:.2f} GB in the layout {options.layout}, {options.axis}={options.ranks}"
    print(f"checkpoint of {sizes}, {options.rounds} rounds")
    for name, seconds in result["seconds"].items():
        of = quartiles(seconds)
        speed = "" if name in ("stall", "copy") else f"   {gigabytes / of['median']:.2f} GB/s"
        print(f"  {name:12} {of['median']:7.3f} s   quartiles {of['q1']:.3f} .. {of['q3']:.3f}{speed}")
    for name, r in result["ratios"].items():
        print(f"  {name:18} {r['median']:.4f}   quartiles {r['q1']:.4f} .. {r['q3']:.4f}")
