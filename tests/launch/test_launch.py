"""The launch scripts: signals at any moment, exit codes, and the last lines on the console."""

import fcntl
import json
import os
import pty
import random
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ndtrain import checkpoint
from ndtrain.checkpoint import list_checkpoints
from ndtrain.config import load_config, resolve
from ndtrain.run.stop_signals import POLL_S
from tests.lib import namespaces
from tests.lib.helpers import (
    KILLED,
    MARK,
    arguments,
    checkpoint_of,
    one_error,
    processes,
    reset_signals,
    rows,
    wait_for,
    write_corpus,
)

FULL = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "launch"
# the environment of a shell with the virtual environment activated
ENV = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
LOCAL = [str(SCRIPTS / "local.sh")]
LONG = ["mesh.fsdp=2", "train.steps=100000"]
START_S = 240  # allowed for a start on a busy machine
SLOW = "train.global_batch=400"  # more than a second per step, which is the interval of checks for the stop file


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """A corpus of several documents, so that some can be held out."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(20):
        write_corpus(folder / f"{number}.txt", 1000 + number)
    return folder


@contextmanager
def script(argv: Sequence[str], cwd: Path, ranks: int = 2, **env: str) -> Iterator[subprocess.Popen]:
    """Starts a launch script. At the end of the block all its processes are killed."""
    given = os.environ | ENV | {"NPROC": str(ranks), MARK: str(cwd)} | env
    with (
        (cwd / "out").open("a") as out,
        (cwd / "err").open("a") as err,
        subprocess.Popen(
            argv, cwd=cwd, env=given, stdout=out, stderr=err, start_new_session=True, preexec_fn=reset_signals
        ) as process,
    ):
        try:
            yield process
        finally:
            for pid in processes(cwd):
                os.kill(pid, signal.SIGKILL)


def ended(argv: Sequence[str], cwd: Path, ranks: int = 2, **env: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a launch script that ends by itself."""
    with script(argv, cwd, ranks, **env) as process:
        code = process.wait(START_S)
    return code, *(cwd.joinpath(name).read_text() for name in ("out", "err"))


def reach(folder: Path, step: int = 1) -> None:
    """Waits until `step` steps are logged."""
    wait_for(lambda: len(rows(folder)) >= step, f"step {step}", START_S)


def exit_of(folder: Path) -> dict:
    return json.loads((folder / "exit.json").read_text())


def duration(row: dict) -> float:
    """Seconds of a step and the evaluation after it."""
    return row["step_time_s"] + row.get("eval_time_s", 0)


def ask(process: subprocess.Popen, folder: Path, send: Callable[[], object]) -> int:
    """Sends a signal to the launch script and waits until the script has passed it on to the ranks. Returns how many
    steps were logged then: what the script itself takes is no time of the ranks."""
    logged = len(rows(folder))
    send()
    wait_for(lambda: (folder / "stop").exists() or process.poll() is not None, "the stop file", START_S)
    return len(rows(folder)) if process.poll() is None else logged


def stopped(folder: Path, args: list[str], logged: int) -> None:
    """Asserts that the run made at most two steps after `logged`, when its stop file was there (more only within
    POLL_S), and saved them completely."""
    status, made = exit_of(folder), rows(folder)
    step, between = (
        len(made),
        sum(map(duration, made[logged + 1 : -1])),
    )  # without the step of the signal and the last one
    assert logged <= step and between <= POLL_S, f"{step - logged} steps after the signal, {between:.2f} s between"
    assert (status["why"], status["code"], status["requeue"], status["step"]) == ("stopped", 85, True, step)
    assert status["checkpoint"] == str(checkpoint_of(folder, step))
    model = resolve(load_config(args), 2).model
    assert all(checkpoint.inspect(path, model).step for path in list_checkpoints(folder / "checkpoints"))
    assert checkpoint_of(folder, step) == list_checkpoints(folder / "checkpoints")[0]
    assert not (folder / "stop").exists()


# ------------------------------------------------------------------------------------------------------------ the ends


