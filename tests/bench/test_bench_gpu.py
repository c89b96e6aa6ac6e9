"""`bench step` and `bench gpu`: figures are printed, goals are met or missed, and missing measurements are marked."""

import importlib.util
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.profiler import profile, record_function

from lab.gpu import baselines
from lab.gpu import case as gpu_case
from lab.gpu import run as gpu_run
from lab.gpu.case import WAITING_OPERATORS, lacking, waits
from lab.gpu.estimate import layers_that_fit, peak_bytes, seconds
from lab.gpu.goals import GOALS, WINDOW, deviation, goals
from lab.gpu.longest import longest
from lab.gpu.parity import compare_with_cpu
from lab.gpu.report import markdown
from lab.gpu.run import choose_suite, select
from lab.gpu.suite import NARROW, SHAPES, SUITES, Case, config_of
from ndtrain.bench.__main__ import main
from ndtrain.config import ConfigError, load_config, resolve
from ndtrain.engine.memory_check import least_bytes
from ndtrain.engine.train_step import StepReport
from ndtrain.measure.training import (
    TOLERANCE,
    Chain,
    DifferentWork,
    Outcome,
    batches_of,
    compare,
    compare_progress,
    outcome_of,
)
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.flops import flops_per_token, parameter_count
from ndtrain.parallel.build import build_stages

GIB = 2**30
CASES = ("| tiny", "| small", "| experts")  # how lines of the smoke suite's cases begin
MEMORY = {"h200": 139 * GIB, "h100": 78 * GIB}
QUICK = {"8b 8192", "8b 8192 full offloaded", "8b longest budget", "tiny fp8"}  # the rest is for the full sweep
ALL = [
    pytest.param(name, case, id=f"{name}: {case.name}", marks=[] if case.name in QUICK else pytest.mark.full)
    for name, suite in SUITES.items()
    for case in suite.cases
]


def saved_results(folder, suite="smoke"):
    return json.loads((folder / f"gpu-{suite}.json").read_text())


def smoke(words: str) -> Case:
    return next(case for case in SUITES["smoke"].cases if case.name == f"tiny {words}")


def single(cfg) -> Mesh:
    return Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))


# -------------------------------------------------------------------------------------------------------- bench step


def test_bench_step_saves_and_prints_measurements(tmp_path, capsys):
    case = "recompute=full train.micro_batch=4 hardware.peak_tflops=0.01"
    args = ["recipe=llama_debug", f"cases={case}", "rounds=2", "steps=1", "device=cpu", f"out={tmp_path}/results.json"]
    assert main(["step", *args]) == 0
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["commit"] and saved["versions"]["torch"] and list(saved["results"]) == [case]
    own = saved["results"][case]["sides"]["ours"]
    assert len(own["block_ms"]) == 2 and own["q1"] <= own["ms_per_step"] <= own["q3"]
    assert own["tokens_per_s"] == pytest.approx(8 * 64 / own["ms_per_step"] * 1e3)
    m = resolve(load_config(["recipe=llama_debug"]), 1).model
    assert own["mfu"] == pytest.approx(own["tokens_per_s"] * flops_per_token(m, 64) / 1e10)
    assert own["hfu"] > own["mfu"]
    assert own["state_bytes"] == 16 * parameter_count(m)  # in fp32 the weights are their own master
    said = capsys.readouterr().out
    assert case in said and f"{own['mfu']:.1%}" in said and f"{own['tokens_per_s']:,.0f}" in said


@pytest.mark.full
def test_bench_step_on_two_ranks_prints_profiles(capsys):
    cases = ["mesh.fsdp=2", "mesh.cp=2 data.pack=true"]
    args = ["recipe=llama_debug", "ranks=2", f"cases={' | '.join(cases)}", "profile=true"]
    assert main(["step", *args, "rounds=1", "steps=1", "device=cpu"]) == 0
    said = capsys.readouterr().out
    assert all(f"where the time goes: {case}" in said for case in cases) and "matmul" in said


