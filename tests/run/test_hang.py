"""The flight recorder, the hang watchdog and the detection of stragglers."""

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ndtrain.mesh.collectives import all_gather
from ndtrain.mesh.flight_recorder import RECORDER, Recorder
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.run import exit_status
from ndtrain.run.hang_diagnosis import diagnose
from ndtrain.run.hang_report import Report, as_runs
from ndtrain.run.hang_watchdog import CALLED, HangWatchdog
from ndtrain.run.rendezvous import Meeting
from ndtrain.run.signed_store import SignedStore
from tests.lib import helpers
from tests.lib.helpers import arguments, processes, rows, run, write_corpus
from tests.lib.ranks import run_ranks

FULL = pytest.mark.full
DEADLINE_S = 6

# ------------------------------------------------------------------------------------------------------------ recorder


def group(name: str, rank: int, n: int) -> SimpleNamespace:
    return SimpleNamespace(group_name=name, rank=lambda: rank, size=lambda: n)


def test_the_recorder_counts_by_channel_and_keeps_the_last():
    recorder = Recorder(kept=3)
    recorder.name_group(group("g", 1, 2), "tp", [4, 6])
    recorder.begin(7)
    recorder.action = "F"
    records = [recorder.launch("all_reduce", group("g", 1, 2), 8) for _ in range(4)]
    sent = recorder.launch("send", group("g", 1, 2), 8, to=0)
    received = recorder.launch("receive", group("g", 1, 2), 8, source=0)
    exchanged = recorder.launch("shift", group("g", 1, 2), 8, to=0, source=0)
    assert [r.number for r in records] == [1, 2, 3, 4] and {r.channel for r in records} == {"tp [4, 6]"}
    assert sent.channel == "tp [4, 6] 1 to 0" and recorder.members[sent.channel] == (6, 4)
    assert received.channel == "tp [4, 6] 0 to 1" and recorder.members[received.channel] == (4, 6)
    assert exchanged.channel == "tp [4, 6] 0 with 1"
    assert list(recorder.last) == [sent, received, exchanged] and (sent.step, sent.action) == (7, "F")
    assert recorder.where == "F"
    recorder.op = 4
    assert recorder.where == "F, op 4"


def test_recorder_knows_longest_wait():
    recorder = Recorder()
    recorder.begin(1)
    assert recorder.longest_wait() == (None, 0.0)
    work = recorder.launch("all_reduce", group("g", 0, 2), 8)
    recorder.enter(work)
    time.sleep(0.05)
    with recorder.waiting("data"):
        waited_for, seconds = recorder.longest_wait()
    assert waited_for is work and seconds >= 0.05
    recorder.leave(work)
    assert recorder.longest_wait() == (None, 0.0) and recorder.busy() < 0.04


def gather_once() -> tuple[list, int]:
    out = torch.empty(2)
    before = len(RECORDER.last)
    all_gather(out, torch.ones(1), torch.distributed.group.WORLD).wait()
    return [(r.op, r.nbytes, r.ended >= r.waited > 0) for r in list(RECORDER.last)[before:]], len(RECORDER._waits)


def test_collectives_are_recorded():
    assert run_ranks(gather_once, 2) == [([("all_gather", 8, True)], 0)] * 2


# ----------------------------------------------------------------------------------------------------------- diagnosis

SPEC = MeshSpec(("dp", "tp"), (2, 2))


def record(op: str = "all_gather", channel: str = "tp [0, 1]", number: int = 5, nbytes: int = 64, **at) -> dict:
    return {
        "op": op,
        "channel": channel,
        "number": number,
        "nbytes": nbytes,
        "step": 3,
        "action": "F0",
        "launched": 1.0,
    } | at


