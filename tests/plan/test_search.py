"""`plan search`: candidates, the bound of their memory, the choice of the best one, and its command."""

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from ndtrain.config import Config, ConfigError, resolve
from ndtrain.parallel.distribution import Distribution
from ndtrain.plan import accuracy as published
from ndtrain.plan.__main__ import main
from ndtrain.plan.candidates import Candidate, Space, Stages, candidate_of, searched_run
from ndtrain.plan.estimate import Place, pipeline
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.options import unresolved_config
from ndtrain.plan.predict import Predictor
from ndtrain.plan.search import (
    Row,
    TooLarge,
    fits,
    override_line,
    own_row,
    predict,
    rank_all,
    reason,
    search,
    shortlist,
)
from ndtrain.program import step as program
from ndtrain.run import cli
from tests.lib.helpers import MARK, processes, wait_for

H100 = load_hardware("h100")
RUN = ["recipe=llama_debug", "precision.compute=bf16", "train.compile=true", "model.num_hidden_layers=4"]
LARGE = [
    "recipe=llama3_8b", "train.compile=true", "train.seq_len=4096", "train.global_batch=64",
    "model.num_hidden_layers=8",
]  # fmt: skip


def space_of(*overrides: str, ranks: int = 4) -> Space:
    return Space(cli.plain_config([*RUN, *overrides]), ranks, H100)


def test_candidates_are_exactly_legal_meshes():
    space = space_of()
    placed = {mesh for mesh in space.meshes() for _ in space.places(mesh)}
    legal = set()
    for mesh in space.meshes():
        axes = zip(("pp", "dp", "fsdp", "cp", "tp"), mesh, strict=True)
        try:
            resolve(cli.plain_config([*RUN, *(f"mesh.{a}={n}" for a, n in axes), "train.micro_batch=1"]), 4)
            legal.add(mesh)
        except ConfigError:
            pass
    assert placed == legal and (1, 1, 1, 1, 4) in legal and (4, 1, 1, 1, 1) in legal
    assert all(mesh[3] == 1 for mesh in space.meshes())  # 64 tokens are too few for cp on a GPU


def test_given_settings_are_not_searched():
    space = space_of("mesh.tp=2", "schedule=zb_v", "recompute=full", "train.micro_batch=2", "mesh.zero=1")
    ranked, _ = rank_all(space, None)
    candidates = [r.candidate for r in ranked]
    assert {c.size("tp") for c in candidates} == {2} and {c.micro_batch for c in candidates} == {2}
    assert {c.stages.schedule for c in candidates} == {"zb_v"} and {c.recompute[0] for c in candidates} == {"full"}
    assert {c.zero for c in candidates} == {1}


def test_searched_run_drops_split_of_recipe():
    recipe = "recipe=llama3_405b"
    cfg, given = searched_run([recipe], H100)
    assert cfg.schedule.split is None and given == [recipe, "schedule.split=null"]
    own = [recipe, "schedule.split=[63,63]"]
    cfg, given = searched_run(own, H100)
    assert cfg.schedule.split == [63, 63] and given == own


def test_split_with_shorter_ends_is_a_candidate():
    six = ["model.num_hidden_layers=6", "mesh.pp=4", "schedule=interleaved", "schedule.chunks=2"]
    space = space_of(*six)
    place, cfg = next(iter(space.places((4, 1, 1, 1, 1))))
    candidates = list(space.on(place, cfg))
    assert {c.stages.split for c in candidates} == {(0, 1, 1, 1, 1, 1, 1, 0)}
    line = shlex.split(override_line(candidates[0], [*RUN, *six]))
    pasted = resolve(cli.plain_config(line), 4)
    assert [len(layers) for layers in Distribution.of(pasted).placement.layers] == [0, 1, 1, 1, 1, 1, 1, 0]
    bound = Place(cfg, H100, Predictor(H100).rates).estimate(candidates[0]).memory_bytes
    assert bound <= predict(space, candidates[0]).memory_bytes


