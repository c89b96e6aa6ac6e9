"""The lock of a run folder: never two writers, and no wait that is longer than stated."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from ndtrain import Trainer, compose
from ndtrain.config import ConfigError
from ndtrain.config.store import folder_at
from ndtrain.device import heartbeat
from ndtrain.device.heartbeat import BEAT_S, DEAD_S, beat_of, set_beat
from ndtrain.device.process_owner import LAUNCH, Owner
from ndtrain.engine.train_step import TrainingStep
from ndtrain.run import exit_status, folder_lock
from ndtrain.run.folder_lock import Claim, FolderLock, FolderLost, acquire
from ndtrain.train import main
from tests.lib import namespaces
from tests.lib.clock import Clock
from tests.lib.helpers import (
    arguments,
    checkpoint_of,
    one_error,
    refusal,
    rows,
    started,
    tensor_bytes,
    wait_for,
    write_corpus,
)

FULL = pytest.mark.full
ENDLESS = ["train.steps=100000", "checkpoint.every=3", "resume=auto"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(params=["disk", "store"])
def place(request, tmp_path) -> Iterator[Path]:
    """A folder on a disk, or in an object store."""
    if request.param == "disk":
        yield tmp_path
    else:
        yield folder_at("memory://bucket/lock")
        folder_at("memory://bucket").remove_all()


def elsewhere(name: str = "n1", **fields) -> Owner:
    """A process on another machine."""
    me = Owner.this_process()
    return replace(me, host=name, machine=f"boot of {name}", pid=7, token=f"{name}-{random.random()}", **fields)


def left_by(run_dir: Path, owner: Owner) -> Path:
    """An owner file as a killed run leaves it. Returns the file."""
    lock = acquire(run_dir, owner)
    lock._heartbeat.stop()
    Claim.release(lock)
    return lock.file


def taken(run_dir: Path, me: Owner | None = None, then: Callable[[float], None] = lambda now: None) -> float:
    """Seconds after which the folder was taken over, on a clock that nobody waits for."""
    clock = Clock(then)
    acquire(run_dir, me, clock, clock.sleep).release()
    return clock.now


# ------------------------------------------------------------------------------------------------------------ takeover


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_released_folder_is_free_at_once(place):
    acquire(place, elsewhere()).release()
    assert taken(place) == taken(place, elsewhere()) == 0


@pytest.mark.parametrize("gone", ["killed", "its number has a new process", "not reaped"])
def test_dead_owner_on_same_machine_is_replaced_at_once(gone, tmp_path):
    me = Owner.this_process()
    child = subprocess.Popen(["sleep", "0" if gone == "not reaped" else "60"])
    try:
        started_at = int(Path(f"/proc/{child.pid}/stat").read_text().split()[21])
        owner = replace(me, pid=child.pid, started=started_at + (gone == "its number has a new process"), token="x")
        left_by(tmp_path, owner)
        if gone == "killed":
            child.kill()
            child.wait()
        if gone == "not reaped":
            wait_for(lambda: " Z " in Path(f"/proc/{child.pid}/stat").read_text(), "a zombie")
        assert taken(tmp_path) == 0
    finally:
        child.kill()
        child.wait()


def test_living_owner_on_same_machine_is_never_replaced(tmp_path):
    """This holds even without a heartbeat: the owner is paused, or its file system is slow."""
    with subprocess.Popen(["sleep", "60"]) as child:
        os.kill(child.pid, signal.SIGSTOP)
        ticks = int(Path(f"/proc/{child.pid}/stat").read_text().split()[21])
        left_by(tmp_path, replace(Owner.this_process(), pid=child.pid, started=ticks, token="x", job="mine:12"))
        try:
            with pytest.raises(ConfigError) as error:
                taken(tmp_path, then=lambda now: pytest.fail("it waited"))
        finally:
            child.kill()
    for word in (f"run.dir={tmp_path} ", f"pid {child.pid} on host {os.uname().nodename}", "Slurm job 12, since 20"):
        assert word in str(error.value)
    assert f"touch {tmp_path}/stop" in str(error.value) and "\n" not in str(error.value)


def test_dead_owner_on_other_machine_is_replaced_after_dead_s(place, capsys):
    left_by(place, elsewhere("n7"))
    assert DEAD_S <= taken(place) <= DEAD_S + 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pid 7 on host n7" in line and f"up to {DEAD_S:g} s" in line


@pytest.mark.parametrize("skew_s", [0, 600, -600, -1.7e9])
def test_living_owner_on_other_machine_is_never_replaced(skew_s, place):
    """Its heart beats once just before the observer's wait ends. Its clock may be wrong."""
    right = time.time()
    with mock.patch("time.time", lambda: right + skew_s):
        file = left_by(place, elsewhere())
        beat = lambda now: set_beat(file, 1) if now >= DEAD_S - 1 else None
        with pytest.raises(ConfigError, match="belongs to a run that is alive: pid 7 on host n1"):
            taken(place, then=beat)


