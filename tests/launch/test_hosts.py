"""Training across hosts gives the result of one host, also with killed workers, broken links and a lost host."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ndtrain.checkpoint import list_checkpoints
from tests.lib.helpers import arguments, checkpoint_of, rank_main, rows, tensor_bytes, wait_for, write_corpus
from tests.lib.namespaces import Host, hosts, missing
from tests.lib.parity import FP64, distance
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))
FULL = pytest.mark.full
PATIENCE_S = 240.0  # default timeout, long enough for the start of two hosts on two busy cores
HOME = (2, ["mesh.fsdp=2"])
SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ENDLESS = ["train.steps=1000000", "checkpoint.every=0"]


@pytest.fixture(autouse=True)
def default_environment(monkeypatch):
    monkeypatch.delenv(SHARED, raising=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus) -> Callable[..., Path]:
    """The run folder of an undisturbed run on this host. Each (ranks, overrides) is run once."""
    made: dict[tuple, Path] = {}

    def get(ranks: int, overrides: Sequence[str]) -> Path:
        key = (ranks, *overrides)
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            args = arguments(folder, corpus, *overrides)
            assert run_ranks(rank_main, ranks, args, timeout=600) == [0] * ranks
            made[key] = folder
        return made[key]

    return get


# ------------------------------------------------------------------------------------------------------------ the jobs


def start(nodes: Sequence[Host], args: Sequence[str], folder: Path, nproc: int = 1, **kw) -> list[subprocess.Popen]:
    """Starts a job: one torchrun on each host, with its console in a file."""
    return [start_one(host, nodes, args, folder, nproc, **kw) for host in nodes]


def start_one(host: Host, nodes: Sequence[Host], args, folder: Path, nproc: int = 1, **kw) -> subprocess.Popen:
    with open(folder / f"{host.name}.console", "a") as console:
        streams = {"stdout": console, "stderr": subprocess.STDOUT}
        return host.torchrun(nodes, nproc, args, folder, **streams, **kw)


def consoles(folder: Path) -> list[str]:
    """The console output of each host."""
    return [path.read_text() for path in sorted(folder.glob("*.console"))]


def console_text(folder: Path) -> str:
    return "".join(f"\n--- n{i}\n{text}" for i, text in enumerate(consoles(folder)))


def waited(folder: Path, condition: Callable, what: str, timeout: float = PATIENCE_S, pause: float = 0.02) -> None:
    """As `wait_for`. If it fails, the message contains the consoles of all hosts."""
    try:
        wait_for(condition, what, timeout, pause)
    except AssertionError as error:
        raise AssertionError(f"{error}:{console_text(folder)}") from None


def ended(processes: Sequence[subprocess.Popen], folder: Path, timeout: float = PATIENCE_S) -> list[int]:
    """Waits for the end of the job. Returns the exit statuses of its torchruns."""
    left = lambda: [p for p in processes if p.poll() is None]
    waited(folder, lambda: not left(), "the end of the job", timeout)
    return [p.returncode for p in processes]


def has_made(run_dir: Path, step: int, processes: Sequence[subprocess.Popen], folder: Path) -> None:
    """Waits until a step is logged."""

    def logged() -> bool:
        assert any(p.poll() is None for p in processes), console_text(folder)
        return len(rows(run_dir)) >= step

    waited(folder, logged, f"step {step}")


def newest(run_dir: Path) -> int:
    """The step of the newest checkpoint; 0: there is none."""
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    return int(checkpoints[0].name[5:]) if checkpoints else 0


def exit_file(run_dir: Path) -> dict:
    return json.loads((run_dir / "exit.json").read_text())


def assert_same_curve(run_dir: Path, want: Path, bound: float = 1e-10) -> None:
    got, expected = rows(run_dir), rows(want)
    assert [r["step"] for r in got] == [r["step"] for r in expected]
    for a, b in zip(got, expected, strict=True):
        assert abs(a["loss"] - b["loss"]) <= bound * max(1, abs(b["loss"])), (a["step"], a["loss"], b["loss"])


def assert_same_weights(checkpoint: Path, reference: Path, bound: float = 1e-9) -> None:
    """Compares the weights and moments of two checkpoints."""
    for name in ("model", "optimizer"):
        a, b = (load_file(p / f"{name}.safetensors") for p in (checkpoint, reference))
        off = {key: distance(a[key], b[key]) for key in b}
        worst = max(off, key=off.get)
        assert a.keys() == b.keys() and off[worst] <= bound, f"{worst} is off by {off[worst]:.1e}"


# --------------------------------------------------------------------------------------------------------- the harness

SERVER = """
import socket
listening = socket.create_server(("", 7))
print(flush=True)
peer, size = listening.accept()[0], 0
while data := peer.recv(65536):
    size += len(data)
