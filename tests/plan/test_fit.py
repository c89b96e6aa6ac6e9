"""`ndtrain plan fit`: rates found again from step times that the planner itself made, and its report."""

import json
from dataclasses import replace

import pytest

from lab.published import fit
from ndtrain.plan.__main__ import main
from ndtrain.plan.price import Rates
from tests.plan.published.test_run import ROW
from tests.plan.test_table import written

TRUE = replace(Rates(), matmul=0.6, network=0.4, step_s=0.02)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Step times that `TRUE` predicts of runs of two sources, on one host and on two."""
    rows = [
        ROW | {"source": f"{source} exp {i}", "tp": str(tp), "dp": str(dp), "gpus": str(2 * tp * dp), "hidden": "2048"}
        | {"global_batch_seqs": str(16 * dp), "derived_step_time_s": "1", "memory_gb": "1"}
        for source in ("one", "two")
        for i, (tp, dp) in enumerate([(1, 4), (2, 2), (1, 8), (4, 2)])
    ]  # fmt: skip
    priced = fit.measurements(rows)
    times, memory = fit.step_times(priced, TRUE), fit.memories(priced, replace(TRUE, memory_gb=2.0))
    for row, seconds, size in zip(rows, times, memory, strict=True):
        row |= {"derived_step_time_s": f"{seconds:.6f}", "memory_gb": f"{size:.4f}"}
    return written(tmp_path_factory.mktemp("fit") / "in.csv", rows)


@pytest.mark.full
def test_fit_recovers_rates_across_sources(table, tmp_path, capsys):
    args = ["fit", f"in={table}", f"json={tmp_path}/fit.json", f"svg={tmp_path}/fit.svg"]
    assert main(args) == 0
    made = json.loads((tmp_path / "fit.json").read_text())
    assert made["rates"]["memory_gb"] == pytest.approx(2.0, rel=0.1)
    for part in ("sources", "cross_validation"):
        assert list(made[part]) == ["one", "two", "all"] and made[part]["all"]["rows"] == 8
        assert made[part]["all"]["median"] < 0.03 and made[part]["one"]["tau"] > 0.99
        assert made[part]["all"]["memory_median"] < 0.02
    assert "five-fold cross-validation" in capsys.readouterr().out
    assert (tmp_path / "fit.svg").read_text().count('r="3.5"') == 8


def test_fit_false_reports_accuracy_of_own_rates(table, capsys):
    assert main(["fit", f"in={table}", "fit=false"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rates of the planner") and "cross-validation" not in out
    everything = next(line for line in out.splitlines() if line.startswith("all "))
    assert float(everything.split()[2]) > 5, "its rates are not those that made the table"


def test_table_without_measurements_is_one_line_error(tmp_path, capsys):
    source = written(tmp_path / "in.csv", [ROW])
    assert main(["fit", f"in={source}"]) == 2
    assert "no row has a measured step time and can be priced" in capsys.readouterr().err