def report(rank: int, waits: dict | None = None, last: tuple = (), **counts: int) -> Report:
    channels = {"tp01": ("tp [0, 1]", [0, 1]), "tp23": ("tp [2, 3]", [2, 3]), "dp02": ("dp [0, 2]", [0, 2])}
    of = {channels[key][0]: n for key, n in counts.items()}
    stack = ["/x/ndtrain/step.py:9 in run", "/y/lib.py:3 in sleep"]
    members = {name: as_runs(ranks) for name, ranks in channels.values()}
    return Report(rank, 3, "F0", waits, 6.0, of, members, list(last), stack)


def test_diagnose_names_rank_that_waits_for_nobody():
    reports = {0: report(0, record(), tp01=5), 1: report(1, tp01=4)}
    reports |= {
        2: report(2, record(channel="dp [0, 2]", number=2), dp02=2, tp23=5),
        3: report(3, record(channel="tp [2, 3]", number=6), tp23=6),
    }
    lines = diagnose(reports, SPEC).splitlines()
    assert lines[0].startswith(
        "rank 1 (dp=0 tp=1) is waited for: step 3, F0, in no collective, at /y/lib.py:3 in sleep"
    )
    assert "/x/ndtrain/step.py:9 in run" in lines[0]
    assert "rank 0 (dp=0 tp=0) waits for rank 1: step 3, F0, waiting 6 s in all_gather 5 over tp [0, 1]" in lines[1]
    assert any("rank 2 (dp=1 tp=0) waits for rank 0" in line for line in lines), "a chain of waits"
    assert not any(re.match(r" *rank [023].* is waited for", line) for line in lines)


def test_diagnose_shows_disagreement_after_skipped_collective():
    one = [record(number=4), record("reduce_scatter", number=5), record("all_gather", number=6)]
    other = [record(number=4), record("all_gather", number=5)]
    reports = {0: report(0, one[-1], tuple(one), tp01=6), 1: report(1, None, tuple(other), tp01=5)}
    line = diagnose(reports, MeshSpec(("tp",), (2,))).splitlines()[0]
    assert line.startswith("ranks disagree on operation 5 over tp [0, 1]")
    assert "rank 0 (tp=0): reduce_scatter of 64 bytes, step 3 in F0" in line
    assert "rank 1 (tp=1): all_gather of 64 bytes, step 3 in F0" in line


def test_diagnose_names_ranks_without_report():
    lines = diagnose({r: report(r, record(number=9), tp01=9) for r in (0,)}, SPEC).splitlines()
    assert lines[0] == "ranks 1, 2, 3 do not answer: dead, or cut off"
    assert "rank 0 (dp=0 tp=0) waits for rank 1" in lines[1]


# --------------------------------------------------------------------------------------------------- between the ranks


def test_report_round_trips_as_json():
    sent = report(1, record(), (record(), record(waited=2)), tp01=5)
    assert Report.from_json(json.loads(json.dumps(asdict(sent))), 1, 4) == sent


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2}, {"step": "3"}, {"waits": {"op": "x"}}, {"last": [{}]}, {"last": [None]}, {"counts": {"tp": []}},
        {"members": {"tp": 7}}, {"stack": [1]}, {"pending": [record()]}, {"more": 1},
    ],
)  # fmt: skip
def test_report_from_json_refuses_other_values(change):
    with pytest.raises(ValueError, match="not a report of rank 1"):
        Report.from_json(asdict(report(1, record())) | change, 1, 4)
    for other in ("text", [], {}, None):
        with pytest.raises(ValueError, match="not a report of rank 1"):
            Report.from_json(other, 1, 4)


class Signed(Meeting):
    """A meeting whose messages are signed with a token of the test."""

    @property
    def messages(self) -> SignedStore:
        return SignedStore(self.store, self.prefix, "secret")


@pytest.fixture
def watchdog(tmp_path, monkeypatch) -> Iterator[HangWatchdog]:
    """That of rank 0, whose end is an event."""
    store, ended = dist.HashStore(), threading.Event()
    monkeypatch.setattr(HangWatchdog, "_end", lambda self: ended.set())
    watchdog = HangWatchdog(Signed(store, "attempt"), SPEC, 0, tmp_path, 0.5)
    watchdog.store, watchdog.ended = store, ended
    yield watchdog
    watchdog.close()


