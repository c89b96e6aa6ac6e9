"""`bench step` and `bench gpu`: figures are there, goals are met or missed, and what is not measured is said to be."""

import importlib.util
import json
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.profiler import profile, record_function

from ndtrain.bench.__main__ import main
from ndtrain.bench.gpu import baselines
from ndtrain.bench.gpu import case as gpu_case
from ndtrain.bench.gpu.case import WAITING_OPERATORS, longest, waits
from ndtrain.bench.gpu.goals import GOALS, WINDOW, deviation
from ndtrain.bench.gpu.report import markdown
from ndtrain.bench.gpu.run import select
from ndtrain.bench.gpu.suite import SUITES, Case, config_of
from ndtrain.bench.training import (
    TOLERANCE,
    Chain,
    DifferentWork,
    Outcome,
    batches_of,
    compare,
    compare_progress,
    timed,
)
from ndtrain.config import load_config, resolve
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.model.flops import flops_per_token, parameter_count
from ndtrain.parallel.build import build_stages

GIB = 2**30
MEMORY = {"h200": 139 * GIB, "h100": 78 * GIB}
QUICK = {"8b 8192", "8b 8192 full offloaded", "8b longest budget", "tiny fp8"}  # the rest is for the full sweep
ALL = [
    pytest.param(name, case, id=f"{name}: {case.name}", marks=[] if case.name in QUICK else pytest.mark.full)
    for name, suite in SUITES.items()
    for case in suite.cases
]


def saved_results(folder, suite="smoke"):
    return json.loads((folder / f"gpu-{suite}.json").read_text())


def single(cfg) -> Mesh:
    return Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))


# -------------------------------------------------------------------------------------------------------- bench step


def test_step_measures_a_case(tmp_path, capsys):
    case = "recompute=full train.micro_batch=4 hardware.peak_tflops=0.01"
    args = ["recipe=llama_debug", f"cases={case}", "rounds=2", "steps=1", "device=cpu", f"out={tmp_path}/results.json"]
    assert main(["step", *args]) == 0
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["commit"] and saved["versions"]["torch"] and list(saved["found"]) == [case]
    own = saved["found"][case]["sides"]["ours"]
    assert len(own["block_ms"]) == 2 and own["q1"] <= own["ms_per_step"] <= own["q3"]
    assert own["tokens_per_s"] == pytest.approx(8 * 64 / own["ms_per_step"] * 1e3)
    m = resolve(load_config(["recipe=llama_debug"]), 1).model
    assert own["mfu"] == pytest.approx(own["tokens_per_s"] * flops_per_token(m, 64) / 1e10)
    assert own["hfu"] > own["mfu"]
    assert own["state_bytes"] == 16 * parameter_count(m)  # in fp32 the weights are their own master
    said = capsys.readouterr().out
    assert case in said and f"{own['mfu']:.1%}" in said and f"{own['tokens_per_s']:,.0f}" in said


@pytest.mark.full
def test_step_over_ranks_with_profile(capsys):
    cases = ["mesh.fsdp=2", "mesh.cp=2 data.pack=true"]
    args = ["recipe=llama_debug", "ranks=2", f"cases={' | '.join(cases)}", "profile=true"]
    assert main(["step", *args, "rounds=1", "steps=1", "device=cpu"]) == 0
    said = capsys.readouterr().out
    assert all(f"where the time goes: {case}" in said for case in cases) and "matmul" in said


def test_state_bytes_counts_a_storage_once():
    cfg = resolve(load_config(["recipe=llama_debug", "precision.compute=bf16", "mesh.zero=2"]), 1)
    units = build_stages(cfg, single(cfg)).units
    assert units.state_bytes() == (2 + 4 + 4 + 8) * sum(u.layout.numel for u in units.units.values())


