"""`python -m ndtrain.bench collectives`: wrong results are found, bytes are counted as documented, the
demo shows what each operation does, mistakes are one line."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ndtrain.bench.__main__ import main
from ndtrain.measure.collectives import demo, operations
from ndtrain.measure.collectives import run as collectives
from ndtrain.measure.collectives.cases import PERIOD, Case, Form, Pattern, Setting
from ndtrain.measure.collectives.operations import OPERATIONS, TWO_STEPS
from ndtrain.measure.collectives.run import Options
from ndtrain.observe import free_memory_bytes
from tests.lib.ranks import run_ranks

NINE = {
    "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send/recv",
}  # fmt: skip
OURS = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send/recv", TWO_STEPS}
QUICK = ["min=1KiB", "max=8KiB", "factor=8", "rounds=1", "backend=gloo"]


def is_png(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR"
    return struct.unpack(">II", head[16:])


def run_bench(args: list[str], folder: Path, capsys: pytest.CaptureFixture) -> tuple[str, dict]:
    """Checks the output, the files and the size of the plot."""
    files = [f"out={folder}/results.json", f"plot={folder}/results.png"]
    assert main(["collectives", *QUICK, *args, *files]) == 0
    width, height = is_png(folder / "results.png")
    assert width > 800 and height > 400
    return capsys.readouterr().out, json.loads((folder / "results.json").read_text())


def call(fn: Callable, args: tuple) -> dict:
    return fn(dist.get_rank(), *args)


def forked(fn: Callable, ranks: int, *args: object, backend: str) -> dict:
    """`on_ranks` by the tests' own processes, which start sooner; the full sweep starts real ones."""
    return run_ranks(call, ranks, fn, args)[0]


def require_all_right(results: dict, n: int, sizes: list[int]) -> None:
    """Of one axis: every operation at every size in every form, right on all ranks, with bandwidths that its time and
    bytes give."""
    assert {(r["operation"], r["bytes"]) for r in results["rows"]} == {
        (o, s) for o in {*NINE, TWO_STEPS} for s in sizes
    }
    for row in results["rows"]:
        forms = {"torch", "ours"} if row["operation"] in OURS else {"torch"}
        assert row["n"] == n and row["forms"].keys() == forms == row["wrong"].keys()
        assert not any(row["wrong"].values()), row
        assert ("ratio" in row) == ("ours" in forms)
        for form in row["forms"].values():
            assert form["algbw"] == pytest.approx(row["bytes"] / form["ms"] / 1e6)
            assert form["busbw"] == pytest.approx(form["algbw"] * FACTORS[row["operation"]](n))
    assert results["equal"] == [{"bytes": s, "unlike": {"torch": [], "ours": []}} for s in sizes]


# NCCL-tests, doc/PERFORMANCE.md; scatter and gather as its scatter_perf and gather_perf have them
FACTORS: dict[str, Callable[[int], float]] = {
    "broadcast": lambda n: 1, "reduce": lambda n: 1, "send/recv": lambda n: 1,
    "scatter": lambda n: (n - 1) / n, "gather": lambda n: (n - 1) / n, "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n, "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n, TWO_STEPS: lambda n: 2 * (n - 1) / n,
}  # fmt: skip


@pytest.mark.full
def test_two_ranks_all_operations_correct(tmp_path, capsys):
    with mock.patch.object(collectives, "on_ranks", forked):
        said, results = run_bench([], tmp_path, capsys)
    assert results["axes"].keys() == {"dp"} and results["mesh"]["dp"] == 2 and results["backend"] == "gloo"
    require_all_right(results["axes"]["dp"], 2, [1024, 8192])
    assert "WRONG" not in said and said.count("  yes\n") == 20
    assert said.count("bitwise equal on every rank") == 2
    assert all(f"{op.counted:20} {op.formula}" in said and op.why in said for op in OPERATIONS.values())


@pytest.mark.full
@pytest.mark.parametrize(
    ("args", "axes"),
    [(["mesh=dp=2 tp=2"], {"dp": 2, "tp": 2}), (["ranks=4"], {"dp": 4}), (["mesh=tp=2,pp=2", "axis=pp"], {"pp": 2})],
    ids=str,
)
def test_four_ranks_all_operations_correct_on_every_axis(args, axes, tmp_path, capsys):
    said, results = run_bench(args, tmp_path, capsys)
    assert results["axes"].keys() == axes.keys()
    for axis, n in axes.items():
        require_all_right(results["axes"][axis], n, [1024, 8192])
        assert f"collectives over {axis}={n}" + ", 2 groups at once" * (n == 2) in said


@pytest.mark.full
def test_indivisible_sizes_are_rounded_up(tmp_path, capsys):
    _, results = run_bench(["ranks=3", "min=1000", "max=1MB", "factor=1000"], tmp_path, capsys)
    require_all_right(results["axes"]["dp"], 3, [1008, 1000008])


