"""Epochs: shares and rows of a batch, the next epoch, and who may decide it."""

import json
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.islands.epoch import Epoch, Member, epoch_of, fill_rows, quorum, split_rows
from ndtrain.islands.messages import Start
from ndtrain.islands.next_epoch import Report, planned_epoch, unplanned_epoch

SMALL = settings(max_examples=300)
spans = st.tuples(st.integers(0, 1000), st.integers(1, 50)).map(lambda s: (s[0], s[0] + s[1]))


def member(k: int, grain: int = 1, speed: float = 1.0) -> Member:
    return Member(f"i{k}", f"i{k}#1", f"host{k}:1", grain, speed)


def report(k: int, done: int | None, step: int = 0, weights: str = "w", grain: int = 1) -> Report:
    return Report(member(k, grain), done, done is not None, Start(step, weights, {}))


@st.composite
def members(draw, most: int = 5, grain: int = 6):
    grains = draw(st.lists(st.integers(1, grain), min_size=1, max_size=most))
    return tuple(member(k, g, draw(st.floats(0.1, 10))) for k, g in enumerate(grains))


@st.composite
def epochs(draw):
    of = draw(members())
    names = st.lists(st.sampled_from([x.name for x in of]), unique=True).map(tuple)
    opening = st.just(()) | st.tuples(*(st.lists(spans, max_size=3).map(tuple) for _ in of))
    numbers = st.integers(1, 2**40)
    shares = draw(st.tuples(*(st.integers(0, 99) for _ in of)))
    return Epoch(draw(numbers), of, draw(numbers), shares, draw(names), draw(names), draw(opening))


def covered(rows, batch: int) -> list[int]:
    """Return the rows of spans that are in the global batch, sorted."""
    return sorted(r for of_member in rows for start, stop in of_member for r in range(start, stop) if r < batch)


def sums_exist(total: int, grains: list[int]) -> bool:
    return any(sum(c) == total for c in product(*(range(0, total + 1, g) for g in grains)))


# --------------------------------------------------------------------------------------------------------------- shares


@SMALL
@given(st.integers(1, 200), members())
def test_split_rows_any_members_are_multiples_that_cover_the_batch(batch, of):
    sizes = split_rows(batch, of)
    assert all(n >= 0 and n % x.grain == 0 for n, x in zip(sizes, of, strict=True))
    assert batch <= sum(sizes) < batch + min(x.grain for x in of)


@SMALL
@given(st.integers(1, 24), members(most=4))
def test_fill_rows_exact_sum_exists_exactly_if_brute_force_finds_one(batch, of):
    sizes = fill_rows(batch, of)
    assert (sizes is not None) == sums_exist(batch, [x.grain for x in of])
    assert sizes is None or (sum(sizes) == batch and all(n % x.grain == 0 for n, x in zip(sizes, of, strict=True)))


@SMALL
@given(st.integers(1, 40), st.lists(st.floats(0.1, 10), min_size=1, max_size=3))
def test_split_rows_grain_of_one_is_as_fast_as_the_best_split(batch, speeds):
    sizes = split_rows(batch, [member(k, 1, v) for k, v in enumerate(speeds)])
    slowest = lambda of: max(n / v for n, v in zip(of, speeds, strict=True))
    others = product(range(batch + 1), repeat=len(speeds) - 1)
    best = min(slowest((*o, batch - sum(o))) for o in others if sum(o) <= batch)
    assert slowest(sizes) == pytest.approx(best)


@pytest.mark.parametrize(
    ("batch", "grains", "speeds", "sizes"),
    [
        (8, (1, 1), (1, 1), (4, 4)),
        (12, (1, 1), (1, 2), (4, 8)),
        (16, (4, 4), (1, 3), (4, 12)),
        (10, (4, 2), (1, 1), (4, 6)),
        (10, (4, 4), (1, 1), (8, 4)),  # two rows of padding
        (7, (3, 4), (1, 1), (3, 4)),
        (8, (3, 4), (5, 1), (0, 8)),  # the fast one gives up its rows, as no other sum is exact
    ],
)
def test_split_rows_known_case_gives_known_shares(batch, grains, speeds, sizes):
    of = [member(k, g, v) for k, (g, v) in enumerate(zip(grains, speeds, strict=True))]
    assert split_rows(batch, of) == sizes


# ----------------------------------------------------------------------------------------------------------------- rows


def test_rows_of_shares_follow_the_order_of_the_members():
    epoch = Epoch(1, tuple(map(member, range(3))), 5, (3, 0, 2))
    assert epoch.rows(5) == epoch.rows(6) == {"i0": ((0, 3),), "i2": ((3, 5),)}


def test_rows_of_the_first_step_are_the_opening():
    epoch = Epoch(2, tuple(map(member, range(3))), 5, (2, 2, 1), opening=(((0, 1), (4, 5)), (), ((1, 4),)))
    assert epoch.rows(5) == {"i0": ((0, 1), (4, 5)), "i2": ((1, 4),)}
    assert epoch.rows(6) == {"i0": ((0, 2),), "i1": ((2, 4),), "i2": ((4, 5),)}


def test_rows_of_a_batch_that_is_no_sum_of_grains_reach_past_its_end():
    of = [member(0, 4), member(1, 4)]
    assert list(Epoch(1, tuple(of), 1, split_rows(10, of)).rows(1).values()) == [((0, 8),), ((8, 12),)]


# -------------------------------------------------------------------------------------------------------------- planned