def test_state_bytes_counts_shared_storage_once():
    cfg = resolve(load_config(["recipe=llama_debug", "precision.compute=bf16", "mesh.zero=2"]), 1)
    units = build_stages(cfg, single(cfg)).units
    assert units.state_bytes() == (2 + 4 + 4 + 8) * sum(u.layout.numel for u in units.units.values())


# ------------------------------------------------------------------------------------------------------- what is run


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_parts_of_suite_cover_each_case_once(suite, n):
    cases = SUITES[suite].cases
    parts = [select(cases, f"{k}/{n}", "") for k in range(1, n + 1)]
    assert sorted(c.name for part in parts for c in part) == sorted({c.name for c in cases})
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("suite", "case"), ALL)
def test_every_case_resolves_and_its_state_fits(suite, case):
    cfg = config_of(case)
    for peer in set(case.implementations) - {"ours"}:
        baselines.check(peer, cfg)
    assert cfg.train.seq_len * cfg.train.global_batch > 0
    if suite in MEMORY:
        needed = sum(16 if name != "ours" else bytes_a_parameter(cfg) for name in case.implementations)
        assert needed * parameter_count(cfg.model) < 0.95 * MEMORY[suite]


def bytes_a_parameter(cfg) -> int:
    """On the device: see the suite's table."""
    moments = 4 if cfg.optim.state_dtype == "bf16" else 8
    return (2 if cfg.mesh.zero < 3 else 0) + 4 + (0 if cfg.optim.offload else 4 + moments)


def test_chain_tokens_are_learnable_and_independent_of_ranks():
    tokens = Chain(4096, 4001).tokens(3, range(4))
    assert tokens.shape == (4, 4001) and tokens.min() >= 0 and tokens.max() < 1024
    follows = (tokens[:, 1:] - tokens[:, :-1]) % 1024 == 7
    assert follows.mean() == pytest.approx(0.75, abs=0.02)
    assert np.array_equal(tokens[2:], Chain(4096, 4001).tokens(3, range(2, 4)))
    assert not np.array_equal(tokens, Chain(4096, 4001).tokens(4, range(4)))
    assert Chain(256, 100).tokens(0, [0]).max() < 256


@pytest.mark.parametrize("memory", [None, 10_000_000])
@pytest.mark.parametrize("limit", [0, 1, 63, 64, 100, 128, 700, 1000, 1024, 5000])
def test_longest_finds_longest_fitting_sequence(limit, memory):
    """The line through the measured peaks meets the memory far from the limit here."""
    asked = []

    def peak(length):
        asked.append(length)
        return 1_000_000 + 3000 * length if length <= limit else None

    most = min(limit, 1024)
    assert longest(peak, start=128, most=1024, grain=64, memory=memory) == most // 64 * 64
    assert len(asked) == len(set(asked)) and all(a <= 1024 and a % 64 == 0 for a in asked)


def test_longest_extrapolates_from_measured_peaks():
    """Only two long sequences are tried: the longest that fits, and the next one, which does not."""
    asked = []

    def peak(length):
        asked.append(length)
        needed = 60_000 + 10 * length
        return needed if needed <= 980_000 else None

    assert longest(peak, start=1000, most=2**20, grain=1000, memory=1_000_000) == 92_000
    assert asked == [1000, 2000, 92_000, 93_000]


@pytest.mark.full
@pytest.mark.parametrize("name", ["h200", "h100"])
def test_suite_estimate_is_under_half_an_hour(name):
    """The estimates assume that compiled code is cached. The two cases that take minutes come last."""
    expected = {case.name: seconds(case, SUITES[name]) for case in SUITES[name].cases}
    *short, _, _ = expected.values()
    assert max(short) <= 40 and sum(expected.values()) <= 30 * 60
    assert [words.split()[-1] for words in list(expected)[-2:]] == ["full", "offloaded"]


