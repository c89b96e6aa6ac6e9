"""A process ends with its launcher, and only with a launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ndtrain.run import launcher, stop_signals
from ndtrain.run.launcher import Launcher, script_of_torchrun, torchrun_of_rank
from ndtrain.run.stop_signals import StopRequest
from tests.lib.helpers import wait_for

# starts the child as torchrun does, in a session of its own, and stays
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""
CHILD = """
import os, time
from pathlib import Path
from ndtrain.run import launcher
grandparent = int(Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(")")[2].split()[1])
with launcher.ends_with({function}, "the launcher was killed"):
    Path({ready!r}).touch()
    time.sleep(60)
"""
FAMILIES = [
    ("launcher.torchrun_of_rank()", {"TORCHELASTIC_RUN_ID": "job"}, True),
    pytest.param("launcher.torchrun_of_rank()", {}, False, marks=pytest.mark.full),
    ("launcher.script_of_torchrun(f'{os.uname().nodename}-{os.getppid()}-1.5')", {}, True),
    ("launcher.script_of_torchrun(f'{os.uname().nodename}-{grandparent}-1.5')", {}, False),  # it lives on
    pytest.param("launcher.script_of_torchrun(f'another-host-{os.getppid()}-1.5')", {}, False, marks=pytest.mark.full),
    pytest.param("launcher.script_of_torchrun(None)", {}, False, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("function", "variables", "ends"), FAMILIES)
def test_a_process_ends_with_its_launcher_and_with_no_other_parent(function, variables, ends, tmp_path):
    ready, env = tmp_path / "ready", {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_RUN_ID"} | variables
    child = CHILD.format(function=function, ready=str(ready))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, child], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    try:
        wait_for(ready.exists, "the child")
        parent.kill()
        parent.wait()
        if ends:
            wait_for(lambda: not lives(pid), "the child to end", 5)
            assert parent.stderr.read() == "the launcher was killed\n"
        else:
            time.sleep(2 * launcher.POLL_S)
            assert lives(pid), "it has ended with a parent that is no launcher"
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)


def test_torchrun_in_a_container_ends_with_the_launch_script(tmp_path):
    """The program of the container stays between the two, and outlives the script."""
    ready, named = tmp_path / "ready", "launcher.script_of_torchrun(f'{os.uname().nodename}-{grandparent}-1.5')"
    child = CHILD.format(function=named, ready=str(ready))
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PARENT!r}, {child!r}])"
    script = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = int(script.stdout.readline())
    container = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    try:
        wait_for(ready.exists, "the child")
        script.kill()
        script.wait()
        wait_for(lambda: not lives(pid), "the child to end", 5)
        assert lives(container)
    finally:
        for left in (pid, container):
            if lives(left):
                os.kill(left, signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_torchrun_that_ended_before_rank_is_gone(monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    launcher.name_torchrun()
    monkeypatch.setenv("NDTRAIN_TORCHRUN", os.environ["NDTRAIN_TORCHRUN"])  # so that it is taken back
    assert not torchrun_of_rank().is_gone()
    named = os.environ["NDTRAIN_TORCHRUN"].replace(str(os.getpid()), str(ended.pid), 1)
    monkeypatch.setenv("NDTRAIN_TORCHRUN", named)
    assert torchrun_of_rank().is_gone()
    monkeypatch.setenv("NDTRAIN_TORCHRUN", f"{ended.pid}-1")  # of another container
    assert not torchrun_of_rank().is_gone()


@pytest.mark.parametrize("launch", ["", "x", f"n0-{os.getppid()}-1", f"{os.uname().nodename}-1x-1"])
def test_a_script_that_is_not_the_parent_is_no_launcher(launch):
    assert script_of_torchrun(launch).pid is None


def test_end_of_launcher_requests_stop_but_signal_wins():
    living, gone = Launcher(os.getppid()), Launcher(-1)
    assert StopRequest(signals=False, launcher=living).asked() == 0
    asked = StopRequest(signals=False, launcher=gone).asked()
    assert stop_signals.name(asked) == stop_signals.LAUNCHER_GONE
    request = StopRequest(launcher=living)
    try:
        signal.raise_signal(signal.SIGTERM)
        assert stop_signals.name(max(0, asked, request.asked())) == "SIGTERM", "it takes precedence"
    finally:
        request.restore()
    assert max(0, asked) == asked, "ranks without a request send 0"
    assert StopRequest(signals=False).asked() == 0, "a process that torchrun has not started has no launcher"