def test_slow_file_system_of_observer_replaces_no_owner(tmp_path):
    """It begins to count again after a gap between two looks."""
    left_by(tmp_path, elsewhere())
    clock = Clock()
    gaps = iter([20.0] * 10)
    sleep = lambda seconds: clock.sleep(next(gaps, seconds))
    acquire(tmp_path, clock=clock, sleep=sleep).release()
    assert clock.now >= 10 * 20 + DEAD_S


def test_owner_file_beats_until_release(place):
    with mock.patch.object(heartbeat, "BEAT_S", 0.01):
        lock = acquire(place)
        seen = {beat_of(lock.file)}
        wait_for(lambda: seen.add(beat_of(lock.file)) or len(seen) > 3, "beats")
        lock.release()
    assert beat_of(lock.file) == 0 and not lock._heartbeat.alive
    assert BEAT_S * 5 < DEAD_S


@pytest.mark.parametrize("then", ["queued again", "the same start", "another job", "another cluster"])
def test_requeued_slurm_job_takes_folder_at_once(then, tmp_path):
    left_by(tmp_path, elsewhere("n1", job="c:5", restart=1))
    job, restart = {"another job": ("c:6", 2), "another cluster": ("d:5", 2), "the same start": ("c:5", 1)}.get(
        then, ("c:5", 2)
    )
    seconds = taken(tmp_path, elsewhere("n2", job=job, restart=restart))
    assert seconds == 0 if then == "queued again" else seconds >= DEAD_S