def test_the_balanced_split_is_no_second_candidate():
    """Ten layers in four stages are balanced as [2,3,3,2] if the head is cheap, but not if it is expensive."""
    for vocabulary, splits in ((512, {()}), (2**20, {(), (2, 3, 3, 2)})):
        ten = ["model.num_hidden_layers=10", f"model.vocab_size={vocabulary}", "schedule=interleaved"]
        space = space_of(*ten, "schedule.chunks=2", ranks=2)
        place, cfg = next(iter(space.places((2, 1, 1, 1, 1))))
        assert {c.stages.split for c in space.on(place, cfg)} == splits


def test_the_placement_of_the_llama_3_paper_is_a_candidate():
    cfg, given = searched_run(["recipe=llama3_405b"], H100)
    space = Space(cfg, 16_384, H100)
    papers = [s for s in space.stages(16) if (s.schedule, s.chunks) == ("interleaved", 8)]
    assert [s.split for s in papers] == [(0, *[1] * 126, 0)]
    one = Candidate((16, 1, 128, 1, 8), 1, "ring", 1, papers[0], ("none", ()))
    line = override_line(one, given)
    assert line.count("schedule.split=") == 1 and "schedule.split=null" not in line
    even = override_line(one._replace(stages=Stages("1f1b")), given)
    assert "schedule.split=null" in even, "the recipe's own split is of other stages"


def test_stages_without_layer_are_no_candidates():
    stages = space_of("model.num_hidden_layers=7").stages(4)
    assert Stages("zb_v") not in stages and Stages("1f1b") in stages and all(not s.split for s in stages)


def test_equivalent_recompute_modes_are_one_candidate():
    space = space_of(ranks=2)
    for mesh, kept in (((1, 1, 1, 1, 2), 5), ((1, 1, 2, 1, 1), 6)):
        place, cfg = next(iter(space.places(mesh)))
        assert len({c.recompute for c in space.on(place, cfg)}) == kept
    place, cfg = next(iter(Space(cli.plain_config([*LARGE]), 4, H100).places((1, 1, 1, 2, 2))))
    assert [r for r, _ in sorted({c.recompute for c in space.on(place, cfg)})] == [
        "full", "none", "selective", "selective",
    ]  # fmt: skip


@pytest.mark.full
def test_the_bound_is_below_the_predicted_memory():
    space = Space(cli.plain_config(LARGE), 16, H100)
    predictor, tried = Predictor(H100), 0
    for mesh in ((1, 1, 16, 1, 1), (4, 1, 2, 1, 2), (2, 2, 1, 2, 2)):
        place, cfg = next(iter(space.places(mesh)))
        shared = Place(cfg, H100, predictor.rates)
        for candidate in list(space.on(place, cfg))[::17]:
            prediction = predict(space, candidate)
            if prediction is None:  # not legal with this schedule
                continue
            bound = shared.estimate(candidate).memory_bytes
            assert 0.2 * prediction.memory_bytes < bound <= prediction.memory_bytes, candidate
            tried += 1
    assert tried > 10


@pytest.mark.parametrize("memory_gb, ranks", [(0.1, [0]), (80, [0, 3, 1, 2])])
def test_too_large_candidate_plans_one_rank_only(memory_gb, ranks, monkeypatch):
    space, made, of_rank = space_of(), [], program._rank_plan
    candidate, _ = next(iter(space.places((4, 1, 1, 1, 1))))
    program._shared.cache_clear()
    monkeypatch.setattr(program, "_rank_plan", lambda step, rank: made.append(rank) or of_rank(step, rank))
    small = replace(space, hardware=replace(H100, memory_gb=memory_gb))
    assert isinstance(predict(small, candidate), TooLarge) == (memory_gb < 1) and made == ranks


@pytest.mark.parametrize("name, chunks", [("1f1b", None), ("interleaved", 4), ("zb_h1", None), ("gpipe", None)])
def test_pipeline_estimate_of_16_stages_is_near_simulation(name, chunks):
    from ndtrain import schedule as schedules

    table = schedules.build(name, 16, 48, chunks)
    pieces = chunks or 1
    timeline = schedules.simulate(table, {kind: cost / pieces for kind, cost in schedules.COST.items()})
    idle, live = pipeline(name, 16, 48, chunks, None)
    assert idle == pytest.approx(timeline.makespan - 3 * 48, rel=0.1)
    assert live == pytest.approx(max(timeline.peak_shares), rel=0.1)