@pytest.mark.full
def test_collectives_bench_runs_under_torchrun(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    args = ["-m", "ndtrain.bench", "collectives", *QUICK, f"out={tmp_path}/results.json"]
    done = subprocess.run([*launch, *args], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    require_all_right(json.loads((tmp_path / "results.json").read_text())["axes"]["dp"], 2, [1024, 8192])
    assert done.stdout.count("How bytes are counted") == 1, "one rank speaks"
    wrong = subprocess.run([*launch, *args, "ranks=3"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 1 and wrong.stderr.count("error: ranks=3: torchrun has started 2") == 1


def test_bandwidth_factors_equal_nccl_tests():
    assert OPERATIONS.keys() == FACTORS.keys()
    for op in OPERATIONS.values():
        assert [op.factor(n) for n in (2, 4, 8)] == [FACTORS[op.name](n) for n in (2, 4, 8)]


# ------------------------------------------------------------------------------------------------ wrong results


def late_piece(s: Setting) -> Case:
    """An all_gather that puts one element of another rank in a wrong place."""
    case = operations._all_gather(s)
    plain = case.forms["torch"]

    def call() -> None:
        plain.call()
        if s.me == 1:
            plain.result[:2] = plain.result[:2].flip(0)

    return replace(case, forms={**case.forms, "torch": Form(call, plain.result)})


def idle(s: Setting) -> Case:
    """A broadcast that does nothing."""
    case = operations._broadcast(s)
    return replace(case, forms={"torch": Form(lambda: None, case.forms["torch"].result)})


def unsummed(s: Setting) -> Case:
    """Our two-step implementation without the sum."""
    case = operations._two_steps(s)
    return replace(case, forms={**case.forms, "ours": Form(lambda: None, case.forms["ours"].result)})


MUTANTS = {"all_gather": late_piece, "broadcast": idle, TWO_STEPS: unsummed}


def mutated(rank: int, options: Options) -> dict:
    """On one rank: the results of `measure` with each of MUTANTS in the place of its operation."""
    broken = {name: replace(OPERATIONS[name], prepare=prepare) for name, prepare in MUTANTS.items()}
    with mock.patch.dict(OPERATIONS, broken):
        return collectives.measure(rank, options, "gloo")


def test_wrong_result_names_operation_and_rank(capsys):
    options = Options(min="256", max="256", rounds=1)
    results = forked(mutated, 2, options, backend="gloo")
    wrong = {row["operation"]: row["wrong"] for row in results["dp"]["rows"] if any(row["wrong"].values())}
    assert wrong == {
        "all_gather": {"torch": [1], "ours": []},
        "broadcast": {"torch": [1]},
        TWO_STEPS: {"torch": [], "ours": [0, 1]},
    }
    assert results["dp"]["equal"] == [{"bytes": 256, "unlike": {"torch": [], "ours": [0, 1]}}]
    with mock.patch.object(collectives, "on_ranks", return_value=results):
        assert main(["collectives", "min=256", "max=256", "rounds=1", "backend=gloo"]) == 1
    out, err = capsys.readouterr()
    assert out.count("  WRONG\n") == 3 and out.count("WRONG: bits differ") == 1
    assert err.count("\n") == 1 and "all_gather of 256 B over dp on rank 1" in err
    assert f"{TWO_STEPS} (ours) as all_reduce of 256 B over dp on ranks 0 1" in err


@pytest.mark.parametrize("count", [5, PERIOD, 2 * PERIOD + 7])
def test_pattern_detects_any_wrong_element(count):
    pattern, x = Pattern.of_rank(3), torch.empty(count)
    pattern.write(x)
    assert pattern.matches(x) and pattern.matches(x[3:], start=3) and pattern.matches(x[:0], start=9)
    assert not pattern.matches(x[3:], start=4) and not Pattern.of_rank(2).matches(x)
    for at in (0, count // 2, count - 1):
        y = x.clone()
        y[at] += 1
        assert not pattern.matches(y)
    y[-1] = torch.nan
    assert not pattern.matches(y)


# ---------------------------------------------------------------------------------------------------- the demonstration

SHOWN = {
    "all_to_all": [
        "rank 0 (dp=0)   [ 0  1]  ->  [ 0 10]",
        "rank 1 (dp=1)   [10 11]  ->  [ 1 11]",
    ],
    "reduce_scatter": ["rank 0 (dp=0)   [ 0  1]  ->  [10]", "rank 1 (dp=1)   [10 11]  ->  [12]"],
    "all_reduce": ["rank 0 (dp=0)   [ 0  1]  ->  [10 12]", "rank 1 (dp=1)   [10 11]  ->  [10 12]"],
    "scatter": ["rank 0 (dp=0)   [0 1]  ->  [0]", "rank 1 (dp=1)   -      ->  [1]"],
    "gather": ["rank 0 (dp=0)   [ 0]  ->  [ 0 10]", "rank 1 (dp=1)   [10]  ->  -"],
}


def paragraphs(said: str) -> dict[str, list[str]]:
    """Operation -> the lines of its ranks."""
    blocks = [block.strip().splitlines() for block in said.split("\n\n")]
    return {b[0].partition(":")[0]: [line.strip() for line in b[1:]] for b in blocks if len(b) > 1}


def test_demo_shows_tensors_before_and_after(capsys):
    options = Options(ranks=2)
    results = forked(demo.demonstrate, 2, options.spec, options.axes, "gloo", backend="gloo")
    assert demo.show_demo(results, options.spec) == []
    shown = paragraphs(capsys.readouterr().out)
    assert shown.keys() == OPERATIONS.keys()
    assert {name: shown[name] for name in SHOWN} == SHOWN
    results["dp"]["all_to_all"][1] = ([10.0, 11.0], [1.0, 12.0], False)
    assert demo.show_demo(results, options.spec) == ["all_to_all over dp on rank 1"]
    assert "[ 1 12]  WRONG" in capsys.readouterr().out


@pytest.mark.full
def test_demo_of_four_ranks_prints_every_axis(capsys):
    assert main(["collectives", "demo=true", "backend=gloo"]) == 0
    shown = paragraphs(capsys.readouterr().out)
    assert shown["all_to_all"][2] == "rank 2 (dp=2)   [20 21 22 23]  ->  [ 2 12 22 32]"
    assert shown["reduce_scatter"][3] == "rank 3 (dp=3)   [30 31 32 33]  ->  [72]"
    assert main(["collectives", "demo=true", "backend=gloo", "mesh=dp=2,tp=2"]) == 0
    said = capsys.readouterr().out
    assert "=== over dp=2 in 2 groups [0, 2] [1, 3], each by itself" in said
    assert "rank 3 (dp=1 tp=1)   [30 31]  ->  [11 31]" in said.partition("=== over tp")[0]


# ------------------------------------------------------------------------------------------------------------ arguments


def test_sizes_end_with_the_largest():
    assert Options(min="4KiB", max="1GiB").sizes == [4096 * 4**i for i in range(10)]
    assert Options(min="4KB", max="1GB", factor=10).sizes == [4000, 40000, 400000, 4000000, 40000000, 400000000, 10**9]
    assert Options(min="1MiB", max="1MiB").sizes == [2**20]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ranks=1"], "ranks=1: a collective needs at least 2 ranks"),
        (["mesh=dp=2,tp=3", "ranks=4"], "its sizes multiply to 6, but there are 4 ranks"),
        (["mesh=ddp=2"], 'must be sizes of axes, e.g. "dp=2 tp=2"; known axes: pp, dp, fsdp, cp, tp'),
        (["mesh=dp=0"], "must be sizes of axes"),
        (["mesh=dp=2", "axis=tp"], "axis=tp: not an axis with more than one rank; known: dp"),
        (["min=1GB"], "min=1GB is more than max=64MiB"),
        (["max=12furlongs"], "max=12furlongs: must be a number of bytes, or one with a unit"),
        (["factor=1"], "factor=1: must be at least 2"),
        (["max=1000TiB"], "are free: lower max"),
        (["backend=mpi"], "mpi: no such backend"),
        (["out=/nowhere/x.json"], "the folder /nowhere does not exist"),
        (["plot=/nowhere/x.png"], "the folder /nowhere does not exist"),
        (["plot=x.svg"], "let the name end in .png"),
        (["demo=true", "out=x.json"], "demo=true measures nothing"),
        (["sizes=4"], "sizes: no such key"),
    ],
)
def test_bad_argument_is_one_line_error(args, said, capsys):
    assert main(["collectives", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err


def test_a_plot_without_matplotlib_is_refused(capsys, tmp_path):
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert main(["collectives", f"plot={tmp_path}/x.png"]) == 2
    assert "needs matplotlib, which is not installed: pip install 'ndtrain[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nccl", "gpus", "said"),
    [(False, 8, "this PyTorch has no NCCL"), (True, 1, "2 ranks on this host but 1 GPUs, and each rank needs its own")],
)
def test_nccl_without_support_or_gpus_is_refused(nccl, gpus, said, capsys):
    with (
        mock.patch("torch.distributed.is_nccl_available", return_value=nccl),
        mock.patch("torch.cuda.device_count", return_value=gpus),
    ):
        assert main(["collectives", "backend=nccl"]) == 2
    assert f"backend=nccl: {said}; use backend=gloo" in capsys.readouterr().err


def test_free_memory_respects_container_limit(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr("ndtrain.device.memory._CGROUP", tmp_path)
    whole = free_memory_bytes(cpu)
    assert whole > 64 << 20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 5000000\n")
    assert free_memory_bytes(cpu) > 64 << 20
    (tmp_path / "memory.max").write_text(f"{32 << 20}\n")
    assert free_memory_bytes(cpu) == (32 << 20) - 1000


@pytest.mark.gpu
def test_two_gpus_all_operations_correct_on_nccl(tmp_path, capsys):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _, results = run_bench(["backend=nccl"], tmp_path, capsys)
    require_all_right(results["axes"]["dp"], 2, [1024, 8192])
