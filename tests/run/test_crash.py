"""Kills, full disks and Ctrl-C: a run resumes from its last complete checkpoint and leaves no partial files."""

import copy
import errno
import os
import random
import re
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from ndtrain import checkpoint
from ndtrain.checkpoint import list_checkpoints, saving
from ndtrain.config import Config, ModelConfig, load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.observe.jsonl import read_rows
from ndtrain.run import exit_status
from ndtrain.run.failure_report import report_failure
from ndtrain.train import main, train
from tests.islands.runs import free_port
from tests.lib import helpers
from tests.lib.disks import tmpfs
from tests.lib.helpers import (
    KILLED,
    arguments,
    checkpoint_of,
    flip,
    given_process_group,
    processes,
    rank_main,
    rows,
    run,
    started,
    tensor_bytes,
    wait_for,
    write_corpus,
)
from tests.lib.ranks import run_ranks, started_ranks

FULL = pytest.mark.full
OFTEN = ["checkpoint.every=1", "resume=auto"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in rows(run_dir)]


def newest(run_dir: Path) -> Path | None:
    return next(iter(list_checkpoints(run_dir / "checkpoints")), None)


# ------------------------------------------------------------------------------------------------------------ kill -9


def kill_one_rank(args: list[str], folder: Path, moments: random.Random, during_save: bool) -> None:
    """Starts two ranks and kills a random one some steps later, in a step or in a save."""
    with started(args, folder.parent, ranks=2) as process:
        logged = lambda: len(read_rows(folder / "metrics.jsonl"))  # a run that writes, or was killed in a write
        before = logged() + moments.randrange(1, 6)
        wait_for(lambda: logged() >= before, "some steps")
        if during_save:
            wait_for(lambda: list(folder.glob("checkpoints/.writing-*")), "a save", pause=0)
        time.sleep(moments.uniform(0, 0.01 if during_save else 0.08))
        victim = moments.choice("01")
        os.kill(next(pid for pid, rank in processes(folder.parent).items() if rank == victim), signal.SIGKILL)
        process.communicate(timeout=30)
        assert process.returncode != 0, "the launcher does not report that a rank died"
        assert not processes(folder.parent), "a process is left"


@FULL
@pytest.mark.parametrize("kills", [1, 10])
def test_killed_rank_resumes_to_same_result(kills, tmp_path, corpus):
    moments = random.Random(kills)
    steps = 12 * kills
    folder, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    plan = ["mesh.fsdp=2", f"train.steps={steps}"]
    args = arguments(folder, corpus, *plan, *OFTEN)
    for number in range(kills):
        kill_one_rank(args, folder, moments, during_save=number % 2 == 0)
        last = int(newest(folder).name[5:])
        assert last >= len(read_rows(folder / "metrics.jsonl")) - 1, "more than the current step is lost"
        assert all_complete(folder, resolve(load_config(args), 2).model), "a partial checkpoint was published"
    done = run(args, tmp_path, ranks=2)
    assert done.returncode == 0 and f"at step {last}" in done.stdout + done.stderr, done.stderr
    run_ranks(rank_main, 2, arguments(undisturbed, corpus, *plan))
    assert tensor_bytes(newest(folder)) == tensor_bytes(newest(undisturbed))
    assert losses(folder) == losses(undisturbed)
    left = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert left == [f"step-{s:08d}" for s in (steps - 1, steps)], "half-written or removed checkpoints are left"