print(socket.gethostname(), size)
"""
CLIENT = """
import socket, sys, time
began = time.monotonic()
server = socket.create_connection(("n1", 7), 1)
server.settimeout(20)
server.sendall(bytes(int(sys.argv[1])))
server.shutdown(socket.SHUT_WR)
server.recv(1)  # until it closes
print(time.monotonic() - began)
"""


def send(n0: Host, n1: Host, size: int, cwd: Path) -> float:
    """Seconds that `size` bytes take from n0 to n1.

    Raises:
        OSError: they do not arrive.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    server = n1.popen([sys.executable, "-c", SERVER], cwd, **pipes)
    server.stdout.readline()
    client = n0.popen([sys.executable, "-c", CLIENT, str(size)], cwd, **pipes)
    out, err = client.communicate(timeout=60)
    if client.returncode:
        server.kill()
        raise OSError(err)
    assert server.communicate(timeout=60)[0].split() == ["n1", str(size)]
    return float(out)


@FULL
def test_namespace_hosts_have_limited_and_cuttable_links(tmp_path):
    with hosts(2) as (n0, n1):
        quick = send(n0, n1, 2**20, tmp_path)
        n1.limit(10)
        slow = send(n0, n1, 2**20, tmp_path)
        assert slow > 0.7 > quick, (slow, quick)  # 8.4 Mbit
        n0.cut()
        with pytest.raises(OSError, match=r"timed out|No route"):
            send(n0, n1, 1, tmp_path)
        n0.mend()
        send(n0, n1, 1, tmp_path)
        sleeper = n1.popen(["sleep", "100"], tmp_path)
        wait_for(lambda: sleeper.pid in n1.processes(), "a process on n1")
        assert sleeper.pid not in n0.processes()
    assert sleeper.returncode == -signal.SIGKILL
    assert not list(Path("/run/netns").glob(f"ndtrain-{os.getpid()}-*"))


# ------------------------------------------------------------------------------------------------------ across hosts

ACROSS = [  # (ranks on each of two hosts, mesh)
    (1, ["mesh.fsdp=2"]), (1, ["mesh.tp=2"]), (1, ["mesh.cp=2"]), (1, ["mesh.pp=2"]), (1, ["mesh.dp=2"]),
    (2, ["mesh.fsdp=2", "mesh.tp=2"]), (2, ["mesh.pp=2", "mesh.dp=2", "schedule=zb_h1"]),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("nproc", "mesh"), ACROSS, ids=lambda v: "-".join(v) if isinstance(v, list) else str(v))
def test_training_across_hosts_equals_one_process(nproc, mesh, tmp_path, corpus, undisturbed):
    run_dir, plan = tmp_path / "run", [*FP64, "train.global_batch=8", "train.micro_batch=1"]
    with hosts(2) as nodes:
        job = start(nodes, arguments(run_dir, corpus, *plan, *mesh), tmp_path, nproc)
        assert ended(job, tmp_path) == [0, 0], console_text(tmp_path)
    want = undisturbed(1, plan)
    assert_same_curve(run_dir, want)
    assert_same_weights(checkpoint_of(run_dir, 10), checkpoint_of(want, 10))


# ----------------------------------------------------------------------------------------------------- killed workers

EVERY = 10  # steps between checkpoints
STEPS = 30  # steps of a run per kill


