"""The diagnosis of a hang from the reports of all ranks: the rank that the others wait for, the place, and the axis."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ndtrain.mesh.mesh import MeshSpec
from ndtrain.run.hang_report import Place, Report, of_runs, place_of, shown_frames

SHOWN = 8  # maximum number of ranks named in a list of the diagnosis, and of lines of one kind
ASKED = 8  # maximum number of operations whose records the diagnosis requests


def questions(reports: Mapping[int, Report]) -> list[Place]:
    """Return the operations whose records `diagnose` needs: the operations at the ends of the chains of waits.

    Nobody is late for such an operation, or only ranks that wait for nobody themselves.
    """
    waits = _Waits(reports)
    ops = {place_of(op): op for report in reports.values() for op in report.operations}
    ends = [place for place, op in ops.items() if waits.ends_at(op)] or list(ops)
    return sorted(ends, key=lambda place: (ops[place]["step"], place))[:ASKED]


def diagnose(reports: Mapping[int, Report], spec: MeshSpec) -> str:
    """Return the diagnosis as lines of text, most important first.

    A rank caused the hang if it launched a different operation than the others under the same number on the same
    channel. Otherwise a rank caused it if others wait for it while it does not wait itself. If all ranks wait for one
    another, no rank is named as the cause. The diagnosis then names operations that all their ranks have launched but
    some GPUs do not complete.

    Args:
        reports: rank -> its report; ranks that did not answer are missing. Records are needed of `questions` only.
    """
    waits = _Waits(reports)
    waited_for = {r: wait for r, report in reports.items() if (wait := waits.of(report))}
    rest = [r for r in sorted(reports) if reports[r].waits and r not in waited_for]
    lines = _silent([r for r in range(spec.world_size) if r not in reports], spec)
    lines += _disagreement(reports, spec)
    lines += _causes(waited_for.values(), reports, spec)
    lines += _stuck([reports[r] for r in rest], waits, spec)
    for r in _most_direct(waited_for, reports):
        op, late = waited_for[r]
        lines.append(f"{_ranks([r], spec)} waits for {_ranks(late, spec, False)}: {_where(reports[r], op)}")
    lines += [f"{_ranks([r], spec)} waits: {_where(reports[r], reports[r].waits)}" for r in rest[:SHOWN]]
    if not lines:
        lines = [f"{_ranks([r], spec)} does nothing: {_where(reports[r], None)}" for r in sorted(reports)[:SHOWN]]
    return "\n  ".join(lines or ["no rank waits for another"])


class Wait(NamedTuple):
    """The wait of a rank for others.

    Attributes:
        op: the operation.
        ranks: the ranks that delay it.
    """

    op: dict
    ranks: list[int]


class _Waits:
    """The ranks that delay each operation. Many ranks wait for one operation, so it is looked at once."""

    def __init__(self, reports: Mapping[int, Report]):
        self.reports = reports
        self._members: dict[str, tuple[int, ...]] = {}
        self._late: dict[Place, list[int]] = {}
        self._behind: dict[Place, list[int]] = {}
        for report in reports.values():
            for op in report.operations:
                if op["channel"] not in self._members:
                    self._members[op["channel"]] = of_runs(report.members.get(op["channel"], []))

    def members(self, op: dict) -> tuple[int, ...]:
        """Return the ranks on an operation's channel."""
        return self._members[op["channel"]]

    def of(self, report: Report) -> Wait | None:
        """Return the wait of a rank; None if no rank delays any of its operations.

        Only the oldest operation can wait for a GPU that is behind. If that one itself hangs, its ranks are behind with
        all later operations.
        """
        looks = [(op, self.late) for op in report.operations] + [(op, self.behind) for op in report.operations[:1]]
        for op, delaying in looks:
            if ranks := [r for r in delaying(op) if r != report.rank]:
                return Wait(op, ranks)
        return None

    def late(self, op: dict) -> list[int]:
        """Return the ranks that have not launched the operation, including ranks without a report."""
        if (place := place_of(op)) not in self._late:
            count = lambda r: self.reports[r].counts.get(op["channel"], 0) if r in self.reports else 0
            self._late[place] = [r for r in self.members(op) if count(r) < op["number"]]
        return self._late[place]

    def behind(self, op: dict) -> list[int]:
        """Return the ranks that have launched the operation, but whose GPU cannot have begun it yet."""
        if (place := place_of(op)) not in self._behind:
            here = (r for r in self.members(op) if r in self.reports)
            self._behind[place] = [r for r in here if _holds(self.reports[r], op)]
        return self._behind[place]

    def ends_at(self, op: dict) -> bool:
        """Return True if nobody is late for the operation, or a rank is that waits for nobody."""
        late = self.late(op)
        return not late or any(r in self.reports and not self.reports[r].operations for r in late)


