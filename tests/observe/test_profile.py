"""Profiles: the time of a step by kind of work, `train.profile`, and the memory snapshot."""

import gzip
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.observe import snapshot
from ndtrain.observe.kernel_kinds import kind_of
from ndtrain.observe.profile import Table, Tally, record, recording
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.train import main
from tests.lib.helpers import arguments, rank_main, refusal, rows, write_corpus
from tests.lib.parity import make_batches
from tests.lib.ranks import run_ranks

FULL = pytest.mark.full
CPU = torch.device("cpu")
SHAPE = [
    "model.vocab_size=256", "model.hidden_size=128", "model.intermediate_size=384", "model.num_hidden_layers=2",
    "model.num_attention_heads=4", "model.num_key_value_heads=2", "train.seq_len=64", "train.global_batch=4",
    "train.micro_batch=2", "train.steps=20",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


def table_of_a_step(overrides: list[str], steps: int = 2) -> Table:
    """The table of a training step on one rank."""
    rank, _, world = world_from_env()
    cfg = resolve(load_config([*SHAPE, *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, CPU)
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, batches = TrainingStep(cfg, mesh, stages), make_batches(cfg, mesh, 1, "none")
    return record(lambda: step.run(1, batches).wait(), steps, CPU)


# --------------------------------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    "name, device, kind",
    [
        ("aten::addmm_", "cpu", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "cpu", "attention"),
        ("aten::_log_softmax_backward_data", "cpu", "elementwise"),
        ("aten::mul_", "cpu", "elementwise"),
        ("aten::_fused_adamw_", "cpu", "optimizer"),
        ("aten::index_add_", "cpu", "copies"),
        ("aten::matmul", "cpu", "views"),  # it only calls mm
        ("aten::t", "cpu", "views"),
        ("c10d::allreduce_", "cpu", "communication"),
        ("wait for all_gather over fsdp [0, 1]", "cpu", "communication"),
        ("waiting for data", "cpu", "waiting"),
        ("_LinearBackward", "cpu", "autograd"),
        ("autograd::engine::evaluate_function: MulBackward0", "cpu", "autograd"),
        ("Optimizer.step#AdamW.step", "cpu", "python"),
        ("aten::frobnicate", "cpu", "unnamed"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", "cuda", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>", "cuda", "matmul"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "cuda", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "cuda", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "cuda", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "cuda", "communication"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "cuda", "optimizer"),
        ("triton_poi_fused_mul_silu_3", "cuda", "elementwise"),
        ("triton_poi_fused__to_copy_add_cat_mul_neg_split_view_1", "cuda", "elementwise"),
        (
            "triton_poi_fused___rshift____to_copy_add_bitwise_and_bitwise_xor_copy__div_pow_sqrt_sub_0",
            "cuda",
            "optimizer",
        ),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)", "cuda", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "cuda", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "cuda", "copies"),
    ],
)
def test_kind_of_classifies_operators(name, device, kind):
    assert kind_of(name, device) == kind


def test_every_operator_of_a_step_has_a_kind():
    """The times add up to the step's, and the calls are those expected for the shape of the model."""
    table = table_of_a_step([])
    assert table.steps == 2 and table.plain_ms > 0
    assert sum(spent.ms for spent in table.kinds.values()) == pytest.approx(table.step_ms)
    assert sum(spent.ms for _, spent in table.operators.values()) == pytest.approx(table.step_ms)
    large = {name for name, (kind, spent) in table.operators.items() if spent.ms > 0.01 * table.step_ms}
    assert not {name for name in large if table.operators[name][0] == "unnamed"} and table.share("unnamed") < 0.01
    layers, microbatches = 2, 2
    assert table.kinds["attention"].calls >= 2 * layers * microbatches  # forward and backward
    linears = 5 * layers + 1  # q with k, v, o, gate with up, down and the head; each has three matmuls
    assert 3 * linears * microbatches <= table.kinds["matmul"].calls <= 4 * linears * microbatches
    assert 0.1 < table.kernel_share < 1 - table.share("python", "autograd", "views") + 1e-9
    output = "\n".join(table.lines())
    assert f"{table.kernel_share:.1%}" in output and "aten::mm" in output and "step, unprofiled" in output
    assert json.loads(json.dumps(table.as_dict()))["kinds"]["matmul"]["ms"] == table.kinds["matmul"].ms


def test_time_outside_operators_counts_as_python():
    x, slept = torch.randn(256, 256), {"python": [], "waiting": []}

    def sleep(kind: str, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        slept[kind].append(1e3 * (time.perf_counter() - began))

    def step() -> None:
        torch.mm(x, x)
        sleep("python", 0.03)
        with RECORDER.waiting("the result of step 12"):
            sleep("waiting", 0.02)

    table = record(step, 2, CPU)
    for kind, times in slept.items():  # of five steps the third and the fifth are profiled
        assert table.kinds[kind].ms == pytest.approx((times[2] + times[4]) / 2, abs=5)
    assert table.operators["waiting for the result of step"][1].calls == 1
    assert table.operators["aten::mm"] == ("matmul", table.kinds["matmul"])
    assert RECORDER.mark is None, "waits would be annotated for ever"


def test_tally_charges_gpu_time_to_one_kernel():
    """A collective gets its exposed time, the first of two concurrent kernels theirs, and the host the idle time."""
    span = lambda a, b: SimpleNamespace(start=a, end=b, elapsed_us=lambda: b - a)
    event = lambda name, a, b, gpu=True, note=False: SimpleNamespace(
        name=name, time_range=span(a, b), is_user_annotation=note, is_async=False,
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
    )  # fmt: skip
    tally = Tally(torch.device("cuda"))
    tally.add(
        [
            event("step 7", 1000, 11000, gpu=False, note=True),
            event("step 7", 1500, 9000, note=True),  # the profiler's copy of the annotation on the device
            event("aten::mm", 1000, 1100, gpu=False),
            event("sm90_gemm", 500, 3000),  # began before the step: 2000 of it lie in the step
            event("elementwise_kernel", 2500, 4000),  # 1000 beside the gemm
            event("ncclDevKernel_AllGather", 2000, 6000),  # 2000 exposed
            event("ncclDevKernel_AllGather", 5000, 6500),  # 500 more
            event("Memcpy DtoH", 10000, 10500),
        ]
    )
    table = tally.table()
    ms_of_kind = {kind: spent.ms for kind, spent in table.kinds.items()}
    assert ms_of_kind == {
        "no kernel": pytest.approx(4.0), "matmul": pytest.approx(2.0), "communication": pytest.approx(2.5),
        "elementwise": pytest.approx(1.0), "copies": pytest.approx(0.5),
    }  # fmt: skip
    assert table.communication_ms == pytest.approx(4.5) and table.step_ms == pytest.approx(10)
    assert "communication: 4.50 ms under way, 2.50 ms exposed" in table.lines()


@FULL
@pytest.mark.parametrize("mesh", ["mesh.fsdp=2", "mesh.tp=2", "mesh.pp=2"])
def test_waits_for_collectives_count_as_communication(mesh):
    for table in run_ranks(table_of_a_step, 2, [mesh]):
        assert table.kinds["communication"].ms > 0 and table.communication_ms > 0
        assert any(name.startswith("wait for ") and mesh[5:7] in name for name in table.operators)
        assert table.share("unnamed") < 0.01


# -------------------------------------------------------------------------------------------------------------- memory


def test_peak_bytes_finds_peak_of_recorded_memory():
    with recording(CPU, profile_memory=True) as recorded:
        gone = torch.empty(300)
        kept = torch.ones(1000)
        del gone
        a = torch.empty(5000) + 1
        del a
        b = kept * 2
    seen = snapshot.peak_bytes(recorded)
    numbers = 32  # bytes of the tensors that Python's numbers become
    assert seen["peak_bytes"] == pytest.approx(4 * (1000 + 5000 + 5000), abs=numbers)
    live = {row["by"]: (row["bytes"], row["tensors"]) for row in seen["live"] if row["bytes"] > numbers}
    assert live == {
        "aten::add": (20000, 1), "aten::empty": (20000, 1), "aten::ones > aten::empty": (4000, 1),
    }  # fmt: skip
    assert seen["timeline"][-1][1] == pytest.approx(b.nbytes + kept.nbytes, abs=numbers)
    assert max(n for _, n in seen["timeline"]) == seen["peak_bytes"]
    assert [seen["peak_ms"], seen["peak_bytes"]] in seen["timeline"]


# --------------------------------------------------------------------------------------------------------------- a run


def read_trace(folder: Path, rank: int = 0) -> list[dict]:
    return json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))["traceEvents"]


