"""Sockets that listen during a run on one machine, and attacks by a stranger who reaches them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lib import namespaces
from tests.lib.helpers import arguments, rows, wait_for, write_corpus
from tests.lib.namespaces import Host
from tests.lib.sockets import FOREIGN_CLIENT, listeners, pickled_command

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=str(namespaces.missing()))
FULL = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
ENDLESS = ["mesh.fsdp=2", "train.steps=1000000", "checkpoint.every=0", "hardware.timeout_s=60"]
START_S = 240


@dataclass
class Run:
    """A run of two ranks on a host whose name is not a loopback address, as on a cluster."""

    host: Host
    process: subprocess.Popen
    cwd: Path

    @property
    def folder(self) -> Path:
        return self.cwd / "run"

    def console(self) -> str:
        return (self.cwd / "console").read_text()

    def step(self) -> int:
        return len(rows(self.folder))

    def goes_on(self, seconds: float = 4.0) -> None:
        """Waits so long, and asserts that the run has made steps meanwhile."""
        before, end = self.step(), time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.console()
            time.sleep(0.1)
        wait_for(lambda: self.step() > before + 2, "more steps", 60)

    def attack(self, text: str, *changes: tuple[str, str]) -> list[str]:
        """Writes the text into all stores of the run, as a stranger. Returns the keys: those that have a pattern, with
        it replaced, for one of the changes after the other."""
        argv = [sys.executable, "-c", FOREIGN_CLIENT, text, json.dumps(changes), *sorted(self.stores())]
        client = self.host.popen(argv, self.cwd, stdout=subprocess.PIPE, text=True)
        return client.communicate(timeout=120)[0].split()

    def stores(self) -> set[str]:
        """The ports of the launcher and of the ranks' own store."""
        mine = self.host.processes()
        ports = {str(x.port) for x in listeners([pid for pid in mine if not mine[pid]])}
        for pid in self.host.ranks():
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            ports |= {v.removeprefix("MASTER_PORT=") for v in variables if v.startswith("MASTER_PORT=")}
        return ports


def running(cwd: Path, argv: list[str], **env: str) -> Iterator[Run]:
    with namespaces.hosts(1) as (host,), (cwd / "console").open("w") as console:
        given = {"OMP_NUM_THREADS": "1"} | env
        process = host.popen(argv, cwd, given, stdout=console, stderr=console)
        run = Run(host, process, cwd)
        wait_for(lambda: run.step() >= 1 or process.poll() is not None, "a step", START_S)
        assert process.poll() is None, run.console()
        yield run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    cwd = tmp_path_factory.mktemp("network")
    args = arguments(cwd / "run", write_corpus(cwd / "corpus.txt"), *ENDLESS)
    launcher = [sys.executable, "-m", "ndtrain.run.torchrun", "--nproc-per-node", "2", "-m", "ndtrain.train"]
    yield from running(cwd, [*launcher, *args])


def assert_loopback_only(run: Run) -> None:
    heard = listeners(run.host.processes())
    assert {listener.pid for listener in heard} >= set(run.host.ranks()), "gloo listens in every rank"
    assert [listener for listener in heard if not listener.is_loopback] == []


def test_nothing_listens_beyond_loopback(run):
    assert_loopback_only(run)


def test_a_pickle_in_the_store_is_not_executed(run):
    mark = run.cwd / "executed"
    as_rendezvous = ("configuration|torch.rendezvous.*", "torch.rendezvous.x")
    assert run.attack(pickled_command(f"touch {mark}"), as_rendezvous, ("torch.rendezvous.*", r"\g<0>"))
    run.goes_on()
    assert not mark.exists()


@FULL
def test_forged_hang_alert_is_ignored_and_logged(run):
    assert run.attack("1", ("configuration$", "hang/called"))
    run.goes_on()
    assert "hang/called" in (run.folder / "logs" / "rank-0.log").read_text()


def test_stop_file_ends_launcher_with_85(run):
    """The last test of the run: it ends it."""
    (run.folder / "stop").touch()
    assert run.process.wait(120) == 85, run.console()


@FULL
def test_the_launch_script_listens_on_loopback_only(tmp_path):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), *ENDLESS)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for run in running(tmp_path, [str(ROOT / "launch" / "local.sh"), *args], NPROC="2", PATH=path):
        assert_loopback_only(run)
        mark = run.cwd / "executed"
        run.attack(pickled_command(f"touch {mark}"), ("configuration|torch.rendezvous.*", "torch.rendezvous.x"))
        run.attack("1", ("configuration$", "hang/called"))
        run.goes_on()
        assert not mark.exists()


@FULL
def test_under_plain_torchrun_gloo_listens_on_loopback(tmp_path):
    """torchrun's own stores listen on all interfaces."""
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), *ENDLESS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ndtrain.train"]
    for run in running(tmp_path, [*launcher, *args]):
        ranks = listeners(run.host.ranks())
        assert ranks and all(listener.is_loopback for listener in ranks)