@pytest.fixture
def of_island(tmp_path, monkeypatch) -> Iterator[HangWatchdog]:
    """The watchdog of an island in its first step, whose end is an event."""
    ended = threading.Event()
    monkeypatch.setattr(HangWatchdog, "_end", lambda self: ended.set())
    RECORDER.begin(1)
    watchdog = HangWatchdog(
        Signed(dist.HashStore(), "attempt"), MeshSpec(("dp",), (1,)), 0, tmp_path, 0.5, island="east"
    )
    watchdog.ended = ended
    yield watchdog
    watchdog.close()
    RECORDER.step = 0


def test_island_that_does_nothing_ends_and_names_itself(of_island):
    for index in range(20):  # twice the deadline, in which something moves
        RECORDER.op = index
        assert not of_island.ended.wait(0.05)
    assert of_island.ended.wait(20)
    own = Report.of(RECORDER, 0, threading.get_ident())
    of_island._diagnose(own, {0: own})
    first, second = exit_status.read(of_island.run_dir).error.splitlines()
    assert first == "hang: island east: nothing has moved for 0.5 s (hardware.timeout_s)"
    assert second.startswith("  rank 0 does nothing: step 1, begin, op 19, in no collective, at ")


def test_island_that_only_waits_shortly_does_not_end(of_island):
    for _ in range(20):
        with RECORDER.waiting("other islands"):
            assert not of_island.ended.wait(0.05)


def test_time_for_which_the_process_was_stopped_is_no_hang(of_island, monkeypatch):
    """Its clock jumps, and no check comes in between."""
    now, jump = time.monotonic, 0.0
    monkeypatch.setattr("ndtrain.run.hang_watchdog.time", SimpleNamespace(monotonic=lambda: now() + jump))
    assert not of_island.ended.wait(0.2)
    jump = 100.0
    assert not of_island.ended.wait(0.3)
    assert of_island.ended.wait(20)  # since it goes on, it has done nothing for the deadline


def test_alerted_rank_names_caller(watchdog):
    SignedStore(watchdog.store, "attempt", "secret").put(CALLED, 3)
    assert watchdog.ended.wait(20)
    watchdog._diagnose(report(0), {})
    text = exit_status.read(watchdog.run_dir).error
    assert text.startswith("hang: alert from rank 3: nothing has moved for 0.5 s (hardware.timeout_s)\n")


class Blocked(Meeting):
    """A meeting whose connection is in use for ever, by another thread."""

    @property
    def messages(self) -> SignedStore:
        threading.Event().wait()

    def reconnected(self) -> Meeting:
        return Signed(self.store, self.prefix)


def test_rank_whose_connection_is_in_use_opens_another_one(watchdog, monkeypatch):
    monkeypatch.setattr("ndtrain.run.hang_watchdog.ANSWER_S", 0.1)
    assert watchdog._answering() is watchdog._meeting
    watchdog._meeting = Blocked(watchdog.store, "attempt")
    assert isinstance(watchdog._answering(), Signed)


@pytest.mark.parametrize(("token", "caller"), [("guess", 3), ("secret", 4), ("secret", "3"), ("secret", 0)])
def test_alert_is_ignored_unless_another_rank_has_signed_it(watchdog, token, caller):
    SignedStore(watchdog.store, "attempt", token).put(CALLED, caller)
    assert not watchdog.ended.wait(0.3)


# ----------------------------------------------------------------------------------------------------- a run that hangs

