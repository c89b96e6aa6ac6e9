"""torchrun's report of a failing rank: it ends with the error line of the rank."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import ndtrain.bench.__main__ as bench
from ndtrain.device.cores import THREADS_ARE_A_DEFAULT
from ndtrain.device.process_owner import LAUNCH
from ndtrain.run import exit_status, torchrun
from ndtrain.run.agent_rendezvous import ONE_HOST, SEVERAL_HOSTS
from ndtrain.run.launcher_report import ERROR_FILE, RUN_FOLDER_FILE, record_error, tell_run_folder
from ndtrain.run.signed_store import TOKEN
from tests.lib.helpers import MARK, arguments, processes, reset_signals, rows, wait_for, write_corpus

WRAPPER = [sys.executable, "-m", "ndtrain.run.torchrun", "--standalone", "--nproc-per-node", "2"]
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


def test_torchrun_box_ends_with_error_line(error_file):
    record_error("mesh.fsdp=3: needs 3 ranks")
    record_error("a later error of the same rank")
    assert box(ProcessFailure(0, 1, 2, str(error_file)))[-2] == "traceback : mesh.fsdp=3: needs 3 ranks"


def test_recorded_exception_is_one_line(error_file):
    try:
        fails()
    except RuntimeError as error:
        record_error(error)
    line = box(ProcessFailure(1, 1, 1, str(error_file)))[-2]
    assert line.startswith("traceback : RuntimeError: deliberate (") and line.endswith(", in fails)")
    assert f"{Path(__file__).name}:" in line


def test_box_names_failing_rank_before_terminated_ones(error_file):
    """The terminated rank failed in the same second, has the smaller number, and wrote no error file."""
    record_error("the cause")
    assert (
        box(ProcessFailure(0, 1, -15, "none"), ProcessFailure(1, 2, 1, str(error_file)))[-2] == "traceback : the cause"
    )


def test_record_error_without_torchrun_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    record_error("x")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "gone/error.json"))
    record_error("x")
    assert not list(tmp_path.iterdir())


def test_bench_error_is_recorded_for_torchrun(error_file, capsys):
    assert bench.main(["peerz"]) == 2
    assert json.loads(error_file.read_text())["message"]["message"].startswith("peerz: no such bench; did you mean")


def test_last_line_names_rank_and_cause(error_file):
    said = lambda local_rank, code, file="none": torchrun.last_line(3, ProcessFailure(local_rank, 1, code, file))
    assert said(1, -9) == "rank 3 failed: ended by SIGKILL, possibly because the host ran out of memory"
    assert said(1, -11) == "rank 3 failed: ended by SIGSEGV"
    assert said(1, 5) == "rank 3 failed: ended with exit status 5"
    record_error("mesh.fsdp=3: needs 3 ranks")
    assert said(1, 2, str(error_file)) == "rank 3 failed: mesh.fsdp=3: needs 3 ranks"
    assert said(0, 2, str(error_file)) == "", "local rank 0 has printed it itself"
    error_file.unlink()
    record_error(ValueError("bad"))
    assert said(0, 1, str(error_file)) == "rank 3 failed: ValueError: bad"


@pytest.mark.parametrize(
    ("codes", "first"),
    [([2, -15], 0), ([-15, 2], 1), ([-9, 75], 0), ([75, -9], 0), ([-15, -15, -9], 2), ([-15, -15], 0)],
)
def test_first_to_end_passes_over_ranks_that_torchrun_ended(codes, first):
    """A rank that has reported its error may get torchrun's SIGTERM while it is exiting."""
    failures = {rank: ProcessFailure(rank, 1, code, "none") for rank, code in enumerate(codes)}
    for when, failure in enumerate(failures.values()):
        failure.timestamp = when
    assert torchrun.first_to_end(ChildFailedError("ndtrain.train", failures))[0] == first


