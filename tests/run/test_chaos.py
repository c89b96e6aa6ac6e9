"""Fault injection: runs that are killed, damaged or out of disk space end with the result of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from ndtrain.checkpoint import list_checkpoints
from ndtrain.checkpoint.merging import merge
from ndtrain.run import exit_status
from ndtrain.train import main
from tests.lib.chaos import Supervisor
from tests.lib.helpers import (
    MARK,
    arguments,
    checkpoint_of,
    processes,
    rank_main,
    rows,
    tensor_bytes,
    wait_for,
    write_corpus,
)
from tests.lib.parity import FP64, distance
from tests.lib.ranks import run_ranks

FULL = pytest.mark.full
STEPS, KEEP = 60, 3
PLAN = [
    f"train.steps={STEPS}", "checkpoint.every=2", f"checkpoint.keep={KEEP}", "resume=auto", "optim.ema=0.9",
    "train.global_batch=4", "train.micro_batch=1", "data.pack=true",
]  # fmt: skip
FP32 = ["precision.params=fp32", "precision.compute=fp32"]
HOME = (2, ["mesh.fsdp=2"])
AWAY = [
    HOME, (1, []), (2, ["mesh.tp=2"]), (2, ["mesh.cp=2"]), (2, ["mesh.pp=2"]), (2, ["mesh.dp=2"]),
    (4, ["mesh.fsdp=2", "mesh.tp=2"]), (4, ["mesh.pp=2", "mesh.dp=2", "schedule=zb_h1"]),
]  # fmt: skip
# 20 runs of ten kills in each layout: (seed, meshes, precision, whether saves are asynchronous, layout)
KINDS = ("step", "save", "save", "cut", "flip", "disk")
RUNS = [
    (seed, [HOME] if seed % 2 else AWAY, FP32 if seed % 4 < 2 else FP64, seed % 3 == 0, layout)
    for layout, seeds in (("shared", range(20)), ("host", range(20, 40)))
    for seed in seeds
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    """The folder of an undisturbed run on the first mesh, for a precision. Each is made once."""
    made: dict[str, Path] = {}

    def get(precision: list[str]) -> Path:
        name = precision[0][-4:]
        if name not in made:
            folder = made[name] = tmp_path_factory.mktemp(name) / "run"
            assert run_ranks(rank_main, HOME[0], [*arguments(folder, corpus, *PLAN, *precision), *HOME[1]]) == [0, 0]
        return made[name]

    return get


@pytest.fixture
def disk(tmp_path):
    """The run's checkpoint folder on a tmpfs; None where mounting is not allowed."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "none", str(place)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    yield place if mounted else None
    if mounted:
        subprocess.run(["umount", "-l", str(place)], capture_output=True)


def inject_faults(
    seed, meshes, precision, asynchronous, layout, kills, tmp_path, corpus, undisturbed, disk
) -> Supervisor:
    saves = [f"checkpoint.async_save={str(asynchronous).lower()}", f"checkpoint.layout={layout}"]
    plan = [*PLAN, *precision, *saves]
    folder = tmp_path / "run"
    kinds = [k for k in KINDS if k != "disk" or disk]
    args = arguments(folder, corpus, *plan)
    supervisor = Supervisor(folder, args, meshes, STEPS, KEEP, kinds, random.Random(seed), disk)
    report = supervisor.run(kills)
    assert not report.lost, f"checkpoints lost: {report.lost}"
    reference = undisturbed(precision)
    last, want = checkpoint_of(folder, STEPS), checkpoint_of(reference, STEPS)
    if layout == "host":
        merge(last, tmp_path / "merged")
        last = tmp_path / "merged"
    assert [r["step"] for r in rows(folder)] == list(range(1, STEPS + 1))
    if len(meshes) == 1:
        assert tensor_bytes(last) == tensor_bytes(want)
    else:
        compare(last, want, 1e-6 if precision == FP64 else 1e-3)
    print(f"seed {seed}: {sum(report.faults.values())} kills {dict(report.faults)}, resumed at {report.resumed}")
    return supervisor


def compare(checkpoint: Path, reference: Path, bound: float) -> None:
    for name in ("model", "optimizer"):
        a, b = (load_file(p / f"{name}.safetensors") for p in (checkpoint, reference))
        off = {key: distance(a[key], b[key]) for key in b if not key.startswith("exp_avg")}
        worst = max(off, key=off.get, default=None)
        assert a.keys() == b.keys() and (worst is None or off[worst] <= bound), f"{worst} is off by {off[worst]:.1e}"
        assert all(np.isfinite(v) for v in off.values())


