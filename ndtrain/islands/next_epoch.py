"""The next epoch, as a function of what the islands have reported."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ndtrain.islands.epoch import Epoch, Member, Span, fill_rows, split_rows
from ndtrain.islands.messages import Start


class Report(NamedTuple):
    """The state of an island that will be a member.

    Attributes:
        done: the number of steps that it has finished; None: it has no weights of this run yet.
        has_sum: True if it can offer the summed gradient of step `done`.
        start: the state with which its process has started.
    """

    member: Member
    done: int | None
    has_sum: bool
    start: Start


def planned_epoch(
    number: int, begin: int, reports: Sequence[Report], batch: int, learners_share: bool = False
) -> Epoch:
    """Return the next epoch if no member was lost. New members have no weights.

    Args:
        batch: the rows of a global batch.
        learners_share: as in `Rules`.
    """
    members = tuple(r.member for r in reports)
    learners = tuple(r.member.name for r in reports if r.done is None)
    teachers = [r.member for r in reports if r.done is not None]
    opening = _spread(batch, members, teachers) if learners and not learners_share else ()
    return Epoch(number, members, begin, split_rows(batch, members), learners, (), opening)


def unplanned_epoch(
    number: int,
    reports: Sequence[Report],
    batch: int,
    rows: Mapping[str, tuple[Span, ...]] | None,
    learners_share: bool = False,
) -> Epoch:
    """Return the next epoch if a member was lost, or the first one.

    The step that is in progress begins it. Its members keep the rows that they may have computed already, and take over
    the lost rows.

    Args:
        rows: the rows of the members in the step in progress, by name; None: no step is in progress.
        learners_share: as in `Rules`. Then all rows are shared anew.
    """
    members = tuple(r.member for r in reports)
    done, holders, learners = _positions(reports)
    shares = split_rows(batch, members)
    summed = tuple(r.member.name for r in reports if r.member.name in holders and r.has_sum)
    sharers = [m for m in members if m.name not in learners]
    opening = ()
    if not learners_share:
        opening = (rows is not None and _kept(batch, members, sharers, rows)) or _spread(batch, members, sharers)
    # The holders keep the sum of the last step until all sharers of this one have it. Others have to read weights.
    idle = {m.name for m, share in zip(members, opening or shares, strict=True) if not share}
    learners = tuple(m.name for m in members if m.name in learners or (m.name in idle and m.name not in holders))
    return Epoch(number, members, done + 1, shares, learners, holders, opening, summed)


def _positions(reports: Sequence[Report]) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Return the last finished step, the members that have finished it, and the members that have to read weights.

    If no process has weights of this run any more, the newest state with which one has started counts.
    """
    done = {r.member.name: r.done for r in reports if r.done is not None}
    if done:
        last = max(done.values())
        holders = tuple(name for name, step in done.items() if step == last)
        has_sum = any(r.has_sum for r in reports if r.done == last)
        behind = {name for name, step in done.items() if step < (last - 1 if has_sum else last)}
        return last, holders, tuple(n for r in reports if (n := r.member.name) not in done or n in behind)
    newest = max(reports, key=lambda r: (r.start.step, bool(r.start.weights))).start
    same = lambda r: (r.start.step, r.start.weights) == (newest.step, newest.weights)
    holders = tuple(r.member.name for r in reports if same(r))
    return newest.step, holders, tuple(r.member.name for r in reports if not same(r))


def _spread(batch: int, members: Sequence[Member], sharers: Sequence[Member]) -> tuple[tuple[Span, ...], ...]:
    """Return the rows of a step, split anew over the members that have a share."""
    spans, at = {}, 0
    for member, size in zip(sharers, split_rows(batch, sharers), strict=True):
        spans[member.name] = ((at, at + size),) if size else ()
        at += size
    return tuple(spans.get(m.name, ()) for m in members)


def _kept(
    batch: int, members: Sequence[Member], sharers: Sequence[Member], rows: Mapping[str, tuple[Span, ...]]
) -> tuple[tuple[Span, ...], ...] | None:
    """Return the rows of a step such that every sharer keeps its rows, and the others' rows are spread over them.

    Return None if the lost rows are no sum of multiples of the grains.
    """
    mine = {m.name: rows.get(m.name, ()) for m in sharers}
    lost = _gaps(batch, [span for spans in mine.values() for span in spans])
    sizes = fill_rows(sum(stop - start for start, stop in lost), sharers)
    if sizes is None:
        return None
    for member, size in zip(sharers, sizes, strict=True):
        taken, lost = _take(lost, size)
        mine[member.name] = (*mine[member.name], *taken)
    return tuple(mine.get(m.name, ()) for m in members)


def _gaps(batch: int, spans: Sequence[Span]) -> list[Span]:
    """Return the rows of the batch that are in no span."""
    gaps, at = [], 0
    for start, stop in sorted(spans):
        if start > at:
            gaps.append((at, min(start, batch)))
        at = max(at, stop)
    return [*gaps, (at, batch)] if at < batch else gaps


def _take(spans: Sequence[Span], size: int) -> tuple[list[Span], list[Span]]:
    """Split spans into their first `size` rows and the rest."""
    taken, rest = [], []
    for start, stop in spans:
        cut = min(stop, start + size)
        size -= cut - start
        taken += [(start, cut)] * (cut > start)
        rest += [(cut, stop)] * (stop > cut)
    return taken, rest
