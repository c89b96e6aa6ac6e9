"""Islands that hang, are stopped, or lose a rank: the others name them, wait, and go on without them."""

import re
import signal

import pytest

from ndtrain.engine.island_tasks import Task, Tasks
from ndtrain.engine.train_step import TrainingStep
from ndtrain.islands.island import LOST_WEIGHTS
from ndtrain.run import exit_status
from tests.islands.launched import LaunchedIslands
from tests.islands.runs import PATIENCE_S, free_port, island_arguments
from tests.lib.helpers import rank_main, rows, write_corpus
from tests.lib.ranks import started_ranks

FULL = pytest.mark.full
DEADLINE_S = 8
SHORT = (f"hardware.timeout_s={DEADLINE_S}", "islands.timeout_s=5")
AT = 10  # the step at which a fault happens


def steps_after(islands: LaunchedIslands, name: str, number: int = 5) -> None:
    """Wait until an island has made further steps."""
    islands.reach(name, islands.step(name) + number)


def check_taken_over(islands: LaunchedIslands, by: str, lost: str) -> None:
    """Check that an island takes over the rows of another one, in the step in which that one was lost."""
    islands.wait_for_line(by, f" without {lost}: ")
    begin = int(re.findall(rf"islands from step (\d+) without {lost}: {by} 12 rows", islands.console(by))[-1])
    islands.reach(by, begin + 5)
    assert begin in (islands.step(lost) + 1, islands.step(lost) + 2)  # the last step may not be logged
    assert "hang" not in islands.console(by)


def loop_at_step(number: int, args: list[str]) -> int:
    """For `started_ranks`: an island of one process whose training thread loops for ever in a step."""
    passes = TrainingStep.forward_backward

    def forward_backward(self, step, *rest):
        while step == number:
            sum(range(1000))
        return passes(self, step, *rest)

    TrainingStep.forward_backward = forward_backward
    return rank_main(args)


def test_training_thread_that_loops_ends_its_island_in_one_step_of_the_other(tmp_path):
    corpus, steps, deadline_s = write_corpus(tmp_path / "corpus.txt"), 12, 3
    more = ("islands.count=2", f"islands.address=127.0.0.1:{free_port()}", f"hardware.timeout_s={deadline_s}")
    args = island_arguments(tmp_path, corpus, steps, "model.hidden_size=32", "model.num_hidden_layers=2", *more)
    a, b = ([*args, f"run.dir={tmp_path / name}"] for name in "ab")
    with started_ranks(rank_main, 1, a) as ((one,), _), started_ranks(loop_at_step, 1, 4, b) as ((stuck,), _):
        stuck.join(PATIENCE_S)
        one.join(PATIENCE_S)
    status = exit_status.read(tmp_path / "b")
    assert (one.exitcode, stuck.exitcode, status.why) == (0, 75, "hang")
    assert status.error.startswith(f"hang: island b: nothing has moved for {deadline_s} s (hardware.timeout_s)\n")
    assert [row["islands/rows"] for row in rows(tmp_path / "a")] == [6, 6, 6, *[12] * (steps - 3)]
    assert "for island b, which has not computed step 4" in (tmp_path / "a" / "logs" / "rank-0.log").read_text()


@FULL
def test_training_thread_that_loops_ends_its_island_and_the_other_takes_over(tmp_path):
    with LaunchedIslands(tmp_path, {"a": "one", "b": "one"}, SHORT) as islands:
        islands.reach("a", AT)
        islands.loop("b")
        assert islands.wait_for_end("b") == 75
        check_taken_over(islands, "a", "b")
        assert re.search(r"waits \d+ s for island b, which has not computed step \d+\n", islands.console("a"))
        first, second = islands.console("b").partition("error: hang: ")[2].splitlines()[:2]
    assert first == f"island b: nothing has moved for {DEADLINE_S} s (hardware.timeout_s)"
    assert second.startswith("  rank 0 does nothing: ") and "driver.py:" in second and "in forward_backward" in second


def lose_weights(args: list[str]) -> int:
    """For `started_ranks`: an island that is told that its source of weights is lost."""
    Tasks.next = lambda self: Task("stop", reason=LOST_WEIGHTS)
    return rank_main(args)


