"""The state of a rank in a hang. The rank writes it to a file, and sends it to the rank that prints the diagnosis.

The size of what a rank sends does not depend on the number of ranks. The last records are most of a report. They are
sent only for the operations that the diagnosis needs.
"""

import os
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ndtrain.mesh.flight_recorder import Recorder

Runs = list[list[int]]  # some ranks in order, as arithmetic progressions: [first rank, number of ranks, distance]
Place = tuple[str, int]  # an operation: its channel, and its number there
NEAR = 8  # operations before a place whose records are sent too: a rank that left one out has others there


@dataclass(frozen=True)
class Report:
    """The state of a rank.

    Attributes:
        step, action: the current step, and the current action with the index of the op in the rank's program.
        waits: the `CollectiveRecord` of the longest current wait, as a dict; None: the rank does not wait.
        seconds: the duration of that wait.
        counts: channel -> number of operations launched on it.
        members: channel -> global ranks.
        last: the last records as dicts, oldest first, including all operations that the GPU has not completed.
        stack: the call stack of the main thread, innermost frame last.
        pending: the first incomplete operation of each channel that blocks the GPU, as dicts, oldest first.
        completed: channel -> number of operations that the GPU has completed.
    """

    rank: int
    step: int
    action: str
    waits: dict[str, Any] | None
    seconds: float
    counts: dict[str, int]
    members: dict[str, Runs]
    last: list[dict[str, Any]] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)
    completed: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, recorder: Recorder, rank: int, thread: int) -> "Report":
        """Create the report of the current state. `thread` is the id of the training thread."""
        record, seconds = recorder.longest_wait()
        last, device = list(recorder.last), recorder.device
        older = [r for r in device.incomplete() if r.launched < last[0].launched] if device and last else []
        return cls(
            rank,
            recorder.step,
            recorder.where,
            asdict(record) if record else None,
            seconds,
            dict(recorder.counts),
            {channel: as_runs(ranks) for channel, ranks in recorder.members.items()},
            [asdict(r) for r in (*older, *last)],
            _stack(thread),
            [asdict(r) | {"waited": since} for r, since in device.blocking()] if device else [],
            dict(device.completed) if device else {},
        )

    @classmethod
    def from_json(cls, value: Any, rank: int, world: int) -> "Report":
        """Create the report of a rank from the dict (`asdict`) that its process has published.

        Raises:
            ValueError: the value is not a report of this rank.
        """
        if _is_report(value, world) and value["rank"] == rank:
            return cls(**value)
        raise ValueError(f"not a report of rank {rank}")

    @property
    def reached(self) -> int:
        """The first step that the rank has not completed. With a GPU the host may already be in a later step."""
        return min([self.step, *(op["step"] for op in self.pending)])

    @property
    def operations(self) -> list[dict[str, Any]]:
        """The operations that the rank waits for: the `pending` ones of its GPU or, if none, the host's operation."""
        return self.pending or [w for w in [self.waits] if w is not None and w["channel"]]

    def brief(self) -> "Report":
        """Return what the diagnosis needs of every rank."""
        members = {op["channel"]: self.members.get(op["channel"], []) for op in self.operations}
        return replace(self, last=[], members=members, stack=shown_frames(self.stack))

    def with_records(self, records: Any) -> "Report":
        """Return the report with records that the rank has sent later. Ignore everything that is not a record."""
        return replace(self, last=[r for r in records if is_record(r)] if isinstance(records, list) else [])

    def near(self, places: Collection[Place]) -> list[dict[str, Any]]:
        """Return the records of these operations, and of the operations shortly before each of them."""
        newest = {channel: max(n for c, n in places if c == channel) for channel, _ in places}
        return [r for r in self.last if r["channel"] in newest and -NEAR < r["number"] - newest[r["channel"]] <= 0]


def place_of(op: dict) -> Place:
    """Return the place of a record."""
    return op["channel"], op["number"]


def as_runs(ranks: Sequence[int]) -> Runs:
    """Return ranks as runs, in their order."""
    runs: Runs = []
    for rank in ranks:
        if runs and (runs[-1][1] == 1 or rank == runs[-1][0] + runs[-1][1] * runs[-1][2]):
            run = runs[-1]
            run[2] = rank - run[0] if run[1] == 1 else run[2]
            run[1] += 1
        else:
            runs.append([rank, 1, 1])
    return runs


def of_runs(runs: Runs) -> tuple[int, ...]:
    """Return the ranks of runs."""
    return tuple(first + i * stride for first, count, stride in runs for i in range(count))


_TIME = (int, float)
_RECORD = {  # the fields of a record that the diagnosis reads, with their types
    "op": str, "channel": str, "number": int, "nbytes": int, "step": int, "action": str, "launched": _TIME,
}  # fmt: skip


def _is_report(value: Any, world: int) -> bool:
    """Return True if the value is a `Report` as a dict."""
    match value:
        case {
            "rank": int(), "step": int(), "action": str(), "waits": None | dict() as waits, "seconds": int() | float(),
            "counts": dict(counts), "members": dict(members), "last": list(last), "stack": list(stack),
            "pending": list(pending), "completed": dict(completed), **rest,
        } if not rest:  # fmt: skip
            return (
                _all([*counts.values(), *completed.values()], int)
                and all(_are_runs(runs, world) for runs in members.values())
                and _all(stack, str)
                and (waits is None or is_record(waits))
                and all(map(is_record, last))
                and all(is_record(record) and isinstance(record.get("waited"), _TIME) for record in pending)
            )
    return False


def _are_runs(value: Any, world: int) -> bool:
    """Return True if the value is `Runs` of at most `world` ranks."""
    if not isinstance(value, list) or not all(isinstance(run, list) and len(run) == 3 for run in value):
        return False
    if not all(_all(run, int) and run[1] > 0 for run in value) or sum(run[1] for run in value) > world:
        return False
    return all(0 <= end < world for first, count, stride in value for end in (first, first + (count - 1) * stride))


def is_record(value: Any) -> bool:
    """Return True if the value is a `CollectiveRecord` as a dict."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in _RECORD.items())


def _all(values: Iterable[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _stack(thread: int) -> list[str]:
    frame = sys._current_frames().get(thread)
    return [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_stack(frame)] if frame else []


def shown_frames(stack: Sequence[str]) -> list[str]:
    """Return the innermost frame in ndtrain and the innermost frame of all."""
    in_ndtrain = [line for line in stack if f"{os.sep}ndtrain{os.sep}" in line]
    return list(dict.fromkeys([*in_ndtrain[-1:], *stack[-1:]]))