def test_layers_of_8b_follow_from_gpu_memory():
    assert layers_that_fit(MEMORY["h200"], NARROW) == 32 and layers_that_fit(MEMORY["h100"], NARROW) == 16
    assert SUITES["h100"].large == "8b16" and "model.num_hidden_layers=16" in SHAPES["8b16"]
    assert SUITES["h100"].paired == "8b4" and "model.num_hidden_layers=4" in SHAPES["8b4"]
    memory = lambda gib: mock.patch.multiple(
        "torch.cuda",
        is_available=lambda: True,
        get_device_properties=lambda _: SimpleNamespace(total_memory=gib * GIB),
        mem_get_info=lambda _: (0, gib * GIB),
    )
    whole = config_of(next(c for c in SUITES["h200"].cases if c.name == "8b 8192"))
    for gib, name in ((139.8, "h200"), (79.2, "h100"), (94, "h100"), (178, "h200")):
        with memory(gib):
            assert choose_suite("auto") == name
            why = lacking(whole, torch.device("cuda"))
            assert why == ("" if gib > 90 else "the state alone needs 89.7 GiB, but this GPU has 79.2")
    with memory(39), pytest.raises(ConfigError, match="this GPU has 39 GiB, and suite=h100 needs 78"):
        choose_suite("auto")


def test_recipe_8b_needs_no_recompute_on_eight_80_gb_gpus():
    cfg = resolve(load_config(["recipe=llama3_8b"]), 8)
    assert cfg.recompute.name == "none" and peak_bytes(cfg) < 0.9 * 79 * GIB
    one = resolve(load_config(["recipe=llama3_8b", "recompute=budget", "recompute.budget=12GiB"]), 1)
    assert least_bytes(one, 0)[0] + one.recompute.budget < 0.97 * 139 * GIB


def test_compare_with_cpu_finds_one_wrong_gradient():
    cfg = config_of(next(c for c in SUITES["smoke"].cases if c.name == "small parity fp32"))
    assert compare_with_cpu(cfg, single(cfg), 2)["gradient"] == 0
    from lab.gpu import parity

    right, calls = parity.gradients_of, []

    def wrong(stages):
        gradients = right(stages)
        if not calls:
            gradients["model.layers.1.mlp.up_proj.weight"][7] *= -1
        calls.append(0)
        return gradients

    with mock.patch.object(parity, "gradients_of", wrong):
        off = compare_with_cpu(cfg, single(cfg), 1)
    assert off["loss"] == 0 and off["gradient"] > 1e-4 and off["tensor"] == "model.layers.1.mlp.up_proj.weight"


def test_waits_counts_only_steady_steps():
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([x], fused=True)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    with profile() as record:
        x.sum().item()
        with record_function(gpu_case._STEADY):
            x.mean().item()
            x.nonzero()
            optimizer.step()  # the CPU's fused update reads found_inf inside
        x.sum().item()
    assert waits(record.events(), WAITING_OPERATORS) == {"aten::_local_scalar_dense": 1, "aten::nonzero": 1}


# ---------------------------------------------------------------------------------------------------- what it comes to


def test_measured_case_is_saved_and_not_measured_again(tmp_path, capsys):
    only = ["gpu", "suite=smoke", "device=cpu", "only=tiny eager", f"folder={tmp_path}"]
    assert main(only) == 0
    said, saved = capsys.readouterr().out, saved_results(tmp_path)
    row = saved["cases"]["tiny eager"]
    assert row["status"] == "measured" and row["commit"] == saved["commit"] and row["device"] == "cpu"
    own = row["sides"]["ours"]
    assert own["ms_per_step"] > 0 and 0 < own["mfu"] == own["hfu"] and row["peak_memory_bytes"] > own["state_bytes"]
    report = (tmp_path / "gpu-smoke.md").read_text()
    assert report in said and f"{own['tokens_per_s']:,.0f}" in report
    lines = {line.split("|")[1].strip(): line for line in report.splitlines() if line.startswith(CASES)}
    assert "not measured" not in lines["tiny eager (2 x 64)"]
    assert all("not measured" in line for name, line in lines.items() if name != "tiny eager (2 x 64)")
    assert len(lines) == len(SUITES["smoke"].cases)
    with mock.patch("lab.gpu.run.run_case", side_effect=AssertionError("measured again")):
        assert main([*only, "missing=true"]) == 0
        assert saved_results(tmp_path) == saved
        later = tmp_path / "later"
        later.mkdir()
        there = ["gpu", "suite=smoke", "device=cpu", "only=tiny eager", f"folder={later}"]
        assert main([*there, f"resume={tmp_path}/gpu-smoke.json"]) == 0
    assert f"{own['tokens_per_s']:,.0f}" in (later / "gpu-smoke.md").read_text()