# ------------------------------------------------------------------------------------------------------- what is run


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_parts_are_a_partition(suite, n):
    cases = SUITES[suite].cases
    parts = [select(cases, f"{k}/{n}", "") for k in range(1, n + 1)]
    assert sorted(c.name for part in parts for c in part) == sorted({c.name for c in cases})
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("suite", "case"), ALL)
def test_every_case_can_be_configured_and_its_state_fits(suite, case):
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


def test_tokens_can_be_learnt_and_do_not_depend_on_the_ranks():
    tokens = Chain(4096, 4001).tokens(3, range(4))
    assert tokens.shape == (4, 4001) and tokens.min() >= 0 and tokens.max() < 1024
    follows = (tokens[:, 1:] - tokens[:, :-1]) % 1024 == 7
    assert follows.mean() == pytest.approx(0.75, abs=0.02)
    assert np.array_equal(tokens[2:], Chain(4096, 4001).tokens(3, range(2, 4)))
    assert not np.array_equal(tokens, Chain(4096, 4001).tokens(4, range(4)))
    assert Chain(256, 100).tokens(0, [0]).max() < 256


@pytest.mark.parametrize("limit", [0, 1, 63, 64, 100, 128, 700, 1000, 1024, 5000])
def test_longest_finds_what_fits(limit):
    asked = []

    def fits(length):
        asked.append(length)
        return length <= limit

    most = min(limit, 1024)
    assert longest(fits, start=128, most=1024, grain=64) == most // 64 * 64
    assert len(asked) == len(set(asked)) and all(a <= 1024 and a % 64 == 0 for a in asked)


def test_waits_are_those_of_the_steady_steps():
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


def test_one_case_is_written_and_not_measured_again(tmp_path, capsys):
    only = ["gpu", "suite=smoke", "device=cpu", "only=tiny eager", f"folder={tmp_path}"]
    assert main(only) == 0
    said, saved = capsys.readouterr().out, saved_results(tmp_path)
    row = saved["cases"]["tiny eager"]
    assert row["status"] == "measured" and row["commit"] == saved["commit"] and row["device"] == "cpu"
    own = row["sides"]["ours"]
    assert own["ms_per_step"] > 0 and 0 < own["mfu"] == own["hfu"] and row["peak_memory_bytes"] > own["state_bytes"]
    report = (tmp_path / "gpu-smoke.md").read_text()
    assert report in said and f"{own['tokens_per_s']:,.0f}" in report
    lines = {line.split("|")[1].strip(): line for line in report.splitlines() if line.startswith("| tiny")}
    assert "not measured" not in lines["tiny eager (2 x 64)"]
    assert all("not measured" in line for name, line in lines.items() if name != "tiny eager (2 x 64)")
    assert len(lines) == len(SUITES["smoke"].cases)
    with mock.patch("ndtrain.bench.gpu.run.run_case", side_effect=AssertionError("measured again")):
        assert main([*only, "missing=true"]) == 0
    assert saved_results(tmp_path) == saved


def test_without_a_gpu_every_line_is_not_measured(tmp_path, capsys):
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert main(["gpu", f"folder={tmp_path}"]) == 0
    report = (tmp_path / "gpu-h200.md").read_text()
    said = capsys.readouterr().out
    assert "no CUDA device" in said and "python -m ndtrain.bench gpu suite=h200 missing=true" in said
    rows = [line for line in report.splitlines() if line.startswith(("| 1b", "| 8b"))]
    assert len(rows) == len(SUITES["h200"].cases) and all("not measured" in row for row in rows)
    assert sum(line.count("not measured") for line in report.splitlines() if "| at " in line) == 2 * len(GOALS)
    assert "met" not in report.split("## Steps")[0].replace("transformers", "") and "missed" not in report
    assert not (tmp_path / "gpu-h200.json").exists()


