"""`plan validate`: the compared runs and the printed summary."""

import pytest
import torch

from ndtrain.plan import validate
from ndtrain.plan.__main__ import main
from ndtrain.plan.accuracy import kendall_tau
from ndtrain.plan.validate import CASES, Options, Row, config_of, summary


def test_cases_are_at_least_40_and_cover_every_setting():
    cases = [f"{ranks} {case}" for ranks, of_ranks in CASES.items() for case in of_ranks]
    assert len(cases) >= 40 and len(set(cases)) == len(cases)
    words = {word for case in cases for word in case.split()}
    assert words >= {f"mesh.{axis}=2" for axis in ("pp", "dp", "fsdp", "cp", "tp")} | {"precision.compute=bf16"}
    assert words >= {f"mesh.zero={n}" for n in (1, 2, 3)} | {f"recompute={n}" for n in ("full", "selective", "every")}
    assert len([word for word in words if word.startswith("schedule=")]) == 5


@pytest.mark.full
def test_every_case_resolves():
    for ranks, cases in CASES.items():
        for case in cases:
            config_of(case, ranks)


def test_kendall_tau_equals_hand_calculation():
    assert kendall_tau([1, 2, 3], [4, 5, 6]) == 1 and kendall_tau([1, 2, 3], [6, 5, 4]) == -1
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)


def test_summary_separates_runs_by_cores():
    rows = [Row(1, "a", [1.5, 1.0, 2.0], 1.1), Row(2, "b", [1.0], 0.8), Row(4, "c", [1.0], 3.0)]
    said = "\n".join(summary(rows, 2))
    assert "ranks <= cores: error median 15.0%, worst 20.0%; 1 of 2 within 15%" in said
    assert "ranks > cores: error median 200.0%, worst 200.0%; 0 of 1 within 15%" in said


def test_row_uses_fastest_block_and_summary_has_median():
    row = Row(1, "a", [2.0, 1.0, 4.0], 1.1)
    assert (row.measured, row.median) == (1.0, 2.0) and row.error == pytest.approx(0.1)
    said = "\n".join(summary([row], 2))
    assert "ranks <= cores: error median 10.0%" in said and "of the median blocks: error median 45.0%" in said


def test_measure_times_blocks_of_each_case(monkeypatch):
    torch.set_num_threads(1)
    small = [config_of(f"model.hidden_size=64 model.num_hidden_layers={n} train.global_batch=1", 1) for n in (1, 6)]
    one, six = validate.measure(0, small, Options(hardware="", rounds=3, steps=1, warmup=1), "cpu")
    assert len(one) == len(six) == 3 and 0 < min(one) < min(six)


def test_launch_collects_blocks_of_all_launches(monkeypatch):
    """Launches of all parts take turns."""
    starts = iter([(1, [[1.0], [2.0]]), (2, [[7.0]]), (1, [[3.0, 4.0], [5.0, 6.0]]), (2, [[8.0]])])

    def run_ranks(fn, ranks, *args, backend):
        expected, blocks = next(starts)
        assert ranks == expected
        return blocks

    monkeypatch.setattr("ndtrain.measure.ranks.run_ranks", run_ranks)
    parts = [(1, ["", "recompute=full"]), (2, ["mesh.dp=2"])]
    assert validate._launch(parts, Options(hardware="", launches=2), "cpu") == [
        [[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]],
        [[7.0, 8.0]],
    ]


MISTAKES = {
    "not measured": (
        ["hardware=h100"],
        "hardware=h100: has no measurements: give a file written by `ndtrain plan calibrate`",
    ),
    "override": (["hardware=h100", "mesh.tp=2"], "mesh.tp"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_argument_is_one_line_error(name, capsys):
    args, text = MISTAKES[name]
    assert main(["validate", *args]) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1
