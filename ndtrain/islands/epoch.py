"""Epochs: who trains in which steps, and on which rows of the global batch.

The islands agree on each epoch (`island.py`). Everything in this file is a pure function of epochs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

MOST_ISLANDS = 256
MOST_TEXT = 1000  # characters of a name or an address


Span = tuple[int, int]  # rows [start, stop) of a global batch


class Member(NamedTuple):
    """An island, as the others know it.

    Attributes:
        name: its name, which it keeps when it is restarted.
        life: a random text. A restarted island has another one.
        address: where its leader listens, "host:port".
        grain: its number of rows is a multiple of this number.
        speed: measured rows per second; 0: unknown.
    """

    name: str
    life: str
    address: str
    grain: int = 1
    speed: float = 0.0


@dataclass(frozen=True)
class Epoch:
    """A period in which the same islands train on the same shares of the global batch.

    Attributes:
        number: 1, 2, 3, ... Two epochs with the same number are equal.
        members: the islands, the one that has been a member for the longest time first.
        begin: the first step of the epoch, counted from 1. It ends where the next one begins.
        shares: the number of rows of each member in every step.
        learners: the names of members that have no weights yet. They read the state after step `begin` - 1 from the
            others while these compute step `begin`, in which the learners have no share.
        holders: if a member was lost, the names of members that have finished step `begin` - 1. Empty: nobody was lost,
            and the previous epoch goes on until step `begin` - 1.
        summed: the holders that can offer the summed gradient of that step. A member that is one step behind reads it.
        opening: the rows of each member in step `begin`, as spans [start, stop). Empty: they follow from the shares.
    """

    number: int
    members: tuple[Member, ...]
    begin: int
    shares: tuple[int, ...]
    learners: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    opening: tuple[tuple[Span, ...], ...] = ()
    summed: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(m.name for m in self.members)

    def member(self, name: str) -> Member | None:
        """Return the member with this name, or None."""
        return next((m for m in self.members if m.name == name), None)

    def has_life(self, life: str) -> bool:
        return any(m.life == life for m in self.members)

    def rows(self, step: int) -> dict[str, tuple[Span, ...]]:
        """Return the rows of the members that have a share in a step of this epoch, in the order of the members.

        Rows after the last one of the global batch are empty: they fill a member's share up to a multiple of its grain.
        """
        if step == self.begin and self.opening:
            return {m.name: spans for m, spans in zip(self.members, self.opening, strict=True) if spans}
        ends = accumulate(self.shares)
        return {m.name: ((end - n, end),) for m, n, end in zip(self.members, self.shares, ends, strict=True) if n}

    def to_json(self) -> dict[str, Any]:
        """Return the epoch as JSON."""
        return {**self.__dict__, "members": [list(m) for m in self.members]}


def epoch_of(data: Any) -> Epoch:
    """Return the epoch that `Epoch.to_json` has described.

    Raises:
        ValueError: the data has another form.
    """
    match data:
        case {
            "number": int(number), "members": list(members), "begin": int(begin), "shares": list(shares),
            "learners": list(learners), "holders": list(holders), "opening": list(opening), "summed": list(summed),
            **rest,
        } if not rest and _is_count(number) and _is_count(begin) and 0 < len(members) <= MOST_ISLANDS:  # fmt: skip
            made = tuple(member_of(m) for m in members)
            names = {m.name for m in made}
            _require(len(names) == len(made) == len(shares) and len(opening) in (0, len(made)))
            _require(all(_is_row(n) for n in shares))
            _require(all(isinstance(n, str) and n in names for n in (*learners, *holders, *summed)))
            spans = tuple(tuple(_span_of(s) for s in _list(of_member)) for of_member in opening)
            who = tuple(learners), tuple(holders)
            return Epoch(number, made, begin, tuple(shares), *who, spans, tuple(summed))
    raise ValueError("not an epoch")


def member_of(data: Any) -> Member:
    """Return the member in a list, as JSON has it.

    Raises:
        ValueError: the data has another form.
    """
    match data:
        case [str(name), str(life), str(address), grain, float() | int() as speed] if _is_count(grain):
            _require(not isinstance(speed, bool))
            _require(0 < len(name) <= MOST_TEXT and 0 < len(life) <= MOST_TEXT and len(address) <= MOST_TEXT)
            _require(0 <= speed < 1e12)
            return Member(name, life, address, grain, float(speed))
    raise ValueError("not a member")


def _span_of(data: Any) -> Span:
    match data:
        case [int(start), int(stop)] if _is_row(start) and _is_row(stop) and start < stop:
            return start, stop
    raise ValueError("not a span of rows")


def _list(data: Any) -> list[Any]:
    _require(isinstance(data, list) and len(data) <= MOST_ISLANDS)
    return data


def _is_row(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**53


def _require(ok: bool) -> None:
    if not ok:
        raise ValueError("a field of an epoch is out of bounds")


def split_rows(batch: int, members: Sequence[Member]) -> tuple[int, ...]:
    """Return the number of rows of each member, a multiple of its grain, such that the slowest member is as fast as
    possible. Together they are the global batch. If no multiples add up to it, they are a few rows more.

    A member whose speed is unknown counts as an average one.
    """
    for total in range(batch, batch + min(m.grain for m in members)):
        if sizes := fill_rows(total, members):
            return sizes
    raise AssertionError("the smallest grain fits into the last total")


def fill_rows(batch: int, members: Sequence[Member]) -> tuple[int, ...] | None:
    """Return the number of rows of each member as in `split_rows`, or None if they do not add up to `batch`.

    Rows are given one grain at a time to the member that would finish first. If some rows are left over, the last
    grains are given again, until the rows that are left can be given out exactly.
    """
    sizes, speeds, given = [0] * len(members), speeds_of(members), list[int]()
    left = batch
    while fitting := [i for i, m in enumerate(members) if m.grain <= left]:
        best = min(fitting, key=lambda i: ((sizes[i] + members[i].grain) / speeds[i], i))
        sizes[best] += members[best].grain
        left -= members[best].grain
        given.append(best)
    while (extra := _sum_of_grains(left, [m.grain for m in members])) is None:
        if not given:
            return None
        last = given.pop()
        sizes[last] -= members[last].grain
        left += members[last].grain
    return tuple(n + more for n, more in zip(sizes, extra, strict=True))


def speeds_of(members: Sequence[Member]) -> list[float]:
    """Return the speed of each member. Unknown ones are the mean of the others."""
    known = [m.speed for m in members if m.speed]
    mean = sum(known) / len(known) if known else 1.0
    return [m.speed or mean for m in members]


def _sum_of_grains(total: int, grains: Sequence[int]) -> list[int] | None:
    """Return multiples of the grains that add up to `total`, or None."""
    reached: dict[int, tuple[int, int]] = {0: (-1, -1)}  # sum -> (the grain that was added last, the sum before it)
    frontier = [0]
    for at in frontier:
        for i, grain in enumerate(grains):
            if at + grain <= total and at + grain not in reached:
                reached[at + grain] = (i, at)
                frontier.append(at + grain)
    if total not in reached:
        return None
    extra = [0] * len(grains)
    while total:
        i, before = reached[total]
        extra[i] += total - before
        total = before
    return extra


def quorum(epoch: Epoch, voters: set[str], dead: Mapping[str, bool], me: str) -> bool:
    """Return True if these members may decide the next epoch.

    They may if they are more than half. They also may if they are half and include the first member. Of two members,
    one may decide alone if the process of the other member has provably ended. Then nobody is left who could decide
    otherwise. Any two sets that may decide have a member in common.

    Args:
        voters: names of members that agree.
        dead: life -> True if its process has provably ended.
        me: the life of the island that counts the votes. A restarted island does not know what happened before, so it
            cannot decide alone.
    """
    n, votes = len(epoch.members), len(voters)
    if n != 2:
        return 2 * votes > n or (2 * votes == n and epoch.members[0].name in voters)
    absent = [m for m in epoch.members if m.name not in voters]
    return not absent or (len(absent) == 1 and dead.get(absent[0].life, False) and epoch.has_life(me))
