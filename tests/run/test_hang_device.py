"""Hangs on a GPU: the diagnosis where hosts are ahead of their devices, and runs on a stub of a device that hangs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from ndtrain.mesh.mesh import MeshSpec
from ndtrain.run import exit_status
from ndtrain.run.hang_diagnosis import diagnose
from ndtrain.run.hang_report import Report, as_runs
from tests.lib import helpers
from tests.lib.helpers import arguments, rows, run, write_corpus
from tests.run.test_hang import hang_of

FULL = pytest.mark.full
DEADLINE_S = 6
DRIVER = Path(__file__).parent / "hung_device.py"

# ----------------------------------------------------------------------------------------------------------- diagnosis

SPEC = MeshSpec(("dp", "tp"), (2, 2))
CHANNELS = {"tp01": [0, 1], "tp23": [2, 3], "dp02": [0, 2], "dp13": [1, 3]}


def op(channel: str, number: int, launched: float, waited: float = 0.0, step: int = 3) -> dict:
    """A record of a rank, as in a report; `launched` and `waited` are times."""
    at = {"step": step, "action": "F0", "nbytes": 64, "launched": launched, "waited": waited}
    return {"op": "all_gather", "channel": name(channel), "number": number} | at


def name(channel: str) -> str:
    return f"{channel[:2]} {CHANNELS[channel]}"


def report(rank: int, last: list[dict], pending: list[dict], **completed: int) -> Report:
    """Of a rank whose host is in step 5. It has launched `last`, and all with smaller numbers."""
    counts = {record["channel"]: record["number"] for record in last}
    members = {name(channel): as_runs(ranks) for channel, ranks in CHANNELS.items() if rank in ranks}
    stack = ["/x/ndtrain/step.py:9 in run", "/y/lib.py:3 in sleep"]
    done = {name(channel): number for channel, number in completed.items()}
    return Report(rank, 5, "F2", pending[0] if pending else None, 7.0, counts, members, last, stack, pending, done)


def test_diagnose_names_rank_that_has_not_launched():
    ahead = [op("tp01", n, n, n + 0.5, step=3 + n // 9) for n in range(5, 40)]
    idle = [op("tp23", 9, 1.0)]
    reports = {
        0: report(0, ahead, ahead[:1], tp01=4),
        1: report(1, [op("tp01", 4, 1.0)], [], tp01=4),
        2: report(2, idle, [], tp23=9),
        3: report(3, idle, [], tp23=9),
    }
    lines = diagnose(reports, SPEC).splitlines()
    assert lines[0].startswith(
        "rank 1 (dp=0 tp=1) is waited for: step 5, F2, in no collective, at /y/lib.py:3 in sleep"
    )
    assert lines[1] == (
        "  rank 0 (dp=0 tp=0) waits for rank 1: step 5, F2, waiting 7 s in all_gather 5 over tp [0, 1], launched in "
        "step 3, F0"
    )
    assert len(lines) == 2


def test_diagnose_ignores_message_posted_early():
    """The rank at fault has posted a receive, which its GPU has not completed and nothing waits for."""
    stuck = op("tp01", 5, 1.0, 1.1)
    reports = {
        0: report(0, [stuck], [stuck], tp01=4),
        1: report(1, [op("tp01", 4, 1.0), op("dp13", 2, 2.0)], [], tp01=4),
    }
    assert "rank 1 (dp=0 tp=1) is waited for" in diagnose(reports, SPEC)


def test_diagnose_checks_every_channel_of_device():
    """The oldest operation that is not complete is launched on both its ranks. The next channel's is not."""
    over_dp, over_tp = op("dp02", 3, 1.0, 1.1), op("tp01", 5, 1.05, 1.2)
    reports = {
        0: report(0, [over_dp, over_tp], [over_dp, over_tp], dp02=2, tp01=4),
        1: report(1, [op("tp01", 4, 1.0)], [], tp01=4),
        2: report(2, [over_dp], [over_dp], dp02=2),
        3: report(3, [op("tp23", 6, 1.0)], [], tp23=6),
    }
    lines = [line.strip() for line in diagnose(reports, SPEC).splitlines()]
    assert lines[0].startswith("rank 1 (dp=0 tp=1) is waited for")
    assert any(re.match(r"rank 0 .* waits for rank 1: .* in all_gather 5 over tp", line) for line in lines)


def test_diagnose_follows_chain_of_devices():
    """Rank 3's host is late. Rank 2 waits for it over tp, and has launched what rank 0 waits for behind that."""
    over_dp = [op("dp02", 3, 1.0, 1.1)]
    over_tp, behind = op("tp23", 7, 4.0, 4.1), op("dp02", 3, 5.0, 5.1)
    reports = {
        0: report(0, over_dp, over_dp, dp02=2),
        1: report(1, [op("tp01", 7, 1.0)], [], tp01=7),
        2: report(2, [over_tp, behind], [over_tp, behind], tp23=6, dp02=2),
        3: report(3, [op("tp23", 6, 1.0)], [], tp23=6),
    }
    lines = [line.strip() for line in diagnose(reports, SPEC).splitlines()]
    assert lines[0].startswith("rank 3 (dp=1 tp=1) is waited for")
    assert lines[1].startswith("rank 0 (dp=0 tp=0) waits for rank 2: step 5, F2, waiting 7 s in all_gather 3 over dp")
    assert lines[2].startswith("rank 2 (dp=1 tp=0) waits for rank 3: step 5, F2, waiting 7 s in all_gather 7 over tp")