def test_this_process_reads_slurm_job(monkeypatch):
    for name, value in {"JOB_ID": "77", "CLUSTER_NAME": "c", "RESTART_COUNT": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv(LAUNCH, "host-1-2.5")
    me = Owner.this_process()
    assert (me.job, me.restart, me.launch, me.pid) == ("c:77", 3, "host-1-2.5", os.getpid())


def test_restarted_launch_takes_folder_at_once(tmp_path):
    left_by(tmp_path, elsewhere("n1", launch="a-1-2"))
    assert taken(tmp_path, elsewhere("n2", launch="a-1-2")) == 0


@pytest.mark.parametrize("content", ["", "{", '{"host": 1}'])
def test_invalid_owner_file_expires(content, place):
    left_by(place, elsewhere()).write_bytes(content.encode())
    assert DEAD_S <= taken(place) <= DEAD_S + 1


def test_lock_works_without_hard_links(tmp_path):
    with mock.patch("os.link", side_effect=PermissionError(1, "no links")):
        lock = acquire(tmp_path)
        with pytest.raises(ConfigError, match="another Trainer of this process"):
            acquire(tmp_path)
        lock.check()
        lock.release()
        assert taken(tmp_path) == 0


def test_one_of_many_takers_wins(place):
    left_by(place, replace(Owner.this_process(), pid=dead_pid(), token="x"))
    gate = threading.Barrier(8)

    def take(number: int) -> FolderLock | None:
        gate.wait()
        try:
            return acquire(place, replace(Owner.this_process(), token=f"{number}"))
        except ConfigError:
            return None

    with ThreadPoolExecutor(8) as pool:
        (lock,) = [lock for lock in pool.map(take, range(8)) if lock]
    lock.check()
    lock.release()


def test_a_late_taker_finds_the_newer_owner(place):
    """Between its look and its claim, one run came and went and another one came."""
    create, winners = folder_lock._create, []

    def late(file: Path, owner: Owner) -> bool:
        if owner.token == "late" and not winners:
            acquire(place).release()
            winners.append(acquire(place))
        return create(file, owner)

    acquire(place).release()
    with mock.patch.object(folder_lock, "_create", late), pytest.raises(ConfigError, match="another Trainer"):
        acquire(place, replace(Owner.this_process(), token="late"))
    winners[0].check()
    winners[0].release()


# ---------------------------------------------------------------------------------------------------- the former owner


def test_replaced_owner_raises_folder_lost(tmp_path):
    paused = left_by(tmp_path, elsewhere())
    claim = Claim.from_message([str(paused), json.loads(paused.read_text())])
    claim.check()
    exit_status.write(tmp_path, "died")
    winner = acquire(tmp_path, elsewhere("n2"), *(lambda c: (c, c.sleep))(Clock()))
    with pytest.raises(FolderLost, match="taken over by pid 7 on host n2"):
        claim.check()
    folder_lock._claims[folder_lock._key(tmp_path)] = claim
    exit_status.write(tmp_path, "failed")
    assert exit_status.read(tmp_path).why == "died", "it has written into the winner's folder"
    claim.release()
    winner.check()
    winner.release()


def test_a_removed_owner_file_is_restored(place):
    """Someone cleans up: that ends nobody's run. But a run that came in between is the owner."""
    lock = acquire(place)
    lock.file.unlink()
    lock.check()
    assert lock.file.exists()
    lock.file.unlink()
    other = acquire(place, elsewhere())
    with pytest.raises(FolderLost):
        lock.check()
    other.release()
    lock.release()
    assert beat_of(other.file) == 0


def test_newer_owner_file_counts_before_cleanup(place):
    lock = acquire(place)
    (lock.file.parent / "000002.json").write_bytes(b"{}")
    with pytest.raises(FolderLost):
        lock.check()
    lock.release()


def test_unresponsive_file_system_ends_no_run(tmp_path):
    lock = acquire(tmp_path)
    for function in ("os.listdir", "pathlib.Path.read_text"):
        with mock.patch(function, side_effect=TimeoutError(110, "no answer")):
            lock.check()
    with mock.patch("os.utime", side_effect=OSError(28, "full")), mock.patch.object(heartbeat, "BEAT_S", 0.01):
        time.sleep(0.05)
        assert lock._heartbeat.alive
    lock.release()


# ------------------------------------------------------------------------------------------------------ random trials


@FULL
@pytest.mark.parametrize("seed", range(100))
def test_random_trials_have_one_writer(seed, place, monkeypatch):
    """Five runs on three machines start, write, are paused, are killed and start again in a random order, on a clock of
    the test. No run writes after another one has taken over, none that is well is stopped, and none waits for longer
    than stated."""
    draw, clock, written = random.Random(seed), Clock(), []
    owner: list[str] = []  # the run that may write comes last
    alive: dict[str, FolderLock] = {}
    paused: dict[str, float] = {}  # since when
    beats: dict[str, int] = {}

    def is_gone(self: Owner, here: Owner) -> bool | None:
        """As of a real process: known on its own machine only."""
        living = {lock.owner.token for lock in alive.values()}
        return self.token not in living if self.machine == here.machine else None

    monkeypatch.setattr(Owner, "is_gone", is_gone)

    def tick(now: float) -> None:
        for name, lock in alive.items():
            if name not in paused:
                beats[name] = beats.get(name, 0) + 1
                if now % BEAT_S < 1 and lock.file.exists():
                    set_beat(lock.file, beats[name])

    def start(name: str) -> None:
        began, before = clock.now, owner[-1:]
        me = replace(elsewhere(f"n{draw.randrange(3)}"), token=f"{name}-{clock.now}-{draw.random()}")
        try:
            lock = acquire(place, me, clock, clock.sleep)
        except ConfigError:
            assert before and before[0] in alive, "a dead run holds the folder"
            assert before[0] not in paused or alive[before[0]].owner.machine == me.machine
            return
        assert clock.now - began <= DEAD_S + 1, "stuck for longer than stated"
        lock._heartbeat.stop()  # the test beats
        assert not before or before[0] not in alive or clock.now - paused[before[0]] >= DEAD_S, "it was alive"
        alive[name] = lock
        owner.append(name)

    clock._then = tick
    for _ in range(40):
        clock.sleep(draw.choice([0.5, 3, 20, 70]))
        name = f"run {draw.randrange(5)}"
        if name not in alive:
            start(name)
        elif name in paused:
            del paused[name]
        elif draw.random() < 0.25:
            paused[name] = clock.now
        elif draw.random() < 0.2:
            del alive[name]  # killed, with no release
        else:
            try:
                alive[name].check()
                assert name == owner[-1], "two writers"
                written.append(name)
            except FolderLost:
                assert name != owner[-1], "a healthy run was stopped"
                del alive[name]
    assert written or len(owner) > 1


# ------------------------------------------------------------------------------------------------------------ processes


def at_step(number: int, action: Callable[[], None]):
    """Calls `action` when step `number` begins."""
    forward_backward = TrainingStep.forward_backward

    def acting(self, step, *rest):
        if step == number:
            action()
        return forward_backward(self, step, *rest)

    return mock.patch.object(TrainingStep, "forward_backward", acting)


def intact(folder: Path, straight: Path, steps: int) -> None:
    """Asserts that a run has every step once, with the losses and the weights of an undisturbed run."""
    expected = [(r["step"], r["loss"]) for r in rows(straight)]
    assert [(r["step"], r["loss"]) for r in rows(folder)] == expected[:steps]
    assert tensor_bytes(checkpoint_of(folder, steps)) == tensor_bytes(checkpoint_of(straight, steps))


def test_a_second_run_is_refused(tmp_path, corpus, capsys):
    folder = tmp_path / "run"
    assert main(arguments(folder, corpus, "train.stop_at=2")) == 0
    content = lambda: {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent.name != "logs"}
    before = content()
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = int(Path(f"/proc/{child.pid}/stat").read_text().split()[21])
        file = left_by(folder, replace(Owner.this_process(), pid=child.pid, started=ticks, token="x"))
        try:
            line = refusal(capsys, arguments(folder, corpus, "resume=auto"))
        finally:
            child.kill()
    assert f"run.dir={folder} belongs to a run that is alive: pid {child.pid} on host" in line
    after = content()
    file.unlink()
    assert {p for p in before | after if before.get(p) != after.get(p)} == {file, folder / "owner" / "000001.json"}


@FULL
def test_second_job_is_refused_and_first_unharmed(tmp_path, corpus):
    """The second is refused in one line, and the first one loses nothing."""
    folder, straight = tmp_path / "run", tmp_path / "straight"
    assert main(arguments(straight, corpus)) == 0
    seen = []

    def second() -> None:
        folder_before = sorted(p.name for p in folder.iterdir())
        done = subprocess.run(
            [sys.executable, "-m", "ndtrain.train", *arguments(folder, corpus, "resume=auto")],
            capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
        seen.append((done.returncode, one_error(done.stderr)))
        assert sorted(p.name for p in folder.iterdir()) == folder_before

    with at_step(5, second):
        assert main(arguments(folder, corpus, "checkpoint.every=2", "resume=auto")) == 0
    ((code, line),) = seen
    assert code == 2 and f"run.dir={folder} belongs to a run that is alive: pid {os.getpid()} on host" in line
    intact(folder, straight, 10)
    assert exit_status.read(folder).why == "finished"
    assert taken(folder) == 0


def test_a_run_that_lost_its_folder_writes_nothing_more(tmp_path, corpus, capsys):
    """It was paused for longer than its heart may rest. The winner's files stay as they are."""
    folder, winners = tmp_path / "run", []

    def take_over() -> None:
        clock = Clock()
        winners.append(acquire(folder, elsewhere("n9"), clock, clock.sleep))
        exit_status.write(folder, "died", step=1234)

    with at_step(5, take_over), pytest.raises(SystemExit) as ended:
        main(arguments(folder, corpus, "checkpoint.every=2"))
    (winner,) = winners
    assert ended.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"{folder} was taken over by pid 7 on host n9" in line
    assert len(rows(folder)) == 4
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert exit_status.read(folder).step == 1234
    winner.check()
    winner.release()


def test_a_checkpoint_is_not_published_into_a_lost_folder(tmp_path, corpus):
    """The last look at the owner comes after a checkpoint's tensors are written."""
    folder, winners = tmp_path / "run", []

    def take_over(*args) -> None:
        clock = Clock()
        winners.append(acquire(folder, elsewhere("n9"), clock, clock.sleep))

    with mock.patch("ndtrain.checkpoint.saving._write_owned", take_over), pytest.raises(SystemExit):
        main(arguments(folder, corpus, "train.stop_at=1"))
    assert not list((folder / "checkpoints").glob("step-*"))
    winners[0].release()


def test_trainer_releases_folder_at_end_error_and_close(tmp_path, corpus):
    """A Trainer releases its folder at its end, after an error and with close()."""
    args = arguments(tmp_path / "run", corpus, "train.steps=2", "optim.warmup=1", "resume=auto")
    open_one = Trainer(compose(*args))
    with pytest.raises(ConfigError, match="another Trainer of this process"):
        Trainer(compose(*args))
    open_one.close()
    failing = Trainer(compose(*args))
    with mock.patch.object(TrainingStep, "forward_backward", side_effect=RuntimeError), pytest.raises(RuntimeError):
        failing.train()
    trainer = Trainer(compose(*args))
    assert trainer.train() == 0 and taken(tmp_path / "run") == 0
    for unfinished in (failing, trainer):
        unfinished.close()


@FULL
def test_killed_owner_is_replaced_at_once(tmp_path, corpus):
    folder, straight = tmp_path / "run", tmp_path / "straight"
    args = arguments(folder, corpus, *ENDLESS)
    with started(args, tmp_path) as process:
        wait_for(lambda: len(rows(folder)) > 6, "steps")
        process.kill()
        process.wait()
    began = time.monotonic()
    acquire(folder).release()
    assert time.monotonic() - began < 1
    steps = len(rows(folder)) + 3
    assert main([*args, f"train.stop_at={steps}"]) == 0
    assert main(arguments(straight, corpus, "train.steps=100000", f"train.stop_at={steps}")) == 0
    intact(folder, straight, steps)


@FULL
@pytest.mark.skipif(bool(namespaces.missing()), reason=str(namespaces.missing()))
def test_folder_moves_to_second_host_after_power_loss(tmp_path, corpus):
    """Each host has processes of its own, as seen from the other. While n0 trains, n1 is refused. When n0 has lost its
    power, n1 goes on after the stated seconds."""
    folder, straight = tmp_path / "run", tmp_path / "straight"
    args = arguments(folder, corpus, "checkpoint.every=3", "resume=auto", "train.steps=100000")
    isolated = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    program = [*isolated, sys.executable, "-m", "ndtrain.train"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with namespaces.hosts(2) as (n0, n1):
        n0.popen([*program, *args], tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: len(rows(folder)) > 6, "steps", 120)
        began = time.monotonic()
        _, err = n1.popen([*program, *args], tmp_path, **pipes).communicate(timeout=120)
        assert "belongs to a run that is alive: pid " in one_error(err) and " on host n0, since " in err, err
        assert time.monotonic() - began < DEAD_S / 2
        n0.kill()
        steps, began = len(rows(folder)) + 5, time.monotonic()
        _, err = n1.popen([*program, *args, f"train.stop_at={steps}"], tmp_path, **pipes).communicate(timeout=240)
        assert "on host n0" in err and f"waiting up to {DEAD_S:g} s" in err, err
        assert DEAD_S <= time.monotonic() - began < DEAD_S + 60
    assert main(arguments(straight, corpus, "train.steps=100000", f"train.stop_at={steps}")) == 0
    intact(folder, straight, steps)
    assert json.loads((folder / "owner" / "000002.json").read_text())["host"] == "n1"
