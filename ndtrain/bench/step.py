"""`bench step`: times a recipe's training step under each of a list of overrides."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ndtrain.arguments import option
from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.measure.ranks import DEVICE_HELP, Device, choose_device, rank_device, run_ranks
from ndtrain.measure.results import require_folder, save
from ndtrain.measure.rounds import BlockOptions
from ndtrain.measure.training import QueuedSteps, ours, timed
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.observe.profile import name_fused_kernels, record
from ndtrain.parallel.compile_choice import compiles
from ndtrain.run.rendezvous import backend_of

GIB = 2**30
PROFILED = 10  # steps, each after an unprofiled step; several, since single steps vary on a shared machine


@dataclass(frozen=True)
class CaseOptions:
    """The cases to time, and the ranks and device to run them on."""

    recipe: str = option("recipe whose step is measured")
    cases: str = option('overrides of each case, separated by " | "; default: the unchanged recipe', "")
    ranks: int = option("processes on this machine; set the mesh with overrides", 1)
    device: Device = option(DEVICE_HELP, "auto")


@dataclass(frozen=True)
class Options(BlockOptions, CaseOptions):
    """Options of `bench step`: first `CaseOptions`, then `BlockOptions`."""

    @property
    def device_type(self) -> str:
        return choose_device(self.device)

    @property
    def overrides(self) -> dict[str, list[str]]:
        """Each case as it was written -> its overrides."""
        return {case.strip(): shlex.split(case) for case in self.cases.split("|")}


def run(options: Options) -> None:
    """Measure each case in processes of its own, print it and write `options.out`.

    Raises:
        ConfigError: a case cannot be trained; then none is measured.
    """
    device = options.device_type
    if device == "cuda" and options.ranks > torch.cuda.device_count():
        raise ConfigError(f"ranks={options.ranks}: this machine has {torch.cuda.device_count()} GPUs")
    require_folder("out", options.out)
    cases = {name: config_of(options, own) for name, own in options.overrides.items()}
    print(f"{options.recipe} on {options.ranks} x {device}; {options.rounds} rounds of {options.steps} steps\n")
    print(HEAD)
    backend, by_case = backend_of(device), {}
    for name, cfg in cases.items():
        by_case[name] = run_ranks(measure, options.ranks, options, cfg, device, backend=backend)
        print(line(name or "as it is", by_case[name]))
    for name, result in by_case.items():
        if options.profile:
            print(f"\nwhere the time goes: {name or 'as it is'}", *result["extra"]["lines"], sep="\n  ")
    save("step", options, device=device, results=by_case)


def config_of(options: Options, overrides: Sequence[str]) -> Config:
    """Return the resolved configuration of a case.

    Raises:
        ConfigError: names the key.
    """
    return resolve(load_config([f"recipe={options.recipe}", *overrides]), options.ranks)


def measure(rank: int, options: Options, cfg: Config, device: str) -> dict[str, Any]:
    """Measure one case. Runs in each rank's process."""
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, rank_device(rank, device))
    if options.profile and compiles(cfg.train, cfg.model, mesh.spec, mesh.device):
        name_fused_kernels()
    return timed(cfg, mesh, {"ours": ours}, options, profiled if options.profile else None)


def profiled(steps: QueuedSteps) -> dict[str, Any]:
    """Profile a step. Return the table of where its time goes, as lines and as numbers."""
    table = record(lambda: (steps(), steps.finish()), steps=PROFILED, device=steps.device)
    return {"lines": table.lines(), "kernel_share": table.kernel_share, "table": table.as_dict()}


_WIDTH = 36  # of a case's name
HEAD = f"{'':{_WIDTH}}   ms/step          quartiles    tokens/s     MFU     HFU  peak GiB  state GiB"


def line(name: str, result: dict[str, Any]) -> str:
    """Return the line of one case, to print below `HEAD`."""
    own = result["sides"]["ours"]
    quartiles = f"{own['q1']:.1f} .. {own['q3']:.1f}"
    return (
        f"{name:{_WIDTH}} {own['ms_per_step']:9.1f} {quartiles:>18} {own['tokens_per_s']:11,.0f} {own['mfu']:7.1%} "
        f"{own['hfu']:7.1%} {result['peak_memory_bytes'] / GIB:9.3f} {own['state_bytes'] / GIB:10.3f}"
    )