def test_diagnose_names_operation_launched_by_all():
    stuck = [op("tp01", 5, 1.0, 1.1), op("tp01", 6, 2.0, 2.1)]
    reports = {r: report(r, stuck, stuck[:1], tp01=4) for r in (0, 1)}
    lines = diagnose(reports, MeshSpec(("tp",), (2,))).splitlines()
    assert lines[0] == (
        "all_gather 5 over tp [0, 1], launched in step 3, F0, by all its ranks, is not complete on ranks 0, 1: "
        "a link or a kernel before it hangs"
    )
    assert not any("is waited for" in line for line in lines)


def test_diagnose_blames_nobody_for_what_is_behind_a_hanging_operation():
    """All ranks have launched two operations, on two channels. The first one hangs on all GPUs."""
    first, second = op("tp01", 5, 1.0, 1.1), op("dp02", 6, 2.0, 2.1) | {"channel": "dp [0, 1]"}
    both = {"counts": {"tp [0, 1]": 5, "dp [0, 1]": 6}, "members": {"tp [0, 1]": [[0, 2, 1]], "dp [0, 1]": [[0, 2, 1]]}}
    both |= {"completed": {"tp [0, 1]": 4, "dp [0, 1]": 5}}
    reports = {r: replace(report(r, [first, second], [first, second]), **both) for r in (0, 1)}
    lines = diagnose(reports, MeshSpec(("tp",), (2,))).splitlines()
    assert lines[0].startswith("all_gather 5 over tp [0, 1], launched in step 3, F0, by all its ranks, is not complete")
    assert not any("waits for rank" in line for line in lines)


def test_report_reached_is_step_of_device():
    assert report(0, [op("tp01", 5, 1.0, 1.1)], [op("tp01", 5, 1.0, 1.1)]).reached == 3
    assert report(0, [op("tp01", 5, 1.0)], []).reached == 5


# -------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


def train(fault: str, victim: int, mesh: str, deadline_s: float, tmp_path: Path, corpus: Path):
    overrides = [*mesh.split(), f"hardware.timeout_s={deadline_s}", "model.num_hidden_layers=2", "train.steps=4"]
    args = arguments(tmp_path / "run", corpus, *overrides)
    with mock.patch.object(helpers, "MODULE", [str(DRIVER), fault, str(victim)]):
        return run(args, tmp_path, 2, timeout=120)


CASES = [
    ("late", "mesh.tp=2", 1, "tp"),
    pytest.param("late", "mesh.pp=2", 0, "pp", marks=FULL),
    pytest.param("late", "mesh.fsdp=2 mesh.zero=3", 0, "fsdp", marks=FULL),
    pytest.param("launch", "mesh.tp=2", 0, "tp", marks=FULL),
    pytest.param("link", "mesh.tp=2", 1, "tp", marks=FULL),
]


@pytest.mark.parametrize(("fault", "mesh", "victim", "axis"), CASES)
@pytest.mark.full
def test_device_hang_is_diagnosed_by_rank_and_axis(fault, mesh, victim, axis, tmp_path, corpus):
    """Nothing blocks the hosts. All is as on a CPU: who, when, the exit code, exit.json and the ranks' files."""
    folder = tmp_path / "run"
    done = train(fault, victim, mesh, DEADLINE_S, tmp_path, corpus)
    diagnosis = hang_of(done, folder, tmp_path, DEADLINE_S, 2)
    other = json.loads((folder / "logs" / f"hang-rank-{1 - victim}.json").read_text())
    assert other["pending"][0]["channel"].startswith(f"{axis} ") and other["pending"][0]["step"] == 3
    assert re.search(rf"over {axis} [^,]*, [^,]*, launched in step 3, \w+\(microbatch", diagnosis), diagnosis
    first = diagnosis.split("\n")[1].strip()
    if fault == "link":
        assert first.endswith("is not complete on ranks 0, 1: a link or a kernel before it hangs"), diagnosis
        return
    at = r"step 3, F\(microbatch 0, stage 0\), op \d+, in no collective"
    assert re.match(rf"rank {victim} \([^)]*\) is waited for: {at}", first), diagnosis
    assert f"rank {1 - victim} " in diagnosis.split("\n")[2] and f"waits for rank {victim}: " in diagnosis, diagnosis
    if fault == "launch":
        assert other["counts"][other["pending"][0]["channel"]] > other["pending"][0]["number"] + 10, "it went on"


@FULL
def test_slow_device_is_no_hang(tmp_path, corpus):
    """Three operations of 5 s under a deadline of 8 s: the host waits 15 s for the result of the step."""
    done = train("slow", 0, "mesh.tp=2", 8, tmp_path, corpus)
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "run")) == 4 and exit_status.read(tmp_path / "run").why == "finished"
    ended_at = (tmp_path / "run" / "exit.json").stat().st_mtime
    assert ended_at - float((tmp_path / "failed-at").read_text()) > 15