def die_at(nth: int, folder: str, cfg: Config, writes: bool) -> int:
    """Trains in a forked process that kills itself with SIGKILL before its nth change of `folder`. With `writes` each
    write counts as a change. Returns the exit status; -9 if it was killed."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = nth

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, details: tuple) -> None:
        changes = event in CHANGES or (event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        named = any(folder in os.fspath(d) for d in details if isinstance(d, str | os.PathLike))
        if changes and (named or event == "os.remove"):
            count()

    sys.addaudithook(hook)
    saving.MOST_VIEWS = 2  # a write for every two tensors: more places for a kill
    for name in ("fsync", "pwritev") if writes else ("fsync",):
        call = getattr(os, name)
        setattr(os, name, lambda *a, call=call: (count(), call(*a))[1])
    os._exit(train(cfg))


CHANGES = ("os.mkdir", "os.rename", "os.rmdir", "os.remove")


def all_complete(folder: Path, model: ModelConfig) -> bool:
    """Whether every checkpoint in the folder is complete."""
    try:
        return all(checkpoint.inspect(path, model) for path in list_checkpoints(folder / "checkpoints"))
    except checkpoint.DamagedCheckpoint:
        return False


@dataclass
class Death:
    """A killed run and the run that resumed it.

    Attributes:
        code: exit status of the killed run.
        newest: its newest checkpoint.
        complete: whether all its checkpoints were complete.
        status: exit status of the resumed run.
        tensors: the last checkpoint of the resumed run.
        losses: (step, loss) of both.
        names: the content of checkpoints/ at the end.
    """

    code: int
    newest: str
    complete: bool
    status: int
    tensors: dict[str, bytes]
    losses: list[tuple[int, float]]
    names: set[str]


def every_death(start: Path, folder: Path, first: list[str], then: list[str], writes: bool) -> list[Death]:
    """Kills the run `first` before its first, second, ... file operation, each time in a copy of the folder `start`,
    and resumes it with the run `then`. The last of the runs `first` is not killed."""
    deaths, configs = [], [resolve(load_config(args), 1) for args in (first, then)]
    while not deaths or deaths[-1].code == -signal.SIGKILL:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        one, two = copy.deepcopy(configs)
        code = die_at(len(deaths) + 1, str(folder / "checkpoints"), one, writes)
        last, complete = newest(folder).name, all_complete(folder, two.model)
        status = train(two)
        names = {p.name for p in (folder / "checkpoints").iterdir()}
        deaths.append(Death(code, last, complete, status, tensor_bytes(newest(folder)), losses(folder), names))
    return deaths


@FULL
@pytest.mark.parametrize("writes", [False, True], ids=["", "writes"])
@pytest.mark.parametrize("case", ["a new step", "a damaged step again", "from an older step"])
def test_kill_before_any_file_operation_does_not_change_result(case, writes, tmp_path, corpus):
    """A save is a sequence of file operations. A kill before any of them changes neither the final weights nor
    metrics.jsonl. That includes saves that replace a damaged checkpoint, and saves while newer checkpoints exist."""
    whole, start, folder = tmp_path / "whole", tmp_path / "start", tmp_path / "run"
    plan = ["train.steps=6", "checkpoint.keep=2"]
    resume = f"resume={checkpoint_of(folder, 3)}" if case == "from an older step" else "resume=auto"
    assert main(arguments(whole, corpus, *plan)) == 0
    stop = 5 if case == "from an older step" else 3
    assert main(arguments(start, corpus, *plan, "checkpoint.every=3", f"train.stop_at={stop}")) == 0
    if case == "a damaged step again":
        damaged = shutil.copytree(newest(start), checkpoint_of(start, 4))
        flip(damaged / "model.safetensors", -1)
    first = arguments(folder, corpus, *plan, resume, "train.stop_at=4")
    then = arguments(folder, corpus, *plan, *OFTEN)
    (deaths,) = run_ranks(every_death, 1, start, folder, first, then, writes, timeout=600)  # hundreds of short runs
    for number, death in enumerate(deaths, start=1):
        assert death.status == 0 and death.tensors == tensor_bytes(newest(whole)), f"dead before operation {number}"
        assert death.losses == losses(whole), f"dead before operation {number}, newest {death.newest}"
        assert not any(name.startswith(".") for name in death.names), f"dead before operation {number}"
        assert death.complete or case == "a damaged step again", f"half-written where dead before operation {number}"
    assert deaths[-1].code == 0 and len(deaths) > (80 if writes else 15), "operations are not seen"
    assert deaths[-1].newest == "step-00000004"


def test_next_save_removes_leftovers_of_kill(tmp_path, corpus):
    folder = tmp_path / "run"
    assert main(arguments(folder, corpus, "train.stop_at=2")) == 0
    for name in (".writing-step-00000003", ".removing-step-00000001"):
        shutil.copytree(newest(folder), folder / "checkpoints" / name)
    assert main(arguments(folder, corpus, "resume=auto", "train.stop_at=5")) == 0
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000002", "step-00000005"]


# ------------------------------------------------------------------------------------------------- a stage that fails


DRIVER = """
import os, runpy, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

from ndtrain.engine.executor import Executor
from ndtrain.engine.train_step import TrainingStep

fault, victim = sys.argv[1:3]
forward_backward, backward = TrainingStep.forward_backward, Executor._backward


def run(self, number, *rest):
    self.executor.number = number
    return forward_backward(self, number, *rest)


def failing(self, run, microbatch):
    if self.number == 2 and os.environ["RANK"] == victim:
        Path("failed-at").write_text(str(time.time()))
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1), async_op=True)  # a collective in progress that no peer enters
        raise ValueError(f"rank {victim} fails as planned")
    return backward(self, run, microbatch)