def test_an_error_is_a_row(tmp_path):
    suite = SUITES["smoke"]
    case = Case("tiny", "odd", ("train.seq_len=64", "train.micro_batch=2", "train.global_batch=3"))
    row = gpu_case.run_case(case, suite, "cpu", 60)
    assert row["status"] == "failed" and "train.global_batch=3 must be a multiple" in row["why"]
    cfg = config_of(suite.cases[0])
    ends = {
        "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        "WRONG": DifferentWork("not the same work"),
    }
    for status, error in ends.items():
        with mock.patch.dict(gpu_case.KINDS, timed=mock.Mock(side_effect=error)):
            row = gpu_case.measure(0, suite.cases[0], cfg, suite, "cpu")
        assert row["status"] == status and row["why"] == str(error).splitlines()[0]
    saved = {"hardware": {"gpus": ["X, 1, 2"], "cpu": "y", "cores": 1}, "versions": {}, "cases": {}}
    saved["cases"]["tiny eager"] = {**row, "commit": "abc"}
    report = markdown("smoke", suite, saved)
    assert "| tiny eager (2 x 64)          | WRONG" in report and "- tiny eager: WRONG: not the same work" in report


def test_different_work_is_refused():
    first = {"ours": Outcome(11.5, 2.0), "peer": Outcome(11.55, 2.05)}
    compare(first, *TOLERANCE["bf16"])
    for off in (Outcome(11.6, 2.0), Outcome(11.5, 2.2), Outcome(math.nan, 2.0), Outcome(11.5, math.inf)):
        with pytest.raises(DifferentWork, match=r"not the same work: .* of peer"):
            compare(first | {"peer": off}, *TOLERANCE["bf16"])


def test_different_progress_is_refused():
    losses = {"ours": [12.0, 9.0, 6.0], "peer": [12.0, 9.5, 7.0]}
    compare_progress(losses, 5e-3)
    for end in (12.0, 7.3, 4.7, math.nan):
        with pytest.raises(DifferentWork, match="the last loss of peer"):
            compare_progress(losses | {"peer": [12.0, 9.5, end]}, 5e-3)


@pytest.mark.full
@pytest.mark.parametrize("peer", ["native", "transformers"])
def test_a_peer_that_skips_something_is_wrong(peer):
    """The check of the first step sees a layer that is left out, that of the last an update that is."""
    if peer == "transformers" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    cfg = config_of(SUITES["smoke"].cases[0])
    repeats = SimpleNamespace(rounds=2, steps=2, warmup=1)
    assert timed(cfg, single(cfg), ["ours", peer], repeats)["ratios"].keys() == {peer}
    make = baselines.PEERS[peer]

    def idle(*args):
        loop = make(*args)
        loop.optimizer.step = lambda: None
        return loop

    with mock.patch.dict(baselines.PEERS, {peer: idle}), pytest.raises(DifferentWork, match=peer):
        timed(cfg, single(cfg), ["ours", peer], repeats)


def measured(**row):
    return {"status": "measured", **row}


def rows_of(mfu, own, fp8, ratio, off, waiting):
    """Results in which every goal's case is measured."""
    timed_row = lambda speed, share: measured(sides={"ours": {"mfu": share, "tokens_per_s": speed}})
    curve = np.linspace(12, 3, 200)
    cases = {"1b 8192": timed_row(50000, mfu), "8b 8192": timed_row(own, mfu), "8b 8192 full": timed_row(own, mfu / 2)}
    cases |= {"8b 8192 fp8": timed_row(fp8, mfu), "8b 8192 losses bf16": measured(losses=curve)}
    cases["8b 8192 losses fp8"] = measured(losses=curve * (1 + off))
    cases["1b 4096 host waits"] = measured(waits={"cudaStreamSynchronize": waiting} if waiting else {}, steps=3)
    for words, peer in (("", "native"), ("selective ", "native"), ("", "transformers")):
        for shape in ("1b", "8b8"):
            lower = ratio if shape == "8b8" else 2.0
            cases[f"{shape} 8192 {words}against {peer}"] = measured(ratios={peer: {"median": lower}})
    return cases


