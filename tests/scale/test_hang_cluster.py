"""The diagnosis of hangs of many ranks, from the messages that they exchange through a store."""

import json
import threading
from collections.abc import Callable, Collection
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lab.scale.counted_store import CountedStore
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.run import hang_watchdog
from ndtrain.run.hang_diagnosis import diagnose
from ndtrain.run.hang_report import NEAR, Report
from ndtrain.run.hang_watchdog import HangWatchdog
from ndtrain.run.signed_store import SignedStore
from tests.scale.hung_cluster import Call, Cluster

SIZES = {  # ranks -> sizes of pp, dp, fsdp, cp, tp
    64: (2, 2, 4, 1, 4),
    2048: (8, 1, 32, 1, 8),
    16384: (16, 1, 128, 1, 8),
}
REPORT_BYTES = 1500
Program = list[Call]


def sleeps(step: Program) -> Program:
    return step[:2]


def leaves_one_out(step: Program) -> Program:
    return step[:2] + step[3:]


def spec_of(ranks: int) -> MeshSpec:
    return MeshSpec(("pp", "dp", "fsdp", "cp", "tp"), SIZES[ranks])


def diagnosed(cluster: Cluster, missing: Collection[int] = ()) -> tuple[str, CountedStore, int]:
    """Return the diagnosis, the store as the reporting rank has used it, and the most bytes of a rank's report."""
    store = dist.HashStore()
    messages, counted = SignedStore(store, "attempt", "secret"), CountedStore(store)
    own = {report.rank: report for report in cluster.reports() if report.rank not in missing}
    sent = {rank: asdict(report.brief()) for rank, report in own.items()}
    messages.put_all({f"hang/report/{rank}": report for rank, report in sent.items()})
    reporter = min(own)

    def answer() -> None:
        places = hang_watchdog._places(messages.wait("hang/asked", 60))
        records = {rank: report.near(places) for rank, report in own.items() if rank != reporter}
        messages.put_all({f"hang/records/{rank}": found for rank, found in records.items() if found})

    others = threading.Thread(target=answer)
    others.start()
    watchdog = SimpleNamespace(spec=cluster.spec, rank=reporter)
    reports = HangWatchdog._gather(watchdog, own[reporter], SignedStore(counted, "attempt", "secret"))
    others.join()
    text = diagnose(reports, cluster.spec)
    return text, counted, max(len(json.dumps(report)) for report in sent.values())


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """One process answers for all ranks, so answers come later than from real ranks."""
    monkeypatch.setattr(hang_watchdog, "ANSWERS_S", 60.0)


@pytest.mark.parametrize("ranks", [64, *(pytest.param(n, marks=pytest.mark.full) for n in (2048, 16384))])
@pytest.mark.parametrize("fault", [sleeps, leaves_one_out])
def test_victim_is_named_with_step_action_and_axis(ranks: int, fault: Callable[[Program], Program]):
    victim = ranks // 3
    spec = spec_of(ranks)
    text, counted, nbytes = diagnosed(Cluster(spec, victim, fault))
    first = text.splitlines()[0]
    named = f"rank {victim} ({spec.where(victim)})"
    if fault is sleeps:
        assert first.startswith(f"{named} is waited for: step 3, F, in no collective"), first
    else:
        assert first.startswith("ranks disagree on operation ") and " over tp [" in first, first
        assert f"{named}: all_gather of 1,048,576 bytes, step 3 in B" in first, first
    assert "over tp [" in text and nbytes < REPORT_BYTES
    assert counted.operations.total() < 100, counted.operations


@pytest.mark.parametrize("ranks", [64, *(pytest.param(n, marks=pytest.mark.full) for n in (2048, 16384))])
def test_dead_rank_is_named(ranks: int):
    victim, spec = ranks // 3, spec_of(ranks)
    text, _, _ = diagnosed(Cluster(spec, victim, sleeps), missing=[victim])
    first, *rest = text.splitlines()
    assert first == f"rank {victim} ({spec.where(victim)}) does not answer: dead, or cut off"
    assert any(f"waits for rank {victim}: step 3, F, waiting" in line for line in rest), text


def test_ranks_of_a_host_that_is_cut_off_are_named(monkeypatch):
    monkeypatch.setattr(hang_watchdog, "GATHER_S", 0.2)
    text, _, _ = diagnosed(Cluster(spec_of(64), 9, sleeps), missing=range(8, 16))
    assert text.splitlines()[0] == "ranks 8, 9, 10, 11, 12, 13, 14, 15 do not answer: dead, or cut off"


def test_records_are_sent_of_what_is_asked_for_only():
    own = next(iter(Cluster(spec_of(64), 21, sleeps).reports()))
    channel, count = next((c, n) for c, n in own.counts.items() if c.startswith("tp"))
    near = own.near([(channel, count), ("fsdp [9]", 3)])
    assert [r["number"] for r in near] == list(range(max(1, count - NEAR + 1), count + 1))
    assert {r["channel"] for r in near} == {channel}
    assert Report.from_json(asdict(own.brief()), own.rank, 64).with_records("no list").last == []


@pytest.mark.parametrize(
    "runs", [[[0, 65, 1]], [[0, 33, 2]], [[60, 5, 1]], [[3, 2, -4]], [[0, 0, 1]], [[0, 1]], [0, 1, 1], [[0, "1", 1]], 7]
)
def test_runs_of_ranks_that_do_not_exist_are_refused(runs):
    own = asdict(next(iter(Cluster(spec_of(64), 21, sleeps).reports())).brief())
    channel = next(iter(own["members"]))
    Report.from_json(own, 0, 64)
    with pytest.raises(ValueError, match="not a report of rank 0"):
        Report.from_json(own | {"members": {channel: runs}}, 0, 64)
