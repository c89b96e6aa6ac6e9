"""`launch/train.sbatch` on a real Slurm: several nodes, time limits, lost nodes, arrays, pre-emption."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from ndtrain.checkpoint import list_checkpoints
from tests.launch.test_launch import ENV, SCRIPTS
from tests.lib import slurm
from tests.lib.helpers import KILLED, arguments, checkpoint_of, rows, tensor_bytes, wait_for, write_corpus

pytestmark = pytest.mark.full
STEPS = 60
TWO_NODES = ["-N", "2", f"--gpus-per-node={slurm.GPUS}"]
MESH = ["mesh.dp=2", "mesh.fsdp=2"]
PLAN = [*MESH, f"train.steps={STEPS}", "checkpoint.every=5"]
SOON = ["--time=30", "--signal=B:USR1@45"]  # minutes; seconds before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cluster, corpus) -> tuple[Path, str]:
    """The run folder and the output of an undisturbed job of two nodes and four ranks."""
    home = tmp_path_factory.mktemp("undisturbed")
    job = submit(cluster, home, corpus, *PLAN)
    shown = cluster.wait(job, "COMPLETED")
    assert shown["ExitCode"] == "0:0" and shown["Restarts"] == "0"
    return home / "run", cluster.output(shown)


@pytest.fixture(autouse=True)
def alone(cluster):
    """Ends all jobs of one test before the next."""
    yield
    cluster.call("scancel", "--user", os.environ.get("USER", "root"))
    wait_for(cluster.ready, "the nodes to be free again", 120, pause=0.2)


def submit(cluster, home: Path, corpus: Path, *overrides: str, options=(*TWO_NODES, *SOON), **env: str) -> str:
    args = arguments(home / "run", corpus, *overrides)
    return cluster.submit([*options, str(SCRIPTS / "train.sbatch"), *args], home, ENV | env)


def reach(folder: Path, step: int) -> None:
    wait_for(lambda: len(rows(folder)) >= step, f"step {step} in {folder}", 240)


def exit_of(folder: Path) -> dict:
    return json.loads((folder / "exit.json").read_text())


def same_as(undisturbed: Path, folder: Path) -> None:
    """Asserts that every step was logged once and that the last checkpoint equals the undisturbed run's to the bit."""
    assert [r["step"] for r in rows(folder)] == list(range(1, STEPS + 1))
    assert tensor_bytes(checkpoint_of(folder, STEPS)) == tensor_bytes(checkpoint_of(undisturbed, STEPS))
    assert exit_of(folder)["why"] == "finished"


def test_two_nodes_with_four_ranks_train_to_end(undisturbed):
    folder, output = undisturbed
    assert "mesh dp=2 fsdp=2" in output and f"finished step {STEPS} of {STEPS}" in output
    same_as(folder, folder)
    printed = {n: (folder / "logs" / f"rank-{n}.out").read_text().splitlines() for n in (0, 2)}
    assert {p.name for p in (folder / "logs").glob("*.out")} == {"rank-0.out", "rank-2.out"}, "one file a host"
    assert [line[:3] for line in printed[0] if f"finished step {STEPS}" in line] == ["0: "]
    assert all(line[:3] in (f"{n}: ", f"{n + 1}: ") for n, lines in printed.items() for line in lines)


def test_time_limit_saves_and_requeues_job(cluster, corpus, undisturbed, tmp_path):
    """At Slurm's warning before the time limit the job saves; it is requeued and continues."""
    job, folder = submit(cluster, tmp_path, corpus, *PLAN), tmp_path / "run"
    reach(folder, 7)
    held, logged = next(iter(cluster.ranks())), len(rows(folder))
    os.kill(held, signal.SIGSTOP)  # Slurm looks at time limits twice a minute: the run is not to end before
    cluster.call("scontrol", "update", f"jobid={job}", "timelimit=1")
    wait_for((folder / "stop").exists, "the signal before the time limit", 90)
    os.kill(held, signal.SIGCONT)
    cluster.wait_for_restart(job)
    saved = int(list_checkpoints(folder / "checkpoints")[0].name[5:])
    assert logged < saved <= logged + 2 < STEPS and exit_of(folder)["why"] == "stopped"
    cluster.call("scontrol", "update", f"jobid={job}", "timelimit=30")
    shown = cluster.wait(job, "COMPLETED")
    assert shown["Restarts"] == "1" and f"at step {saved};" in cluster.output(shown)
    same_as(undisturbed[0], folder)


def test_lost_node_requeues_job_with_same_result(cluster, corpus, undisturbed, tmp_path):
    job, folder = submit(cluster, tmp_path, corpus, *PLAN), tmp_path / "run"
    reach(folder, 12)
    cluster.lose("n1")
    try:
        cluster.wait_for_restart(job)
    finally:
        cluster.bring_back("n1")
    assert len(rows(folder)) < STEPS
    cluster.wait(job, "COMPLETED")
    same_as(undisturbed[0], folder)


