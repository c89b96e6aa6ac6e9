"""Schedule tables are legal, and the checker refuses those that are not."""

import random

import pytest

from ndtrain.schedule import GENERATORS, Action, IllegalSchedule, check


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 13])
def test_generated_tables_are_legal(name, pp, microbatches):
    check(GENERATORS[name](pp, microbatches), microbatches, pp)


def test_live_microbatches():
    def peak(actions):
        alive, most = 0, 0
        for a in actions:
            alive += 1 if a.kind == "F" else -1
            most = max(most, alive)
        return most

    assert [peak(a) for a in GENERATORS["1f1b"](4, 16)] == [4, 3, 2, 1]
    assert [peak(a) for a in GENERATORS["gpipe"](4, 16)] == [16] * 4


def test_checker_names_what_is_wrong():
    table = GENERATORS["1f1b"](2, 2)
    with pytest.raises(IllegalSchedule, match=r"B\(microbatch 1, stage 1\) is missing"):
        check([table[0], table[1][:-1]], 2, 2)
    with pytest.raises(IllegalSchedule, match=r"rank 1: F\(microbatch 0, stage 1\) stands there twice"):
        check([table[0], [*table[1], table[1][0]]], 2, 2)
    backward_first = [[Action("B", 0, 0), Action("F", 0, 0)]]
    with pytest.raises(
        IllegalSchedule, match=r"rank 0: B\(microbatch 0, stage 0\) waits for F\(microbatch 0, stage 0\)"
    ):
        check(backward_first, 1, 1)


def test_swapped_actions_are_refused_exactly_when_they_cannot_run():
    """Swapping two neighbours of a rank's list is illegal just where the first is what the second waits for, or where
    the ranks come to wait for each other: against a brute-force run of the table."""
    draw = random.Random(0)
    refused = 0
    for _ in range(200):
        pp, m = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
        table = [list(a) for a in draw.choice(list(GENERATORS.values()))(pp, m)]
        for _ in range(draw.randint(1, 4)):
            actions = draw.choice(table)
            i, j = draw.randrange(len(actions)), draw.randrange(len(actions))
            actions[i], actions[j] = actions[j], actions[i]
        try:
            check(table, m, pp)
            legal = True
        except IllegalSchedule:
            legal = False
            refused += 1
        assert legal == runs_through(table, pp)
    assert 20 < refused < 180


def runs_through(table, stages) -> bool:
    """Runs the table, one random ready rank at a time."""
    queues, done = [list(a) for a in table], set()
    while any(queues):
        ready = [q for q in queues if q and may_run(q[0], done, stages)]
        if not ready:
            return False
        done.add(random.choice(ready).pop(0))
    return True


def may_run(a: Action, done: set, stages: int) -> bool:
    if a.kind == "F":
        return a.stage == 0 or ("F", a.microbatch, a.stage - 1) in done
    after = a.stage == stages - 1 or ("B", a.microbatch, a.stage + 1) in done
    return ("F", a.microbatch, a.stage) in done and after
