"""Incomplete operations of a GPU, on a stub: the test sets the results of works, and has its own clock."""

import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ndtrain.mesh.collectives import Pending, all_reduce
from ndtrain.mesh.device_progress import DeviceProgress
from ndtrain.mesh.flight_recorder import RECORDER, Recorder
from tests.lib.ranks import run_ranks


class Work:
    """An operation that the device completes when the test says so. Its wait does not block."""

    def __init__(self):
        self.result = torch.futures.Future()

    def wait(self) -> None:
        pass

    def get_future_result(self) -> torch.futures.Future:
        return self.result

    def complete(self) -> None:
        self.result.set_result(0)


class Run:
    """A rank on a GPU: what it launches, and a clock in seconds."""

    def __init__(self):
        self.recorder, self.now = Recorder(), 0.0
        with self.at(0):
            self.recorder.device = DeviceProgress()
        self.recorder.device.runs = lambda group: True

    def at(self, now: float):
        self.now = now
        return mock.patch("time.monotonic", lambda: self.now)

    def launch(self, name: str, now: float, wait: bool = True, works: int = 1) -> list[Work]:
        group = SimpleNamespace(group_name=name, rank=lambda: 0, size=lambda: 2)
        launched = [Work() for _ in range(works)]
        with self.at(now), mock.patch("ndtrain.mesh.collectives.RECORDER", self.recorder):
            pending = Pending(launched, record=self.recorder.launch("all_reduce", group, 8))
            if wait:
                pending.wait()
        return launched

    def longest_wait(self, now: float) -> tuple[str | None, float]:
        """(channel and number, seconds), as the watchdog asks."""
        with self.at(now):
            self.recorder.device.poll()
            record, seconds = self.recorder.longest_wait()
        return record and f"{record.channel} {record.number}", seconds


def test_longest_wait_names_first_incomplete_operation():
    run = Run()
    (first,) = run.launch("tp", 1)
    run.launch("tp", 2)
    assert run.longest_wait(5) == ("tp 1", 4)
    first.complete()
    assert run.longest_wait(6) == ("tp 2", 0), "time counts from a completion"
    assert run.longest_wait(20) == ("tp 2", 14)


def test_operation_completes_with_its_last_message():
    run = Run()
    one, other = run.launch("cp", 1, works=2)
    one.complete()
    assert run.longest_wait(3) == ("cp 1", 2)
    other.complete()
    assert run.longest_wait(4) == (None, 0.0)


def test_early_posted_message_is_not_waited_for():
    run = Run()
    run.launch("pp", 1, wait=False)
    assert run.longest_wait(100) == (None, 0.0)
    run.launch("pp", 100)  # waited for, behind the first in its channel
    assert run.longest_wait(103) == ("pp 1", 3)


def test_blocking_has_first_incomplete_operation_per_channel():
    run = Run()
    run.launch("fsdp", 1)[0].complete()
    run.launch("fsdp", 2)
    run.launch("tp", 3)
    run.launch("fsdp", 4)
    run.longest_wait(5)
    device = run.recorder.device
    assert [(r.channel, r.number, since) for r, since in device.blocking()] == [("fsdp", 2, 2), ("tp", 1, 3)]
    assert device.completed == {"fsdp": 1}
    assert [(r.channel, r.number) for r in device.incomplete()] == [("fsdp", 2), ("tp", 1), ("fsdp", 3)]


def test_eleven_minute_collective_is_within_30_minute_deadline():
    """Five of them in a row are fine too, although the host waits for all of them at once at the result of the step."""
    run, deadline_s = Run(), 1800
    works = [run.launch("dp", 1)[0] for _ in range(5)]
    longest = 0.0
    with run.at(1):
        wait = run.recorder.waiting("the result of step 7", on_device=True)
        wait.__enter__()
    for second in range(2, 60 * 60):
        if second % (11 * 60) == 0 and second // (11 * 60) <= len(works):
            works[second // (11 * 60) - 1].complete()
        name, seconds = run.longest_wait(second)
        if second == 600:
            assert name == "dp 1", "the wait for a result is a wait for the first operation that is not complete"
        longest = max(longest, seconds if second < 5 * 11 * 60 else 0)
    assert 600 < longest < deadline_s
    assert (name, seconds) == (" 0", second - 5 * 11 * 60), "nothing is pending: the host alone waits"
    with run.at(second):
        wait.__exit__(None, None, None)


def test_longest_wait_may_be_of_host():
    run = Run()
    with run.at(1):
        data = run.recorder.waiting("data")
        data.__enter__()
    run.launch("tp", 5)
    assert run.longest_wait(11) == (" 0", 10)
    with run.at(11):
        data.__exit__(None, None, None)
    assert run.longest_wait(12) == ("tp 1", 7)


def sums_on_gloo() -> tuple[bool, bool, int]:
    """(on the device, pending, completed) where nothing follows a device, and where something does."""
    RECORDER.device = DeviceProgress()
    all_reduce(torch.ones(1), torch.distributed.group.WORLD).wait()
    return RECORDER.last[-1].on_device, bool(RECORDER.device.incomplete()), len(RECORDER.device.completed)


def test_gloo_operations_are_not_followed():
    """Checkpoints of a run on GPUs send over gloo, whose wait blocks the host."""
    assert run_ranks(sums_on_gloo, 2) == [(False, False, 0)] * 2


@pytest.mark.parametrize(("value", "runs"), [("0", True), ("1", False)])
def test_nccl_blocking_wait_disables_device_progress(value, runs, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)
    with mock.patch("torch.distributed.get_backend", return_value="nccl"):
        assert DeviceProgress().runs(SimpleNamespace(group_name="g")) is runs


def test_follow_costs_less_than_100_microseconds():
    """Processor time of this thread, and the best of some rounds: other processes on the machine do not count."""
    run = Run()
    group = SimpleNamespace(group_name="tp", rank=lambda: 0, size=lambda: 2)
    works, n = [Work()], 500

    def seconds_each() -> float:
        began = time.thread_time()
        for _ in range(n):
            run.recorder.follow(run.recorder.launch("all_reduce", group, 8), works)
        return (time.thread_time() - began) / n

    assert min(seconds_each() for _ in range(5)) < 100e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_longest_wait_sees_busy_gpu(tmp_path):
    """A sum over NCCL of one rank, behind a kernel that spins for some seconds."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    RECORDER.device = progress = DeviceProgress()
    try:
        x = torch.ones(8, device=device)
        all_reduce(x, torch.distributed.group.WORLD).wait()  # creates the communicator
        torch.cuda.synchronize()
        time.sleep(1)
        progress.poll()  # time counts from the last completion that a poll saw
        torch.cuda._sleep(int(4e9))  # clock ticks: two seconds or more
        began = time.monotonic()
        all_reduce(x, torch.distributed.group.WORLD).wait()
        assert time.monotonic() - began < 1, "the wait does not block the host"
        time.sleep(1)
        progress.poll()
        record, seconds = RECORDER.longest_wait()
        assert record.op == "all_reduce" and record.number == RECORDER.counts[record.channel] and seconds > 0.5
        torch.cuda.synchronize()
        time.sleep(1)  # PyTorch's thread looks ten times a second
        progress.poll()
        assert RECORDER.longest_wait() == (None, 0.0) and progress.completed[record.channel] == record.number
    finally:
        RECORDER.device = None
        torch.distributed.destroy_process_group()