def fake_case(case, suite, device, limit_s):
    return {"kind": "losses", "status": "measured", "losses": [2.0, 1.0], "seconds": 1.0}


def test_resume_after_kill_loses_one_case(tmp_path, capsys):
    """The third case never ends. The results of the first two are complete, and are resumed from the given path."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    args = ["gpu", "suite=smoke", "device=cpu", "only=losses"]
    measured_cases = []

    def killed(case, *rest):
        if measured_cases:
            raise KeyboardInterrupt
        measured_cases.append(case.name)
        return fake_case(case, *rest)

    with mock.patch.object(gpu_run, "run_case", killed), pytest.raises(KeyboardInterrupt):
        main([*args, f"folder={first}"])
    assert list(saved_results(first)["cases"]) == ["tiny losses bf16"]
    assert "| tiny losses bf16 (2 x 64) | 2 " in (first / "gpu-smoke.md").read_text()
    measured_cases.clear()
    with mock.patch.object(gpu_run, "run_case", side_effect=fake_case) as run_case:
        assert main([*args, f"folder={second}", f"resume={first}/gpu-smoke.json"]) == 0
    assert [call.args[0].name for call in run_case.call_args_list] == ["tiny losses fp8"]
    assert list(saved_results(second)["cases"]) == ["tiny losses bf16", "tiny losses fp8"]
    assert main([*args, f"folder={second}", f"resume={tmp_path}/none.json"]) == 2
    assert "none.json: no such file: remove resume= to start" in capsys.readouterr().err


def test_case_beyond_time_limit_is_not_started(tmp_path, capsys):
    slow = lambda case, suite: 100 if case.name == "tiny losses bf16" else 5
    args = ["gpu", "suite=smoke", "device=cpu", "only=losses", f"folder={tmp_path}", "minutes=1"]
    with mock.patch.object(gpu_run, "run_case", side_effect=fake_case), mock.patch.object(gpu_run, "seconds", slow):
        assert main(args) == 0
    assert list(saved_results(tmp_path)["cases"]) == ["tiny losses fp8"]
    assert "not started or not finished because of minutes=1: tiny losses bf16; resume=" in capsys.readouterr().out


@pytest.mark.full
def test_list_prints_every_case_and_measures_none(tmp_path, capsys):
    with mock.patch.object(gpu_run, "run_case", side_effect=AssertionError("measured")):
        assert main(["gpu", "suite=smoke", "list=true", f"folder={tmp_path}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [line.split("|")[1].strip() for line in lines] == [case.name for case in SUITES["smoke"].cases]
    assert not list(tmp_path.iterdir())


def test_report_without_gpu_has_only_unmeasured_rows(tmp_path, capsys):
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert main(["gpu", f"folder={tmp_path}"]) == 0
    report = (tmp_path / "gpu-h200.md").read_text()
    said = capsys.readouterr().out
    assert "no CUDA device" in said and "python -m ndtrain.bench gpu suite=h200 missing=true" in said
    rows = [line for line in report.splitlines() if line.startswith(("| 1b", "| 8b", "| a3b", "| small"))]
    assert len(rows) == len(SUITES["h200"].cases) and all("not measured" in row for row in rows)
    assert sum(line.count("not measured") for line in report.splitlines() if "| at " in line) == 2 * len(GOALS)
    assert "ahead" not in report and "behind" not in report.lower()
    assert not (tmp_path / "gpu-h200.json").exists()


def test_failed_case_becomes_a_row(tmp_path):
    suite = SUITES["smoke"]
    case = Case("tiny", "odd", ("train.seq_len=64", "train.micro_batch=2", "train.global_batch=3"))
    row = gpu_case.run_case(case, suite, "cpu", 60)
    assert row["status"] == "failed" and "train.global_batch=3 must be a multiple" in row["why"]
    cfg = config_of(smoke("eager"))
    ends = {
        "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        "WRONG": DifferentWork("not the same work"),
    }
    for status, error in ends.items():
        with mock.patch.dict(gpu_case.KINDS, timed=mock.Mock(side_effect=error)):
            row = gpu_case.measure(0, smoke("eager"), cfg, suite, "cpu")
        assert row["status"] == status and row["why"] == str(error).splitlines()[0]
    saved = {"hardware": {"gpus": ["X, 1, 2"], "cpu": "y", "cores": 1}, "versions": {}, "cases": {}}
    saved["cases"]["tiny eager"] = {**row, "commit": "abc"}
    report = markdown("smoke", suite, saved)
    assert "| tiny eager (2 x 64)          | WRONG" in report and "- tiny eager: WRONG: not the same work" in report


def test_compare_refuses_different_losses():
    first = {"ours": Outcome(11.5, 2.0), "peer": Outcome(11.55, 2.05)}
    compare(first, *TOLERANCE["bf16"])
    for off in (Outcome(11.6, 2.0), Outcome(11.5, 2.2), Outcome(math.nan, 2.0), Outcome(11.5, math.inf)):
        with pytest.raises(DifferentWork, match=r"not the same work: .* of peer"):
            compare(first | {"peer": off}, *TOLERANCE["bf16"])


def test_outcome_of_refuses_skipped_step():
    report = StepReport(2, 11.5, math.nan, lr=3e-4, tokens=128, skipped=True, signals=torch.zeros(1, 1))
    with pytest.raises(DifferentWork, match=r"step 2 was skipped: loss 11\.5, gradient norm nan"):
        outcome_of(report)
    assert outcome_of(replace(report, grad_norm=2.0, skipped=False)) == Outcome(11.5, 2.0)


def test_compare_progress_refuses_different_final_loss():
    losses = {"ours": [12.0, 9.0, 6.0], "peer": [12.0, 9.5, 7.0]}
    compare_progress(losses, 5e-3)
    for end in (12.0, 7.3, 4.7, math.nan):
        with pytest.raises(DifferentWork, match="the last loss of peer"):
            compare_progress(losses | {"peer": [12.0, 9.5, end]}, 5e-3)


@pytest.mark.full
@pytest.mark.parametrize("peer", ["native", "transformers"])
def test_timed_peers_detects_skipped_layer_or_update(peer):
    """The check of the first step finds a missing layer, the check of the last step a missing update."""
    if peer == "transformers" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    cfg = config_of(smoke("eager"))
    repeats = SimpleNamespace(rounds=2, steps=2, warmup=1)
    assert baselines.timed_peers(cfg, single(cfg), ["ours", peer], repeats)["ratios"].keys() == {peer}
    make = baselines.PEERS[peer]

    def idle(*args):
        loop = make(*args)
        loop.optimizer.step = lambda: None
        return loop

    with mock.patch.dict(baselines.PEERS, {peer: idle}), pytest.raises(DifferentWork, match=peer):
        baselines.timed_peers(cfg, single(cfg), ["ours", peer], repeats)


def measured(**row):
    return {"status": "measured", "commit": "a1b2", **row}


def rows_of(mfu, own, fp8, ratio, off, waiting, shape="8b"):
    """Results in which every goal's case is measured."""
    timed_row = lambda speed, share: measured(sides={"ours": {"mfu": share, "tokens_per_s": speed}})
    curve = np.linspace(12, 3, 50)
    cases = {"1b 4096 trains": measured(losses=[12.0, 12.0 * (0.7 + 30 * off)])}
    for words in ("fp32", "packed", "bf16", "bf16 compiled"):
        cases[f"small parity {words}"] = measured(loss=1e-6 if off > 0 else 1e-2, gradient=1e-5 if off > 0 else 0.1)
    for name in ("1b 8192", "1b 4096", f"{shape} 8192", f"{shape} 4096"):
        cases[name] = timed_row(own, mfu)
    cases[f"{shape} 8192 full"] = timed_row(own, mfu / 2)
    cases[f"{shape} 8192 fp8"] = timed_row(fp8, mfu)
    cases[f"{shape} 2048 losses bf16"] = measured(losses=curve)
    cases[f"{shape} 2048 losses fp8"] = measured(losses=curve * (1 + off))
    cases["1b 4096 host waits"] = measured(waits={"cudaStreamSynchronize": waiting} if waiting else {}, steps=3)
    for words, peer in (("", "native"), ("selective ", "native"), ("", "transformers")):
        for side in ("1b", "8b8"):
            cases[f"{side} 8192 {words}against {peer}"] = measured(ratios={peer: {"median": ratio}})
    return cases