def steps_in(folder: Path, rank: int = 0) -> set[str]:
    """The annotated steps of the trace that contain operators."""
    events = [e for e in read_trace(folder, rank) if e.get("ph") == "X"]
    of = lambda e, step: step["ts"] <= e["ts"] < step["ts"] + step["dur"]
    steps = [e for e in events if e["name"].startswith("step ")]
    return {s["name"] for s in steps if any(e["name"] == "aten::mm" and of(e, s) for e in events)}


def test_profiled_run_writes_files_and_trains_as_without(tmp_path, corpus, capsys):
    """Both files and the log have only the steps of the window. Profiling does not change the training."""
    args = partial(arguments, corpus=corpus)
    assert main([*args(tmp_path / "run"), "train.stop_at=4", "train.profile=2-3"]) == 0
    output = capsys.readouterr().out
    assert main([*args(tmp_path / "plain"), "train.stop_at=4"]) == 0
    made = tmp_path / "run" / "profile"
    assert sorted(p.name for p in made.iterdir()) == ["memory-rank-0.json", "rank-0.json.gz"]
    assert steps_in(made) == {"step 2", "step 3"}
    memory = json.loads((made / "memory-rank-0.json").read_text())
    assert memory["peak_bytes"] == sum(row["bytes"] for row in memory["live"]) > 0
    assert any(row["by"].startswith("step ") and "_Linear" in row["by"] for row in memory["live"])
    assert "profile of steps 2 to 3, a step on rank 0:" in output and "step, profiled" in output
    assert "step, profiled" in (tmp_path / "run/logs/rank-0.log").read_text()
    assert not (tmp_path / "plain" / "profile").exists()
    numbers = [[(r["step"], r["loss"], r["grad_norm"]) for r in rows(tmp_path / f)] for f in ("run", "plain")]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 4