@pytest.mark.parametrize(("given", "ranks", "threads"), [(None, 2, 4), (None, 16, 1), ("3", 2, 3)])
def test_set_threads_divides_cores_over_ranks(given, ranks, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    monkeypatch.setenv(THREADS_ARE_A_DEFAULT, "")
    monkeypatch.delenv(THREADS_ARE_A_DEFAULT)
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    torchrun.set_threads(ranks)
    assert os.environ["OMP_NUM_THREADS"] == str(threads)
    assert (THREADS_ARE_A_DEFAULT in os.environ) == (given is None)


def test_torchrun_help_prints_usage(capsys):
    assert torchrun.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ndtrain torchrun [torchrun's options] -m ndtrain.train")


# ----------------------------------------------------------------------------------------------------- the exit status


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A run folder that a rank of this launch has told its launcher."""
    (tmp_path / "run").mkdir()
    monkeypatch.setenv(RUN_FOLDER_FILE, str(tmp_path / "told"))
    monkeypatch.setenv(LAUNCH, "n0-7-1.5")
    monkeypatch.setenv(exit_status.JOB, "job")
    tell_run_folder(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("why", "error", "ranks", "status"),
    [
        ("finished", None, 0, 0), ("stopped", None, 0, 85), ("stopped", None, 130, 85), ("hang", "stuck", 1, 75),
        ("failed", "a traceback", 1, 1), ("config", "a key", 2, 2), ("died", "a peer was lost", 1, 75),
        ("running", None, 75, 75), ("running", None, 1, 1), ("running", None, 143, 143),
        ("died", "a peer was lost", 143, 143),
    ],
)  # fmt: skip
def test_status_of_run_follows_exit_json(why, error, ranks, status, folder):
    """In the last four cases exit.json has only the start (a full disk), or a signal ended the run unsaved."""
    exit_status.write(folder, why, error=error)
    assert torchrun.status_of_run(ranks, "job") == status


def test_status_of_run_ignores_other_start(folder, monkeypatch):
    exit_status.write(folder, "finished")
    monkeypatch.setenv(LAUNCH, "n0-8-2.5")
    assert torchrun.status_of_run(1, "job") == 0, "on another host of the same job"
    assert torchrun.status_of_run(1, "later job") == 1


def test_status_of_run_without_folder_is_status_of_ranks(folder, tmp_path):
    exit_status.write(folder, "finished")
    (tmp_path / "told").unlink()
    assert torchrun.status_of_run(2, "job") == 2 and torchrun.status_of_run(0, "job") == 0


@pytest.mark.parametrize(
    ("argv", "backend"),
    [
        (["--nproc-per-node", "2"], ONE_HOST),
        (["--standalone", "--nproc-per-node", "2"], ONE_HOST),
        (["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n0:29400"], ONE_HOST),
        (["--master-port", "29511"], ONE_HOST),
        (["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n0:29400"], SEVERAL_HOSTS),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "n0"], "static"),
        (["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "n0:2379"], "etcd-v2"),
    ],
)
def test_choose_rendezvous_follows_arguments(argv, backend, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in (TOKEN, LAUNCH, "NDTRAIN_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    options = run.parse_args([*argv, "-m", "ndtrain.train", "x=1"])
    torchrun.choose_rendezvous(options)
    assert (options.rdzv_backend, options.standalone) == (backend, False)
    one_host = backend == ONE_HOST
    assert (TOKEN in os.environ, "GLOO_SOCKET_IFNAME" in os.environ) == (one_host, one_host)
    assert (os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1") == (backend == SEVERAL_HOSTS)
    assert (f"warning: {TOKEN} is not set" in capsys.readouterr().err) == (backend == SEVERAL_HOSTS)


def test_choose_rendezvous_keeps_user_interface(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"GLOO_SOCKET_IFNAME": "eth7"})
    torchrun.choose_rendezvous(run.parse_args(["-m", "ndtrain.train"]))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_missing_interface_is_one_line_error(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", os.environ | {"NDTRAIN_INTERFACE": "eth7"})
    assert torchrun.main(["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n0:1", "-m", "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: NDTRAIN_INTERFACE=eth7: no interface of host") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [("3", 3), ("os.kill(os.getpid(), 9)", 75), ("0", 0)],
)
@FULL
def test_another_program_has_its_own_exit_status(code, status, tmp_path):
    (tmp_path / "program.py").write_text(f"import os, sys\nsys.exit({code})\n")
    assert ended([*WRAPPER[:4], str(tmp_path / "program.py")], tmp_path)[0] == status


# ------------------------------------------------------------------------------------------------------ whole programs


def ended(argv: list[str], cwd: Path) -> tuple[int, str]:
    """(exit code, stderr), without OMP_NUM_THREADS in the environment."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stderr


@FULL
def test_wrong_mesh_is_one_line_error(tmp_path):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "mesh.fsdp=3")
    code, err = ended([*WRAPPER, "-m", "ndtrain.train", *args], tmp_path)
    assert code == 2 and err.startswith("error: mesh fsdp=3 needs 3 ranks but 2 started") and err.count("\n") == 1


@FULL
def test_a_refused_run_of_two_ranks_leaves_no_folder(tmp_path):
    """Only rank 0 refuses it, before rank 1 has opened a log."""
    overrides = ["mesh.fsdp=2", "train.sample_every=1", "train.sample_prompts=[]"]
    args = arguments(tmp_path / "runs" / "new", write_corpus(tmp_path / "corpus.txt"), *overrides)
    code, err = ended([*WRAPPER, "-m", "ndtrain.train", *args], tmp_path)
    assert code == 2 and "train.sample_prompts is empty" in err
    assert not (tmp_path / "runs").exists()


@FULL
def test_plain_torchrun_ends_with_error_line(tmp_path):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "mesh.fsdp=3")
    plain = [sys.executable, "-m", "torch.distributed.run", *WRAPPER[3:]]
    code, err = ended([*plain, "-m", "ndtrain.train", *args], tmp_path)
    assert code == 1 and "traceback : mesh fsdp=3 needs 3 ranks but 2 started" in err.rstrip().splitlines()[-2]


@FULL
def test_ctrl_c_saves_without_traceback(tmp_path):
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
    assert process.returncode == 85 and "stopped by SIGINT" in out + err, "it has saved"
    assert "Traceback" not in err and err.rstrip().endswith("SIGINT: every rank has ended"), err
