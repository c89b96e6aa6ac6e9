"""`bench collectives`: every collective over every axis of a mesh: whether it is right, how fast it is, and ours
compared with PyTorch's own call.

The groups of an axis work at the same time, as in training. A time is the slowest rank's, as the median over the
rounds. PyTorch's call and ours alternate. Each rank computes the expected results alone (see `cases`). Every operation
of every size is checked to the last element on every rank, before it is timed and again afterwards.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ndtrain.arguments import option
from ndtrain.config import AXES, ConfigError, MeshConfig, world_from_env
from ndtrain.config.checks import parse_bytes
from ndtrain.measure import plot
from ndtrain.measure.collectives.cases import Pattern, Setting
from ndtrain.measure.collectives.demo import demonstrate, show_demo
from ndtrain.measure.collectives.operations import OPERATIONS, equals_all_reduce
from ndtrain.measure.collectives.table import panels, show
from ndtrain.measure.ranks import Backend, WrongResult, device_under, from_all_ranks, launched, on_ranks, usable_backend
from ndtrain.measure.results import require_folder, save, size_name
from ndtrain.measure.rounds import BlockTimer, calls_in_block, in_round, ratio
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.observe import free_memory_bytes

WIDTH = 4  # bytes of an fp32 element
MOST_CALLS = 50  # in a block
COPIES = 4  # copies of the largest message that a rank holds at once, gloo's buffers included; 3.8 were measured


@dataclass(frozen=True)
class Options:
    """Options of `bench collectives`."""

    ranks: int = option(
        "processes; default: the ranks of torchrun, otherwise the product of mesh, or 2 (4 for a demo)", 0
    )
    mesh: str = option('sizes of axes, e.g. "dp=2 tp=2"; default: one axis with all ranks', "")
    axis: str = option("measure only this axis", "")
    min: str = option('smallest message, with a unit ("4KiB", "1GB")', "4KiB")
    max: str = option("largest message", "64MiB")
    factor: int = option("factor from one message size to the next", 4)
    rounds: int = option("timed blocks per message size", 5)
    backend: Backend = option("auto: nccl if each rank has its own GPU", "auto")
    demo: bool = option(
        "instead show each operation on a small example: the tensors of all ranks before and after", False
    )
    out: str = option("JSON file for all results", "")
    plot: str = option(plot.HELP, "")

    @property
    def world(self) -> int:
        given = self.ranks or math.prod(self._axes.values())
        return world_from_env()[2] if launched() else given if given > 1 else 4 if self.demo else 2

    @property
    def spec(self) -> MeshSpec:
        return MeshSpec.of(MeshConfig(**self._axes or {"dp": self.world}))

    @property
    def axes(self) -> list[str]:
        return [a for a in self.spec.order if self.spec.size(a) > 1 and self.axis in ("", a)]

    @property
    def bounds(self) -> tuple[int, int]:
        """Bytes of the smallest and the largest message."""
        return parse_bytes("min", self.min), parse_bytes("max", self.max)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each message: from the smallest, multiplied by `factor`, to the largest, which is always
        included."""
        least, most = self.bounds
        steps = range(math.ceil(math.log(most / least, self.factor) - 1e-9))
        return [*(least * self.factor**i for i in steps), most]

    @property
    def _axes(self) -> dict[str, int]:
        """Axis -> size, from the option `mesh`.

        Raises:
            ConfigError: `mesh` is not a list of axis sizes.
        """
        pairs = [word.partition("=") for word in self.mesh.replace(",", " ").split()]
        for axis, _, size in pairs:
            if axis not in AXES or not size.isdecimal() or int(size) < 1:
                known = ", ".join(AXES)
                raise ConfigError(f'mesh={self.mesh}: must be sizes of axes, e.g. "dp=2 tp=2"; known axes: {known}')
        return {axis: int(size) for axis, _, size in pairs}

    def check(self) -> str:
        """Check the options and return the backend to use.

        Raises:
            ConfigError: options that do not go together, or that this machine does not support.
        """
        self._check_mesh()
        least, most = self.bounds
        if least > most:
            raise ConfigError(f"min={self.min} is more than max={self.max}")
        if self.factor < 2:
            raise ConfigError("factor=1: must be at least 2, or the sizes would never end")
        require_folder("out", self.out)
        plot.check(self.plot)
        if self.demo and (self.out or self.plot):
            raise ConfigError("demo=true measures nothing: remove out and plot")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) if launched() else self.world
        backend = usable_backend(self.backend, here)
        self._check_memory(backend, here)
        return backend

    def _check_mesh(self) -> None:
        ranks, product = self.world, self.spec.world_size
        if launched() and self.ranks not in (0, ranks):
            raise ConfigError(f"ranks={self.ranks}: torchrun has started {ranks}: remove ranks")
        if product != ranks:
            raise ConfigError(f"mesh={self.mesh}: its sizes multiply to {product}, but there are {ranks} ranks")
        if self.ranks == 1:
            raise ConfigError("ranks=1: a collective needs at least 2 ranks")
        if not self.axes:
            wide = ", ".join(a for a in self.spec.order if self.spec.size(a) > 1)
            raise ConfigError(f"axis={self.axis}: not an axis with more than one rank; known: {wide}")

    def _check_memory(self, backend: str, here: int) -> None:
        on_cuda = backend == "nccl"
        free = free_memory_bytes(torch.device("cuda", 0) if on_cuda else torch.device("cpu"))
        need = COPIES * self.bounds[1] * (1 if on_cuda else here)
        if need > free:
            where = "a GPU" if on_cuda else f"the {here} ranks of this host"
            raise ConfigError(
                f"max={self.max} needs {size_name(need)} on {where}, but {size_name(free)} are free: lower max"
            )


