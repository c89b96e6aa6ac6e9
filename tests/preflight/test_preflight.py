"""The preflight: clean where nothing is wrong; what is wrong comes with the name of the rank that it is wrong on."""

import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ndtrain.checkpoint.elements import checkpoint_bytes
from ndtrain.config import Config, MeshConfig, load_config, resolve, world_from_env
from ndtrain.mesh import collectives
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.parallel.build import state_plan
from ndtrain.preflight import coordinator, host, links, network, report, storage
from ndtrain.preflight import run as preflights
from ndtrain.preflight.rank_context import RankContext
from ndtrain.preflight.report import Ranks, Row, Status, show, usual_rate
from ndtrain.run import cli, listeners
from ndtrain.run.signed_store import SignedStore
from tests.lib import namespaces
from tests.lib.disks import tmpfs
from tests.lib.helpers import arguments, given_process_group, one_error, wait_for
from tests.lib.ranks import run_ranks, started_ranks

ALONE = ["ranks", "mesh", "versions", "devices", "matmul", "disk space", "storage", "one folder"]
RATES = ("matmul", "storage", "links")  # on a busy machine these may be worth a warning
SHORT = "hardware.timeout_s=4"


class Cell(NamedTuple):
    result: str
    text: str


class Said(NamedTuple):
    """The result of a preflight on one rank."""

    code: int
    out: str
    err: str

    @property
    def table(self) -> dict[str, Cell]:
        return read_table(self.out)

    @property
    def failed(self) -> dict[str, str]:
        return {check: cell.text for check, cell in self.table.items() if cell.result == "FAILED"}


def read_table(out: str) -> dict[str, Cell]:
    """check -> its result, and figure and notes in lines."""
    lines = out.splitlines()
    head = next(line for line in lines if all(word in line for word in ("check", "result", "figure")))
    cuts = [head.index(word) for word in ("check", "result", "figure")]
    cells: dict[str, Cell] = {}
    for line in lines[lines.index(head) + 2 :]:
        check, result, text = (line[a:b].strip() for a, b in zip(cuts, [*cuts[1:], None], strict=True))
        if not line.strip():
            break
        if check:
            last = check
            cells[check] = Cell(result, text)
        else:
            cells[last] = cells[last]._replace(text=f"{cells[last].text}\n{text}")
    return cells


def arguments_of(folder: Path, *overrides: str) -> list[str]:
    return arguments(folder / "run", folder / "no corpus is read", "train.global_batch=12", *overrides)


Spoil = Callable[[], Any]  # gives a context in which a rank is not as it should be


def examine(folder: Path, overrides: list[str], spoil: Spoil | None, rank: int) -> Said:
    """For `run_ranks`: the preflight on one rank; within `spoil()` on rank `rank`."""
    me, _, world = world_from_env()
    store = lambda *_: SignedStore(dist.FileStore(str(folder / "preflight-store"), world), "preflight")
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(coordinator, "open_store", store) if world > 1 else nullcontext(),
        given_process_group(),
        redirect_stdout(out),
        redirect_stderr(err),
        spoil() if spoil and me == rank else nullcontext(),
    ):
        code = cli.main(preflights.preflight, arguments_of(folder, *overrides))
    return Said(code, out.getvalue(), err.getvalue())


def leader(folder: Path, n: int, overrides: list[str], spoil: Spoil | None = None, code: int = 1) -> Said:
    """The output of rank 0 of n. All ranks have the same exit status, and the others print nothing."""
    said = run_ranks(examine, n, folder, overrides, spoil, 1)
    assert [s.code for s in said] == [code] * n, "\n".join(s.out + s.err for s in said)
    assert not any(s.out or s.err for s in said[1:])
    return said[0]


# --------------------------------------------------------------------------------------------------------------- clean


CLEAN = {
    (1,): [],
    (2, "mesh.fsdp=2"): ["collectives over fsdp", "links over fsdp"],
    (3, "mesh.dp=3", "train.micro_batch=4"): ["collectives over dp", "links over dp"],
    (4, "mesh.dp=2", "mesh.tp=2", "train.micro_batch=2"): [
        "collectives over dp", "collectives over tp", "links over dp", "links over tp"
    ],
    (4, "mesh.fsdp=2", "mesh.cp=-1", "train.micro_batch=2"): [
        "collectives over fsdp", "collectives over cp", "collectives over fsdp x cp", "links over fsdp", "links over cp"
    ],
}  # fmt: skip