DRIVER = """
import os, runpy, sys, time
from pathlib import Path

import ndtrain.parallel.grad_sums, ndtrain.parallel.fsdp, ndtrain.parallel.tp, ndtrain.optim
from ndtrain.mesh.collectives import Pending
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.engine.executor import Executor

fault, victim = sys.argv[1:3]
mine = os.environ["RANK"] == victim
forward, done = Executor._forward, []


def due():
    if not mine or RECORDER.step != 3 or done:
        return False
    done.append(Path("failed-at").write_text(str(time.time())))
    return True


def sleeping(self, run, microbatch):
    if due():
        time.sleep(600)
    return forward(self, run, microbatch)


def skipping(call):
    return lambda *args: Pending(()) if RECORDER.action[0] in "FBg" and due() else call(*args)


if fault == "sleep":
    Executor._forward = sleeping
else:
    module, name = fault.split(".")
    module = getattr(ndtrain.parallel, module)
    setattr(module, name, skipping(getattr(module, name)))
del sys.argv[1:3]
runpy.run_module("ndtrain.train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


CASES = [
    ("sleep", "mesh.tp=2", 2, 1, "tp"),
    pytest.param("sleep", "mesh.pp=2", 2, 0, "pp", marks=FULL),
    pytest.param("sleep", "mesh.fsdp=2 mesh.tp=2", 4, 3, "tp", marks=FULL),
    pytest.param("grad_sums.all_reduce", "mesh.dp=2", 2, 1, "dp", marks=FULL),
    pytest.param("tp.all_reduce", "mesh.tp=2 tp.sequence_parallel=false", 2, 0, "tp", marks=FULL),
]


def hang_of(done: subprocess.CompletedProcess, folder: Path, tmp_path: Path, deadline_s: float, ranks: int) -> str:
    """Asserts that a run ended by a hang in its third step: in time, all of it, with exit.json and a file of each rank.
    Returns the diagnosis."""
    assert done.returncode != 0 and not processes(tmp_path) and len(rows(folder)) == 2
    reported_at = (folder / "exit.json").stat().st_mtime
    assert reported_at - float((tmp_path / "failed-at").read_text()) < deadline_s + 10
    assert done.stderr.count("error: hang:") == 1, done.stderr
    status = exit_status.read(folder)
    assert (status.why, status.code, status.requeue, status.step) == ("hang", 75, True, 2)
    assert {p.name for p in folder.glob("logs/hang-rank-*.json")} == {f"hang-rank-{r}.json" for r in range(ranks)}
    return done.stderr.partition("error: hang:")[2].partition("the last actions")[0]


@pytest.mark.parametrize(("fault", "mesh", "ranks", "victim", "axis"), CASES)
def test_hang_is_diagnosed_by_rank_and_axis(fault, mesh, ranks, victim, axis, tmp_path, corpus):
    """One rank sleeps in the third step, or leaves a collective out."""
    (tmp_path / "driver.py").write_text(DRIVER)
    folder = tmp_path / "run"
    args = arguments(folder, corpus, *mesh.split(), f"hardware.timeout_s={DEADLINE_S}", "model.num_hidden_layers=2")
    with mock.patch.object(helpers, "MODULE", [str(tmp_path / "driver.py"), fault, str(victim)]):
        done = run(args, tmp_path, ranks, timeout=120)
    diagnosis = hang_of(done, folder, tmp_path, DEADLINE_S, ranks)
    assert diagnosis.split("\n")[1] in exit_status.read(folder).error
    last = json.loads((folder / "logs" / f"hang-rank-{victim}.json").read_text())
    assert last["rank"] == victim and last["step"] == 3 and last["last"]
    named = re.search(rf"rank {victim} \([^)]*\)", diagnosis)
    assert named and f"over {axis} " in diagnosis and "step 3" in diagnosis, diagnosis
    if fault == "sleep":
        where = r"step 3, F\(microbatch 0, stage 0\), op \d+, in no collective"
        assert re.search(rf"{re.escape(named[0])} is waited for: {where}", diagnosis), diagnosis
        assert "in sleeping" in last["stack"][-1]
    else:
        assert f"rank {victim}" in diagnosis.split("\n")[1], diagnosis