GOOD = {"mfu": 0.63, "own": 11000, "fp8": 14000, "ratio": 1.21, "off": 0.003, "waiting": 0}
BAD = {"mfu": 0.59, "own": 10000, "fp8": 12000, "ratio": 1.09, "off": -0.006, "waiting": 6}


def test_goal_outcomes_are_ahead_behind_or_not_measured():
    good, bad = rows_of(**GOOD), rows_of(**BAD) | {"1b 4096 trains": measured(losses=[12.0, 11.0])}
    assert [goal.outcome(good)[1] for goal in GOALS] == ["ahead"] * len(GOALS)
    assert [goal.outcome(bad)[1] for goal in GOALS] == ["behind"] * len(GOALS)
    assert GOALS[-1].outcome(bad) == ("2", "behind") and GOALS[9].outcome(good)[0] == "63.0%"
    several = ("8b 8192", "8b 8192 full", *(n for n in good if "against native" in n))  # others remain
    for name in good:
        without = good | {name: {"status": "out of memory", "why": "x"}}
        assert any(goal.outcome(without) == ("not measured",) * 2 for goal in GOALS) or name in several, name
    assert [goal.outcome({}) for goal in GOALS] == [("not measured",) * 2] * len(GOALS)
    on_cpu = {name: row | {"device": "cpu"} for name, row in good.items()}
    assert [goal.outcome(on_cpu) for goal in GOALS] == [("not measured",) * 2] * len(GOALS)