@FULL
def test_profile_window_cut_short_writes_recorded_steps(tmp_path, corpus, capsys):
    """A run that is stopped within the window writes the recorded steps. A run that resumes after it prints a
    warning."""
    args = arguments(tmp_path / "run", corpus, "train.profile=1-3")
    forward_backward = TrainingStep.forward_backward

    def stopped(self, *rest):
        os.kill(os.getpid(), signal.SIGTERM)
        return forward_backward(self, *rest)

    with mock.patch.object(TrainingStep, "forward_backward", stopped):
        assert main(args) == 85
    assert "profile of step 1, a step on rank 0:" in capsys.readouterr().out
    assert steps_in(tmp_path / "run" / "profile") == {"step 1"}
    assert main([*args, "resume=auto", "train.profile=1", "train.stop_at=2"]) == 0
    output = capsys.readouterr().out
    assert (
        "warning: train.profile=1: the run is already at step 1: choose later steps" in output
        and "profile of" not in output
    )


def test_profile_that_cannot_be_written_gives_warning(tmp_path, corpus, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("in the way")
    assert main(arguments(tmp_path / "run", corpus, "train.profile=1", "train.stop_at=2")) == 0
    output = capsys.readouterr().out
    assert "warning: profile of step 1 not written: File exists" in output and "step, profiled" in output
    assert len(rows(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    "args, expected",
    [
        (["train.profile=x"], "train.profile=x: must be a step or a range of steps, counted from 1, e.g. 10 or 10-12"),
        (["train.profile=0"], "train.profile=0: must be a step or a range of steps, counted from 1, e.g. 10 or 10-12"),
        (
            ["train.profile=3-2"],
            "train.profile=3-2: must be a step or a range of steps, counted from 1, e.g. 10 or 10-12",
        ),
        (["train.profile=9-11"], "train.profile=9-11 exceeds train.steps=10: choose earlier steps"),
        (["train.profile=3", "train.stop_at=2"], "train.profile=3 exceeds train.stop_at=2: choose earlier steps"),
        (
            ["train.profile=3", "train.trace=true"],
            "train.profile=3 would slow down the step that train.trace=true measures: set only one of them",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_profile_steps_are_refused(args, expected, tmp_path, corpus, capsys):
    assert refusal(capsys, arguments(tmp_path / "run", corpus, *args)) == expected
    assert not (tmp_path / "run").exists()


@FULL
def test_every_rank_writes_its_profile(tmp_path, corpus):
    args = arguments(tmp_path / "run", corpus, "mesh.fsdp=2", "train.stop_at=3", "train.profile=2")
    assert run_ranks(rank_main, 2, args) == [0, 0]
    for rank in range(2):
        assert steps_in(tmp_path / "run" / "profile", rank) == {"step 2"}
        names = {e["name"] for e in read_trace(tmp_path / "run" / "profile", rank)}
        assert any(name.startswith("wait for all_gather over fsdp") for name in names)
        output = (tmp_path / "run/logs/rank-0.log").read_text()
        assert f"profile of step 2, a step on rank {rank}:" in output and "ms exposed" in output
