"""The trials of `lab.islands`: what they compute from the steps that they see, and the slow network."""

import json
import os
import socket

import pytest

from lab.islands import figures, probe, wide_area
from lab.islands.__main__ import main
from lab.islands.partition import Options as PartitionOptions
from lab.islands.partition import _has_all
from lab.islands.processes import listener, usage
from lab.islands.watch import Finished, RowReader, logged
from lab.islands.wide_area import Line, Network
from ndtrain.arguments import ArgumentError, parse
from tests.lib import namespaces


def row(at: float, island: str, step: int, loss: float = 1.0) -> Finished:
    return Finished(at, island, step, loss, 2.0)


def lines(*steps: tuple[int, float]) -> str:
    return "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in steps)


# ------------------------------------------------------------------------------------------------------- reading


def test_reader_returns_each_row_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)
    assert reader.read() == []
    whole = lines((1, 0.5), (2, 0.25))
    path.write_text(whole[:-3])
    assert [x["step"] for x in reader.read()] == [1]
    path.write_text(whole)
    assert [x["step"] for x in reader.read()] == [2]
    assert reader.read() == []


def test_reader_follows_a_file_that_a_restarted_island_has_rewritten(tmp_path):
    path, part = tmp_path / "metrics.jsonl", tmp_path / "part"
    reader = RowReader(path)
    path.write_text(lines((1, 0.5), (2, 0.25), (3, 0.125)))
    reader.read()
    part.write_text(lines((1, 0.5), (2, 0.25), (3, 0.75), (4, 0.0625)))  # longer than before, and one row differs
    part.replace(path)
    assert [(x["step"], x["loss"]) for x in reader.read()] == [(3, 0.75), (4, 0.0625)]


def test_lines_of_the_log_have_their_time(tmp_path):
    (tmp_path / "logs").mkdir()
    first = "2026-11-30 07:52:01,122 rank 0 INFO first\nTraceback of no use\n"
    (tmp_path / "logs" / "rank-0.log").write_text(first + "2026-11-30 07:52:03,622 rank 0 WARNING second\n")
    (at, first), (later, second) = logged(tmp_path)
    assert (first, second, later - at) == ("first", "second", pytest.approx(2.5))
    assert logged(tmp_path / "nothing") == []


# ------------------------------------------------------------------------------------------------------- figures


def test_rate_counts_a_step_of_several_islands_once_and_finds_the_longest_gap():
    finished = [row(0.0, "a", 1), row(1.0, "a", 2), row(1.5, "b", 2), row(4.0, "b", 3), row(5.0, "a", 3)]
    found = figures.rate(finished, 0.5, 5.5)
    assert (found["steps"], found["steps_per_s"]) == (2, 2 / 5)
    assert (found["longest_gap_s"], found["median_gap_s"]) == (3.0, 3.0)


def test_longest_gap_includes_the_time_after_the_last_step():
    assert figures.rate([row(1.0, "a", 1), row(2.0, "a", 2)], 0.0, 10.0)["longest_gap_s"] == 8.0


def test_steps_with_several_losses_and_steps_done_twice_are_found():
    finished = [row(0.0, "a", 1), row(0.1, "b", 1), row(1.0, "a", 2), row(1.1, "b", 2, loss=1.0 + 2**-52)]
    assert figures.disagreements(finished) == [2]
    assert figures.repeated([*finished, row(2.0, "a", 2)]) == [("a", 2)]


def test_growth_is_the_slope_after_the_settled_time():
    samples = [(100.0, 500.0), *((100.0 + t, 10.0 + t / 3600) for t in range(60, 660, 60))]
    grown = figures.growth(samples, 60.0)
    assert grown["per_hour"] == pytest.approx(1.0) and grown["first"] == pytest.approx(10.0 + 60 / 3600)
    assert figures.growth(samples[:3], 60.0) is None


def test_next_step_is_of_the_named_islands():
    finished = [row(1.0, "a", 1), row(2.0, "b", 1), row(3.0, "a", 2)]
    assert figures.next_step_after(finished, ["a"], 1.5) == 1.5
    assert figures.next_step_after(finished, ["b"], 2.5) is None


