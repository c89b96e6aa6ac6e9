"""`plan tune`: its table survives interruption, names the fastest, and feeds the measured rate back."""

import json

import pytest

from ndtrain.plan import tune
from ndtrain.plan.__main__ import main
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.predict import Predictor
from ndtrain.plan.tune import Table, Trial, Tuned, described, measured_over_predicted, ranking

FAST, SLOW, BROKEN = (
    Trial(f"recipe=llama_debug mesh.{axis}=2", 2, ms) for axis, ms in zip("abc", (4.0, 8.0, None), strict=True)
)
ARGS = ["tune", "recipe=llama_debug", "hardware=cpu", "ranks=2", "rounds=2", "candidates=mesh.fsdp=2 | mesh.tp=2"]


def test_ranking_orders_by_fastest_step_and_failures_last(tmp_path):
    table = Table.open(str(tmp_path))
    table.add(SLOW, 0, {"block_ms": [9.0, 7.0], "error": ""})
    table.add(BROKEN, 0, {"block_ms": [], "error": "out of memory"})
    table.add(FAST, 0, {"block_ms": [50.0, 6.0], "error": ""})
    tuned = ranking(table, [SLOW, BROKEN, FAST])
    assert [t.step_ms for t in tuned] == [6.0, 7.0, None] and tuned[-1].error == "out of memory"
    assert measured_over_predicted(tuned) == pytest.approx((6 / 4 + 7 / 8) / 2)
    assert "winner: recipe=llama_debug mesh.a=2" in tune.as_text(tuned)


def test_interrupted_tune_resumes(tmp_path, monkeypatch, capsys):
    done = []

    def measured(trial: Trial, steps: int) -> dict:
        if len(done) == 3 and "stop" in done:
            raise KeyboardInterrupt
        done.append("stop" if not done else trial.overrides)
        return {"block_ms": [5.0 if "fsdp" in trial.overrides else 6.0], "error": ""}

    monkeypatch.setattr(tune, "measure", measured)
    assert main([*ARGS, f"folder={tmp_path}"]) == 130
    out, err = capsys.readouterr()
    assert "interrupted: run the same command again" in out and "winner: recipe=llama_debug mesh.fsdp=2" in out
    assert err == "interrupted\n"
    with (tmp_path / "tune.jsonl").open("a") as file:
        file.write('{"machine": "cut')  # what a kill leaves
    done[:] = [None]
    assert main([*ARGS, f"folder={tmp_path}"]) == 0
    assert done == [None, "recipe=llama_debug mesh.fsdp=2"]  # round 1 runs backwards, and its first one was there
    rows = [json.loads(line) for line in (tmp_path / "tune.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and {(r["overrides"], r["round"]) for r in rows} == {
        (f"recipe=llama_debug mesh.{axis}=2", n) for axis in ("fsdp", "tp") for n in (0, 1)
    }
    assert "winner: recipe=llama_debug mesh.fsdp=2" in capsys.readouterr().out


def test_table_ignores_rows_of_other_machine(tmp_path, monkeypatch):
    Table.open(str(tmp_path)).add(FAST, 0, {"block_ms": [1.0], "error": ""})
    assert Table.open(str(tmp_path)).has(FAST, 0)
    monkeypatch.setattr(tune, "cpu_model", lambda: "another")
    assert not Table.open(str(tmp_path)).has(FAST, 0)


def test_described_scales_predictions_by_measured_ratio(tmp_path):
    from ndtrain.config import load_config, resolve

    (tmp_path / "tuned.yaml").write_text(described("h100", 1.25))
    (tmp_path / "again.yaml").write_text(described(f"{tmp_path}/tuned.yaml", 2.0))
    cfg = resolve(load_config(["recipe=llama_debug", "precision.compute=bf16"]), 1)
    plain, tuned, again = (
        Predictor(load_hardware(name)).predict(cfg)
        for name in ("h100", f"{tmp_path}/tuned.yaml", f"{tmp_path}/again.yaml")
    )
    assert tuned.step_time_s == pytest.approx(1.25 * plain.step_time_s)
    assert again.step_time_s == pytest.approx(2.5 * plain.step_time_s)
    assert sum(tuned.waterfall.values()) == pytest.approx(tuned.step_time_s)


def test_measured_over_predicted_without_predictions_is_none():
    assert measured_over_predicted([Tuned("a", 1.0, 1.0, None, ""), Tuned("b", None, None, 2.0, "failed")]) is None


@pytest.mark.full
def test_failed_measurement_records_error():
    trial = Trial("recipe=llama_debug mesh.tp=3", 3, None)
    row = tune.measure(trial, 1)
    assert row["block_ms"] == [] and "mesh.tp=3" in row["error"]


MISTAKES = {
    "folder": (["recipe=llama_debug", "hardware=cpu", "ranks=2"], "folder is missing"),
    "recipe": (["hardware=cpu", "ranks=2", "folder=FOLDER"], "recipe is missing"),
    "candidate": (["recipe=llama_debug", "hardware=cpu", "ranks=2", "folder=FOLDER", "candidates=mesh.tp=3"], "mesh"),
    "quote": (["recipe=llama_debug", "hardware=cpu", "ranks=2", "folder=FOLDER", "candidates='"], "is not closed"),
    "hardware": (
        ["recipe=llama_debug", "hardware=cpu", "ranks=2", "folder=FOLDER"],
        "is missing: add it to your own description",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_argument_is_one_line_error(name, capsys, tmp_path):
    own, text = MISTAKES[name]
    assert main(["tune", *(word.replace("FOLDER", str(tmp_path)) for word in own)]) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1


def test_damaged_table_is_one_line_error(tmp_path, capsys):
    (tmp_path / "tune.jsonl").write_text("no row\n")
    assert main([*ARGS, f"folder={tmp_path}"]) == 2
    assert "is not a table of plan tune" in capsys.readouterr().err


@pytest.mark.full
def test_tune_command_measures_and_ranks(tmp_path):
    assert main([*ARGS, f"folder={tmp_path}", "rounds=1", "steps=1", f"json={tmp_path}/tuned.json"]) == 0
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert len(tuned) == 2 and 0 < tuned[0]["step_ms"] <= tuned[1]["step_ms"]
