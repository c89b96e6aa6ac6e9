"""The launch scripts for islands: on this machine, over ssh, and as an array of Slurm."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.islands.runs import free_port
from tests.launch.test_launch import ENV, FULL, SCRIPTS, START_S, ended, exit_of, reach, remote_shell, script
from tests.lib import slurm
from tests.lib.helpers import arguments, processes, rows, wait_for, write_corpus

LOCAL, SSH = str(SCRIPTS / "islands_local.sh"), str(SCRIPTS / "islands_ssh.sh")
LONG = ["train.steps=100000", "checkpoint.every=0", "hardware.timeout_s=60"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


def printed(folder: Path) -> str:
    return "".join((folder / name).read_text() for name in ("out", "err"))


def names(folder: Path) -> list[Path]:
    return [folder / f"island-{n}" for n in (1, 2)]


@pytest.mark.parametrize(
    ("program", "args"), [(LOCAL, []), (LOCAL, ["0"]), (LOCAL, ["x=1"]), (SSH, []), (SSH, ["n0"]), (SSH, ["--"])]
)
def test_wrong_usage_is_one_line_error(program, args, tmp_path):
    code, out, err = ended([program, *args], tmp_path)
    assert code == 2 and out == "" and err.startswith(f"error: usage: launch/{Path(program).name} ")
    assert len(err.splitlines()) == 1


def test_islands_sbatch_outside_of_an_array_is_one_line_error(tmp_path):
    code, out, err = ended([str(SCRIPTS / "islands.sbatch"), "recipe=llama_debug"], tmp_path)
    assert code == 2 and out == "" and err.startswith("error: submit this Slurm job script as an array: ")


# ----------------------------------------------------------------------------------------------------------- by oneself


def functions(call: str, **env: str) -> str:
    """Return what a line of bash prints, with the functions of `islands.sh`."""
    text = f"source {SCRIPTS}/islands.sh; {call}"
    done = subprocess.run(["bash", "-euc", text], env=os.environ | env, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("code", "deaths", "lived", "returns"),
    [(75, 0, 1, True), (137, 0, 1, True), (75, 2, 1, True), (75, 3, 1, False), (75, 3, 700, True), (1, 0, 1, False),
     (2, 0, 1, False), (85, 0, 1, False), (0, 0, 1, False)],
)  # fmt: skip
def test_island_is_started_again_if_it_died_from_outside(code, deaths, lived, returns):
    state = f"deaths[1]={deaths}; started[1]=0; SECONDS={lived}"
    assert functions(f"{state}; may_return 1 {code} && echo yes || echo no") == ("yes\n" if returns else "no\n")


def test_stopped_island_is_not_started_again():
    assert functions("started[1]=0; asked=INT; may_return 1 75 && echo yes || echo no") == "no\n"


# ---------------------------------------------------------------------------------------------------------- one machine


@FULL
def test_local_killed_island_is_started_again_and_all_stop_on_signal(tmp_path, corpus):
    folder = tmp_path / "run"
    with script([LOCAL, "2", *arguments(folder, corpus, *LONG)], tmp_path, ranks=1) as process:
        for island in names(folder):
            reach(island, 3)
        victim = next(p for p, rank in processes(tmp_path).items() if rank == "0" and "island-2" in _command(p))
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: "with island-2: " in printed(tmp_path), "the island to return", START_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 85, printed(tmp_path)
        assert not processes(tmp_path)
    assert "island-2 ended with status 75: it is started again\n" in printed(tmp_path)
    assert [exit_of(island)["why"] for island in names(folder)] == ["stopped", "stopped"]
    assert "island-1: islands from step " in (tmp_path / "out").read_text()


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


@FULL
def test_local_wrong_override_ends_all_islands_with_2(tmp_path, corpus):
    code, _, err = ended([LOCAL, "2", *arguments(tmp_path / "run", corpus, "optim.lr=x")], tmp_path, ranks=1)
    assert code == 2 and "started again" not in err


# ----------------------------------------------------------------------------------------------------------------- ssh


@FULL
def test_ssh_islands_of_several_hosts_train_to_end(tmp_path, corpus):
    """The first island has two hosts. No secret is on a command line."""
    log, port = tmp_path / "remote.log", free_port()
    lines = ["#!/usr/bin/env bash", f'echo "$2" >> {shlex.quote(str(log))}', 'exec bash -c "$2"']
    secrets = {"NDTRAIN_ISLANDS_TOKEN": "a secret"}
    ports = {"ISLANDS_PORT": str(port), "PORT": str(29500 + os.getpid() % 1000)}
    args = arguments(tmp_path / "run", corpus, "mesh.fsdp=-1", "train.micro_batch=1", "train.global_batch=12")
    env = ports | secrets | {"SSH": remote_shell(tmp_path, lines)}
    code, out, err = ended([SSH, "localhost,127.0.0.1", "localhost", "--", *args], tmp_path, 1, **env)
    assert code == 0, out + err
    one, two = names(tmp_path / "run")
    assert [r["loss"] for r in rows(one)] == [r["loss"] for r in rows(two)] and len(rows(one)) == 10
    assert "mesh fsdp=2" in out + err and "islands from step 1: " in out
    commands = [shlex.split(line) for line in log.read_text().splitlines()]
    assert len(commands) == 3 and "a secret" not in log.read_text()
    assert all(f"islands.address=[localhost:{port},localhost:{port + 1}]" in words for words in commands)


# --------------------------------------------------------------------------------------------------------------- Slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@FULL
def test_slurm_array_trains_islands_a_requeued_task_returns_and_a_later_one_joins(cluster, corpus, tmp_path):
    folder = tmp_path / "run"
    args = arguments(folder, corpus, "train.steps=100000", "checkpoint.every=20", "hardware.timeout_s=60")
    options = ["-N", "1", "--gpus-per-node=1", "--time=30"]
    job = cluster.submit([*options, "--array=1-2", str(SCRIPTS / "islands.sbatch"), *args], tmp_path, ENV)
    for island in names(folder):
        wait_for(lambda island=island: len(rows(island)) >= 25, f"steps of {island}", START_S)
    victim = next(p for p in cluster.ranks() if "island-2" in _command(p))
    os.kill(victim, signal.SIGKILL)
    cluster.wait_for_restart(f"{job}_2")
    log = lambda n: (folder / f"island-{n}" / "logs" / "rank-0.out").read_text()
    wait_for(lambda: "without island-2: " in log(1) and "with island-2: " in log(1), "the island to return", START_S)
    more = cluster.submit([*options, "--array=3", str(SCRIPTS / "islands.sbatch"), *args], tmp_path, ENV)
    wait_for(lambda: "with island-3: " in log(1), "an island of a later array", START_S)
    cluster.call("scancel", more)
    assert (folder / "islands" / "token").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in (folder / "islands" / "addresses").iterdir()) == ["1", "2", "3"]
    cluster.call("scancel", job)
    for task in (1, 2):
        cluster.wait(f"{job}_{task}", "CANCELLED")
    wait_for(lambda: not cluster.ranks(), "the ranks to end")
