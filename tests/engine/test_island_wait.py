"""The ranks of an island wait for other islands together."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ndtrain.engine.island_wait import IslandWait
from ndtrain.mesh.flight_recorder import RECORDER
from tests.lib.ranks import run_ranks

DEADLINE_S = 0.8


def waiting(told: list[str]) -> IslandWait:
    world = dist.group.WORLD if dist.is_initialized() else None
    return IslandWait(SimpleNamespace(world=world, device=torch.device("cpu")), DEADLINE_S, told.append)


def wait_three_deadlines() -> tuple[bool, float, list[str]]:
    """Rank 1 waits for another island for three deadlines. Return the longest wait that a watchdog has seen."""
    told, longest, ended = list[str](), 0.0, threading.Event()
    wait = waiting(told)

    def watch() -> None:
        nonlocal longest
        while not ended.wait(0.02):
            longest = max(longest, RECORDER.longest_wait()[1])

    watchdog = threading.Thread(target=watch)
    watchdog.start()
    work = lambda: time.sleep(3 * DEADLINE_S * dist.get_rank()) is None
    ok = wait.run(work, lambda: "island b" if dist.get_rank() == 0 else "")
    ended.set()
    watchdog.join()
    return ok, longest, told


def test_rank_that_is_ready_waits_for_another_rank_without_a_hang():
    (ok, longest, told), (other_ok, other_longest, nothing) = run_ranks(wait_three_deadlines, 2)
    assert ok and other_ok and max(longest, other_longest) < DEADLINE_S
    assert nothing == [] and [line.partition(" s for ")[2] for line in told] == ["island b"] * len(told)
    assert 1 <= len(told) <= 3  # each after twice the time of the one before


def fail_on_rank_1() -> list[bool]:
    wait = waiting([])
    return [wait.run(lambda: dist.get_rank() == 0, str), wait.run(lambda: True, str)]


def test_run_returns_false_on_all_ranks_if_one_has_failed():
    assert run_ranks(fail_on_rank_1, 2) == [[False, True]] * 2


def test_run_raises_the_error_of_its_work():
    def fail() -> bool:
        raise KeyError("a table")

    wait = waiting([])
    with pytest.raises(KeyError, match="a table"):
        wait.run(fail, str)
    assert wait.run(lambda: not torch.is_grad_enabled(), str)