TrainingStep.forward_backward, Executor._backward = run, failing
del sys.argv[1:3]
runpy.run_module("ndtrain.train", run_name="__main__", alter_sys=True)
"""
SLOW = [
    ("raise", "gpipe", 2, 1),
    ("raise", "1f1b", 2, 0), ("raise", "interleaved", 2, 1), ("raise", "zb_v", 2, 0), ("raise", "zb_v", 2, 1),
    ("raise", "dualpipe_v", 2, 0), ("kill", "gpipe", 2, 0), ("kill", "zb_h1", 2, 1), ("kill", "interleaved", 2, 0),
    ("kill", "zb_v", 2, 1), ("kill", "dualpipe_v", 2, 0), ("raise", "1f1b", 4, 2), ("kill", "1f1b", 4, 1),
    ("raise", "zb_h1", 4, 3), ("kill", "1f1b", 2, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "schedule", "ranks", "victim"),
    [
        ("raise", "zb_h1", 2, 1),
        *(pytest.param(*case, marks=FULL) for case in SLOW),
    ],
)
def test_failing_stage_ends_job_and_shows_cause(fault, schedule, ranks, victim, tmp_path, corpus):
    """A rank fails in a backward of the second step. The job ends within seconds. The console shows only the traceback
    of the failed rank, or the launcher's report of the killed rank."""
    (tmp_path / "driver.py").write_text(DRIVER)
    plan = [f"mesh.pp={ranks}", f"schedule={schedule}", "model.num_hidden_layers=4"]
    with mock.patch.object(helpers, "MODULE", [str(tmp_path / "driver.py"), fault, str(victim)]):
        done = run(arguments(tmp_path / "run", corpus, *plan), tmp_path, ranks, timeout=120)
    assert time.time() - float((tmp_path / "failed-at").read_text()) < 20
    assert done.returncode != 0 and not processes(tmp_path) and len(rows(tmp_path / "run")) == 1
    reporting = re.findall(r"^\[rank(\d)\]: Traceback", done.stderr, re.MULTILINE)
    if fault == "raise":
        assert reporting == [str(victim)], done.stderr
        assert f"[rank{victim}]: ValueError: rank {victim} fails as planned" in done.stderr
    else:
        assert not reporting, done.stderr
    status = exit_status.read(tmp_path / "run")
    if fault == "raise":
        assert (status.why, status.rank) == ("failed", victim)
    else:
        assert status.why in KILLED
    assert fault == "kill" or f"rank {victim} fails as planned" in status.error
    cause = done.stderr.partition("Root Cause")[2]
    assert fault == "kill" or f"ValueError: rank {victim} fails as planned" in cause, (
        "the last lines do not name the cause"
    )
    assert re.search(rf"rank +: {victim} .*\n +exitcode +: {-9 if fault == 'kill' else 1} ", cause), done.stderr


@pytest.mark.parametrize(("fault", "victims", "others"), [("raise", 1, 1), ("kill", -signal.SIGKILL, 75)])
def test_rank_without_launcher_exits_with_reason_of_failed_peer(fault, victims, others, tmp_path, corpus):
    """Slurm and Kubernetes start ranks without torchrun too, and see only their exit statuses."""
    (tmp_path / "driver.py").write_text(DRIVER)
    args = arguments(tmp_path / "run", corpus, "mesh.pp=2", "schedule=1f1b", "model.num_hidden_layers=4")
    alone = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with mock.patch.object(helpers, "MODULE", [str(tmp_path / "driver.py"), fault, "1"]), ExitStack() as closing:
        ranks = []
        for rank in ("0", "1"):
            with mock.patch.dict(os.environ, alone | {"RANK": rank, "LOCAL_RANK": rank}):
                ranks.append(closing.enter_context(started(args, tmp_path)))
        codes = [process.wait(timeout=120) for process in ranks]
    assert codes == [others, victims]
    assert exit_status.read(tmp_path / "run").why == ("failed" if fault == "raise" else "died")


LOST = [
    RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3491"),
    RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9ms for recv"),
    dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
]
REAL = [ValueError("a mistake"), RuntimeError("[enforce fail at alloc_cpu.cpp:117] not enough memory")]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("error", LOST + REAL, ids=lambda e: str(e)[-20:])
def test_a_rank_that_lost_a_peer_reports_last(error, stopped, tmp_path, capsys):
    """It waits, but reports in the end: otherwise a run that loses its network would end without a message."""
    stop = mock.Mock(signal="SIGTERM" if stopped else None)
    with mock.patch("time.sleep") as sleep:
        why = report_failure(error, stop, tmp_path)
    stderr, lost = capsys.readouterr().err, error in LOST
    assert sleep.called == (lost and not stopped)
    assert (str(error) in stderr) == (not (lost and stopped))
    assert stderr.count("\n") == 1 or not (lost and stopped)
    assert (exit_status.read(tmp_path) is None) == (lost and stopped)
    assert why == ("died" if lost else "failed")
    assert (lost and stopped) or exit_status.read(tmp_path).why == why


