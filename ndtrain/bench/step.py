"""`bench step`: what a recipe's training step takes, under each of a list of overrides."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ndtrain.bench.arguments import choose_device
from ndtrain.bench.ranks import run_ranks
from ndtrain.bench.results import results, write
from ndtrain.bench.training import Steady, timed
from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.profiling.profile import name_fused_kernels, record

GIB = 2**30
PROFILED = 10  # steps, each after one that is not: on a shared machine single steps differ by more than the host takes


@dataclass(frozen=True)
class Options:
    """Arguments of `bench step`.

    Attributes:
        recipe: whose step. cases: the overrides of each case, cases apart by " | "; none: the recipe as it is.
        ranks: processes on this machine; the mesh is for the overrides to say.
        rounds: timed blocks; steps: steps a block; warmup: steps before, untimed.
        profile: show where the time goes, by kind of work.
        out: JSON file for everything measured.
    """

    recipe: str
    cases: str = ""
    ranks: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rounds: int = 5
    steps: int = 2
    warmup: int = 2
    profile: bool = False
    out: str = ""

    @property
    def device_type(self) -> str:
        return choose_device(self.device)

    @property
    def overrides(self) -> dict[str, list[str]]:
        """Each case as it was written -> its overrides."""
        return {case.strip(): shlex.split(case) for case in self.cases.split("|")}


def run(options: Options) -> None:
    """Measures each case in processes of its own, prints it and writes `options.out`.

    Raises:
        ConfigError: a case that cannot be trained; none has been measured then.
    """
    device = options.device_type
    if device == "cuda" and options.ranks > torch.cuda.device_count():
        raise ConfigError(f"ranks={options.ranks}: this machine has {torch.cuda.device_count()} GPUs")
    if options.out and not Path(options.out).parent.is_dir():
        raise ConfigError(f"out={options.out}: there is no folder {Path(options.out).parent}")
    cases = {name: config_of(options, own) for name, own in options.overrides.items()}
    print(f"{options.recipe} on {options.ranks} x {device}; {options.rounds} rounds of {options.steps} steps\n")
    print(HEAD)
    found = {}
    for name, cfg in cases.items():
        found[name] = run_ranks(
            measure, options.ranks, options, cfg, device, backend="nccl" if device == "cuda" else "gloo"
        )
        print(line(name or "as it is", found[name]))
    for name, result in found.items():
        if options.profile:
            print(f"\nwhere the time goes: {name or 'as it is'}", *result["extra"]["lines"], sep="\n  ")
    if options.out:
        write(Path(options.out), results("step", options, device=device, found=found))


def config_of(options: Options, overrides: Sequence[str]) -> Config:
    """
    Raises:
        ConfigError: naming the key.
    """
    return resolve(load_config([f"recipe={options.recipe}", *overrides]), options.ranks)


def device_of(rank: int, device: str) -> torch.device:
    """This rank's device, which becomes the current one."""
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    torch.set_num_threads(max(1, os.cpu_count() // torch.cuda.device_count()))  # for what is offloaded to the host
    return torch.device("cuda", rank)


def measure(rank: int, options: Options, cfg: Config, device: str) -> dict[str, Any]:
    """In each rank's process."""
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, device_of(rank, device))
    if options.profile and cfg.train.compile:
        name_fused_kernels()
    return timed(cfg, mesh, ["ours"], options, profiled if options.profile else None)


def profiled(side: Steady) -> dict[str, Any]:
    """The table of where a step's time goes, as its lines and as numbers."""
    table = record(lambda: (side(), side.finish()), steps=PROFILED, device=side.device)
    return {"lines": table.lines(), "kernel_share": table.kernel_share, "table": table.as_dict()}


_WIDTH = 36  # of a case's name
HEAD = f"{'':{_WIDTH}}   ms/step          quartiles    tokens/s     MFU     HFU  peak GiB  state GiB"


def line(name: str, found: dict[str, Any]) -> str:
    """One case, under `HEAD`."""
    own = found["sides"]["ours"]
    quartiles = f"{own['q1']:.1f} .. {own['q3']:.1f}"
    return (
        f"{name:{_WIDTH}} {own['ms_per_step']:9.1f} {quartiles:>18} {own['tokens_per_s']:11,.0f} {own['mfu']:7.1%} "
        f"{own['hfu']:7.1%} {found['peak_memory_bytes'] / GIB:9.3f} {own['state_bytes'] / GIB:10.3f}"
    )