@FULL
@pytest.mark.parametrize("kills", [1, 10])
def test_torchrun_restarts_a_job_whose_worker_was_killed(kills, tmp_path, corpus, undisturbed):
    """Each kill costs at most one of torchrun's restarts and does not change the result."""
    run_dir, draw = tmp_path / "run", random.Random(kills)
    plan = [f"train.steps={STEPS * kills}", f"checkpoint.every={EVERY}"]
    args = arguments(run_dir, corpus, *plan, *HOME[1])
    with hosts(2) as nodes:
        job = start(nodes, args, tmp_path, max_restarts=kills)
        seen: set[int] = set()
        for number in range(kills):
            seen |= kill_one(nodes, run_dir, seen, draw, in_start=number % 4 == 3)
        assert ended(job, tmp_path) == [0, 0], console_text(tmp_path)
    assert [r["step"] for r in rows(run_dir)] == list(range(1, STEPS * kills + 1))
    steps = (checkpoint_of(p, STEPS * kills) for p in (run_dir, undisturbed(HOME[0], [*plan, *HOME[1]])))
    assert tensor_bytes(next(steps)) == tensor_bytes(next(steps))
    assert (run_dir / "logs" / "rank-0.log").read_text().count("resumed ") >= kills - kills // 4
    assert exit_file(run_dir)["why"] == "finished"


def kill_one(nodes: Sequence[Host], run_dir: Path, seen: set[int], draw: random.Random, in_start: bool) -> set[int]:
    """Sends SIGKILL to a random rank of the next attempt, in its start-up or after it has written a checkpoint. Returns
    the process ids of the attempt.

    Args:
        seen: the process ids of earlier attempts.
    """

    def attempt() -> list[int] | None:
        ranks_by_host = [set(host.ranks()) - seen for host in nodes]
        return sorted(set.union(*ranks_by_host)) if all(ranks_by_host) else None

    ranks = wait_for(attempt, "ranks on both hosts", PATIENCE_S, 0.01)
    if not in_start:
        before = newest(run_dir)
        wait_for(lambda: newest(run_dir) > before, f"a checkpoint after that of step {before}", PATIENCE_S)
    time.sleep(draw.uniform(0, 3.0 if in_start else 0.1))
    os.kill(draw.choice(ranks), signal.SIGKILL)
    return set(ranks)


# -------------------------------------------------------------------------------------------------------------- links

DEADLINE_S = 15.0


@pytest.mark.full
def test_link_cut_beyond_deadline_ends_both_hosts(tmp_path, corpus):
    run_dir = tmp_path / "run"
    args = arguments(run_dir, corpus, *ENDLESS, *HOME[1], f"hardware.timeout_s={DEADLINE_S}")
    with hosts(2) as nodes:
        job = start(nodes, args, tmp_path)
        has_made(run_dir, 5, job, tmp_path)
        nodes[1].cut()
        began = time.monotonic()
        codes = ended(job, tmp_path, DEADLINE_S + 10)
        assert time.monotonic() - began > DEADLINE_S - 5, "before the deadline"
        assert codes == [1, -signal.SIGKILL], console_text(
            tmp_path
        )  # torchrun on n1 waits for its own store, and is ended
        assert not any(host.ranks() for host in nodes)
    for rank, console in enumerate(consoles(tmp_path)):
        assert f"rank {1 - rank} (fsdp={1 - rank}) does not answer" in console
        assert f"rank {rank} (fsdp={rank}) waits for rank {1 - rank}: step " in console
        assert (run_dir / "logs" / f"hang-rank-{rank}.json").exists()
    status = exit_file(run_dir)
    assert (status["why"], status["code"]) == ("hang", 75)