def test_gain_across_two_commits_is_not_measured():
    """The two sessions may have used machines of different speed."""
    rows, (gain,) = rows_of(**GOOD), [goal for goal in GOALS if "fp8 over bf16" in goal.text]
    assert gain.outcome(rows) == ("1.273", "ahead")
    rows["8b 8192"]["commit"] = "c3d4"
    assert gain.outcome(rows) == ("not measured", "not measured")


def test_goals_of_16_layers_do_not_count_for_8b():
    """On an H100 the goals of full 8B stay unmeasured. A model with fewer layers has its own goals."""
    outcomes = {goal.text: goal.outcome(rows_of(**GOOD, shape="8b16"))[1] for goal in goals("8b16")}
    own = {text: outcome for text, outcome in outcomes.items() if "16 of 32 layers" in text}
    assert list(own.values()) == ["ahead"] * 4
    assert {o for text, o in outcomes.items() if "at 8B," in text or text.endswith("at 8B")} == {"not measured"}


def test_report_has_profile_of_goal_that_is_behind():
    """The report also covers a part of a suite."""
    rows = {name: row for name, row in rows_of(**BAD).items() if name in ("8b 4096", "small parity fp32")}
    figures = {"ms_per_step": 1, "q1": 1, "q3": 1, "hfu": None, "state_bytes": None}
    rows["8b 4096"]["sides"]["ours"] |= figures
    rows["8b 4096"] |= {"peak_memory_bytes": None}
    rows["small parity fp32"] |= {"tensor": "lm_head.weight"}
    saved = {"hardware": {"gpus": ["NVIDIA H200, 580, 143771 MiB"], "cpu": "y", "cores": 1}, "versions": {}}
    saved |= {"commit": "abc", "cases": {name: row | {"commit": "abc"} for name, row in rows.items()}}
    report = markdown("h200", SUITES["h200"], saved)
    line = next(line for line in report.splitlines() if line.startswith("| MFU at 8B, 4,096"))
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["at least 62.0%", "59.0%", "behind"]
    assert "Behind: where the time of a step goes, 8b 8192 profile\n\n```text\nnot measured\n```" in report
    table = {"step_ms": 9.0, "kernel_share": 0.9, "kinds": {"matmul": {"ms": 8.1}}}
    saved["cases"]["8b 8192 profile"] = measured(lines=["matmul 8.10"], table=table, commit="abc")
    assert "8b 8192 profile\n\n```text\nmatmul 8.10\n```" in markdown("h200", SUITES["h200"], saved)