# ---------------------------------------------------------------------------------------------------------- full disk


@pytest.fixture
def disk(tmp_path):
    """disk(size) mounts <tmp>/run/checkpoints on a disk of `size` bytes; a second call resizes it."""
    with tmpfs(tmp_path / "run" / "checkpoints") as mount:
        yield lambda number: mount(f"size={number}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(arguments(folder, corpus)) == 0
    return folder


def pages(paths) -> int:
    """Bytes that files take on a tmpfs."""
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in paths)


# file of the second checkpoint that fails -> disk space in bytes beyond the first one and the tensors of the second
FREE_SPACE = {
    "a tensor file": -500_000,
    "config.json": 0,
    "the tokenizer": 4096,
    "state.json": 4 * 4096,
}


IN_FULL = ("config.json", "the tokenizer")


@pytest.mark.parametrize("fails_at", [pytest.param(f, marks=[FULL] * (f in IN_FULL)) for f in FREE_SPACE])
def test_full_disk_during_save_keeps_old_checkpoint(fails_at, disk, whole, tmp_path, corpus, capsys):
    """Training continues to its end with warnings and keeps the old checkpoint. A resumed run starts from it once the
    disk has free space."""
    files = list(newest(whole).iterdir())
    tensors = [p for p in files if p.suffix == ".safetensors"]
    folder = disk(pages(files) + pages(tensors) + FREE_SPACE[fails_at])
    args = arguments(tmp_path / "run", corpus, "checkpoint.every=2", "resume=auto")
    assert main(args) == 1, "the last state was not saved"
    output = "".join(capsys.readouterr())
    for step in (4, 6, 8, 10):
        assert f"checkpoint of step {step} not saved: No space left on device" in output
    assert f"the newest checkpoint is {checkpoint_of(tmp_path / 'run', 2)}" in output
    assert [p.name for p in folder.iterdir()] == ["step-00000002"]
    assert [r["step"] for r in rows(tmp_path / "run")] == list(range(1, 11))
    disk(20_000_000)
    assert main(args) == 0
    assert tensor_bytes(checkpoint_of(tmp_path / "run", 10)) == tensor_bytes(newest(whole))
    assert losses(tmp_path / "run") == losses(whole)


def at_step(number: int, action):
    """Calls `action` when step `number` begins."""
    forward_backward = TrainingStep.forward_backward

    def acting(self, step, *rest):
        if step == number:
            action()
        return forward_backward(self, step, *rest)

    return mock.patch.object(TrainingStep, "forward_backward", acting)


def test_full_disk_for_a_while_ends_in_success(disk, whole, tmp_path, corpus, capsys):
    """The exit status is 0 if the last save succeeds."""
    folder = disk(5_000_000)
    args = arguments(tmp_path / "run", corpus, "checkpoint.every=2", "checkpoint.keep=1")
    fill = lambda: (folder / "filler").write_bytes(bytes(2_500_000))
    with at_step(3, fill), at_step(7, (folder / "filler").unlink):
        assert main(args) == 0
    output = "".join(capsys.readouterr())
    assert [s for s in range(2, 11, 2) if f"step {s} not saved" in output] == [4, 6]
    assert [p.name for p in folder.iterdir()] == ["step-00000010"]
    assert tensor_bytes(newest(tmp_path / "run")) == tensor_bytes(newest(whole))


def save_with_failure(args: list[str]) -> int:
    """`main` on one rank. Rank 1 cannot write its part of the second checkpoint."""
    create, done = saving._write_owned, []

    def failing(*rest):
        done.append(True)
        if os.environ["RANK"] == "1" and len(done) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")
        return create(*rest)

    with mock.patch.object(saving, "_write_owned", failing):
        return rank_main(args)


@FULL
def test_failed_write_of_one_rank_skips_checkpoint(tmp_path, corpus):
    """No rank publishes that checkpoint, waits or stops."""
    args = arguments(tmp_path / "run", corpus, "mesh.fsdp=2", "checkpoint.every=2", "checkpoint.keep=9")
    assert run_ranks(save_with_failure, 2, args) == [0, 0]
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{s:08d}" for s in (2, 6, 8, 10)]
    assert "step 4 not saved: Input/output error: disk (rank 1)" in (tmp_path / "run/logs/rank-0.log").read_text()


