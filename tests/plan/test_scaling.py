"""`plan scaling`: points, where regimes begin and axes pay, and its command."""

import json
from types import SimpleNamespace

import pytest

from ndtrain.plan import scaling
from ndtrain.plan.__main__ import main
from ndtrain.plan.candidates import Candidate, Space, Stages, searched_run
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.scaling import fastest_of, gpu_counts, pays, regimes
from ndtrain.plan.scaling_curves import FAMILIES, REGIMES, Beginning, Point
from ndtrain.plan.search import fits, rank_all, shortlist

RUN = ["recipe=llama_debug", "hardware=h100", "precision.compute=bf16", "train.compile=true", "train.global_batch=4"]


def point(gpus: int, family: str, tokens_per_s: float, regime: str = "") -> Point:
    return Point(gpus, 64, family, () if tokens_per_s else None, 1.0, tokens_per_s, 0.4, regime)


def test_gpu_counts_doubles_from_least_to_most():
    assert gpu_counts(8, 100) == [8, 16, 32, 64] and gpu_counts(3, 3) == [3]


def test_regimes_begin_at_first_point():
    points = [point(8 << i, "fsdp", 1.0, regime) for i, regime in enumerate(("", *REGIMES[:2], REGIMES[1], REGIMES[3]))]
    assert regimes(points) == [
        Beginning(REGIMES[0], 16, 64), Beginning(REGIMES[1], 32, 64), Beginning(REGIMES[3], 128, 64)
    ]  # fmt: skip


def test_an_axis_pays_where_its_family_is_faster_or_alone_runs():
    points = [point(8, f, rate) for f, rate in zip(FAMILIES, (100, 100.5, 100.5, 100.5), strict=True)]
    points += [point(16, f, rate) for f, rate in zip(FAMILIES, (100, 110, 110, 110), strict=True)]
    points += [point(32, f, rate) for f, rate in zip(FAMILIES, (0, 0, 0, 150), strict=True)]
    assert pays(points) == [Beginning("tp", 16, 64), Beginning("pp", 32, 64)]


@pytest.mark.full
def test_fastest_of_continues_until_mesh_fits(monkeypatch):
    """Llama 3 8B on eight GPUs: what is estimated to be the fastest, without recompute or with zero 2, does not fit."""
    hardware = load_hardware("h100")
    cfg, _ = searched_run(["recipe=llama3_8b"], hardware)
    space = Space(cfg, 8, hardware)
    monkeypatch.setattr(scaling, "FAMILIES", ("fsdp",))
    fastest, predicted = fastest_of(space, 1, {}, None)
    of_dp_and_fsdp = [r for r in rank_all(space, None)[0] if r.candidate.size("dp") * r.candidate.size("fsdp") == 8]
    at_first = shortlist(of_dp_and_fsdp, 1)
    assert not any(fits(space, predicted[c].memory_bytes) for c in at_first)
    best = predicted[fastest["fsdp"]]
    assert best.memory_bytes < 80e9 and best.mfu > 0.5


@pytest.mark.full
def test_fastest_of_starts_from_previous_winner(monkeypatch):
    """On twice the GPUs, candidates that differ from the winner only in dp and fsdp are predicted."""
    hardware = load_hardware("h100")
    cfg, _ = searched_run(RUN[:1] + RUN[2:], hardware)
    won = Candidate((1, 1, 2, 1, 1), 1, "ring", 3, Stages("1f1b"), ("full", ()))
    _, predicted = fastest_of(Space(cfg, 4, hardware), 1, {"fsdp": won}, None)
    assert {won._replace(mesh=(1, 1, 4, 1, 1)), won._replace(mesh=(1, 2, 2, 1, 1))} <= set(predicted)


def test_fastest_of_credits_finds_to_earlier_family(monkeypatch):
    """Ulysses is found with +pp alone, though it has no pp: so pp does not pay."""
    ring, ulysses = (
        Candidate((1, 1, 2, 2, 1), 1, kind, 1, Stages("1f1b"), ("none", ())) for kind in ("ring", "ulysses")
    )
    found = {"fsdp": {}, "+tp": {}, "+cp": {ring: 2.0}, "+pp": {ulysses: 1.0}}
    timed = lambda s: SimpleNamespace(step_time_s=s)
    of_families = iter([{c: timed(s) for c, s in of_family.items()} for of_family in found.values()])
    monkeypatch.setattr(scaling, "Prediction", SimpleNamespace)
    monkeypatch.setattr(scaling, "rank_all", lambda space, pool: ([], 0))
    monkeypatch.setattr(scaling, "predict_all", lambda space, pool, cs, predicted: predicted.update(next(of_families)))
    monkeypatch.setattr(scaling, "climb", lambda *args: None)
    fastest, _ = fastest_of(None, 1, {}, None)
    assert fastest == {"+cp": ulysses, "+pp": ulysses}


@pytest.mark.full
def test_scaling_command_writes_curves(tmp_path, capsys):
    assert main(["scaling", *RUN, "least=2", "most=8", "predict=1", "processes=1", f"json={tmp_path}/s.json"]) == 0
    out = capsys.readouterr().out
    strong, weak = json.loads((tmp_path / "s.json").read_text())["curves"]
    assert {p["global_batch"] for p in strong["points"]} == {4}
    assert [p["global_batch"] for p in weak["points"][:: len(FAMILIES)]] == [4, 8, 16]
    at = {(p["gpus"], p["family"]): p for p in strong["points"]}
    assert at[8, "fsdp"]["overrides"] is None and at[8, "fsdp"]["regime"] == "batch exhausted"
    assert at[8, "+pp"]["tokens_per_s"] > 0 and "batch exhausted from 8 GPUs on" in out
    for n in (2, 4, 8):
        rates = [at[n, family]["tokens_per_s"] for family in FAMILIES]
        assert rates == sorted(rates)


@pytest.mark.full
def test_model_that_fits_nowhere_is_one_line_error(capsys):
    assert main(["scaling", "recipe=llama3_405b", "hardware=h100", "least=8", "most=8", "processes=1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: most=8: no mesh of at most this number of h100 fits") and err.count("\n") == 1


def test_ctrl_c_prints_points_found_so_far(monkeypatch, capsys):
    """The interrupt comes at the second number of GPUs of the strong curve."""
    found = iter([({}, {})])

    def fastest(*args):
        try:
            return next(found)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(scaling, "fastest_of", fastest)
    assert main(["scaling", *RUN, "least=2", "most=8", "processes=1"]) == 130
    out, err = capsys.readouterr()
    rows = [line for line in out.splitlines() if "does not fit" in line]
    assert "interrupted: results so far" in out and [row.split()[0] for row in rows] == ["2"]
    assert err == "interrupted\n"


def test_most_below_least_is_one_line_error(capsys):
    assert main(["scaling", *RUN, "least=8", "most=4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: most=4 is below least=8") and err.count("\n") == 1