def test_deviation_is_taken_from_worst_window():
    base = np.full(100, 4.0)
    off = base.copy()
    off[50 : 50 + WINDOW] *= 1.01
    assert deviation(off, base) == pytest.approx(0.01) and deviation(base, base) == 0
    off[50 : 50 + WINDOW : 2] = 4 * 0.99  # noise that cancels
    assert deviation(off, base) < 1e-3 + 0.01 / WINDOW


@pytest.mark.full
def test_smoke_suite_runs_on_cpu(tmp_path):
    assert main(["gpu", "suite=smoke", "device=cpu", f"folder={tmp_path}"]) == 0
    cases = saved_results(tmp_path)["cases"]
    assert {name: row.get("why", "") for name, row in cases.items() if row["status"] != "measured"} == {}
    assert len(cases) == len(SUITES["smoke"].cases)
    losses = cases["tiny losses bf16"]["losses"]
    assert losses[-1] < 0.75 * losses[0] and cases["tiny profile"]["table"]["kinds"]
    assert {r["gradient"] for n, r in cases.items() if "parity" in n and "compiled" not in n} == {0.0}
    assert 0 < cases["small parity bf16 compiled"]["gradient"] < 5e-2
    assert 0 < deviation(cases["tiny losses fp8"]["losses"], losses) < 0.05
    assert cases["tiny longest full"]["tokens"] == 320  # more than the shape has positions
    assert set(cases["tiny against native"]["ratios"]) == {"native"}
    own = cases["tiny full"]["sides"]["ours"]
    assert own["hfu"] > own["mfu"]


def test_case_has_microbatches_and_lengths_of_its_name():
    cfg = config_of(next(c for c in SUITES["h100"].cases if c.name == "8b16 8192"))
    assert (cfg.train.micro_batch, cfg.train.seq_len, cfg.microbatches) == (1, 8192, 2)
    tiny = config_of(smoke("eager"))
    (batch,) = batches_of(tiny, single(tiny), 0)
    assert batch.tokens.shape == (2, 64) and torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["step"], "recipe is missing"),
        (["step", "recipe=lama_debug"], "did you mean 'llama_debug'?"),
        (
            ["step", "recipe=llama_debug", "cases=train.compile=true | trian.compile=false"],
            "trian.compile: no such key",
        ),
        (["step", "recipe=llama_debug", "cases=mesh.fsdp=2"], "mesh fsdp=2 needs 2 ranks but 1 started"),
        (["step", "recipe=llama_debug", "out=/nowhere/x.json"], "the folder /nowhere does not exist"),
        (["gpu", "suite=h300"], "h300: no such suite; did you mean 'h200'?"),
        (["gpu", "device=cpu"], "device=cpu: suite=h200 is for a GPU; suite=smoke runs on a CPU too"),
        (["gpu", "part=3/2"], "part=3/2: must be k/n with k from 1 to n"),
        (["gpu", "part=0/2"], "part=0/2: must be k/n"),
        (
            ["gpu", "only=70b"],
            "only=70b: no case of part 1/1 has this text in its name; names begin with 1b, small, 8b, 8b8",
        ),
        (["gpu", "folder=/nowhere"], "folder=/nowhere: no such folder: give an existing one"),
    ],
)
def test_bad_argument_is_one_line_error(args, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err


def test_results_of_another_device_are_refused(tmp_path, capsys):
    args = ["gpu", "suite=smoke", "device=cpu", f"folder={tmp_path}"]
    (tmp_path / "gpu-smoke.json").write_text("{")
    assert main(args) == 2 and "is not JSON" in capsys.readouterr().err
    other = {"hardware": {"gpus": ["NVIDIA X, 1, 2"]}, "cases": {"tiny eager": measured()}}
    (tmp_path / "gpu-smoke.json").write_text(json.dumps(other))
    assert main(args) == 2 and "holds results of NVIDIA X" in capsys.readouterr().err
