"""`plan calibrate`: operators of a step are timed as the kernels that the planner knows, and the file is one that
`hardware=` takes."""

import time
from dataclasses import replace

import pytest
import torch
import yaml

from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.plan import calibrate
from ndtrain.plan.__main__ import main
from ndtrain.plan.events import Kernel
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.kernel_times import CaseTimes, Clock, KernelTimes, fastest, time_case
from ndtrain.plan.pieces import record_pieces
from ndtrain.plan.predict import Predictor

TINY = [(64, 96, 4, 2, 128, 32, 1)]
CPU = torch.device("cpu")


def test_kernel_times_records_operators_as_kernels():
    a, b = torch.randn(256, 512), torch.randn(512, 128)
    with KernelTimes(Clock(CPU)) as times:
        for _ in range(3):
            (a @ b).view(-1).add_(1)
    seconds = times.seconds()
    assert [(k.op, k.shape, k.bytes, len(s)) for k, s in seconds.items()] == [
        ("mm", (1, 256, 128, 512), 4 * (256 * 512 + 512 * 128 + 256 * 128), 3),
        ("add_", (), 2 * 4 * 256 * 128, 3),
    ]
    assert all(0 < s < 1 for spans in seconds.values() for s in spans)


def test_cpu_clock_does_not_count_sleep():
    clock = Clock(CPU)
    start = clock.now()
    time.sleep(0.2)
    assert clock.between(start, clock.now()) < 0.1


def test_timed_step_has_every_predicted_kernel(monkeypatch):
    monkeypatch.setattr(calibrate, "SHAPES", TINY)
    (cfg,) = calibrate.cases("fp32", 1, "cpu")
    timed = {k.op for k in time_case(cfg, Mesh(MeshSpec.of(cfg.mesh), 0, CPU), 1).passes_kernels}
    recorded = {e.op for piece in record_pieces(cfg, "cpu").recorded.values() for e in piece.events}
    assert recorded and not recorded - timed


def kernels(*samples):
    return {Kernel("memory", 0, nbytes, "fp32", (), op): seconds for op, nbytes, seconds in samples}


def test_tables_hold_medians_sorted_by_size():
    case = CaseTimes(1, kernels(("mul", 800, [3.0, 1.0, 2.0]), ("mul", 8, [1.0])), kernels(("mul", 800, [9.0, 9.0])))
    matmul = Kernel("matmul", 2 * 2 * 3 * 4, 0, "bf16", (1, 2, 3, 4), "mm")
    case.passes_kernels[matmul] = [5.0]
    case.passes_kernels[matmul._replace(op="addmm_")] = [7.0]
    tables = calibrate.tables_of([case])
    assert tables["memory"] == {"mul fp32": [[8, 1.0], [800, 3.0]]}
    assert tables["matmul"] == {"bf16": [[1, 2, 3, 4, 6.0]]} and tables["attention"] == {}


def test_host_rates_are_time_outside_operators():
    passes = kernels(("mul", 8, [0.1] * 20), ("add", 8, [0.2] * 20))  # ten of each in a step: 3 s
    updates = kernels(("_fused_adamw_", 8, [1.0] * 2), ("sqrt", 8, [0.5] * 2))
    case = CaseTimes(2, passes, updates, passes=[5.0, 5.0], updates=[2.0, 2.0])
    assert calibrate.host_rates([case]) == pytest.approx({"launch_s": 0.1, "step_s": 1.0})


def test_fastest_chooses_launch_with_fastest_step():
    disturbed, quiet, slow = (CaseTimes(2, steps_s=seconds) for seconds in ([3.0, 8.0], [2.5, 9.0], [3.5, 3.5]))
    assert fastest([disturbed, quiet, slow]) is quiet


def test_share_of_core_is_work_over_step_time():
    half = CaseTimes(2, passes=[1.0, 2.0], updates=[0.5, 0.5], steps_s=[3.0, 5.0])
    assert calibrate._share_of_a_core([half, CaseTimes(1, passes=[1.0], updates=[1.0], steps_s=[4.0])]) == 0.5


def test_host_rates_use_larger_cases_but_not_their_updates():
    small, large, larger = (
        CaseTimes(1, kernels(("mul", 8, [n])), kernels(("_fused_adamw_", 8, [n])), [n + host], [n + host])
        for n, host in ((1.0, 0.1), (8.0, 0.3), (9.0, 0.4))
    )
    assert calibrate.host_rates([larger, small, large]) == pytest.approx({"launch_s": 0.3, "step_s": 0.1})


@pytest.mark.full
def test_cases_shard_every_model_over_every_axis():
    models = {(c.model.hidden_size, c.train.seq_len, c.model.vocab_size) for c in calibrate.cases("bf16", 1, "cpu")}
    assert len(models) == len(calibrate.SHAPES)
    cut = [
        (c.model.hidden_size, c.train.seq_len, c.model.vocab_size, axis)
        for c in calibrate.cases("bf16", 2, "cpu")
        for axis in calibrate.AXES
        if getattr(c.mesh, axis) == 2
    ]
    assert sorted(cut) == sorted((*model, axis) for model in models for axis in calibrate.AXES)


@pytest.mark.full
def test_beside_collectives_recovers_interference_and_lateness(monkeypatch):
    """Step times predicted with known rates, one of them disturbed, lead back to the same rates."""
    monkeypatch.setattr(calibrate, "SHAPES", [(2048, 5632, 16, 8, 8192, 2048, 2)] * 2)
    cfgs, hardware = calibrate.cases("bf16", 2, "cuda"), load_hardware("a100")
    own = {"interference": 0.6, "late_s": calibrate.LATE_S[20]}
    exact = Predictor(replace(hardware, rates=own))
    times = [CaseTimes(1, steps_s=[exact.predict(cfg, explain=False).step_time_s]) for cfg in cfgs]
    times[0] = CaseTimes(1, steps_s=[1.1 * times[0].steps_s[0]])
    assert calibrate.beside_collectives(calibrate.TimedSteps(cfgs, times, 1.0), hardware) == own


MISTAKES = {
    "no out": ([], "out is missing"),
    "json": (["out=this.json"], "out=this.json: must be a YAML file"),
    "folder": (["out=nowhere/this.yaml"], "the folder nowhere does not exist"),
    "precision": (["out=this.yaml", "dtypes=fp12"], "fp12: no such dtype"),
    "override": (["out=this.yaml", "mesh.tp=2"], "mesh.tp"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_argument_is_one_line_error(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, text = MISTAKES[name]
    assert main(["calibrate", *args]) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.full
def test_a_calibration_prices_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "SHAPES", TINY)
    path = tmp_path / "this.yaml"
    assert main(["calibrate", f"out={path}", "dtypes=fp32", "ranks=2", "launches=1", "steps=1", "device=cpu"]) == 0
    assert "wrote" in capsys.readouterr().out
    assert list(yaml.safe_load(path.read_text()))[:2] == ["measured", "rates"], "so that no part of it is a description"
    hardware = load_hardware(str(path))
    assert set(hardware.rates) == {"launch_s", "step_s", "interference", "late_s"}
    assert hardware.measured.collectives["all_gather"]["2 of 2"]
    for ranks in (1, 2):
        cfg = calibrate.cases("fp32", ranks, "cpu")[0]
        prediction = Predictor(hardware).predict(cfg)
        assert 1e-4 < prediction.step_time_s < 10
        assert sum(prediction.waterfall.values()) == pytest.approx(prediction.step_time_s)