def test_preempted_job_continues_with_same_result(cluster, corpus, undisturbed, tmp_path):
    """A job of a partition with a higher priority takes the nodes; afterwards the first job continues."""
    job, folder = submit(cluster, tmp_path, corpus, *PLAN), tmp_path / "run"
    reach(folder, 7)
    cluster.submit(["-p", "urgent", "-N", "2", "--exclusive", "--wrap", "sleep 1"], tmp_path)
    cluster.wait_for_restart(job)
    assert exit_of(folder)["why"] == "stopped" and len(rows(folder)) < STEPS
    cluster.wait(job, "COMPLETED")
    same_as(undisturbed[0], folder)


def test_sweep_array_runs_one_line_per_task(cluster, corpus, tmp_path):
    lines = ["optim.lr=1e-3", "'optim.lr=2e-3'  run.seed=7", f"optim.lr=3e-3 run.dir={tmp_path}/third"]
    (tmp_path / "sweep.txt").write_text("\n".join(lines) + "\n")
    job = submit(
        cluster, tmp_path, corpus, options=["--array=1-3", "--cpus-per-task=1"], SWEEP="sweep.txt"
    )  # one rank each
    for task in (1, 2, 3):
        assert cluster.wait(f"{job}_{task}", "COMPLETED")["ExitCode"] == "0:0"
    folders = [tmp_path / "run" / "1", tmp_path / "run" / "2", tmp_path / "third"]
    assert [rows(f)[-1]["step"] for f in folders] == [10, 10, 10]
    assert [max(r["lr"] for r in rows(f)) for f in folders] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert "seed: 7" in (folders[1] / "config.yaml").read_text()


def test_array_without_sweep_is_refused(cluster, corpus, tmp_path):
    job = submit(cluster, tmp_path, corpus, options=["--array=4", "--cpus-per-task=1"])
    shown = cluster.wait(f"{job}_4", "FAILED")
    assert shown["ExitCode"] == "2:0" and not (tmp_path / "run").exists()
    assert cluster.output(shown).startswith("error: an array needs SWEEP=FILE")


def test_job_that_keeps_dying_is_not_requeued_for_ever(cluster, corpus, tmp_path):
    """It is requeued, but not without end if it writes no new checkpoint."""
    plan = [*MESH, "train.steps=100000", "checkpoint.every=0"]
    job, folder = submit(cluster, tmp_path, corpus, *plan, MAX_RESTARTS="1"), tmp_path / "run"
    for count in (1, 2):
        logged = len(rows(folder))
        wait_for(lambda n=logged: len(rows(folder)) not in (0, n) and len(cluster.ranks()) == 4, "steps", 240)
        os.kill(next(iter(cluster.ranks())), signal.SIGKILL)
        if count == 1:
            cluster.wait_for_restart(job)
    shown = cluster.wait(job, "FAILED")
    assert shown["ExitCode"] == "75:0" and shown["Restarts"] == "1" and exit_of(folder)["why"] in KILLED


def test_configuration_error_is_not_requeued(cluster, corpus, tmp_path):
    job = submit(cluster, tmp_path, corpus, "mesh.dp=3")
    shown = cluster.wait(job, "FAILED")
    assert shown["ExitCode"] == "2:0" and shown["Restarts"] == "0"
    assert "error: mesh" in cluster.output(shown)


def test_scancel_saves_and_does_not_requeue(cluster, corpus, tmp_path):
    """After scancel the job saves if there is time, and is not requeued."""
    job, folder = submit(cluster, tmp_path, corpus, *MESH, "train.steps=100000"), tmp_path / "run"
    reach(folder, 3)
    cluster.call("scancel", job)
    cluster.wait(job, "CANCELLED")
    wait_for(lambda: not cluster.ranks(), "the ranks to end")
    status = exit_of(folder)
    assert status["why"] == "stopped" and checkpoint_of(folder, status["step"]).is_dir()
    assert cluster.show(job)["Restarts"] == "0"


def test_stop_file_does_not_requeue(cluster, corpus, tmp_path):
    job, folder = submit(cluster, tmp_path, corpus, *MESH, "train.steps=100000"), tmp_path / "run"
    reach(folder, 3)
    (folder / "stop").touch()
    shown = cluster.wait(job, "FAILED")
    assert shown["ExitCode"] == "85:0" and shown["Restarts"] == "0" and exit_of(folder)["why"] == "stopped"


def test_a_second_signal_ends_a_job_at_once(cluster, corpus, tmp_path):
    """This also works during a step that takes many seconds."""
    plan = [*MESH, "train.global_batch=20000"]
    job, folder = submit(cluster, tmp_path, corpus, *plan), tmp_path / "run"
    wait_for(lambda: "run folder" in cluster.output(cluster.show(job)), "the first step", 240)
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    wait_for((folder / "stop").exists, "the first signal")
    time.sleep(3)
    assert cluster.show(job)["JobState"] == "RUNNING"
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    shown = cluster.wait(job, "FAILED", timeout=30)
    assert shown["ExitCode"] == "143:0" and shown["Restarts"] == "0" and not cluster.ranks()