def _silent(ranks: list[int], spec: MeshSpec) -> list[str]:
    return [f"{_ranks(ranks, spec)} {'does' if len(ranks) == 1 else 'do'} not answer: dead, or cut off"] * bool(ranks)


def _causes(waits: Collection[Wait], reports: Mapping[int, Report], spec: MeshSpec) -> list[str]:
    """Return a line for each rank that others wait for and that waits for nobody. The rank that most wait for is
    first."""
    waiting = Counter(place_of(wait.op) for wait in waits)
    late = {place_of(wait.op): wait.ranks for wait in waits}
    counts: Counter[int] = Counter()
    for place, ranks in late.items():
        counts.update({r: waiting[place] for r in ranks if r in reports and not reports[r].operations})
    found = sorted(counts, key=lambda r: (-counts[r], r))
    lines = [f"{_ranks([r], spec)} is waited for: {_where(reports[r], reports[r].waits)}" for r in found[:SHOWN]]
    return lines + [f"{len(found) - SHOWN} more ranks are waited for"] * (len(found) > SHOWN)


def _most_direct(waited_for: Mapping[int, Wait], reports: Mapping[int, Report]) -> list[int]:
    """Return some of the waiting ranks, in rank order.

    Ranks that wait for a cause of the hang come before ranks that only wait for other waiting ranks. Among them, ranks
    that wait for few others come first. If many ranks wait for one operation, the first of them is chosen.
    """
    is_end = lambda r: r not in reports or not reports[r].operations
    key = lambda r: (not any(map(is_end, waited_for[r].ranks)), len(waited_for[r].ranks), r)
    ordered = sorted(waited_for, key=key)
    first = set({place_of(waited_for[r].op): r for r in reversed(ordered)}.values())
    return sorted(sorted(ordered, key=lambda r: r not in first)[:SHOWN])


def _holds(report: Report, op: dict) -> bool:
    """Return True if the rank has launched the operation, but its GPU is still blocked by an earlier one."""
    if report.completed.get(op["channel"], 0) >= op["number"]:
        return False
    launched = [r["launched"] for r in report.last if place_of(r) == place_of(op)]
    return any(p["waited"] <= launched[0] for p in report.pending if launched and place_of(p) != place_of(op))


def _stuck(waiting: list[Report], waits: _Waits, spec: MeshSpec) -> list[str]:
    """Return a line for each operation that all its ranks have launched and that no rank delays."""
    lines, reports = [], waits.reports
    for op in {place_of(op): op for report in waiting for op in report.pending[:1]}.values():
        channel, number = place_of(op)
        incomplete = [r for r in waits.members(op) if r in reports and reports[r].completed.get(channel, 0) < number]
        what = f"{op['op']} {number} over {channel}, launched in step {op['step']}, {op['action']}"
        where = _ranks(incomplete, spec, False)
        lines.append(f"{what}, by all its ranks, is not complete on {where}: a link or a kernel before it hangs")
    return lines[:SHOWN]


def _disagreement(reports: Mapping[int, Report], spec: MeshSpec) -> list[str]:
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
        frames = " < ".join(reversed(shown_frames(report.stack))) or "an unknown place"
        return f"{at}, in no collective, at {frames}"
    if not op["channel"]:
        return f"{at}, waiting {report.seconds:.0f} s for {op['op']}"
    since = f"launched in step {op['step']}, {op['action']}"
    return f"{at}, waiting {report.seconds:.0f} s in {op['op']} {op['number']} over {op['channel']}, {since}"


def _ranks(ranks: list[int], spec: MeshSpec, coords: bool = True) -> str:
    """Return a list of ranks as text. With `coords`, add the mesh coordinates if there is only one rank."""
    if len(ranks) == 1:
        at = spec.where(ranks[0])
        return f"rank {ranks[0]} ({at})" if coords and at else f"rank {ranks[0]}"
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:SHOWN]))}{more}"
