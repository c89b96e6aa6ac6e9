"""Fault injection: runs that are killed, damaged or out of disk space end with the result of an undisturbed run."""

import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.lib.chaos import Supervisor
from tests.lib.helpers import arguments, checkpoint_of, rank_main, rows, tensor_bytes, write_corpus
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
# 20 runs of ten kills: (seed, meshes, precision, whether saves are asynchronous)
KINDS = ("step", "save", "save", "cut", "flip", "disk")
RUNS = [
    (seed, [HOME] if seed % 2 else AWAY, FP32 if seed % 4 < 2 else FP64, seed % 3 == 0) for seed in range(20)
]  # fmt: skip


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


def inject_faults(seed, meshes, precision, asynchronous, kills, tmp_path, corpus, undisturbed, disk) -> Supervisor:
    plan = [*PLAN, *precision, f"checkpoint.async_save={str(asynchronous).lower()}"]
    folder = tmp_path / "run"
    kinds = [k for k in KINDS if k != "disk" or disk]
    args = arguments(folder, corpus, *plan)
    supervisor = Supervisor(folder, args, meshes, STEPS, KEEP, kinds, random.Random(seed), disk)
    report = supervisor.run(kills)
    assert not report.lost, f"checkpoints lost: {report.lost}"
    reference = undisturbed(precision)
    last, want = checkpoint_of(folder, STEPS), checkpoint_of(reference, STEPS)
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


@pytest.mark.parametrize(("seed", "meshes", "precision", "asynchronous"), RUNS, ids=[f"seed{s[0]}" for s in RUNS])
@pytest.mark.full
def test_ten_kills(seed, meshes, precision, asynchronous, tmp_path, corpus, undisturbed, disk, request):
    """--chaos 20 makes two hundred kills."""
    if seed >= request.config.getoption("--chaos"):
        pytest.skip("pytest --full --chaos 20 makes all twenty runs")
    inject_faults(seed, meshes, precision, asynchronous, 10, tmp_path, corpus, undisturbed, disk)


@FULL
def test_three_kills(tmp_path, corpus, undisturbed, disk):
    inject_faults(101, AWAY[:5], FP64, True, 3, tmp_path, corpus, undisturbed, disk)