def run(options: Options) -> None:
    """Measure or demonstrate, print, and write `options.out` and `options.plot`.

    Raises:
        ConfigError: options that do not go together.
        WrongResult: an operation gave a wrong result on some rank; raised after everything is printed.
    """
    backend = options.check()
    if options.demo:
        examples = on_ranks(demonstrate, options.world, options.spec, options.axes, backend, backend=backend)
        wrong = show_demo(examples, options.spec) if examples else []
    else:
        by_axis = on_ranks(measure, options.world, options, backend, backend=backend)
        wrong = _report(options, backend, by_axis) if by_axis else []
    if wrong:
        raise WrongResult(f"WRONG results: {', '.join(wrong)}")


def _report(options: Options, backend: str, by_axis: dict[str, Any]) -> list[str]:
    """Print and write rank 0's results. Return the names of the wrong ones."""
    wrong = show(options.spec, backend, options.rounds, by_axis)
    mesh = {a: options.spec.size(a) for a in options.spec.order}
    save("collectives", options, ranks=options.world, backend=backend, mesh=mesh, axes=by_axis)
    title = f"Collectives over {backend}, fp32: median and quartiles of {options.rounds} rounds"
    plot.draw(options.plot, title, panels(options.spec, by_axis), across=4, size=(3.4, 3.0))
    return wrong


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(rank: int, options: Options, backend: str) -> dict[str, Any]:
    """Measure on one rank. Return {axis: {"rows": one per operation and size, "equal": one per size, the comparison of
    all_reduce with its two steps}}."""
    mesh = Mesh(options.spec, rank, device_under(backend))
    patterns = [Pattern.of_rank(r) for r in range(options.world)]
    by_axis = {}
    for axis in options.axes:
        settings = list(_settings(mesh, axis, options, patterns))
        rows = [_row(name, s, options.rounds) for name in OPERATIONS for s in settings]
        by_axis[axis] = {"rows": rows, "equal": [_equal(s) for s in settings]}
    return by_axis


def _settings(mesh: Mesh, axis: str, options: Options, patterns: list[Pattern]) -> Iterator[Setting]:
    group = mesh.group(axis)
    members = [patterns[r] for r in dist.get_process_group_ranks(group)]
    for size in options.sizes:
        share = -(-size // (WIDTH * group.size()))  # rounded up if it does not divide evenly
        yield Setting(group, share * group.size(), mesh.device, members)


def _row(name: str, setting: Setting, rounds: int) -> dict[str, Any]:
    """Measure one operation at one size: milliseconds of its forms, bandwidths in GB/s, and the ranks with wrong
    results."""
    operation, size = OPERATIONS[name], setting.count * WIDTH
    case = operation.prepare(setting)
    wrong = {form: _wrong_ranks(case.right(form)) for form in case.forms}
    on_cuda = setting.device.type == "cuda"
    finish = partial(torch.cuda.synchronize, setting.device) if on_cuda else lambda: None
    timers = {form: BlockTimer(case.forms[form].call, finish) for form in case.forms}
    case.silence()
    _time(timers, rounds)
    for form in case.forms:
        wrong[form] = sorted({*wrong[form], *_wrong_ranks(case.right(form))})
    row = {"operation": name, "n": setting.n, "bytes": size, "wrong": wrong, "forms": {}}
    for form, timer in timers.items():
        algbw = size / timer.ms_per_step / 1e6
        busbw = algbw * operation.factor(setting.n)
        row["forms"][form] = {"ms": timer.ms_per_step, "algbw": algbw, "busbw": busbw, "block_ms": timer.block_ms}
    return row | ({"ratio": ratio(timers["torch"], timers["ours"])} if "ours" in timers else {})


def _time(timers: dict[str, BlockTimer], rounds: int) -> None:
    """Time blocks in alternating rounds. A first block of each form sets the calls per block, the same on all ranks."""
    for timer in timers.values():
        timer.run(1)
        timer.time_block(1)
    calls = calls_in_block(max(timer.block_ms.pop() for timer in timers.values()) / 1e3, MOST_CALLS)
    for i in range(rounds):
        for form in in_round(timers, i):
            timers[form].time_block(calls)


def _wrong_ranks(right: bool) -> list[int]:
    """Return the global ranks where `right` is not True."""
    return [rank for rank, ok in enumerate(from_all_ranks(right)) if ok is not True]


def _equal(setting: Setting) -> dict[str, Any]:
    """List the ranks where reduce_scatter + all_gather differs bitwise from all_reduce, per form, for one message
    size."""
    unlike = {form: _wrong_ranks(equal) for form, equal in equals_all_reduce(setting).items()}
    return {"bytes": setting.count * WIDTH, "unlike": unlike}