@pytest.mark.full
def test_search_finds_nearly_fastest_of_small_space():
    space = space_of("schedule=1f1b", "recompute=none", "mesh.cp=1")
    ranked, counts = rank_all(space, None)
    result = search(space, None, 6)
    every = [p.step_time_s for r in ranked if (p := predict(space, r.candidate))]
    assert len(every) > 2 * 6
    ordered = sorted(every)
    assert result.best[0].prediction.step_time_s <= 1.03 * ordered[0] < ordered[len(every) // 2]
    assert result.counts["candidates"] == counts["candidates"]


def test_the_shortlist_has_each_family():
    ranked, _ = rank_all(space_of(), None)
    chosen = shortlist(ranked, 30)
    families = {(c.size("pp"), c.size("tp")) for c in chosen}
    assert families == {(r.candidate.size("pp"), r.candidate.size("tp")) for r in ranked} and len(families) == 6


@pytest.mark.full
def test_reason_names_largest_increase():
    space = Space(cli.plain_config([*LARGE, "mesh.cp=1", "schedule=1f1b"]), 4, H100)
    result = search(space, None, 4)
    first, last = result.best[0], result.best[-1]
    grown = max(last.prediction.waterfall, key=lambda p: last.prediction.waterfall[p] - first.prediction.waterfall[p])
    assert grown in reason(last, first)
    assert reason(Row(first.candidate, first.prediction), first) == "+0 s"


def test_search_command_prints_and_writes_best_runs(tmp_path, capsys):
    args = [*RUN, "hardware=h100", "ranks=4", "predict=3", "processes=1", "schedule=1f1b", "recompute=none"]
    assert main(["search", *args, "against=mesh.tp=4", f"json={tmp_path}/found.json"]) == 0
    out = capsys.readouterr().out
    plan = json.loads((tmp_path / "found.json").read_text())
    assert plan["against"]["overrides"] in out and "mesh.tp=4" in plan["against"]["overrides"]
    meshes = [tuple(word for word in row["overrides"].split() if word.startswith("mesh.")) for row in plan["best"]]
    axes = [tuple(word for word in mesh if "zero" not in word) for mesh in meshes]
    assert len(set(axes)) == len(axes) > 1, "each mesh has one row"
    assert plan["own"].startswith("mesh") and "own  mesh" in out, "the recipe's mesh has one rank"
    first = plan["best"][0]
    assert first["free_bytes"] == int(84.9e9) - first["memory_bytes"]
    assert first["run"]["days"] == pytest.approx(20 * first["step_time_s"] / 86400), "the recipe has 20 steps"
    assert published.note() in out
    times = [row["step_time_s"] for row in plan["best"]]
    assert times == sorted(times) and plan["best"][0]["reason"] == "" and plan["best"][1]["reason"]
    pasted: Config = resolve(cli.plain_config(shlex.split(plan["best"][0]["overrides"])), 4)
    assert Predictor(H100).predict(pasted, explain=False).step_time_s == times[0]


def test_own_row_describes_run_as_given():
    own = own_row(space_of(), cli.plain_config([*RUN, "mesh.fsdp=-1", "mesh.zero=2", "recompute=full"]))
    assert isinstance(own, Row) and own.candidate.mesh == (1, 1, 4, 1, 1) and own.prediction.waterfall
    assert (own.candidate.zero, own.candidate.recompute[0]) == (2, "full")
    too_large = own_row(Space(cli.plain_config(LARGE), 1, H100, free_gb=84), cli.plain_config(LARGE))
    assert isinstance(too_large, str) and too_large.startswith("does not fit in 0.9 GB: a rank needs at least")


def test_own_row_keeps_split_of_recipe():
    cfg = resolve(unresolved_config(["recipe=llama3_405b"], H100), 16_384)
    assert candidate_of(cfg).stages == Stages("interleaved", 8, (0, *[1] * 126, 0))


def test_fits_excludes_memory_kept_free():
    assert fits(Space(cli.plain_config(RUN), 4, H100), 84.9e9)
    assert not fits(Space(cli.plain_config(RUN), 4, H100, free_gb=8), 77e9)


def interrupted(predictions: int, monkeypatch) -> int:
    """The status of a search that is interrupted after some predictions."""
    made = []

    def counted(*args, **kwargs):
        if len(made) == predictions:
            raise KeyboardInterrupt
        made.append(1)
        return predict(*args, **kwargs)

    monkeypatch.setattr("ndtrain.plan.search.predict", counted)
    return main(["search", *RUN, "hardware=h100", "ranks=4", "processes=1", "schedule=1f1b"])


def test_a_ctrl_c_prints_the_best_so_far(monkeypatch, capsys):
    assert interrupted(3, monkeypatch) == 130
    out, err = capsys.readouterr()
    assert out.startswith("interrupted: the best so far\n4 ranks of h100 of 84.9 GB: 3 predicted")
    assert "mesh.tp=" in out and err.endswith("interrupted\n")


def test_ctrl_c_before_any_prediction_reports_none(monkeypatch, capsys):
    assert interrupted(0, monkeypatch) == 130
    assert capsys.readouterr().out == "interrupted: none of 0 predicted candidates fits so far\n"


@pytest.mark.full
def test_ctrl_c_ends_workers_without_traceback(tmp_path):
    words = ["recipe=llama3_405b", "hardware=h100", "ranks=16384", "processes=2", "mesh.pp=16", "mesh.tp=8"]
    plan = subprocess.Popen(
        [sys.executable, "-m", "ndtrain.plan", "search", *words], env=os.environ | {MARK: str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: len(processes(tmp_path)) == 4, "the search, its two workers and their resource tracker")
    os.killpg(plan.pid, signal.SIGINT)  # as a terminal does: all processes get it
    out, err = plan.communicate(timeout=60)
    assert plan.returncode == 130 and out.startswith("interrupted: "), (out, err)
    assert err.endswith("interrupted\n") and "Traceback" not in err
    wait_for(lambda: not processes(tmp_path), "the workers to end", timeout=20)


MISTAKES = {
    "quote": (["against=mesh.tp='"], "against=mesh.tp=': a quote is not closed"),
    "free": (["free_gb=-1"], "free_gb=-1: must be a number of GB, 0 or more"),
    "no mesh": (["mesh.tp=3"], "no mesh is valid with the given overrides"),
    "heads": (["mesh.tp=4", "model.num_attention_heads=6", "model.num_key_value_heads=2"], "model.num_attention_heads"),
    "against": (["against=mesh.tp=3"], "against=mesh.tp=3: no valid candidate"),
    "ranks": (["nodes=1"], "give only one of them"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_argument_is_one_line_error(name, capsys):
    own, text = MISTAKES[name]
    assert main(["search", *RUN, "hardware=h100", "ranks=4", "processes=1", "predict=2", *own]) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1


def test_model_that_fits_nowhere_is_an_error(capsys):
    args = [*LARGE, "hardware=h100", "ranks=1", "processes=1", "model.num_hidden_layers=80"]
    assert main(["search", *args]) == 2
    assert "fits in 84.9 GB" in capsys.readouterr().err


BUSY = """
import time
from ndtrain.plan.search import workers

if __name__ == "__main__":
    with workers(2) as pool:
        [chunk.result() for chunk in [pool.executor.submit(time.sleep, 600) for _ in range(2)]]
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_workers_end_with_killed_search(sent, tmp_path):
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    search = subprocess.Popen([sys.executable, script], env=os.environ | {MARK: str(tmp_path)}, start_new_session=True)
    wait_for(lambda: len(processes(tmp_path)) == 4, "the search, its two workers and their resource tracker")
    search.send_signal(sent)
    search.wait()
    wait_for(lambda: not processes(tmp_path), "the workers to end", timeout=20)