def test_island_whose_source_of_weights_is_lost_ends_with_the_code_for_a_restart(tmp_path):
    more = "islands.count=1", f"islands.address=127.0.0.1:{free_port()}", f"run.dir={tmp_path / 'a'}"
    args = [*island_arguments(tmp_path, write_corpus(tmp_path / "corpus.txt"), 3), *more]
    with started_ranks(lose_weights, 1, args) as ((rank,), _):
        rank.join(PATIENCE_S)
    ended = exit_status.read(tmp_path / "a")
    assert (ended.why, ended.code, ended.error) == ("died", 75, LOST_WEIGHTS)


@FULL
def test_rank_that_stops_before_it_sends_ends_its_island_alone(tmp_path):
    """One rank of the other island has everything from the stuck island, the second one has not. It must not be taken
    for the cause of a hang."""
    with LaunchedIslands(tmp_path, {"a": "tp", "b": "tp"}, SHORT) as islands:
        islands.reach("a", AT)
        islands.freeze("b")
        islands.wait_for_line("b", "error: hang: island b: ")
        check_taken_over(islands, "a", "b")
        assert re.search(r"waits \d+ s for island b, which has not sent all gradients", islands.console("a"))
        assert "rank 1 (tp=1) does not answer: dead, or cut off" in islands.console("b")


@FULL
@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_that_is_stopped_ends_its_island_and_the_other_takes_over(rank, tmp_path):
    with LaunchedIslands(tmp_path, {"a": "one", "b": "tp"}, SHORT) as islands:
        islands.reach("a", AT)
        islands.send("b", signal.SIGSTOP, rank)
        check_taken_over(islands, "a", "b")
        assert f"rank {rank} (tp={rank}) does not answer: dead, or cut off" in islands.console("b")


@FULL
def test_one_of_two_islands_that_is_stopped_goes_on_with_the_other(tmp_path):
    """The other one cannot know whether it trains, and waits. The time for which it was stopped is no hang."""
    with LaunchedIslands(tmp_path, {"a": "one", "b": "one"}, SHORT) as islands:
        islands.reach("a", AT)
        islands.send("b", signal.SIGSTOP)
        islands.wait_for_line("a", "waits: 1 of 2 islands (a) cannot go on alone, because b may still train")
        assert islands.step("a") <= islands.step("b") + 1
        _stay_stopped(islands, "b")
        steps_after(islands, "a")
        steps_after(islands, "b")
        assert "without b" not in islands.console("a") and "hang" not in islands.console("b")


@FULL
@pytest.mark.parametrize("mesh", ["one", "tp"])
def test_one_of_three_islands_that_is_stopped_is_lost_and_returns(mesh, tmp_path):
    with LaunchedIslands(tmp_path, {"a": "one", "b": mesh, "c": "one"}, SHORT) as islands:
        islands.reach("a", AT)
        islands.send("b", signal.SIGSTOP)
        islands.wait_for_line("a", " without b: ")
        steps_after(islands, "a")
        _stay_stopped(islands, "b")
        islands.wait_for_line("a", " with b: ")
        steps_after(islands, "b")
        assert "hang" not in islands.console("b")


def _stay_stopped(islands: LaunchedIslands, name: str) -> None:
    """Let an island go on after a time in which its watchdog would have ended it."""
    islands.sleep(DEADLINE_S + 8)
    islands.send(name, signal.SIGCONT)


@FULL
@pytest.mark.parametrize("rank", ["0", "1"])
def test_killed_rank_is_restarted_by_torchrun_and_its_island_returns(rank, tmp_path):
    with LaunchedIslands(tmp_path, {"a": "one", "b": "tp"}, SHORT, restarts=1) as islands:
        islands.reach("a", AT)
        islands.send("b", signal.SIGKILL, rank)
        islands.wait_for_line("a", " without b: a 12 rows")
        islands.wait_for_line("a", " with b: ")
        steps_after(islands, "b")
        assert islands.is_running("a") and islands.is_running("b")
