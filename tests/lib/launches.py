"""The launches and waits of every rank, as programs for `tests/lib/rendezvous.py`.

`pipeline` plans the messages of a schedule with the real `Pipeline`, without tensors and processes. `of_journal` reads
the flight recorder's journal of a run: of real gloo ranks, or of one process that runs the program of each rank in
turn on PyTorch's fake process group (`on_fake_ranks`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndtrain.distributed.collectives import Pending
from ndtrain.distributed.flight_recorder import RECORDER, Entry
from ndtrain.distributed.mesh import Link
from ndtrain.parallel import pp
from ndtrain.schedule import COST, Schedule, sends
from tests.lib.rendezvous import Compute, Op, Start, Step, Wait

NameComm = Callable[[int, int], str]  # (source, target) -> communicator

# ---------------------------------------------------------------------------------------------- from a schedule's table


def a_pair_each(source: int, target: int) -> str:
    """The communicators of `Mesh.links`."""
    return f"pp {source} to {target}"


def a_direction_each(source: int, target: int) -> str:
    """The old order: one communicator of all ranks for messages up, one for messages down."""
    return "pp up" if source < target else "pp down"


def pipeline(schedule: Schedule, comm: NameComm = a_pair_each, seconds: float = 0.0) -> dict[int, list[Step]]:
    """The messages of every rank as `Executor.run` launches and waits for them.

    Args:
        comm: the communicator of each pair.
        seconds: of a message, where a forward takes 1.
    """
    programs: dict[int, list[Step]] = {}
    for rank in range(schedule.pp):
        programs[rank] = steps = []
        ends = {"send": _stub(steps, "sends", seconds), "receive": _stub(steps, "receives", seconds)}
        with mock.patch.multiple(pp, **ends, torch=_TORCH):
            _run_row(pp.Pipeline(schedule, _mesh(rank, comm), (0,), torch.float32), steps)
    return programs


_NOTHING = torch.empty(0)
_TORCH = SimpleNamespace(empty=lambda *args, **kwargs: _NOTHING)
_COSTS = {kind: Compute(seconds) for kind, seconds in COST.items()}


def _run_row(pipeline: pp.Pipeline, steps: list[Step]) -> None:
    """As `Executor.run` does with the layers left out. (A test compares the two.)"""
    schedule, rank = pipeline.schedule, pipeline.rank
    rank_of, stages = schedule.rank_of, schedule.stages
    sent: list[Step] = []
    for number, action in enumerate(schedule.table[rank]):
        pipeline.post_recv(number)
        if needed := pipeline.needed(action):
            pipeline.recv(needed)
        steps.append(_COSTS[action.kind])
        message = sends(action)
        if message and 0 <= message.stage < stages:
            pipeline.send(message, _NOTHING)
            if rank_of[message.stage] != rank:
                sent.append(Wait(steps[-1]))
    steps += sent  # `Pipeline.finish`, which leaves out those that are done


class _Stubbed(Pending):
    """A message that is launched and waited for on paper."""

    def __init__(self, op: Op, steps: list[Step]):
        self.op, self.steps = op, steps

    def wait(self) -> None:
        self.steps.append(Wait(self.op))

    def done(self) -> bool:
        return True


def _stub(steps: list[Step], way: str, seconds: float) -> Callable[..., Pending]:
    out = way == "sends"

    def launch(x: torch.Tensor, comm: str, peer: int) -> Pending:
        op = Op(way, comm, (peer,), (), (), 0, seconds) if out else Op(way, comm, (), (peer,), (), 0, seconds)
        steps.append(op)
        return _Stubbed(op, steps)

    return launch


def _mesh(rank: int, comm: NameComm) -> Any:
    """What `Pipeline` asks of a mesh of pp alone."""

    def links(axis: str, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Link]:
        return {(a, b): Link(comm(a, b), b if a == rank else a) for a, b in pairs if rank in (a, b)}

    return SimpleNamespace(coords={"pp": rank}, device=torch.device("cpu"), links=links)


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