@pytest.mark.parametrize(
    ("seed", "meshes", "precision", "asynchronous", "layout"), RUNS, ids=[f"{r[4]}-seed{r[0]}" for r in RUNS]
)
@pytest.mark.full
def test_run_with_ten_faults_ends_like_undisturbed(
    seed, meshes, precision, asynchronous, layout, tmp_path, corpus, undisturbed, disk, request
):
    """With --chaos 20 there are two hundred kills in each layout."""
    if seed % 20 >= request.config.getoption("--chaos"):
        pytest.skip("pytest --full --chaos 20 makes all forty runs")
    inject_faults(seed, meshes, precision, asynchronous, layout, 10, tmp_path, corpus, undisturbed, disk)


@FULL
@pytest.mark.parametrize("layout", ["shared", "host"])
def test_run_with_three_faults_ends_like_undisturbed(layout, tmp_path, corpus, undisturbed, disk):
    inject_faults(101, AWAY[:5], FP64, True, layout, 3, tmp_path, corpus, undisturbed, disk)


# ------------------------------------------------------------------------------------------------ kills of the launcher

ENDED_S = 2.0  # docs/launch.md: the time after which the ranks of a killed launcher stop after a step
BUSY_S = 40.0  # added on a busy machine, where steps, saves and the start of Python take seconds


def kill_a_launcher(args: list[str], folder: Path, cwd: Path, draw: random.Random, starting: bool) -> str:
    """Starts launch/local.sh with two ranks, and kills the script or its torchrun with SIGKILL at a random moment.
    Asserts that no process is left after the documented time. Returns who was killed.

    Args:
        starting: the moment is before the first step.
    """
    before = len(rows(folder))
    victim = draw.choice(["script", "torchrun"])
    with launched(args, cwd) as script:
        ranks = lambda: {pid for pid, rank in processes(cwd).items() if rank}
        wait_for(ranks, "the ranks", 120)
        if not starting:
            wait_for(lambda: len(rows(folder)) > before, "a step", 120)
        time.sleep(draw.uniform(0, 2))
        torchrun = Path(f"/proc/{next(iter(ranks()))}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(script.pid if victim == "script" else int(torchrun), signal.SIGKILL)
        wait_for(lambda: not processes(cwd), f"all processes to end after {victim} was killed", ENDED_S + BUSY_S)
        script.wait()
        out = (cwd / "out").read_text()
        if victim == "torchrun":
            assert script.returncode == 75 and ("torchrun was killed" in out or "the run was killed" in out), (
                script.returncode,
                out,
            )
    if logged := len(rows(folder)):
        assert list_checkpoints(folder / "checkpoints")[0] == checkpoint_of(folder, logged), "a step is lost"
    status = exit_status.read(folder)
    assert status is None or (status.code == 75 and status.why in ("running", "died")), status
    return victim


@contextmanager
def launched(args: list[str], cwd: Path) -> Iterator[subprocess.Popen]:
    """Starts launch/local.sh. At the end of the block all its processes are killed."""
    root = Path(__file__).parents[2]
    env = os.environ | {MARK: str(cwd), "NPROC": "2", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    with (cwd / "out").open("w") as out:
        process = subprocess.Popen(
            ["bash", str(root / "launch/local.sh"), *args], cwd=cwd, env=env, start_new_session=True,
            stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield process
    finally:
        for pid in processes(cwd):
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=FULL)])
def test_ranks_end_with_killed_launcher(kills, tmp_path, corpus):
    """The next start continues from the last step of the previous one."""
    folder, draw = tmp_path / "run", random.Random(kills)
    args = arguments(folder, corpus, "mesh.fsdp=2", "train.steps=100000", "resume=auto", "checkpoint.keep=1")
    victims = [kill_a_launcher(args, folder, tmp_path, draw, starting=n % 4 == 1) for n in range(kills)]
    last = len(rows(folder))
    assert last > 0 and (kills == 1 or {*victims} == {"script", "torchrun"})
    assert main([*args, "mesh.fsdp=1", f"train.stop_at={last + 2}"]) == 0
    assert [r["step"] for r in rows(folder)] == list(range(1, last + 3))