def test_goals_are_met_or_missed():
    good = rows_of(mfu=0.63, own=11000, fp8=14000, ratio=1.21, off=0.004, waiting=0)
    assert [goal.outcome(good)[1] for goal in GOALS] == ["met"] * len(GOALS)
    bad = rows_of(mfu=0.59, own=10000, fp8=12000, ratio=1.09, off=-0.006, waiting=6)
    assert [goal.outcome(bad)[1] for goal in GOALS] == ["missed"] * len(GOALS)
    assert GOALS[-1].outcome(bad) == ("2", "missed") and GOALS[0].outcome(good)[0] == "63.0%"
    for name in good:
        without = good | {name: {"status": "out of memory", "why": "x"}}
        alone = name in ("1b 8192", "8b 8192 full", "8b 8192")  # the best of several cases counts, or others remain
        missing = [goal.outcome(without) == ("not measured",) * 2 for goal in GOALS]
        assert any(missing) or alone, name
    assert [goal.outcome({}) for goal in GOALS] == [("not measured",) * 2] * len(GOALS)


def test_deviation_is_that_of_the_worst_window():
    base = np.full(100, 4.0)
    off = base.copy()
    off[50 : 50 + WINDOW] *= 1.01
    assert deviation(off, base) == pytest.approx(0.01) and deviation(base, base) == 0
    off[50 : 50 + WINDOW : 2] = 4 * 0.99  # noise that cancels
    assert deviation(off, base) < 1e-3 + 0.01 / WINDOW


@pytest.mark.full
def test_the_whole_suite_runs_on_a_cpu(tmp_path):
    assert main(["gpu", "suite=smoke", "device=cpu", f"folder={tmp_path}"]) == 0
    cases = saved_results(tmp_path)["cases"]
    assert {name: row.get("why", "") for name, row in cases.items() if row["status"] != "measured"} == {}
    assert len(cases) == len(SUITES["smoke"].cases)
    losses = cases["tiny losses bf16"]["losses"]
    assert losses[-1] < 0.75 * losses[0]
    assert 0 < deviation(cases["tiny losses fp8"]["losses"], losses) < 0.05
    assert cases["tiny longest full"]["tokens"] == 320  # more than the shape has positions
    assert set(cases["tiny against native"]["ratios"]) == {"native"}
    own = cases["tiny full"]["sides"]["ours"]
    assert own["hfu"] > own["mfu"]


def test_microbatches_of_a_case_are_those_of_its_name():
    cfg = config_of(next(c for c in SUITES["h100"].cases if c.name == "8b8 8192"))
    assert (cfg.train.micro_batch, cfg.train.seq_len, cfg.microbatches) == (1, 8192, 2)
    tiny = config_of(SUITES["smoke"].cases[0])
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
        (["step", "recipe=llama_debug", "out=/nowhere/x.json"], "there is no folder /nowhere"),
        (["gpu", "suite=h300"], "h300: no such suite; did you mean 'h200'?"),
        (["gpu", "device=cpu"], "device=cpu: suite=h200 is for a GPU; suite=smoke runs on a CPU too"),
        (["gpu", "part=3/2"], "part=3/2: must be k/n with k from 1 to n"),
        (["gpu", "part=0/2"], "part=0/2: must be k/n"),
        (["gpu", "only=70b"], "only=70b: no case of part 1/1 is called so; names begin with 1b, 8b, 8b8"),
        (["gpu", "folder=/nowhere"], "folder=/nowhere: there is no such folder"),
    ],
)
def test_bad_arguments_are_one_line(args, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err


def test_results_of_two_devices_do_not_mix(tmp_path, capsys):
    args = ["gpu", "suite=smoke", "device=cpu", f"folder={tmp_path}"]
    (tmp_path / "gpu-smoke.json").write_text("{")
    assert main(args) == 2 and "is no JSON" in capsys.readouterr().err
    other = {"hardware": {"gpus": ["NVIDIA X, 1, 2"]}, "cases": {"tiny eager": measured()}}
    (tmp_path / "gpu-smoke.json").write_text(json.dumps(other))
    assert main(args) == 2 and "holds results of NVIDIA X" in capsys.readouterr().err