def test_rounding_keeps_significant_digits():
    assert figures.rounded({"x": [0.00012345, (123456.0,)], "n": 123456}) == {"x": [0.0001234, [123500.0]], "n": 123456}


def test_epoch_with_all_islands_is_recognised():
    names = ["a", "b", "c"]
    assert _has_all("islands from step 9 with c: a 4, b 4, c 4 rows", names)
    assert not _has_all("islands from step 9 without c: a 6, b 6 rows", names)
    assert not _has_all("waits for an island at 10.0.0.1:29600", names)


# ------------------------------------------------------------------------------------------------------- the command


def test_sides_are_numbers_of_islands():
    assert parse(PartitionOptions, ["sides=2+1+3"]).sides == [2, 1, 3]
    with pytest.raises(ArgumentError, match=r"sides=2: must be the islands of each side"):
        parse(PartitionOptions, ["sides=2"])


def test_unknown_trial_is_refused(capsys):
    assert main(["chrun"]) == 2
    assert "did you mean 'churn'?" in capsys.readouterr().err


@pytest.mark.parametrize("trial", ["churn", "link", "partition", "recovery", "kills"])
def test_each_trial_has_help(trial, capsys):
    assert main([trial, "--help"]) == 0
    assert "  out " in capsys.readouterr().out


def test_listener_of_a_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener(port, [1 << 22, os.getpid()]) == os.getpid()
    assert listener(port, [os.getpid()]) is None


def test_usage_of_a_process():
    used = usage(os.getpid())
    assert used["rss_mib"] > 10 and used["threads"] >= 1 and used["files"] >= 3
    assert usage(1 << 22) is None


# ------------------------------------------------------------------------------------------------------- the network


def frame(target: int, source: int, size: int = 1000) -> bytes:
    address = lambda number: bytes([2, 0, 0, 0, 0, number])
    to = b"\xff" * 6 if target < 0 else address(target)
    return (to + address(source)).ljust(size, b"\0")


def arrivals(network: Network) -> list[tuple[float, int]]:
    """Return (time, card) of all frames under way."""
    found = []
    while (now := network.next_at()) is not None:
        found += [(now, card) for card, _ in network.due(now)]
    return found


def test_frames_leave_one_after_another_and_arrive_after_the_delay():
    network = Network(2, bytes_per_s=1000.0, delay_s=5.0)
    for _ in range(2):
        network.accept(0.0, 0, frame(1, 0))
    # each frame passes two lines in a second each; the second frame waits a second for the first
    assert arrivals(network) == [(7.0, 1), (8.0, 1)]


def test_directions_do_not_disturb_each_other():
    network = Network(2, bytes_per_s=1000.0, delay_s=5.0)
    network.accept(0.0, 0, frame(1, 0))
    network.accept(0.0, 1, frame(0, 1))
    assert sorted(arrivals(network)) == [(7.0, 0), (7.0, 1)]


def test_frames_go_to_all_cards_until_the_place_of_the_target_is_known():
    network = Network(3, bytes_per_s=1e6, delay_s=0.0)
    network.accept(0.0, 0, frame(-1, 0))
    assert {card for _, card in arrivals(network)} == {1, 2}
    network.accept(1.0, 2, frame(0, 2))
    assert [card for _, card in arrivals(network)] == [0]


def test_full_queue_drops_frames():
    line = Line(bytes_per_s=1000.0)  # holds 64 KiB
    left = [line.send(0.0, 1000) for _ in range(100)]
    assert left[:65] == [1.0 + i for i in range(65)] and set(left[65:]) == {None}
    assert line.send(10.0, 1000) == 66.0


@pytest.mark.full
@pytest.mark.skipif(bool(namespaces.missing() or wide_area.missing()), reason="no network namespaces here")
def test_programs_see_the_delay_and_the_bandwidth():
    with namespaces.hosts(2) as hosts, wide_area.wide_area(hosts, mbit=20, delay_ms=10):
        link = probe.measure(*hosts, megabytes=5)
    assert 20 <= link["round_trip_ms"] < 60 and 10 < link["mbit"] <= 20
