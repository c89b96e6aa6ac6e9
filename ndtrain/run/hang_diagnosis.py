"""The diagnosis of a hang from the reports of all ranks: the rank that the others wait for, the place, and the axis."""

import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ndtrain.mesh.flight_recorder import Recorder
from ndtrain.mesh.mesh import MeshSpec

SHOWN = 8  # maximum number of ranks named in a list of the diagnosis

# ------------------------------------------------------------------------------------------------------------- reports


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
    members: dict[str, list[int]]
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
            {channel: list(ranks) for channel, ranks in recorder.members.items()},
            [asdict(r) for r in (*older, *last)],
            _stack(thread),
            [asdict(r) | {"waited": since} for r, since in device.blocking()] if device else [],
            dict(device.completed) if device else {},
        )

    @classmethod
    def from_json(cls, value: Any, rank: int) -> "Report":
        """Create the report of a rank from the dict (`asdict`) that its process has published.

        Raises:
            ValueError: the value is not a report of this rank.
        """
        if _is_report(value) and value["rank"] == rank:
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


_TIME = (int, float)
_RECORD = {  # the fields of a record that the diagnosis reads, with their types
    "op": str, "channel": str, "number": int, "nbytes": int, "step": int, "action": str, "launched": _TIME,
}  # fmt: skip


def _is_report(value: Any) -> bool:
    """Return True if the value is a `Report` as a dict."""
    match value:
        case {
            "rank": int(), "step": int(), "action": str(), "waits": None | dict() as waits, "seconds": int() | float(),
            "counts": dict(counts), "members": dict(members), "last": list(last), "stack": list(stack),
            "pending": list(pending), "completed": dict(completed), **rest,
        } if not rest:  # fmt: skip
            return (
                _all([*counts.values(), *completed.values()], int)
                and all(isinstance(ranks, list) and _all(ranks, int) for ranks in members.values())
                and _all(stack, str)
                and (waits is None or _is_record(waits))
                and all(map(_is_record, last))
                and all(_is_record(record) and isinstance(record.get("waited"), _TIME) for record in pending)
            )
    return False