def test_planned_epoch_without_learners_has_no_opening():
    epoch = planned_epoch(4, 9, [report(0, 7), report(1, 6)], 8)
    assert epoch == Epoch(4, (member(0), member(1)), 9, (4, 4))


@SMALL
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=4), st.integers(1, 40))
def test_planned_epoch_with_learners_leaves_the_first_step_to_the_others(others, batch):
    others = [(False, 1), *others]
    reports = [report(k, None if learns else 5, grain=g) for k, (learns, g) in enumerate(others)]
    epoch = planned_epoch(2, 6, reports, batch)
    assert epoch.learners == tuple(f"i{k}" for k, (learns, _) in enumerate(others) if learns)
    assert not epoch.holders
    first, second = epoch.rows(6), epoch.rows(7)
    assert not set(epoch.learners) & first.keys() or not epoch.learners
    assert covered(first.values(), batch) == covered(second.values(), batch) == list(range(batch))


# ------------------------------------------------------------------------------------------------------------ unplanned


@SMALL
@given(members(grain=3), st.integers(1, 40), st.data())
def test_unplanned_epoch_after_a_loss_keeps_rows_and_spreads_each_lost_row_once(of, batch, data):
    rows = Epoch(1, of, 5, split_rows(batch, of)).rows(5)
    for number in range(2, 4):  # losses one after another, in the same step
        of = data.draw(st.lists(st.sampled_from(of), unique=True, min_size=1).map(tuple))
        epoch = unplanned_epoch(number, [Report(x, 4, True, Start(0, "", {})) for x in of], batch, rows)
        new = epoch.rows(5)
        assert (epoch.begin, epoch.learners, epoch.holders) == (5, (), epoch.names)
        assert covered(new.values(), batch) == list(range(batch))
        mine = {x.name: rows.get(x.name, ()) for x in of}
        lost = batch - len(covered(mine.values(), batch))
        if fill_rows(lost, of) is not None:
            assert all(new.get(name, ())[: len(kept)] == kept for name, kept in mine.items())
        assert all(sum(b - a for a, b in new.get(x.name, ())) % x.grain == 0 for x in of)
        rows = new


def test_unplanned_epoch_member_one_step_behind_is_a_sharer_but_no_holder():
    epoch = unplanned_epoch(2, [report(0, 6), report(1, 5)], 8, None)
    assert (epoch.begin, epoch.holders, epoch.learners) == (7, ("i0",), ())


def test_unplanned_epoch_member_two_steps_behind_is_a_learner():
    epoch = unplanned_epoch(2, [report(0, 6), report(1, 4), report(2, None)], 8, {"i1": ((0, 8),)})
    assert (epoch.begin, epoch.holders, epoch.learners) == (7, ("i0",), ("i1", "i2"))
    assert epoch.rows(7) == {"i0": ((0, 8),)}


def test_unplanned_epoch_without_weights_begins_at_the_newest_start():
    reports = [report(0, None, 3, "a"), report(1, None, 8, "b"), report(2, None, 8, "b"), report(3, None, 8, "c")]
    epoch = unplanned_epoch(1, reports, 8, None)
    assert (epoch.begin, epoch.holders, epoch.learners) == (9, ("i1", "i2"), ("i0", "i3"))
    assert epoch.shares == (2, 2, 2, 2)
    assert epoch.rows(9).keys() == {"i1", "i2"}


# --------------------------------------------------------------------------------------------------------------- quorum


@pytest.mark.parametrize("n", [1, 3, 4, 5, 6, 7])
def test_quorum_two_sets_that_may_decide_have_a_member_in_common(n):
    epoch = Epoch(1, tuple(map(member, range(n))), 1, (1,) * n)
    dead = {x.life: True for x in epoch.members}
    subsets = [set(c) for k in range(n + 1) for c in combinations(epoch.names, k)]
    deciding = [s for s in subsets if quorum(epoch, s, dead, "i0#1")]
    assert deciding and all(a & b for a, b in combinations(deciding, 2))
    assert set(epoch.names) in deciding and set() not in deciding
    half = [s for s in deciding if 2 * len(s) == n]
    assert bool(half) == (n % 2 == 0) and all("i0" in s for s in half)


@pytest.mark.parametrize(
    ("voters", "dead", "me", "may"),
    [
        ({"i0", "i1"}, {}, "i0#1", True),
        ({"i0"}, {}, "i0#1", False),
        ({"i0"}, {"i1#1": False}, "i0#1", False),
        ({"i0"}, {"i0#1": True}, "i0#1", False),
        ({"i0"}, {"i1#1": True}, "i0#1", True),
        ({"i1"}, {"i0#1": True}, "i1#1", True),
        ({"i0"}, {"i1#1": True}, "i0#2", False),  # a restarted process
        (set(), {"i0#1": True, "i1#1": True}, "i0#1", False),
    ],
)
def test_quorum_one_of_two_decides_only_if_the_other_has_ended(voters, dead, me, may):
    assert quorum(Epoch(1, (member(0), member(1)), 1, (1, 1)), voters, dead, me) is may


# ----------------------------------------------------------------------------------------------------------------- JSON


@SMALL
@given(epochs())
def test_epoch_of_to_json_is_equal(epoch):
    assert epoch_of(json.loads(json.dumps(epoch.to_json()))) == epoch


def test_epoch_has_life_tells_a_restarted_process_from_the_member():
    epoch = Epoch(1, (member(0),), 1, (1,))
    assert epoch.has_life("i0#1") and not epoch.has_life("i0#2")
    assert epoch.member("i0") == member(0) and epoch.member("i1") is None
    assert replace(epoch, number=2).names == ("i0",)