@pytest.mark.full
@pytest.mark.parametrize("seconds", [5, 25], ids=["5s", "25s-longer-than-keep-alive"])
def test_link_cut_within_deadline_does_not_change_result(seconds, tmp_path, corpus, undisturbed):
    run_dir, plan = tmp_path / "run", ["train.steps=100"]
    with hosts(2) as nodes:
        job = start(nodes, arguments(run_dir, corpus, *plan, *HOME[1], "hardware.timeout_s=60"), tmp_path)
        has_made(run_dir, 5, job, tmp_path)
        ranks = [host.ranks() for host in nodes]
        nodes[1].cut()
        time.sleep(1)  # packets in flight have arrived
        made = len(rows(run_dir))
        time.sleep(seconds - 1)
        assert len(rows(run_dir)) == made < 100, "the link still works"
        assert [host.ranks() for host in nodes] == ranks
        nodes[1].mend()
        assert ended(job, tmp_path) == [0, 0], console_text(tmp_path)
    got, want = (checkpoint_of(p, 100) for p in (run_dir, undisturbed(HOME[0], [*plan, *HOME[1]])))
    assert tensor_bytes(got) == tensor_bytes(want)


# --------------------------------------------------------------------------------------------------------- lost hosts

QUICK = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=4"


@pytest.mark.full
@pytest.mark.parametrize(("n", "lost", "endpoint", "env"), [(2, 1, 0, {}), (3, 0, 2, {SHARED: "1"})], ids=["2", "3"])
def test_a_job_goes_on_without_a_lost_host(n, lost, endpoint, env, tmp_path, corpus, undisturbed):
    """With three hosts, the lost one has rank 0. Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE torchrun would look for its
    store on the lost host for ever."""
    run_dir, plan = tmp_path / "run", [*FP64, "train.steps=80", f"checkpoint.every={EVERY}", "train.global_batch=12"]
    args = arguments(run_dir, corpus, *plan, "mesh.fsdp=-1")
    how = {"nnodes": f"{n - 1}:{n}", "max_restarts": 1, "rdzv_conf": QUICK, "env": env}
    with hosts(n) as nodes:
        job = start(nodes, args, tmp_path, endpoint=nodes[endpoint], **how)
        waited(tmp_path, lambda: all(host.ranks() for host in nodes), "ranks on all hosts")
        has_made(run_dir, 2 * EVERY, job, tmp_path)
        nodes[lost].kill()
        codes = ended(job, tmp_path)
        assert codes == [-signal.SIGKILL if i == lost else 0 for i in range(n)], console_text(tmp_path)
    assert f"mesh fsdp={n}" in console_text(tmp_path) and ("mesh one process", "mesh fsdp=2")[n - 2] in console_text(
        tmp_path
    )
    want = undisturbed(1, plan)
    assert_same_curve(run_dir, want)
    assert_same_weights(checkpoint_of(run_dir, 80), checkpoint_of(want, 80))


@pytest.mark.full
def test_returning_host_joins_job_again(tmp_path, corpus, undisturbed):
    """The run goes from two hosts to one and back to two, and is then stopped by the stop file. Each start has a new
    store, as in launch/node.sh: torchrun's own store admits no host after the first start."""
    run_dir, plan = tmp_path / "run", [*FP64, "train.steps=1000000", f"checkpoint.every={EVERY}"]
    args = arguments(run_dir, corpus, *plan, "mesh.dp=-1")
    how = {"nnodes": "1:2", "max_restarts": 1, "rdzv_conf": QUICK, "env": {SHARED: "1"}}
    starts = lambda: re.findall(r"mesh (dp=2|one process)", consoles(tmp_path)[0])
    with hosts(2) as nodes:
        job = start(nodes, args, tmp_path, **how)
        again = lambda: job.append(start_one(nodes[1], nodes, args, tmp_path, **how))
        for mesh, then in (("dp=2", nodes[1].kill), ("one process", again), ("dp=2", (run_dir / "stop").touch)):
            waited(tmp_path, lambda mesh=mesh: starts()[-1:] == [mesh], f"a start with {mesh}")
            has_made(run_dir, len(rows(run_dir)) + 2 * EVERY, job, tmp_path)
            then()
        assert ended(job, tmp_path) == [0, -signal.SIGKILL, 0], console_text(tmp_path)
    status, step = exit_file(run_dir), len(rows(run_dir))
    assert (status["why"], status["signal"], status["step"], status["code"]) == ("stopped", "stop file", step, 85)
    want = undisturbed(1, [*plan, f"train.stop_at={step}"])
    assert_same_curve(run_dir, want)
    assert_same_weights(checkpoint_of(run_dir, step), checkpoint_of(want, step))