def test_full_run_folder_is_reported_without_traceback(disk, tmp_path, corpus):
    """metrics.jsonl and the logs cannot be written either. The run still finishes, reports it, and shows no
    traceback."""
    folder = disk(4096 * 3)
    done = run(arguments(folder / "run", corpus, "checkpoint.every=5", "train.steps=40"), tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert (
        "step 40/40" in done.stdout + done.stderr and "not saved: No space left on device" in done.stdout + done.stderr
    )


# -------------------------------------------------------------------------------------------------------------- Ctrl-C

LONG = ["train.steps=100000", "resume=auto"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=FULL), 2])
def test_ctrl_c_saves_and_resumes(ranks, tmp_path, corpus):
    folder = tmp_path / "run"
    args = arguments(folder, corpus, "mesh.fsdp=-1", *LONG)
    with started(args, tmp_path, ranks) as process:
        wait_for(lambda: len(rows(folder)) > 3, "some steps")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert not processes(tmp_path), "a process is left"
    step = len(rows(folder))
    assert f"stopped by SIGINT after step {step} of 100000: saved {checkpoint_of(folder, step)}" in out + err
    assert "Traceback" not in err.partition("torch/distributed")[0], err
    assert newest(folder) == checkpoint_of(folder, step)
    assert main(arguments(folder, corpus, *LONG, f"train.stop_at={step + 2}")) == 0
    assert [r["step"] for r in rows(folder)] == list(range(1, step + 3))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=FULL), signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_after_the_current_step(number, whole, tmp_path, corpus, capsys):
    folder, before = tmp_path / "run", signal.getsignal(number)
    with at_step(4, lambda: os.kill(os.getpid(), number)):
        assert main(arguments(folder, corpus)) == exit_status.read(folder).code == 85
    expected = f"stopped by {number.name} after step 4 of 10: saved {checkpoint_of(folder, 4)}"
    assert expected in "".join(capsys.readouterr()) and newest(folder) == checkpoint_of(folder, 4)
    assert signal.getsignal(number) == before
    assert main(arguments(folder, corpus, "resume=auto")) == 0
    assert tensor_bytes(newest(folder)) == tensor_bytes(newest(whole))


def stuck_in_destroy_process_group(args: list[str], folder: str) -> int:
    stderr = open(Path(folder, f"stderr-{os.getpid()}"), "w")  # noqa: SIM115
    with (
        given_process_group(),
        mock.patch("ndtrain.train.PART_S", 1),
        mock.patch("torch.distributed.destroy_process_group", lambda: time.sleep(60)),
        mock.patch("sys.__stderr__", stderr),
    ):
        return main(args)


def test_rank_stuck_in_destroy_process_group_ends_with_stack(tmp_path, corpus):
    folder = tmp_path / "run"
    with started_ranks(stuck_in_destroy_process_group, 2, arguments(folder, corpus, "mesh.fsdp=2"), str(tmp_path)) as (
        ranks,
        _,
    ):
        for p in ranks:
            p.join(60)
        assert [p.exitcode for p in ranks] == [1, 1]
    errors = [path.read_text() for path in tmp_path.glob("stderr-*")]
    assert len(errors) == 2 and all("Timeout" in text and "in _leave_process_group" in text for text in errors)
    assert newest(folder) == checkpoint_of(folder, 10), "everything was saved before"


@FULL
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_ctrl_c_ends_at_once(ranks, tmp_path, corpus):
    """This also works during a step that takes many seconds."""
    folder = tmp_path / "run"
    args = arguments(folder, corpus, "mesh.fsdp=-1", "train.global_batch=10000")
    with started(args, tmp_path, ranks) as process:
        wait_for(lambda: "run folder" in log_of(folder), "the first step")
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(2.5)
        assert process.poll() is None, "the step is too short for this test"
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=5)
        assert process.returncode != 0 and not processes(tmp_path)
    assert newest(folder) is None


def log_of(folder: Path) -> str:
    path = folder / "logs" / "rank-0.log"
    return path.read_text() if path.exists() else ""


def test_ctrl_c_before_first_step_prints_one_line(tmp_path, corpus, capsys):
    with mock.patch("ndtrain.engine.setup.open_data", side_effect=KeyboardInterrupt):
        assert main(arguments(tmp_path / "run", corpus)) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing was saved" in line