def test_launch_scripts_pass_shellcheck():
    files = sorted(p for p in SCRIPTS.iterdir() if p.suffix in (".sh", ".sbatch"))
    program = shutil.which("shellcheck", path=ENV["PATH"])
    assert program and len(files) >= 5, "pip install -e '.[dev]' brings shellcheck"
    done = subprocess.run([program, *(str(p.relative_to(ROOT)) for p in files)], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@FULL
def test_finished_run_exits_0(tmp_path, corpus):
    """The stop file and exit.json of an earlier run do not affect this one."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "stop").touch()
    (folder / "exit.json").write_text('{"why": "stopped", "code": 85}')
    code, out, err = ended([*LOCAL, *arguments(folder, corpus, "mesh.fsdp=2")], tmp_path)
    assert code == 0 and "finished step 10 of 10" in out + err, err
    status = exit_of(folder)
    assert (status["why"], status["step"], status["code"], status["requeue"]) == ("finished", 10, 0, False)
    assert not processes(tmp_path)


def test_wrong_override_is_one_line_error(tmp_path, corpus):
    code, _, err = ended([*LOCAL, *arguments(tmp_path / "run", corpus, "mesh.tpp=2")], tmp_path)
    assert code == 2 and "mesh.tpp" in one_error(err) and len(err.splitlines()) == 1


@FULL
def test_wrong_mesh_is_one_line_error(tmp_path, corpus):
    """Only the ranks detect this error."""
    code, _, err = ended([*LOCAL, *arguments(tmp_path / "run", corpus, "mesh.fsdp=3")], tmp_path)
    assert code == 2 and "mesh" in one_error(err), err


CRASH = """
import os
if os.environ.get("RANK") == "1":
    from ndtrain.engine import train_step
    run, calls = train_step.TrainingStep.forward_backward, []
    def fails(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("deliberate")
        return run(*args)
    train_step.TrainingStep.forward_backward = fails
"""


@FULL
def test_crash_of_rank_prints_its_traceback_last(tmp_path, corpus):
    """A rank raises. Its traceback is the last text on the console, after the output of torchrun and the other rank."""
    (tmp_path / "sitecustomize.py").write_text(CRASH)  # Python runs it at the start of every process
    args, folder = arguments(tmp_path / "run", corpus, "mesh.fsdp=2"), tmp_path / "run"
    code, _, err = ended([*LOCAL, *args], tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    last = err[err.rindex("Traceback (most recent call last)") :]
    assert code == 1 and last.rstrip().endswith("RuntimeError: deliberate") and "in fails" in last, err
    status = exit_of(folder)
    assert (status["why"], status["rank"], status["requeue"]) == ("failed", 1, False) and len(rows(folder)) == 2


@FULL
def test_killed_rank_exits_75(tmp_path, corpus):
    folder = tmp_path / "run"
    with script([*LOCAL, *arguments(folder, corpus, *LONG)], tmp_path) as process:
        reach(folder, 3)
        os.kill(next(pid for pid, rank in processes(tmp_path).items() if rank == "1"), signal.SIGKILL)
        assert process.wait(START_S) == 75
        assert not processes(tmp_path)
    assert exit_of(folder)["why"] in KILLED and exit_of(folder)["requeue"]


@FULL
def test_killed_rank_is_restarted_with_restarts_1(tmp_path, corpus):
    folder = tmp_path / "run"
    args = arguments(folder, corpus, "mesh.fsdp=2", "train.steps=60", "checkpoint.every=5")
    with script([*LOCAL, *args], tmp_path, RESTARTS="1") as process:
        reach(folder, 7)
        os.kill(next(pid for pid, rank in processes(tmp_path).items() if rank == "1"), signal.SIGKILL)
        assert process.wait(START_S) == 0, (tmp_path / "err").read_text()
    assert [r["step"] for r in rows(folder)] == list(range(1, 61)) and exit_of(folder)["why"] == "finished"


# ------------------------------------------------------------------------------------------------------------- signals

MOMENTS = {  # where the signal hits -> overrides with which most of the time goes there
    "start-up": [SLOW],
    "step": [SLOW],
    "save": [SLOW, "checkpoint.every=1"],
    "evaluation": ["train.eval_every=1", "data.validation=0.3", "train.global_batch=4"],
}


@FULL
@pytest.mark.parametrize(("seed", "where"), list(enumerate([*MOMENTS, *MOMENTS, "start-up", "step"])))
def test_sigterm_at_random_moment_saves_and_stops(seed, where, tmp_path, corpus, documents):
    draw, folder = random.Random(seed), tmp_path / "run"
    args = arguments(folder, documents if where == "evaluation" else corpus, *LONG, *MOMENTS[where])
    with script([*LOCAL, *args], tmp_path) as process:
        if where == "start-up":
            time.sleep(draw.uniform(0, 4))
        else:
            reach(folder, draw.randint(1, 2))
            if where == "save":
                wait_for(lambda: list(folder.glob("checkpoints/.writing-*")), "a save", START_S, pause=0)
            time.sleep(draw.uniform(0, 0.01) if where == "save" else draw.uniform(0, duration(rows(folder)[-1])))
        logged = ask(process, folder, process.terminate)
        assert process.wait(START_S) == 85, (tmp_path / "err").read_text()
        assert not processes(tmp_path)
    stopped(folder, args, logged)
    if where == "evaluation":
        later = rows(folder)[1:]  # the first step also loads PyTorch's optimizers
        assert all(r["eval_time_s"] > duration(r) / 2 for r in later)


@FULL
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_sigint_and_sigusr1_save_and_stop(number, tmp_path, corpus):
    folder = tmp_path / "run"
    args = arguments(folder, corpus, *LONG, SLOW)
    with script([*LOCAL, *args], tmp_path) as process:
        reach(folder)
        logged = ask(process, folder, lambda: process.send_signal(number))
        assert process.wait(START_S) == 85
    stopped(folder, args, logged)


@FULL
def test_second_signal_ends_run_at_once(tmp_path, corpus):
    """This also works during a step that takes many seconds."""
    folder = tmp_path / "run"
    args = arguments(folder, corpus, *LONG, "train.global_batch=20000")
    with script([*LOCAL, *args], tmp_path) as process:
        wait_for(lambda: "run folder" in (tmp_path / "out").read_text(), "the first step", START_S)
        process.terminate()
        process.terminate()  # the same request again, as from a wrapper that forwards signals
        time.sleep(3)
        assert process.poll() is None and (folder / "stop").exists(), "the step is too short for this test"
        process.terminate()
        assert process.wait(5) == 143
        wait_for(lambda: not processes(tmp_path), "all processes to end", 2)
    assert not list_checkpoints(folder / "checkpoints") and exit_of(folder)["why"] == "running"


@FULL
def test_ctrl_c_in_terminal_saves_and_stops(tmp_path, corpus):
    """Ctrl-C reaches every process in the foreground of the terminal."""
    folder = tmp_path / "run"
    args = arguments(folder, corpus, *LONG, SLOW)
    keyboard, terminal = pty.openpty()

    def control() -> None:
        reset_signals()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    env = os.environ | ENV | {"NPROC": "2", MARK: str(tmp_path)}
    process = subprocess.Popen(
        [*LOCAL, *args], cwd=tmp_path, env=env, stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True, preexec_fn=control,
    )  # fmt: skip
    os.close(terminal)
    os.set_blocking(keyboard, False)
    try:
        wait_for(lambda: _drain(keyboard) and rows(folder), "a step", START_S)
        logged = ask(process, folder, lambda: os.write(keyboard, b"\x03"))
        wait_for(lambda: _drain(keyboard) and process.poll() is not None, "the end", START_S)
        assert process.returncode == 85 and not processes(tmp_path)
    finally:
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        os.close(keyboard)
    stopped(folder, args, logged)


def _drain(keyboard: int) -> bool:
    """Reads all terminal output, so that no process blocks on writing."""
    try:
        while os.read(keyboard, 1 << 16):
            pass
    except OSError:  # nothing there
        pass
    return True


# --------------------------------------------------------------------------------------------------------- many hosts


MULTIHOST = [str(SCRIPTS / "multihost.sh"), "localhost", "127.0.0.1", "--"]


@pytest.fixture
def loopback(tmp_path) -> dict[str, str]:
    """For multihost.sh: a remote shell to this machine under any of its names."""
    lines = ["#!/usr/bin/env bash", 'exec bash -c "$2"']
    return {"SSH": remote_shell(tmp_path, lines), "PORT": str(29500 + os.getpid() % 1000)}


def remote_shell(folder: Path, lines: list[str]) -> str:
    path = folder / "remote"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


@FULL
def test_two_hosts_train_to_end(tmp_path, corpus, loopback):
    folder = tmp_path / "run"
    args = arguments(folder, corpus, "mesh.fsdp=2", "run.name='two $hosts'")  # which passes two shells unchanged
    code, out, err = ended([*MULTIHOST, *args], tmp_path, ranks=1, **loopback)
    assert code == 0 and "two $hosts: " in out + err and "finished step 10 of 10" in out + err, err
    printed = [(folder / "logs" / f"rank-{n}.out").read_text() for n in (0, 1)]
    assert "finished step 10" in printed[0] and "finished" not in printed[1]
    assert all(line.startswith(f"{n}: ") for n in (0, 1) for line in printed[n].splitlines())
    assert not processes(tmp_path)


@FULL
def test_two_hosts_stop_on_signal(tmp_path, corpus, loopback):
    folder = tmp_path / "run"
    args = arguments(folder, corpus, *LONG, SLOW)
    with script([*MULTIHOST, *args], tmp_path, 1, **loopback) as process:
        reach(folder)
        logged = ask(process, folder, process.terminate)
        assert process.wait(START_S) == 85, (tmp_path / "err").read_text()
        assert not processes(tmp_path)
    stopped(folder, args, logged)


@FULL
@pytest.mark.parametrize("how", ["a second signal", "the script is killed"])
def test_two_hosts_end_at_once_on_second_signal_or_kill(how, tmp_path, corpus, loopback):
    folder = tmp_path / "run"
    args = arguments(folder, corpus, *LONG, "train.global_batch=20000")
    with script([*MULTIHOST, *args], tmp_path, 1, **loopback) as process:
        wait_for(lambda: "run folder" in (tmp_path / "out").read_text(), "the first step", START_S)
        if how == "a second signal":
            process.terminate()
            time.sleep(3)
            process.terminate()
            assert process.wait(5) == 143
        else:
            process.kill()
            process.wait()  # until then it is still there for `kill -0`
        wait_for(lambda: not processes(tmp_path), "all processes to end", 30)


@FULL
def test_failure_on_one_host_ends_all_hosts(tmp_path, corpus, loopback):
    """All hosts end, and the failing rank's traceback is the last text on the console."""
    (tmp_path / "sitecustomize.py").write_text(CRASH)
    args, env = arguments(tmp_path / "run", corpus, "mesh.fsdp=2"), loopback | {"PYTHONPATH": str(tmp_path)}
    code, _, err = ended([*MULTIHOST, *args], tmp_path, ranks=1, **env)
    assert code == 1 and err.rstrip().endswith("RuntimeError: deliberate"), err
    assert not processes(tmp_path)


@FULL
@pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))
def test_lost_host_with_min_hosts_continues(tmp_path, corpus):
    """With MIN_HOSTS the run continues on the remaining host."""
    folder = tmp_path / "run"
    args = arguments(folder, corpus, "mesh.fsdp=-1", "train.steps=300", "checkpoint.every=10")
    with namespaces.hosts(2) as (n0, n1):
        enter = {h.name: shlex.join(h.popen(["true"], tmp_path).args[:-1]) for h in (n0, n1)}
        cases = [f'{name}) exec {command} bash -c "$2" ;;' for name, command in enter.items()]
        remote = remote_shell(tmp_path, ["#!/usr/bin/env bash", "case $1 in", *cases, "esac"])
        env = ENV | {"NPROC": "1", "SSH": remote, "MIN_HOSTS": "1", "RESTARTS": "3"}
        argv = [str(SCRIPTS / "multihost.sh"), n0.name, n1.name, "--", *args]
        with (tmp_path / "err").open("w") as err:
            process = n0.popen(argv, tmp_path, env=env, stdout=err, stderr=err)
            reach(folder, 16)
            n1.kill()
            assert process.wait(START_S) == 0, (tmp_path / "err").read_text()
    assert [r["step"] for r in rows(folder)] == list(range(1, 301))


def test_ranks_here_counts_cores_despite_thread_limits():
    script = f"nvidia-smi() {{ return 1; }}; source {SCRIPTS}/common.sh; ranks_here"
    limited = os.environ | {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run(["bash", "-c", script], env=limited, capture_output=True, text=True)
    assert int(done.stdout) == len(os.sched_getaffinity(0))
