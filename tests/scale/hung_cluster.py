"""A cluster whose ranks hang, in one process: each rank has a flight recorder, and no rank runs."""

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from ndtrain.mesh.flight_recorder import Recorder
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.run.hang_report import Report, as_runs

STEPS = 3  # the fault happens in the last one
BYTES = 1 << 20


class Call(NamedTuple):
    """A collective of a rank's program."""

    op: str
    axes: tuple[str, ...]
    action: str
    nbytes: int = BYTES


class Rank:
    """The recorder of a rank, and its position in its program."""

    def __init__(self, rank: int, groups: dict[tuple[str, ...], tuple[int, ...]], calls: list[Call]):
        self.rank, self.recorder, self.groups, self.calls, self.at = rank, Recorder(), groups, calls, 0
        for axes, ranks in groups.items():
            self.recorder.name_group(self._group(axes), "+".join(axes), ranks)

    def _group(self, axes: tuple[str, ...]) -> SimpleNamespace:
        ranks = self.groups[axes]
        index = bisect_left(ranks, self.rank)
        return SimpleNamespace(group_name="+".join(axes), rank=lambda: index, size=lambda: len(ranks))

    def launch(self) -> tuple[Call, int]:
        """Launch the next collective and wait for it. Return it, and its number on its channel."""
        call = self.calls[self.at]
        if call.action != self.recorder.action:
            self.recorder.action = call.action
        record = self.recorder.launch(call.op, self._group(call.axes), call.nbytes)
        self.recorder.enter(record)
        self.record = record
        return call, record.number


def program(spec: MeshSpec) -> list[Call]:
    """Return the collectives of a step: gathers and sums of two layers, a sum over replicas, and one over all ranks."""
    calls = [Call("all_gather", ("fsdp",), "F"), Call("all_gather", ("tp",), "F"), Call("reduce_scatter", ("tp",), "F")]
    calls += [Call("shift", ("pp",), "F"), Call("all_gather", ("tp",), "B"), Call("reduce_scatter", ("fsdp",), "B")]
    calls += [Call("all_reduce", ("pp",), "end", 64), Call("all_reduce", tuple(spec.order), "end", 8)]
    return [call for call in calls if spec.size(*call.axes) > 1]


class Cluster:
    """All ranks of a mesh, run until none can go on.

    Args:
        fault: changes the program of the victim in the last step. Its new program ends where the victim stops.
    """

    def __init__(self, spec: MeshSpec, victim: int, fault: Callable[[list[Call]], list[Call]]):
        self.spec, self.victim = spec, victim
        step = program(spec)
        whole = step * STEPS
        groups: list[dict[tuple[str, ...], tuple[int, ...]]] = [{} for _ in range(spec.world_size)]
        for axes in {call.axes for call in step}:
            for ranks in map(tuple, spec.groups(*axes)):  # one tuple for all its ranks
                for r in ranks:
                    groups[r][axes] = ranks
        self.ranks = [Rank(r, groups[r], whole) for r in range(spec.world_size)]
        self.ranks[victim].calls = step * (STEPS - 1) + fault(step)
        self.per_step = len(step)
        self._arrived: dict[tuple, list[int]] = {}
        self._run()

    def _run(self) -> None:
        ready = deque(range(self.spec.world_size))
        while ready:
            rank = self.ranks[ready.popleft()]
            if rank.at == len(rank.calls):
                continue
            step = min(STEPS, rank.at // self.per_step + 1)
            if rank.recorder.step != step:
                rank.recorder.begin(step)
            call, number = rank.launch()
            members = rank.groups[call.axes]
            arrived = self._arrived.setdefault((members[0], call.axes, number, call.op, call.nbytes), [])
            arrived.append(rank.rank)
            if len(arrived) == len(members):
                for r in arrived:
                    self.ranks[r].recorder.leave(self.ranks[r].record)
                    self.ranks[r].at += 1
                ready.extend(arrived)

    def reports(self) -> Iterator[Report]:
        """Yield the report of each rank, in rank order."""
        with mock.patch("ndtrain.run.hang_report.as_runs", lru_cache(maxsize=None)(as_runs)):
            for rank in self.ranks:
                yield Report.of(rank.recorder, rank.rank, threading.get_ident())