def _id(case: Any) -> str:
    return case.__name__ if callable(case) else " ".join(map(str, case))


@pytest.mark.full
@pytest.mark.parametrize("case", CLEAN, ids=_id)
def test_preflight_passes_on_sound_machine(case, tmp_path):
    n, *overrides = case
    said = leader(tmp_path, n, overrides, code=0)
    together = ["connections", "clocks", *CLEAN[case]] if n > 1 else []
    assert list(said.table) == [*ALONE, *together]
    odd = {check: cell for check, cell in said.table.items() if cell.result != "ok"}
    assert all(check.startswith(RATES) and cell.result == "warning" for check, cell in odd.items()), odd
    assert "preflight passed" in said.out and not said.err
    assert not (tmp_path / "run").exists(), "it leaves something behind"


@pytest.mark.full
def test_preflight_leaves_run_unchanged(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    leader(tmp_path, 2, ["mesh.dp=2"], code=0)
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == ["checkpoints", "metrics.jsonl"]


def preflight_of(args: list[str], cwd: Path, ranks: int) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "ndtrain.preflight", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_preflight_under_torchrun_prints_table(tmp_path):
    ended = preflight_of(arguments_of(tmp_path, "mesh.fsdp=2"), tmp_path, 2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = read_table(ended.stdout)
    assert list(table) == [*ALONE, "connections", "clocks", "collectives over fsdp", "links over fsdp"]
    assert str(torch.__version__) in table["versions"].text
    assert ended.stdout.count("preflight passed") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_wrong_mesh_is_one_line_error(ranks, tmp_path, capsys):
    if ranks == 1:
        assert cli.main(preflights.preflight, arguments_of(tmp_path, "mesh.tp=3")) == 2
        out, err = capsys.readouterr()
        assert one_error(err).startswith("mesh tp=3 needs 3 ranks") and not out
        return
    ended = preflight_of(arguments_of(tmp_path, "mesh.tp=3"), tmp_path, ranks)
    assert ended.returncode > 0  # torchrun passes no status on
    assert one_error(ended.stderr).startswith("mesh tp=3 needs 3 ranks")
    assert not ended.stdout


# ----------------------------------------------------------------------------------------------- the odd one, by name


@contextmanager
def changed(where: Any, name: str, change: Callable) -> Iterator[None]:
    """Replaces the function `where.name`: `change` is applied to its result."""
    before = getattr(where, name)
    with mock.patch.object(where, name, lambda *args: change(before(*args))):
        yield


def other_torch():
    return changed(host, "versions", lambda values: values | {"torch": "2.12.1"})


def other_threads():
    return changed(host, "versions", lambda values: values | {"OMP_NUM_THREADS": "7"})


def not_a_number():
    return changed(host, "matmul", lambda product: product.index_fill(0, torch.tensor([3]), float("nan")))


def wrong_product():
    return changed(host, "matmul", lambda product: product + torch.eye(len(product)))


def slow_matmul():
    return changed(host, "matmul", lambda product: (time.sleep(0.1), product)[1])


def wrong_sums():
    before = collectives.all_reduce

    def wrong(full, group):
        pending = before(full, group)
        pending.wait()
        if full.numel() > 1:
            full[full.numel() // 2] += 1
        return pending

    return mock.patch.object(collectives, "all_reduce", wrong)


def damaged_messages():
    before = collectives.send
    damaged = lambda x: x.bitwise_or(64) if x.numel() > 1 else x
    return mock.patch.object(collectives, "send", lambda x, *rest: before(damaged(x), *rest))


def slow_sends():
    """3 MB/s."""
    before = collectives.send
    late = lambda x, *rest: (time.sleep(x.nbytes / 3e6), before(x, *rest))[1]
    return mock.patch.object(collectives, "send", late)


def fast_clock():
    return changed(network, "now", lambda at: at + 5)


def wrong_clock():
    return changed(network, "now", lambda at: at + 3600)


def unwritable():
    return mock.patch.object(storage, "_write_and_read", side_effect=OSError(30, os.strerror(30), "a file"))


ODD = {  # what is wrong on rank 1 of 2 or 4 -> the row, and what it must say
    other_torch: (2, "versions", [f"torch 2.12.1 instead of {torch.__version__}: rank 1 ({{host}}, tp=1)"]),
    not_a_number: (2, "matmul", ["gives NaN or infinity: rank 1 ({host}, tp=1)"]),
    wrong_product: (2, "matmul", ["gives a wrong product: rank 1 ({host}, tp=1)"]),
    slow_matmul: (2, "matmul", ["slow, ", "FLOP/s: rank 1 ({host}, tp=1)"]),
    wrong_sums: (2, "collectives over tp", ["wrong results of all_reduce: rank 1 ({host}, tp=1)"]),
    damaged_messages: (
        4, "links over tp", ["messages arrive damaged: rank 1 ({host}, tp=1) to rank 0 ({host}, tp=0)", "all at rank 1"]
    ),
    slow_sends: (
        4, "links over tp", ["all at rank 1 ({host}, tp=1)\n", "rank 1 ({host}, tp=1) to rank 2 ({host}, tp=2)"]
    ),
    wrong_clock: (2, "clocks", ["+3600.0 s off: rank 1 ({host}, tp=1)"]),
    unwritable: (2, "storage", ["cannot be used (Read-only file system): rank 1 ({host}, tp=1)"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "spoil", [pytest.param(s, marks=[pytest.mark.full] * (s != other_torch)) for s in ODD], ids=_id
)
def test_check_names_odd_rank(spoil, tmp_path):
    n, row, expected = ODD[spoil]
    said = leader(tmp_path, n, [f"mesh.tp={n}"], spoil)
    assert list(said.failed) == [row], said.out
    for text in expected:
        assert text.format(host=os.uname().nodename) in said.failed[row]
    assert f"preflight failed: {row}" in said.out


@pytest.mark.full
@pytest.mark.parametrize("spoil, row", [(other_threads, "versions"), (fast_clock, "clocks")])
def test_warning_does_not_fail_preflight(spoil, row, tmp_path):
    said = leader(tmp_path, 2, ["mesh.tp=2"], spoil, code=0)
    assert said.table[row].result == "warning" and "rank 1 (" in said.table[row].text
    assert "preflight passed; warnings: " in said.out


def another_configuration():
    return changed(host, "_configuration", lambda digits: "0" * len(digits))


@pytest.mark.full
def test_different_configuration_fails_preflight(tmp_path):
    said = leader(tmp_path, 2, ["mesh.tp=2"], another_configuration)
    assert "configuration 00000000 instead of " in said.failed["versions"]


@contextmanager
def another_disk():
    """At the same path."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(RankContext, "run_dir", Path(folder, "run")):
        with mock.patch.object(storage, "PATIENCE_S", 0.1):
            yield
        assert list(Path(folder).iterdir()) == [], "it leaves something behind"


@pytest.mark.full
def test_unshared_run_folder_fails_preflight(tmp_path):
    said = leader(tmp_path, 2, ["mesh.tp=2"], another_disk)
    expected = (
        f"{tmp_path}/run is not the same folder as on rank 0: put run.dir on storage that all hosts share: rank 1 ("
    )
    assert list(said.failed) == ["one folder"] and said.failed["one folder"].startswith(expected)


# -------------------------------------------------------------------------------------------------------------- storage


@pytest.fixture
def disk(tmp_path):
    """disk(options): a tmpfs with these mount options at <tmp>/run; disk(options) again changes them."""
    with tmpfs(tmp_path / "run") as mount:
        yield mount


def test_read_only_run_folder_fails_preflight(disk, tmp_path):
    disk("ro")
    said = leader(tmp_path, 2, ["mesh.tp=2"])
    assert list(said.failed) == ["storage"] and "one folder" not in said.table
    assert said.failed["storage"].startswith(f"run.dir={tmp_path}/run cannot be used (Read-only file system): rank 0 (")
    assert ", rank 1 (" in said.failed["storage"]
    assert said.table["links over tp"].result != "FAILED", "the rest is still checked"


@pytest.mark.full
def test_too_little_disk_space_fails_preflight(disk, tmp_path):
    disk("size=200m")
    overrides = ["mesh.tp=2", "model=llama_small", "checkpoint.keep=2"]
    said = leader(tmp_path, 2, overrides)
    assert list(said.failed) == ["disk space"]
    assert "342 MiB needed for checkpoints of 114 MiB, 200 MiB free" in said.failed["disk space"]
    assert "lower checkpoint.keep=2, or set run.dir: rank 0 (" in said.failed["disk space"]
    disk("size=500m")
    assert leader(tmp_path, 2, overrides, code=0).table["disk space"].result == "ok"


def config(*overrides: str) -> Config:
    return resolve(load_config(["recipe=llama_debug", *overrides]), 1)


def test_planned_bytes_counts_checkpoints_to_keep(tmp_path):
    size = lambda *more: checkpoint_bytes(config(*more).model, state_plan(config(*more)))
    one = size()
    assert size("optim.ema=0.9") * 3 == one * 4
    assert size("precision.params=fp64") == 2 * one
    assert storage.planned_bytes(config("checkpoint.keep=3"), tmp_path) == 4 * one
    kept = config("checkpoint.keep=3", "train.steps=100", "checkpoint.keep_every=30", "optim.warmup=2")
    assert storage.planned_bytes(kept, tmp_path) == 7 * one
    folder = tmp_path / "step-00000010"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    assert storage.planned_bytes(config("checkpoint.keep=3"), tmp_path) == 4 * one - 1000


def test_probe_storage_detects_changed_data(tmp_path):
    cfg = config(f"run.dir={tmp_path}/run")
    context = RankContext(cfg, MeshSpec.of(cfg.mesh), 0, torch.device("cpu"), "nonce", 60)
    assert set(storage.probe_storage(context)) == {"write", "read"}
    storage.file_of(context, 0).unlink()
    with (
        mock.patch("os.pread", lambda fd, n, at: bytes(n)),
        pytest.raises(OSError, match="the data read differs from the data written"),
    ):
        storage.probe_storage(context)


@pytest.mark.full
def test_cleaner_removes_files_of_dead_ranks(tmp_path):
    cfg = config(f"run.dir={tmp_path}/above/run")
    context = RankContext(cfg, MeshSpec.of(cfg.mesh), 0, torch.device("cpu"), "nonce", 60)
    cleaner = storage.Cleaner(context)
    context.run_dir.mkdir(parents=True)
    for rank in (0, 1):
        storage.file_of(context, rank).touch()
    cleaner.remove_file()
    cleaner.remove_folders()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------- no answer


def hangs_in_matmul():
    return mock.patch.object(host, "matmul", lambda a, b: time.sleep(100))


def hangs_between_collectives():
    return mock.patch.object(network, "now", lambda: time.sleep(100))


@pytest.mark.full
@pytest.mark.parametrize(
    "spoil, row, text",
    [
        (hangs_in_matmul, "matmul", "not done within 4 s: rank 1 ("),
        (hangs_between_collectives, "clocks", "not done within 4 s, waiting in all_reduce over "),
    ],
    ids=["alone", "in a collective"],
)
def test_a_rank_that_hangs_is_named_within_the_deadline(spoil, row, text, tmp_path):
    with started_ranks(examine, 2, tmp_path, ["mesh.tp=2", SHORT], spoil, 1) as (_, folder):
        files = [folder / f"result-{r}" for r in range(2)]  # gloo would not let them end before its own deadline
        wait_for(lambda: all(f.exists() for f in files), "both ranks", timeout=30)
        said, other = (pickle.loads(f.read_bytes()) for f in files)
    assert said.code == other.code == 1
    assert text in said.failed[row] and "rank 1 (" in said.failed[row]
    if row == "clocks":
        assert list(said.table)[-1] == "clocks", "nothing goes over broken connections"


def cut_off(folder: Path, overrides: list[str]) -> Said | None:
    """Rank 1 reports nothing from the matmul check on. Returns the output of rank 0."""

    def report_of(self: coordinator.Coordinator, check: str, findings: dict) -> None:
        if check == "matmul":
            raise SystemExit
        before(self, check, findings)

    before = coordinator.Coordinator.report
    with mock.patch.object(coordinator, "MARGIN_S", 1.0), mock.patch.object(preflights, "MARGIN_S", 1.0):
        if world_from_env()[0] == 0:
            return examine(folder, overrides, None, 1)
        with mock.patch.object(coordinator.Coordinator, "report", report_of), pytest.raises(SystemExit):
            examine(folder, overrides, None, 1)
    return None


@pytest.mark.full
def test_unreachable_rank_is_named_below_finished_rows(tmp_path):
    said, _ = run_ranks(cut_off, 2, tmp_path, ["mesh.tp=2", SHORT])
    assert said.code == 1
    assert said.failed == {"matmul": f"no report within 4 s: rank 1 ({os.uname().nodename}, tp=1)"}
    assert list(said.table) == ["ranks", "mesh", "versions", "devices", "matmul"]


def without_rank_0(folder: Path) -> Said | None:
    return examine(folder, ["mesh.tp=2", SHORT], None, 0) if world_from_env()[0] else None


@pytest.mark.full
def test_missing_rank_0_is_reported_by_others(tmp_path):
    _, said = run_ranks(without_rank_0, 2, tmp_path)
    assert said.code == 1 and not said.out
    assert said.err == "error (rank 1): the ranks cannot connect: rank 0 did not connect within 4 s\n"


def ended_by_the_launcher():
    return mock.patch.object(host, "matmul", lambda *args: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)))


@pytest.mark.full
def test_sigterm_prints_rows_finished_so_far(tmp_path):
    (said,) = run_ranks(examine, 1, tmp_path, [], ended_by_the_launcher, 0)
    assert said.code == 1 and list(said.table) == ["ranks", "mesh", "versions", "devices", "the rest"]
    assert said.failed == {"the rest": "stopped by SIGTERM: perhaps another rank has died"}


# ---------------------------------------------------------------------------------------------------------- a slow link


def preflight_on(hosts: list, args: list[str], cwd: Path, nproc: int) -> tuple[int, str]:
    """(exit status, what rank 0 printed)"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = {"module": "ndtrain.preflight", "rdzv_id": f"preflight-{time.monotonic()}"}
    started = [h.torchrun(hosts, nproc, args, cwd, **job, **pipes) for h in hosts]
    said = [p.communicate(timeout=300)[0] for p in started]
    return max(p.returncode for p in started), "".join(said)


@pytest.mark.full
@pytest.mark.skipif(bool(namespaces.missing()), reason=str(namespaces.missing()))
def test_slow_link_between_three_hosts_fails(tmp_path):
    with namespaces.hosts(3) as hosts:
        args = arguments_of(tmp_path, "mesh.fsdp=3", "mesh.tp=2", "train.micro_batch=4")
        code, out = preflight_on(hosts, args, tmp_path, 2)
        table = read_table(out)
        assert code == 0, out
        assert table["mesh"].text == "fsdp=3 (between hosts) tp=2 (within hosts)"
        hosts[1].limit(80)
        code, out = preflight_on(hosts, args, tmp_path, 2)
        failed = {check: cell.text for check, cell in read_table(out).items() if cell.result == "FAILED"}
        assert code != 0 and list(failed) == ["links over fsdp"], out
        assert "all at n1\n" in failed["links over fsdp"]


@pytest.mark.full
@pytest.mark.skipif(bool(namespaces.missing()), reason=str(namespaces.missing()))
def test_slow_link_between_two_hosts_gives_warning(tmp_path):
    """With nothing to compare it with, a link slower than gigabit Ethernet is worth a warning."""
    with namespaces.hosts(2) as hosts:
        hosts[1].limit(80)
        code, out = preflight_on(hosts, arguments_of(tmp_path, "mesh.dp=2"), tmp_path, 1)
        cell = read_table(out)["links over dp"]
        assert code == 0 and cell.result == "warning" and "slower than gigabit Ethernet: rank " in cell.text, out


# ------------------------------------------------------------------------------------------------ what is made of it


def ranks_on(*hosts: str, **sizes: int) -> Ranks:
    ranks = Ranks(MeshSpec.of(MeshConfig(**sizes)))
    ranks.hosts = dict(enumerate(hosts))
    return ranks


def test_ranks_are_described_by_host_and_coordinates():
    ranks = ranks_on(*"aaaabbbb", dp=2, tp=4)
    assert ranks.one(5) == "rank 5 (b, dp=1 tp=1)"
    assert ranks.some([5, 2]) == "rank 2 (a, dp=0 tp=2), rank 5 (b, dp=1 tp=1)"
    assert ranks.some(range(8)) == "every rank"
    assert ranks_on(*"aaaaabbbbb", dp=10).some(range(5, 10)) == "every rank on b"
    assert ranks_on(*"aaaaabbbbb", dp=10).some(range(4, 10)).endswith("rank 7 (b, dp=7) and 2 more")
    assert Ranks(MeshSpec.of(MeshConfig(dp=2))).one(1) == "rank 1 (dp=1)"
    assert ranks.grouped({1: "x", 2: "y", 3: "x"}) == (
        "x: rank 1 (a, dp=0 tp=1), rank 3 (a, dp=0 tp=3)", "y: rank 2 (a, dp=0 tp=2)"
    )  # fmt: skip


@given(st.integers(2, 40))
def test_pairs_by_round_measures_every_link_once(n):
    rounds = links.pairs_by_round(n)
    pairs = [frozenset(pair) for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs)) and set(pairs) == {frozenset((i, (i + 1) % n)) for i in range(n)}
    for one in rounds:
        assert len({r for pair in one for r in pair}) == 2 * len(one), "a rank is in two pairs at a time"


def link_rows(ranks: Ranks, rates: dict[tuple[str, int, int], float]) -> dict[str, Row]:
    by_rank: dict[int, dict] = {r: {"links": [], "damaged": []} for r in ranks.hosts}
    for (axis, source, to), rate in rates.items():
        by_rank[to]["links"].append([axis, source, rate])
    return {row.check: row for row in links.check_links(by_rank, ranks, Config())}


def test_link_rows_compares_links_of_same_kind():
    ranks = ranks_on(*"aabb", dp=2, tp=2)
    rates = {("tp", 0, 1): 1e11, ("tp", 1, 0): 1e11, ("tp", 2, 3): 1e11, ("tp", 3, 2): 1e11}
    across = {("dp", 0, 2): 2e9, ("dp", 2, 0): 2e9, ("dp", 1, 3): 2e9, ("dp", 3, 1): 2e9}
    rows = link_rows(ranks, rates | across)
    assert {row.status for row in rows.values()} == {Status.OK}
    rows = link_rows(ranks, rates | across | {("dp", 1, 3): 5e8})
    assert rows["links over tp"].status == Status.OK and rows["links over dp"].status == Status.FAILED
    assert rows["links over dp"].notes == (
        "500 MB/s, others 2 GB/s: rank 1 (a, dp=0 tp=1) to rank 3 (b, dp=1 tp=1)",
    )  # fmt: skip
    rows = link_rows(ranks, rates | dict.fromkeys(across, 9e7))
    assert rows["links over dp"].status == Status.WARNING and "gigabit" in rows["links over dp"].notes[0]


def test_link_rows_names_one_slow_host_of_three():
    ranks = ranks_on(*"abc", dp=3)
    speed = lambda s, t: 1e7 if 1 in (s, t) else 1e9
    row = link_rows(ranks, {("dp", s, t): speed(s, t) for s in range(3) for t in range(3) if s != t})["links over dp"]
    assert row.status == Status.FAILED and row.notes[0] == "all at rank 1 (b, dp=1)"


def gpu(**changes: Any) -> dict:
    return {"kind": "cuda", "name": "H200", "memory": 100 << 30, "free": 99 << 30} | changes


def device_row(*facts: dict) -> Row:
    return host._devices(dict(enumerate(facts)), ranks_on(*"abcdef"[: len(facts)], dp=len(facts)))


def test_device_row_compares_gpus_of_ranks():
    assert device_row(gpu(), gpu()).status == Status.OK
    row = device_row(gpu(), gpu(name="H100"), gpu())
    assert (row.status, row.notes) == (Status.WARNING, ("H100 instead of H200: rank 1 (b, dp=1)",))
    row = device_row(gpu(), gpu(), gpu(free=50 << 30))
    assert row.status == Status.WARNING
    assert row.notes == ("only 50 GiB of 100 GiB of GPU memory are free: rank 2 (c, dp=2)",)
    row = device_row(gpu(), {"kind": "cpu", "name": "EPYC", "memory": 1 << 30}, gpu())
    assert (row.status, row.notes) == (Status.FAILED, ("cpu instead of cuda: rank 1 (b, dp=1)",))


def test_device_facts_reports_missing_gpu():
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    facts = host.device_facts(torch.device("cpu"), "cuda")
    assert facts["problem"] == "no GPU left for it: 1 ranks on this host, 0 GPUs that torch can use"
    assert "problem" not in host.device_facts(torch.device("cpu"), "auto")


def test_usual_rate_favours_faster_links():
    assert usual_rate([5.0]) == 5 and usual_rate([1.0, 9.0]) == 7 and usual_rate([1, 1, 1, 1, 10, 10]) > 3
    assert usual_rate({0: 3.0, 1: 3.0}.values()) == 3


def test_rates_and_sizes_have_readable_units():
    assert [report.per_second(x) for x in (2.5e12, 1.25e9, 3e6, 2e5)] == ["2.5 TB/s", "1.25 GB/s", "3 MB/s", "0.2 MB/s"]
    assert [report.bytes_of(x) for x in (3 << 40, 5 << 30, 1 << 19)] == ["3 TiB", "5 GiB", "0.5 MiB"]


def test_brackets_in_note_are_printed_literally():
    out = io.StringIO()
    show([Row("clocks", Status.FAILED, "all_reduce over tp [0, 1] [/b]")], out)
    assert "all_reduce over tp [0, 1] [/b]" in out.getvalue()


def test_public_address_gives_warning(monkeypatch):
    ranks = Ranks(MeshSpec(("dp",), (2,)))
    assert host._addresses({0: {"public": []}, 1: {"public": []}}, ranks) == []
    (row,) = host._addresses({0: {"public": []}, 1: {"public": ["8.8.4.4"]}}, ranks)
    assert row.status == Status.WARNING and row.notes == ("listens on the public address 8.8.4.4: rank 1 (dp=1)",)


def test_public_addresses_follow_interface_and_host(monkeypatch):
    """The names of the host are resolved as gloo and the store resolve them."""
    stands_for = {"n0": ["8.8.4.4", "10.0.0.1"], "n1": ["1.1.1.1"], "elsewhere": ["9.9.9.9"]}
    monkeypatch.setattr(listeners, "_addresses", stands_for.get)
    monkeypatch.setattr(listeners, "_is_own", lambda address: address != "9.9.9.9")
    monkeypatch.setattr("socket.gethostname", lambda: "n0")
    monkeypatch.setattr(listeners, "interface_address", lambda name: {"ib0": "192.168.0.1", "eth0": "8.8.4.4"}[name])

    def public(**variables: str) -> list[str]:
        given = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "", "MASTER_ADDR": "elsewhere"}
        for name, value in (given | variables).items():
            monkeypatch.setenv(name, value)
        return listeners.public_addresses()

    assert public() == ["8.8.4.4"] and public(MASTER_ADDR="n1") == ["1.1.1.1", "8.8.4.4"]
    assert public(GLOO_SOCKET_IFNAME="ib0") == [] and public(GLOO_SOCKET_IFNAME="eth0") == ["8.8.4.4"]
    assert public(GLOO_SOCKET_IFNAME="ib0", MASTER_ADDR="n1", LOCAL_WORLD_SIZE="4") == []
