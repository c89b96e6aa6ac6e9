"""Pipeline schedules as plain tables: for every pp rank, the order of its actions. No torch in here.

An action is one forward (F) or backward (B) of one microbatch on one stage. With one chunk per rank, stage = rank.
"""

from typing import NamedTuple


class Action(NamedTuple):
    kind: str  # F | B
    microbatch: int
    stage: int


Table = list[list[Action]]  # per pp rank


def gpipe(pp: int, microbatches: int) -> Table:
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""
    return [
        [Action("F", m, r) for m in range(microbatches)] + [Action("B", m, r) for m in range(microbatches)]
        for r in range(pp)
    ]


def one_f_one_b(pp: int, microbatches: int) -> Table:
    """As few forwards as fill the pipeline, then one backward for each forward (PipeDream-flush, Narayanan et al.,
    2021, arXiv:2006.09503): at most pp - rank microbatches are alive on a rank."""
    table = []
    for r in range(pp):
        ahead = min(pp - 1 - r, microbatches)
        actions = [Action("F", m, r) for m in range(ahead)]
        for m in range(microbatches - ahead):
            actions += [Action("F", ahead + m, r), Action("B", m, r)]
        table.append(actions + [Action("B", m, r) for m in range(microbatches - ahead, microbatches)])
    return table


GENERATORS = {"gpipe": gpipe, "1f1b": one_f_one_b}


class IllegalSchedule(ValueError):
    """A table that cannot run; the message names the first offending action."""


def check(table: Table, microbatches: int, stages: int) -> None:
    """Proves that a table runs: every action stands in it once and, with each rank taking its actions in order and
    waiting for what they depend on, all of them come to their turn.

    F(m, s) needs F(m, s-1); B(m, s) needs F(m, s) and B(m, s+1).

    Raises:
        IllegalSchedule: naming the first action that is missing, doubled, or never gets its turn.
    """
    wanted = {Action(k, m, s) for k in "FB" for m in range(microbatches) for s in range(stages)}
    seen: set[Action] = set()
    for rank, actions in enumerate(table):
        for a in actions:
            if a not in wanted or a in seen:
                raise IllegalSchedule(
                    f"rank {rank}: {_show(a)} {'stands there twice' if a in seen else 'has no place'}"
                )
            seen.add(a)
    if seen != wanted:
        raise IllegalSchedule(f"{_show(min(wanted - seen))} is missing")
    _check_order(table, stages)


def _check_order(table: Table, stages: int) -> None:
    done: set[Action] = set()
    at = [0] * len(table)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(table):
            while at[rank] < len(actions) and all(d in done for d in _needs(actions[at[rank]], stages)):
                done.add(actions[at[rank]])
                at[rank] += 1
                progress = True
    for rank, actions in enumerate(table):
        if at[rank] < len(actions):
            a = actions[at[rank]]
            missing = next(d for d in _needs(a, stages) if d not in done)
            raise IllegalSchedule(f"rank {rank}: {_show(a)} waits for {_show(missing)}, which never comes")


def _needs(a: Action, stages: int) -> list[Action]:
    if a.kind == "F":
        return [Action("F", a.microbatch, a.stage - 1)] if a.stage else []
    after = [Action("B", a.microbatch, a.stage + 1)] if a.stage + 1 < stages else []
    return [Action("F", a.microbatch, a.stage), *after]


def _show(a: Action) -> str:
    return f"{a.kind}(microbatch {a.microbatch}, stage {a.stage})"