def _is_record(value: Any) -> bool:
    """Return True if the value is a `CollectiveRecord` as a dict."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in _RECORD.items())


def _all(values: Iterable[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _stack(thread: int) -> list[str]:
    frame = sys._current_frames().get(thread)
    return [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_stack(frame)] if frame else []


# ----------------------------------------------------------------------------------------------------------- diagnosis


def diagnose(reports: dict[int, Report], spec: MeshSpec) -> str:
    """Return the diagnosis as lines of text, most important first.

    A rank caused the hang if it launched a different operation than the others under the same number on the same
    channel. Otherwise a rank caused it if others wait for it while it does not wait itself. If all ranks wait for one
    another, no rank is named as the cause. The diagnosis then names operations that all their ranks have launched but
    some GPUs do not complete.

    Args:
        reports: rank -> its report; ranks that did not answer are missing.
    """
    silent = [r for r in range(spec.world_size) if r not in reports]
    lines = (
        [f"{_ranks(silent, spec)} {'does' if len(silent) == 1 else 'do'} not answer: dead, or cut off"]
        if silent
        else []
    )
    lines += _disagreement(reports, spec)
    waited_for = {r: wait for r, report in reports.items() if (wait := _waited_for(report, reports))}
    for r in sorted({r for _, late in waited_for.values() for r in late} & set(reports)):
        if not reports[r].operations:
            lines.append(f"{_ranks([r], spec)} is waited for: {_where(reports[r], reports[r].waits)}")
    rest = [r for r in sorted(reports) if reports[r].waits and r not in waited_for]
    lines += _stuck([reports[r] for r in rest], reports, spec)
    for r in sorted(waited_for)[:SHOWN]:
        op, late = waited_for[r]
        lines.append(f"{_ranks([r], spec)} waits for {_ranks(late, spec, False)}: {_where(reports[r], op)}")
    lines += [f"{_ranks([r], spec)} waits: {_where(reports[r], reports[r].waits)}" for r in rest[:SHOWN]]
    if not lines:
        lines = [f"{_ranks([r], spec)} does nothing: {_where(reports[r], None)}" for r in sorted(reports)[:SHOWN]]
    return "\n  ".join(lines or ["no rank waits for another"])


def _waited_for(report: Report, reports: dict[int, Report]) -> tuple[dict, list[int]] | None:
    """Return (operation that the rank waits for, ranks that delay it); None if no rank delays any of them."""
    for holding_up in (_late, _behind):
        for op in report.operations:
            if ranks := holding_up(report, op, reports):
                return op, ranks
    return None


def _late(report: Report, op: dict, reports: dict[int, Report]) -> list[int]:
    """Return the ranks that have not launched the operation, including ranks without a report."""
    count = lambda r: reports[r].counts.get(op["channel"], 0) if r in reports else 0
    return [r for r in report.members.get(op["channel"], ()) if r != report.rank and count(r) < op["number"]]


def _behind(report: Report, op: dict, reports: dict[int, Report]) -> list[int]:
    """Return the ranks that have launched the operation, but whose GPU cannot have begun it yet."""
    others = (r for r in report.members.get(op["channel"], ()) if r != report.rank and r in reports)
    return [r for r in others if _holds(reports[r], op)]


def _holds(report: Report, op: dict) -> bool:
    """Return True if the rank has launched the operation, but its GPU is still blocked by an earlier one."""
    if report.completed.get(op["channel"], 0) >= op["number"]:
        return False
    launched = [r["launched"] for r in report.last if _place(r) == _place(op)]
    return any(p["waited"] <= launched[0] for p in report.pending if launched and _place(p) != _place(op))


def _place(op: dict) -> tuple[str, int]:
    return op["channel"], op["number"]


def _stuck(waiting: list[Report], reports: dict[int, Report], spec: MeshSpec) -> list[str]:
    """Return a line for each operation that all its ranks have launched and that no rank delays."""
    stuck = {_place(op): (op, report.members.get(op["channel"], ())) for report in waiting for op in report.pending[:1]}
    lines = []
    for (channel, number), (op, members) in stuck.items():
        incomplete = [r for r in members if r in reports and reports[r].completed.get(channel, 0) < number]
        what = f"{op['op']} {number} over {channel}, launched in step {op['step']}, {op['action']}"
        where = _ranks(incomplete, spec, False)
        lines.append(f"{what}, by all its ranks, is not complete on {where}: a link or a kernel before it hangs")
    return lines


def _disagreement(reports: dict[int, Report], spec: MeshSpec) -> list[str]:
    """Return one line about the earliest operation whose ranks recorded different kinds, sizes, steps or actions.

    Return an empty list if all ranks agree.
    """
    by_number: dict[tuple[str, int], dict[int, dict]] = {}
    for report in reports.values():
        for record in report.last:
            by_number.setdefault((record["channel"], record["number"]), {})[report.rank] = record
    for (channel, number), records in sorted(
        by_number.items(), key=lambda x: min(r["launched"] for r in x[1].values())
    ):
        kinds: dict[str, list[int]] = {}
        for rank, record in records.items():
            kinds.setdefault(_kind(record), []).append(rank)
        if len(kinds) > 1:
            versions = "; ".join(
                f"{_ranks(ranks, spec)}: {kind}" for kind, ranks in sorted(kinds.items(), key=_rarest_first)
            )
            return [f"ranks disagree on operation {number} over {channel}, so one of them left one out: {versions}"]
    return []


def _rarest_first(kind: tuple[str, list[int]]) -> tuple[int, list[int]]:
    return len(kind[1]), kind[1]


def _kind(record: dict) -> str:
    """Return a description of an operation that must be the same on all its ranks."""
    op = "message" if record["op"] in ("send", "receive") else record["op"]
    at = "" if op == "message" else f" in {record['action']}"  # sender and receiver are in different actions
    return f"{op} of {record['nbytes']:,} bytes, step {record['step']}{at}"


def _where(report: Report, op: dict | None) -> str:
    """Return the step, the action and the wait of a rank as text.

    Args:
        op: the operation that the rank waits for; None: it does not wait.
    """
    at = f"step {report.step}, {report.action}"
    if op is None:
        return f"{at}, in no collective, at {_innermost(report.stack)}"
    if not op["channel"]:
        return f"{at}, waiting {report.seconds:.0f} s for {op['op']}"
    since = f"launched in step {op['step']}, {op['action']}"
    return f"{at}, waiting {report.seconds:.0f} s in {op['op']} {op['number']} over {op['channel']}, {since}"


def _innermost(stack: list[str]) -> str:
    """Return the innermost frame and the innermost frame in ndtrain."""
    in_ndtrain = [line for line in stack if f"{os.sep}ndtrain{os.sep}" in line]
    return " < ".join(dict.fromkeys([*stack[-1:], *in_ndtrain[-1:]])) or "an unknown place"


def _ranks(ranks: list[int], spec: MeshSpec, coords: bool = True) -> str:
    """Return a list of ranks as text. With `coords`, add the mesh coordinates if there is only one rank."""
    if len(ranks) == 1:
        at = spec.where(ranks[0])
        return f"rank {ranks[0]} ({at})" if coords and at else f"rank {ranks[0]}"
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:SHOWN]))}{more}"
