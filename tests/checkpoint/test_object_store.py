"""Checkpoints in an object store: on any mesh, through failing requests, kills, and a bucket that is gone."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from ndtrain import Trainer, checkpoint, compose
from ndtrain.checkpoint.__main__ import main
from ndtrain.checkpoint.merging import merge
from ndtrain.checkpoint.verifying import verify
from ndtrain.config import ConfigError
from ndtrain.config.store import folder_at
from ndtrain.device.process_owner import Owner
from ndtrain.engine import setup
from ndtrain.run import exit_status, folder_lock
from ndtrain.train import main as train
from tests.checkpoint import test_checkpoint_matrix as matrix
from tests.checkpoint.test_checkpoint_matrix import MESHES, SAVED, ranks_of, straight  # noqa: F401 (a fixture)
from tests.lib import s3
from tests.lib.helpers import arguments, checkpoint_of, rank_main, rows, tensor_bytes, wait_for, write_corpus
from tests.lib.ranks import run_ranks, started_ranks

STEP = f"step-{SAVED:08d}"
HOST = "checkpoint.layout=host"
BUCKET = f"s3://{s3.BUCKET}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture
def server():
    pytest.importorskip("moto")
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    with s3.running() as made:
        yield made


def saves_to(address: str, *more: str) -> list[str]:
    return ["train.steps=4", "checkpoint.every=2", HOST, f"checkpoint.folder={address}", *more]


def names(address: str) -> set[str]:
    return {str(p.relative_to(folder_at(address))) for p in folder_at(address).rglob("*")}


# ---------------------------------------------------------------------------------------------------- without a server


@pytest.fixture
def memory():
    address = "memory://bucket/run"
    yield address
    folder_at("memory://bucket").remove_all()


def test_run_in_a_store_equals_run_on_disk(memory, corpus, tmp_path, capsys):
    for name, more in (("disk", ["train.steps=4", "checkpoint.every=2", HOST]), ("store", saves_to(memory))):
        assert train(arguments(tmp_path / name, corpus, *more)) == 0
    assert tensor_bytes_of(f"{memory}/step-00000004") == tensor_bytes(checkpoint_of(tmp_path / "disk", 4))
    assert train(arguments(tmp_path / "store", corpus, *saves_to(memory, "train.steps=6", "resume=auto"))) == 0
    assert [r["step"] for r in rows(tmp_path / "store")] == [1, 2, 3, 4, 5, 6]
    assert {name.partition("/")[0] for name in names(memory)} == {"owner", "step-00000004", "step-00000006"}
    capsys.readouterr()
    assert main(["verify", memory]) == 0 and capsys.readouterr().out.count("good: ") == 2
    assert main(["merge", memory, str(tmp_path / "merged")]) == 0
    for name, source in (("a", memory), ("b", tmp_path / "merged")):
        assert train(arguments(tmp_path / name, corpus, "train.stop_at=3", f"init_from={source}")) == 0
    assert [r["loss"] for r in rows(tmp_path / "a")] == [r["loss"] for r in rows(tmp_path / "b")]


def tensor_bytes_of(address: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder_at(address).glob("*.safetensors")}


@pytest.mark.parametrize("named", ["recipe", "nothing"])
def test_resume_names_run_folder_whose_checkpoints_are_in_a_store(named, memory, corpus, tmp_path):
    assert train(arguments(tmp_path / "run", corpus, *saves_to(memory))) == 0
    more = [f"resume={tmp_path / 'run'}", "train.steps=6"]
    new = arguments(tmp_path / "new", corpus, *saves_to(f"{memory}-new", *more)) if named == "recipe" else more
    assert train(new) == 0
    assert [r["step"] for r in rows(tmp_path / ("new" if named == "recipe" else "run"))][-2:] == [5, 6]


def test_resume_of_older_step_sets_later_ones_aside(memory, corpus, tmp_path):
    args = arguments(tmp_path / "run", corpus, *saves_to(memory))
    assert train(args) == 0
    assert train([*args, f"resume={memory}/step-00000002", "train.stop_at=3"]) == 0
    assert {p.name for p in checkpoint.list_checkpoints(folder_at(memory))} == {"step-00000002", "step-00000003"}
    assert "step-00000004/superseded.json" in names(memory)


def test_damaged_objects_are_named_and_older_checkpoint_is_used(memory, corpus, tmp_path, capsys):
    args = arguments(tmp_path / "run", corpus, *saves_to(memory))
    assert train(args) == 0
    newest = folder_at(memory) / "step-00000004"
    for name, change in (("optimizer-host-00000.safetensors", lambda c: c[:-8]), ("model.pieces.safetensors", None)):
        (newest / name).write_bytes(change((newest / name).read_bytes())) if change else (newest / name).unlink()
        assert name in "".join(verify(newest).values())
    capsys.readouterr()
    assert train([*args, "resume=auto", "train.steps=6"]) == 0
    assert "step-00000002" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


WRONG = {
    "checkpoint.folder=memory://bucket/x": "set checkpoint.layout=host",
    "checkpoint.folder=nostore://bucket/x checkpoint.layout=host": "no package for nostore://",
    "resume=memory://bucket/nothing": "does not exist",
    "init_from=memory://bucket/nothing": "there is no config.json",
    "checkpoint.folder=": "checkpoint.folder is empty",
}


@pytest.mark.parametrize("overrides", WRONG)
def test_wrong_address_is_refused(overrides, corpus, tmp_path, capsys):
    assert train([*arguments(tmp_path / "run", corpus), *overrides.split()]) == 2
    assert WRONG[overrides] in capsys.readouterr().err


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("fsspec.filesystem", lambda *args, **options: (_ for _ in ()).throw(ImportError("no s3fs")))
    with pytest.raises(ConfigError, match=r"no package for s3:// is installed .*pip install 'ndtrain\[s3\]'"):
        folder_at("s3://bucket/run")


def test_folder_in_a_store_has_one_run_at_a_time(memory, corpus, tmp_path):
    first, second = (arguments(tmp_path / name, corpus, *saves_to(memory)) for name in ("first", "second"))
    trainer = Trainer(compose(*first))
    with pytest.raises(ConfigError, match=f"checkpoint.folder={memory} belongs to another Trainer of this process"):
        Trainer(compose(*second))
    trainer.train()
    assert train([*second, "train.steps=6", "resume=auto"]) == 0
    assert [r["step"] for r in rows(tmp_path / "second")] == [5, 6]


def test_run_whose_store_was_taken_over_publishes_nothing(memory, corpus, tmp_path):
    """It made no progress for a minute. Its run folder is still its own."""
    trainer = Trainer(compose(*arguments(tmp_path / "run", corpus, *saves_to(memory))))
    elsewhere = replace(Owner.this_process(), host="n1", machine="another", token="x")
    with mock.patch.object(folder_lock, "_is_free", lambda *args: True):
        winner = folder_lock.acquire(folder_at(memory), elsewhere)
    with pytest.raises(folder_lock.FolderLost, match="taken over by pid"):
        trainer.train()
    assert not checkpoint.list_checkpoints(folder_at(memory))
    winner.check()
    winner.release()


# ------------------------------------------------------------------------------------------------------- with a server


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "source"), [("fsdp2", "tp8"), ("pp2-fsdp2-tp2", "dp2-fsdp2-cp2"), ("one", "pp3-zb_v")]
)
def test_resume_through_failing_requests_is_same_run(mesh, source, server, straight, tmp_path):  # noqa: F811
    run_ranks(matrix.write, ranks_of(MESHES[source]), MESHES[source], str(tmp_path / "disk"))
    server.fail(0.1)
    run_ranks(write_to, ranks_of(MESHES[source]), server.env, [*MESHES[source], HOST], timeout=300)
    by_rank = run_ranks(resume_from, ranks_of(MESHES[mesh]), server.env, MESHES[mesh], tmp_path / "out", timeout=300)
    assert tensor_bytes(tmp_path / "out" / "s3" / STEP) == tensor_bytes(tmp_path / "disk" / STEP)
    matrix.check([rank["s3"][1] for rank in by_rank], straight()[SAVED:])
    assert server.fail(0) > 10, "too few faults"


def write_to(env: dict[str, str], overrides: list[str]) -> None:
    """On one rank: `matrix.write` into the store."""
    os.environ.update(env)
    matrix.write(overrides, f"{BUCKET}/run")


def resume_from(env: dict[str, str], overrides: list[str], out: Path) -> dict:
    os.environ.update(env)
    return matrix.resume(overrides, {"s3": folder_at(f"{BUCKET}/run/{STEP}")}, out)


KILLS = 10
STEPS = 60


def start(env: dict[str, str], args: list[str]) -> int:
    os.environ.update(env)
    return rank_main(args)


def kill_after(step: int, server: s3.Server, args: list[str], tmp_path: Path, draw: random.Random) -> None:
    """Start the ranks, and kill a random one soon after a step."""
    logged = lambda: rows(tmp_path / "run")[-1]["step"] if rows(tmp_path / "run") else 0
    with started_ranks(start, 2, server.env, args) as (ranks, folder):
        said = lambda: "".join(e.read_text() for e in folder.glob("error-*"))
        wait_for(lambda: logged() >= step or said(), "the run", 240)
        assert not said(), said()
        time.sleep(draw.uniform(0, 0.4))
        os.kill(draw.choice(ranks).pid, signal.SIGKILL)
        time.sleep(draw.uniform(0, 0.1))


@pytest.mark.full
@pytest.mark.parametrize("background", [False, True])
def test_run_killed_at_random_moments_loses_nothing(background, server, corpus, tmp_path):
    plan = [f"train.steps={STEPS}", "checkpoint.every=2", "mesh.fsdp=2", HOST, "resume=auto"]
    assert run_ranks(start, 2, server.env, arguments(tmp_path / "undisturbed", corpus, *plan)) == [0, 0]
    server.fail(0.05)
    address, draw = f"{BUCKET}/run", random.Random(background)
    plan += [f"checkpoint.folder={address}", f"checkpoint.async_save={str(background).lower()}"]
    args, newest = arguments(tmp_path / "run", corpus, *plan), 0
    for number in range(KILLS):
        kill_after(newest + draw.randint(1, max(1, (STEPS - newest) // (KILLS - number))), server, args, tmp_path, draw)
        published = checkpoint.list_checkpoints(folder_at(address))
        steps = [int(path.name[5:]) for path in published]
        assert max(steps, default=0) >= newest, f"step {newest} is lost: {steps}"
        assert not any(problem for path in published for problem in verify(path).values())
        newest = max(steps, default=0)
    assert run_ranks(start, 2, server.env, args, timeout=300) == [0, 0]
    merge(folder_at(f"{address}/step-{STEPS:08d}"), tmp_path / "merged")
    merge(checkpoint_of(tmp_path / "undisturbed", STEPS), tmp_path / "wanted")
    assert tensor_bytes(tmp_path / "merged") == tensor_bytes(tmp_path / "wanted")
    assert [r["step"] for r in rows(tmp_path / "run")] == list(range(1, STEPS + 1)) and server.fail(0) > KILLS


@pytest.mark.full
def test_bucket_that_is_gone_is_named_and_training_goes_on(server, corpus, tmp_path, capsys):
    args = arguments(tmp_path / "run", corpus, *saves_to(f"{BUCKET}/run"))
    assert train([*args, "train.stop_at=2"]) == 0
    fresh = arguments(tmp_path / "fresh", corpus, *saves_to(f"{BUCKET}/fresh"))
    with bucket_gone_after_start(server):
        assert train(fresh) == 1
    assert [r["step"] for r in rows(tmp_path / "fresh")] == [1, 2, 3, 4]
    error = exit_status.read(tmp_path / "fresh").error
    assert "checkpoint of step 4 not saved" in error and "The specified bucket does not exist" in error
    for more in (["resume=auto"], ["resume=s3://bucket/run"], [f"run.dir={tmp_path / 'new'}"]):
        capsys.readouterr()
        assert train([*args, *more]) == 2
        err = capsys.readouterr().err
        assert "s3://bucket/run" in err and "there is no bucket bucket, or it cannot be reached" in err


@contextmanager
def bucket_gone_after_start(server: s3.Server) -> Iterator[None]:
    last_of_setup = setup.meet

    def meet(*args):
        server.remove_bucket()
        return last_of_setup(*args)

    with mock.patch.object(setup, "meet", meet):
        yield


@pytest.mark.full
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_one_of_many_runs_gets_a_folder_in_s3(rate, server):
    folder, gate = folder_at(f"{BUCKET}/run"), threading.Barrier(8)
    server.fail(rate)

    def take(number: int) -> folder_lock.FolderLock | None:
        gate.wait()
        with suppress(ConfigError):
            return folder_lock.acquire(folder, replace(Owner.this_process(), token=f"{number}"))

    with ThreadPoolExecutor(8) as pool:
        (lock,) = [lock for lock in pool.map(take, range(8)) if lock]
    lock.check()
    lock.release()
    folder_lock.acquire(folder).release()
