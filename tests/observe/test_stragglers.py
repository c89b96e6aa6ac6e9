"""The ranks that are busy for longer than the ranks with the same work."""

from statistics import median

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ndtrain.mesh.mesh import MeshSpec
from ndtrain.observe.stragglers import WINDOW, Stragglers, _medians_of_others


@given(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=9))
def test_medians_of_others_leave_out_one_value_each(values):
    others = [values[:i] + values[i + 1 :] or values for i in range(len(values))]
    assert _medians_of_others(np.array(values)).tolist() == [median(rest) for rest in others]


def test_straggler_is_named_once_and_on_recovery():
    watch = Stragglers(MeshSpec(("pp", "tp"), (2, 2)))
    usual = [0.1, 0.1, 0.4, 0.4]  # the second stage has more work, so its ranks are not slow
    reports = [watch.update(usual) for _ in range(2 * WINDOW)]
    reports += [watch.update([0.1, 0.1, 0.4, 0.7]) for _ in range(2 * WINDOW)]
    reports += [
        watch.update([0.1, 0.1, 0.4, 0.55 + 0.1 * (step % 2)]) for step in range(4 * WINDOW)
    ]  # still slow, barely
    reports += [watch.update(usual) for _ in range(2 * WINDOW)]
    slow, over = [line for lines in reports for line in lines]
    assert slow == f"rank 3 (pp=1 tp=1) is slow: busy 0.7 s per step, its peers 0.4 s (median of {WINDOW} steps)"
    assert over.startswith("rank 3 (pp=1 tp=1) is no longer slow: ")


def test_single_or_tiny_slow_step_is_no_straggler():
    watch = Stragglers(MeshSpec(("dp",), (2,)))
    assert not any(watch.update([0.1, 9.0 if step % 3 == 0 else 0.1]) for step in range(50))
    tiny = Stragglers(MeshSpec(("dp",), (2,)))
    assert not any(tiny.update([0.001, 0.009]) for _ in range(50))
