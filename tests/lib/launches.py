"""The launches and waits of every rank, as programs for `ndtrain/program/launch_order.py`.

`pipeline` reads the messages of a schedule off the ranks' programs. `of_journal` reads the flight recorder's journal of
a run: of real gloo ranks, or of one process that runs the program of each rank in turn on PyTorch's fake process group
(`on_fake_ranks`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndtrain.mesh.flight_recorder import RECORDER, Entry
from ndtrain.program.build import Holdings, build_program
from ndtrain.program.launch_order import Compute, NameComm, Op, Start, Step, Wait, a_pair_each, launches
from ndtrain.program.ops import RankProgram
from ndtrain.program.passes import Layer
from ndtrain.schedule import Schedule

# ---------------------------------------------------------------------------------------------- from a schedule's table


def a_direction_each(source: int, target: int) -> str:
    """The old order: one communicator of all ranks for messages up, one for messages down."""
    return "pp up" if source < target else "pp down"


def pipeline(schedule: Schedule, comm: NameComm = a_pair_each, seconds: float = 0.0) -> dict[int, list[Step]]:
    """The messages of every rank as its program launches and waits for them, with two layers for each stage.

    Args:
        comm: the communicator of each pair.
        seconds: of a message, where a forward takes 1.
    """
    return {r: list(launches(_program(schedule, r), r, schedule.rank_of, comm, seconds)) for r in range(schedule.pp)}


def _program(schedule: Schedule, rank: int) -> RankProgram:
    layer = partial(Layer, lambda x, ctx: x, (), ())
    last = schedule.stages - 1
    both = lambda stage: [layer(stage, True, False, False, "block"), layer(stage, False, True, stage == last, "head")]
    layers = [layer for stage in schedule.stages_of(rank) for layer in both(stage)]
    return build_program(schedule, rank, Holdings(layers, {}))


# ------------------------------------------------------------------------------------------------------- from a journal


def of_journal(
    entries: Sequence[Entry | Compute], seconds: Callable[[Entry], float] = lambda entry: 0.0
) -> dict[int, list[Step]]:
    """thread -> its launches and waits in order, 0 for the first thread of the journal. Waits without communication
    are left out.

    Args:
        seconds: how long the operation of a launch takes.
    """
    programs: dict[int, list[Step]] = {0: []}
    numbers: dict[int, int] = {}  # of threads, by their ids
    ops: dict[int, Op] = {}  # by the ids of their records
    for entry in entries:
        if isinstance(entry, Compute):
            programs[0].append(entry)
            continue
        thread = numbers.setdefault(entry.thread, len(numbers))
        if thread not in programs:
            programs[0].append(Start(thread))
            programs[thread] = []
        if entry.group is not None:
            ops[id(entry.record)] = op = _op(entry, seconds(entry))
            programs[thread].append(op)
        elif id(entry.record) in ops:
            programs[thread].append(Wait(ops[id(entry.record)]))
    return programs


def _op(entry: Entry, seconds: float) -> Op:
    record, ranks = entry.record, entry.ranks
    comm = f"{record.channel.partition(' [')[0]} {list(ranks)} (group {entry.group})"
    common = {"nbytes": record.nbytes, "seconds": seconds, "at": f"step {record.step}, {record.action}"}
    if entry.to is None and entry.source is None:
        members = ranks if entry.among is None else tuple(ranks[i] for i in entry.among)
        return Op(record.op, comm, members=members, **common)
    one = lambda peer: () if peer is None else (ranks[peer],)
    return Op(record.op, comm, one(entry.to), one(entry.source), **common)


@contextmanager
def journal() -> Iterator[list]:
    """The journal of the block. Collectives that PyTorch is called for directly are entered too."""
    RECORDER.journal = entries = []  # keeps the records, so that no two have one id

    def entered(function: Callable, op: str) -> Callable:
        def call(x: torch.Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            if async_op:  # by `collectives.py`, which enters it
                return function(x, *args, group=group, async_op=True, **kwargs)
            group = group or dist.group.WORLD
            record = RECORDER.launch(op, group, x.nbytes)
            RECORDER.enter(record)
            try:
                return function(x, *args, group=group, **kwargs)
            finally:
                RECORDER.leave(record)

        return call

    direct = {name: entered(getattr(dist, name), name) for name in ("all_reduce", "broadcast")}
    try:
        with mock.patch.multiple(dist, **direct):
            yield entries
    finally:
        RECORDER.journal = None


def on_fake_ranks(run: Callable[[int, list], None], world: int, **reading: Any) -> dict[int, dict[int, list[Step]]]:
    """The programs of `run(rank, entries)` on each of `world` ranks, run one after another in this process. Messages
    carry nothing: a receive leaves its tensor as it was.

    Args:
        run: may append `Compute` to the entries.
        reading: as `of_journal` takes it.
    """
    programs = {}
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            with journal() as entries:
                run(rank, entries)
            programs[rank] = of_journal(entries, **reading)
        finally:
            dist.destroy_process_group()
    return programs
