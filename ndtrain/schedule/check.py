"""Checks schedules: proves that a table can run, or names an action that cannot."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from ndtrain.schedule.table import Action, IllegalSchedule, Table, show


def check(table: Table, microbatches: int, stages: int) -> None:
    """Prove that a table can run, in time linear in the number of its actions.

    Every (microbatch, stage) must have one F and either one B or one I and one W. All actions of a stage must be on one
    rank. F(m, s) depends on F(m, s-1). B(m, s) and I(m, s) depend on F(m, s) and on the B or I of (m, s+1). W(m, s)
    depends on I(m, s). Ranks run their actions in order. Sends do not block. Messages between two ranks arrive in the
    order sent, and a receiver that needs a later one keeps the earlier ones. So messages cause no further waits: a
    table runs if and only if the dependencies and the orders of the rows form no cycle.

    Raises:
        IllegalSchedule: names the first action that is repeated, misplaced or missing, or the cycle of actions that
            wait for each other.
    """
    _check_places(table, microbatches, stages)
    for _ in in_order(table):
        pass


def in_order(table: Table) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yield (rank, action, its dependencies) for every action, in an order in which the table can run.

    Raises:
        IllegalSchedule: the remaining actions wait for each other.
    """
    needs = needs_of(table)
    at = [0] * len(table)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = list(range(len(table)))[::-1]
    while ready:
        rank = ready.pop()
        row = table[rank]
        while at[rank] < len(row):
            action = row[at[rank]]
            needed = needs(action)
            missing = next((n for n in needed if n not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            yield rank, action, needed
            done.add(action)
            at[rank] += 1
            ready += waiting.pop(action, [])
    if waiting:
        raise _deadlock(table, at, {rank: missing for missing, ranks in waiting.items() for rank in ranks})


def needs_of(table: Table) -> Callable[[Action], list[Action]]:
    """Return a function that returns an action's dependencies.

    The next stage's gradient comes from a B or an I, depending on the table.
    """
    gradient = {a[1:]: a for row in table for a in row if a.kind in "BI"}

    def needs(a: Action) -> list[Action]:
        if a.kind == "F":
            return [Action("F", a.microbatch, a.stage - 1)] if a.stage else []
        if a.kind == "W":
            return [Action("I", a.microbatch, a.stage)]
        after = gradient.get((a.microbatch, a.stage + 1))
        return [Action("F", a.microbatch, a.stage), *([after] if after else [])]

    return needs


_EXCLUDES = {"F": "", "B": "IW", "I": "B", "W": "B"}  # kind -> kinds that its (microbatch, stage) must not also have


def _check_places(table: Table, microbatches: int, stages: int) -> None:
    """Check that every (microbatch, stage) has each of its actions exactly once, and that every stage has one rank.

    Raises:
        IllegalSchedule: an action is repeated, misplaced or missing.
    """
    kinds: dict[tuple[int, int], str] = {}  # (microbatch, stage) -> the kinds so far
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(table):
        for index, a in enumerate(row):
            before = kinds.get(a[1:], "")
            fault = _fault(a, microbatches, stages, before)
            if not fault and rank_of.setdefault(a.stage, rank) != rank:
                fault = f"must be on rank {rank_of[a.stage]}, like the earlier actions of its stage"
            if fault:
                raise IllegalSchedule(f"rank {rank}: {show(a)} {fault}", rank, index)
            kinds[a[1:]] = before + a.kind
    for stage in range(stages):
        for m in range(microbatches):
            if missing := _missing(kinds.get((m, stage), "")):
                raise IllegalSchedule(f"{show(Action(missing[0], m, stage))} is missing")


def _fault(a: Action, microbatches: int, stages: int, before: str) -> str | None:
    """Explain why `a` is illegal after the kinds `before` of its microbatch and stage. Return None if it is legal."""
    if a.kind not in _EXCLUDES or not 0 <= a.microbatch < microbatches or not 0 <= a.stage < stages:
        return f"is outside the schedule (microbatches 0 to {microbatches - 1}, stages 0 to {stages - 1})"
    if a.kind in before:
        return "appears twice"
    other = next((kind for kind in _EXCLUDES[a.kind] if kind in before), None)
    return other and f"appears in addition to its {other}: a backward is either B, or I and W"


def _missing(kinds: str) -> list[str]:
    """Return the kinds that are still missing for one microbatch on one stage, given the `kinds` it has."""
    return [kind for kind in ("FIW" if "I" in kinds or "W" in kinds else "FB") if kind not in kinds]


def _deadlock(table: Table, at: list[int], missing: dict[int, Action]) -> IllegalSchedule:
    """Return the error that describes a cycle of waiting ranks, beginning with the lowest rank of the cycle.

    Args:
        at: for each rank, the index of its next action.
        missing: waiting rank -> the action that it waits for.
    """
    rank_of = {a.stage: rank for rank, row in enumerate(table) for a in row}
    path = [min(missing)]
    while (rank := rank_of[missing[path[-1]].stage]) not in path:  # from a rank to the one it waits for
        path.append(rank)
    cycle = path[path.index(rank) :]
    start = cycle.index(min(cycle))
    cycle = cycle[start:] + cycle[: start + 1]
    text = f"rank {cycle[0]}: {show(table[cycle[0]][at[cycle[0]]])} waits for " + ", which waits for ".join(
        _link(missing[rank], after, table[after][at[after]]) for rank, after in pairwise(cycle)
    )
    return IllegalSchedule(text, cycle[0], at[cycle[0]])


def _link(missing: Action, rank: int, current: Action) -> str:
    """Describe the action that another rank waits for, and the next action of `rank`, which has to run before it."""
    return f"rank {rank}: {show(missing)}" + ("" if missing == current else f" behind {show(current)}")
