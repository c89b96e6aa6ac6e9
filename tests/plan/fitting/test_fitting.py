"""The fit of the rates: the minimiser, the errors, the folds and the picture."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lab.published.least_squares import Parameter, fit
from lab.published.scatter import SIDE, Points, scatter_svg
from ndtrain.plan.accuracy import accuracy, folds, kendall_tau

X = np.linspace(1.0, 20.0, 60)
TRUTH = np.array([0.6, 5.0])


def _curve(p):
    return X / p[0] + p[1]


def _parameters(most: float = 1.0):
    return [Parameter(0.9, 0.1, most), Parameter(1.0, 0.01, 100.0)]


def test_fit_finds_parameters_despite_outliers():
    measured = _curve(TRUTH)
    measured[::10] *= 3
    fitted = fit(lambda p: np.log(_curve(p) / measured), _parameters(), np.ones(len(X)), pull=1e-3, rounds=20)
    assert fitted == pytest.approx(TRUTH, rel=0.06)


def test_fit_keeps_parameters_within_bounds():
    fitted = fit(lambda p: np.log(_curve(p) / (X / 4)), _parameters(), np.ones(len(X)))
    assert fitted[0] == pytest.approx(1.0) and fitted[1] < 0.2


def test_fit_leaves_irrelevant_parameter_at_start():
    fitted = fit(lambda p: np.log(X / p[0] / (X / 0.5)), _parameters(), np.ones(len(X)))
    assert fitted[1] == pytest.approx(1.0) and fitted[0] == pytest.approx(0.5, rel=0.01)


def test_accuracy_equals_hand_calculation():
    a = accuracy([1.0, 2.0, 4.0, 8.0], [1.1, 1.8, 8.0, 8.0], [(10.0, 9.0), (20.0, 24.0)])
    assert a.median == pytest.approx(0.1) and a.worst == pytest.approx(1.0) and a.within_25 == 0.75
    assert a.quartiles == pytest.approx((-0.025, 0.325)) and a.memory_median == pytest.approx(0.15)
    assert a.tau == pytest.approx(5 / np.sqrt(6 * 5))  # one tie among the predicted
    assert accuracy([1.0, 2.0], [1.0, 2.0]).tau is None and accuracy([1.0], [1.0]).memory_median is None


def test_kendall_tau_of_ordered_reversed_and_tied_values():
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1 and kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(2 / 3)
    assert kendall_tau([1, 1, 1], [1, 2, 3]) is None


def test_folds_hold_each_source_once_and_are_balanced():
    sources = ["a"] * 9 + ["b"] * 4 + ["c"] * 3 + ["d"] * 2 + ["e"] * 2 + ["f"]
    made = folds(sources, 3)
    assert sorted(s for fold in made for s in fold) == ["a", "b", "c", "d", "e", "f"]
    assert sorted(sum(sources.count(s) for s in fold) for fold in made) == [6, 6, 9]
    assert folds(["a", "b"], 5) == [{"a"}, {"b"}]


def test_scatter_svg_draws_equal_values_on_diagonal():
    svg = ElementTree.fromstring(scatter_svg("T & t", "seconds", [Points("a", [1.0, 10.0], [1.0, 20.0])]))
    circles = [c for c in svg.iter("{http://www.w3.org/2000/svg}circle") if c.get("r") == "3.5"]
    (x, y), (x2, y2) = ((float(c.get("cx")), float(c.get("cy"))) for c in circles)
    assert x == pytest.approx(SIDE - y, abs=0.2) and SIDE - y2 > x2 > x
