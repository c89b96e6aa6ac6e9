"""What torchrun shows of a rank that fails: the line of the rank, at the end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import ndtrain.bench.__main__ as bench
from ndtrain.distributed.cores import THREADS_ARE_A_DEFAULT
from ndtrain.runtime import torchrun
from ndtrain.runtime.launcher_report import ERROR_FILE, record_error
from tests.lib.helpers import MARK, arguments, processes, reset_signals, rows, wait_for, write_corpus

WRAPPER = [sys.executable, "-m", "ndtrain.runtime.torchrun", "--standalone", "--nproc-per-node", "2"]
FULL = pytest.mark.full


@pytest.fixture
def error_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    return tmp_path / "error.json"


def fails() -> None:
    raise RuntimeError("deliberate\nwith a second line")


def box(*failures: ProcessFailure) -> list[str]:
    """torchrun's summary of these failures, by lines."""
    error = ChildFailedError("ndtrain.train", {f.local_rank: f for f in failures})
    return [line.strip() for line in str(error).splitlines()]


def test_torchruns_box_ends_with_the_line(error_file):
    record_error("mesh.fsdp=3: needs 3 ranks")
    record_error("a later error of the same rank")
    assert box(ProcessFailure(0, 1, 2, str(error_file)))[-2] == "traceback : mesh.fsdp=3: needs 3 ranks"


def test_an_exception_is_one_line(error_file):
    try:
        fails()
    except RuntimeError as error:
        record_error(error)
    line = box(ProcessFailure(1, 1, 1, str(error_file)))[-2]
    assert line.startswith("traceback : RuntimeError: deliberate (") and line.endswith(", in fails)")
    assert f"{Path(__file__).name}:" in line


def test_the_rank_at_fault_is_before_one_that_torchrun_has_ended(error_file):
    """In the same second, with the smaller number, and without a file of its own."""
    record_error("the cause")
    assert (
        box(ProcessFailure(0, 1, -15, "none"), ProcessFailure(1, 2, 1, str(error_file)))[-2] == "traceback : the cause"
    )


def test_without_torchrun_or_its_folder_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    record_error("x")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "gone/error.json"))
    record_error("x")
    assert not list(tmp_path.iterdir())


def test_benches_tell_torchrun_too(error_file, capsys):
    assert bench.main(["peerz"]) == 2
    assert json.loads(error_file.read_text())["message"]["message"].startswith("peerz: no such bench; did you mean")


def test_the_last_line(error_file):
    said = lambda local_rank, code, file="none": torchrun.last_line(3, ProcessFailure(local_rank, 1, code, file))
    assert said(1, -9) == "rank 3 failed: ended by SIGKILL, as the kernel does where memory runs out"
    assert said(1, -11) == "rank 3 failed: ended by SIGSEGV"
    assert said(1, 5) == "rank 3 failed: ended with exit status 5"
    record_error("mesh.fsdp=3: needs 3 ranks")
    assert said(1, 2, str(error_file)) == "rank 3 failed: mesh.fsdp=3: needs 3 ranks"
    assert said(0, 2, str(error_file)) == "", "local rank 0 has printed it itself"
    error_file.unlink()
    record_error(ValueError("bad"))
    assert said(0, 1, str(error_file)) == "rank 3 failed: ValueError: bad"


@pytest.mark.parametrize(("given", "ranks", "threads"), [(None, 2, 4), (None, 16, 1), ("3", 2, 3)])
def test_threads_of_a_rank(given, ranks, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    monkeypatch.setenv(THREADS_ARE_A_DEFAULT, "")
    monkeypatch.delenv(THREADS_ARE_A_DEFAULT)
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    torchrun.set_threads(ranks)
    assert os.environ["OMP_NUM_THREADS"] == str(threads)
    assert (THREADS_ARE_A_DEFAULT in os.environ) == (given is None)


def test_help(capsys):
    assert torchrun.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ndtrain torchrun [torchrun's options] -m ndtrain.train")


# ------------------------------------------------------------------------------------------------------ whole programs


def ended(argv: list[str], cwd: Path) -> tuple[int, str]:
    """(exit code, stderr), without OMP_NUM_THREADS in the environment."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stderr


@FULL
def test_a_wrong_mesh_is_one_line(tmp_path):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "mesh.fsdp=3")
    code, err = ended([*WRAPPER, "-m", "ndtrain.train", *args], tmp_path)
    assert code == 1 and err.startswith("error: mesh fsdp=3 needs 3 ranks but 2 started") and err.count("\n") == 1


@FULL
def test_plain_torchrun_ends_with_the_line(tmp_path):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "mesh.fsdp=3")
    plain = [sys.executable, "-m", "torch.distributed.run", *WRAPPER[3:]]
    code, err = ended([*plain, "-m", "ndtrain.train", *args], tmp_path)
    assert code == 1 and "traceback : mesh fsdp=3 needs 3 ranks but 2 started" in err.rstrip().splitlines()[-2]


@FULL
def test_an_interrupt_leaves_no_traceback(tmp_path):
    folder = tmp_path / "run"
    args = arguments(folder, write_corpus(tmp_path / "corpus.txt"), "mesh.fsdp=2", "train.steps=100000")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [*WRAPPER, "-m", "ndtrain.train", *args], cwd=tmp_path, env=os.environ | {MARK: str(tmp_path)},
        preexec_fn=reset_signals, start_new_session=True, **pipes,
    )  # fmt: skip
    try:
        wait_for(lambda: len(rows(folder)) >= 1, "a step", 240)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 130 and "stopped by SIGINT" in out + err
    assert "Traceback" not in err and err.rstrip().endswith("SIGINT: every rank has ended"), err
