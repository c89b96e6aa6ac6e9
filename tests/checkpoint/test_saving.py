"""Background and synchronous saves write the same bytes, all of one step, whatever happens meanwhile."""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ndtrain import checkpoint
from ndtrain.bench.__main__ import main as bench
from ndtrain.bench.checkpoint import Options, config_of
from ndtrain.checkpoint import CheckpointError, DamagedCheckpoint, Saver, State, saving
from ndtrain.checkpoint.elements import digest
from ndtrain.checkpoint.saver import _Snapshot
from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.observe import peak_memory_bytes, reset_peak_memory
from ndtrain.parallel.build import Stages, build_stages, initialise
from ndtrain.parallel.distribution import Distribution
from tests.lib.disks import tmpfs
from tests.lib.helpers import flip, tensor_bytes, wait_for
from tests.lib.parity import SHAPE, make_batches
from tests.lib.ranks import run_ranks
from tests.lib.stages import RankStages

SMALL = [
    *SHAPE, "model.num_attention_heads=8", "model.num_key_value_heads=2", "model.head_dim=4",
    "model.intermediate_size=56", "train.global_batch=8", "train.micro_batch=2",
]  # fmt: skip
EMA = "optim.ema=0.9"
BUFFERS = ("master", "exp_avg", "exp_avg_sq", "ema")


class Training(RankStages):
    """One rank's stages with something in every buffer."""

    @classmethod
    def of(cls, *overrides: str, background: bool = False) -> "Training":
        run = cls.build([*SMALL, *overrides, f"checkpoint.async_save={background}"])
        initialise(run.stages, run.cfg.run.seed)
        for i, x in enumerate(buffers(run.stages)):
            x.add_(i / 1000)
        return run

    def saver(self, folder: Path) -> Saver:
        return Saver(folder, self.stages, self.mesh, self.cfg)

    def values(self) -> list[Tensor]:
        return [x.clone() for x in buffers(self.stages)]


def buffers(stages: Stages, kinds: Sequence[str] = BUFFERS) -> list[Tensor]:
    """The buffers of one process, without the padding behind its tensors, which no checkpoint has."""
    numel_of = lambda unit: sum(t.local_numel for t in unit.layout.tensors)
    every_buffer = ((unit.buffer(b), numel_of(unit)) for unit in stages.units.units.values() for b in kinds)
    return [x[:numel] for x, numel in every_buffer if x is not None]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@contextmanager
def held_writing() -> Iterator[threading.Event]:
    """Delays all writes until the event is set."""
    go, write = threading.Event(), saving._write_owned

    def held(*args):
        assert go.wait(60)
        write(*args)

    with mock.patch.object(saving, "_write_owned", held):
        yield go
        go.set()


@contextmanager
def late_copying() -> Iterator[None]:
    """Delays the copy until training waits for it."""
    asked, copy, settle = threading.Event(), _Snapshot._copy, Saver.settle

    def late(self: _Snapshot) -> None:
        assert asked.wait(60)
        copy(self)

    def settled(self: Saver) -> None:
        if self._copying:
            asked.set()
        settle(self)

    with mock.patch.object(_Snapshot, "_copy", late), mock.patch.object(Saver, "settle", settled):
        yield


# --------------------------------------------------------------------------------------------------- in the background


def test_background_save_writes_values_of_its_step(tmp_path):
    run, state = Training.of(EMA, background=True), State(1, 10, {"seed": 1}, 3, {"at": [1]})
    saver, before = run.saver(tmp_path), run.values()
    with held_writing() as go:
        assert saver.save(state) == []
        saver.settle()
        for x in buffers(run.stages):
            x.add_(1)
        state.step, state.skipped = 2, 4
        state.stream["at"].append(2)
        assert saver.poll() == [] and checkpoint.list_checkpoints(tmp_path) == []
        go.set()
        (saved,) = saver.wait()
    assert saved.path == tmp_path / "step-00000001" and saved.error is None
    assert saved.seconds > saved.seconds_blocked > 0 and saver.wait() == saver.poll() == []
    assert checkpoint.inspect(saved.path, run.cfg.model) == State(1, 10, {"seed": 1}, 3, {"at": [1]})
    after = run.values()
    assert checkpoint.load(saved.path, run.stages, run.mesh) == []
    assert equal(run.values(), before) and not equal(after, before)


def test_save_waits_for_previous_save_and_returns_it(tmp_path):
    run = Training.of(background=True)
    saver = run.saver(tmp_path)
    with held_writing() as go:
        saver.save(State(1, 0, {}))
        first = run.values()
        threading.Timer(0.3, go.set).start()
        saver.settle()
        for x in buffers(run.stages):
            x.mul_(2)
        began = time.monotonic()
        (saved,) = saver.save(State(2, 0, {}))
    assert saved.step == 1 and time.monotonic() - began > 0.2
    (second,) = wait_for(saver.poll, "the save")
    assert second.step == 2 and second.seconds_blocked > 0.2
    doubled = run.values()
    for path, expected in ((saved.path, first), (second.path, doubled)):
        checkpoint.load(path, run.stages, run.mesh)
        assert equal(run.values(), expected)


MESHES = {"fsdp2": ["mesh.fsdp=2"], "tp2": ["mesh.tp=2"]}
MORE = {
    "zero1": ["mesh.fsdp=2", "mesh.zero=1"],
    "dp2": ["mesh.dp=2"],
    "pp2": ["mesh.pp=2", "schedule=zb_v", "model.num_hidden_layers=4"],
    "cp2": ["mesh.cp=2", "mesh.zero=2"],
}


def train_while_saving(overrides: list[str], folder: str) -> list[float]:
    """On one rank: a step, a synchronous save, a save in the background, and two more steps while the latter is
    written."""
    run = Training.of(EMA, *overrides, background=True)
    for x in buffers(run.stages):
        x.abs_()  # second moments are no less than zero
    step, losses = TrainingStep(run.cfg, run.mesh, run.stages), []
    one_more = lambda: losses.append(step.run(len(losses) + 1, make_batches(run.cfg, run.mesh, 1, "none")).wait().loss)
    one_more()
    saver = run.saver(Path(folder) / "background")
    checkpoint.save(Path(folder) / "at once", run.stages, run.mesh, run.cfg, State(1, 0, {}))
    with held_writing() as go, late_copying():
        saver.save(State(1, 0, {}))
        one_more()
        go.set()
        one_more()
        (saved,) = saver.wait()
    assert saved.error is None and saved.path.parent.name == "background"
    return losses


@pytest.mark.parametrize(
    "mesh", [m if m == "fsdp2" else pytest.param(m, marks=pytest.mark.full) for m in MESHES | MORE]
)
def test_background_and_synchronous_saves_write_the_same_bytes(mesh, tmp_path):
    (losses, other) = run_ranks(train_while_saving, 2, (MESHES | MORE)[mesh], str(tmp_path))
    assert losses == other and len(set(losses)) == 3, "the weights do not change"
    folders = [tmp_path / f / "step-00000001" for f in ("at once", "background")]
    assert tensor_bytes(folders[0]) == tensor_bytes(folders[1])
    states = [json.loads((f / "state.json").read_text()) for f in folders]
    assert states[0]["checksums"] == states[1]["checksums"]


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.fixture
def disk(tmp_path):
    """disk(bytes): mounts a disk of that size at <tmp>/disk; a second call resizes it."""
    with tmpfs(tmp_path / "disk") as mount:
        yield lambda number: mount(f"size={number}")


@pytest.mark.parametrize("background", [False, True])
def test_save_on_full_disk_keeps_older_checkpoint(background, disk, tmp_path):
    run, folder = Training.of(background=background), disk(10_000_000)
    saver = run.saver(folder)
    ended = lambda saves: [(s.step, s.path and s.path.name, s.error) for s in (*saves, *saver.wait())]
    assert ended(saver.save(State(1, 0, {}))) == [(1, "step-00000001", None)]
    disk(sum(p.stat().st_size for p in folder.rglob("*.*")) + 300_000)
    ((step, path, error),) = ended(saver.save(State(2, 0, {})))
    assert (step, path) == (2, None)
    assert error.startswith("checkpoint of step 2 not saved: No space left on device") and "\n" not in error
    assert [p.name for p in folder.iterdir()] == ["step-00000001"]
    checkpoint.inspect(folder / "step-00000001", run.cfg.model)
    disk(10_000_000)
    assert ended(saver.save(State(3, 0, {}))) == [(3, "step-00000003", None)]


def one_of_two_fails(folder: str, background: bool) -> list[tuple]:
    """On one rank: three saves, in the second of which rank 1 cannot write. Every `Saved`."""
    run, write, calls = Training.of("mesh.fsdp=2", background=background), saving._write_owned, []

    def failing(*args):
        calls.append(True)
        if len(calls) == 2 and run.mesh.rank == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")
        write(*args)

    with mock.patch.object(saving, "_write_owned", failing):
        saver = run.saver(Path(folder))
        saves = [s for step in (1, 2, 3) for s in saver.save(State(step, 0, {}))] + saver.wait()
    return [(s.step, s.error) for s in saves]


@pytest.mark.parametrize("background", [False, True])
def test_failed_save_of_one_rank_is_reported_by_all(background, tmp_path):
    results = run_ranks(one_of_two_fails, 2, str(tmp_path), background)
    assert results[0] == results[1]
    assert results[0] == [
        (1, None), (2, "checkpoint of step 2 not saved: Input/output error: disk (rank 1)"), (3, None)
    ]  # fmt: skip
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-00000003", "step-00000001"]


def test_exception_in_save_thread_is_raised(tmp_path):
    saver = Training.of(background=True).saver(tmp_path)
    with mock.patch.object(saving, "_write_owned", side_effect=ZeroDivisionError("a mistake")):
        saver.save(State(1, 0, {}))
        with pytest.raises(ZeroDivisionError, match="a mistake"):
            saver.wait()


def killed(folder: str, when: str) -> tuple[list[str], list[str]]:
    """Runs in a process of its own, whose fork dies in a background save. Returns the content of the folder then, and
    after the next save."""
    folder, run = Path(folder), Training.of(background=True)
    saver = run.saver(folder)
    saver.save(State(1, 0, {}))
    assert saver.wait()[0].error is None
    if (pid := os.fork()) == 0:
        hang_in_a_save(run.saver(folder), when)
    wait_for((folder / ".writing-step-00000002" / "hangs").exists, "the save")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    left = sorted(p.name for p in folder.iterdir())
    checkpoint.inspect(folder / "step-00000001", run.cfg.model)
    assert checkpoint.load(folder / "step-00000001", run.stages, run.mesh) == []
    saver.save(State(3, 0, {}))
    assert saver.wait()[0].error is None
    return left, sorted(p.name for p in folder.iterdir())


def hang_in_a_save(saver: Saver, when: str) -> None:
    name = {
        "before the tensors": "_write_owned",
        "before state.json": "write_json",
        "before the name": "flush_to_disk",
    }[when]
    call = getattr(saving, name)

    def hang(*args):
        folder = Path(args[0]) if Path(args[0]).is_dir() else Path(args[0]).parent
        last = name != "write_json" or args[0].name == "state.json"
        if last and folder.name.startswith(".writing"):
            (folder / "hangs").touch()
            time.sleep(60)
        return call(*args)

    setattr(saving, name, hang)
    saver.save(State(2, 0, {}))
    time.sleep(60)
    os._exit(1)


@pytest.mark.parametrize("when", ["before the tensors", "before state.json", "before the name"])
def test_kill_during_background_save_keeps_older_checkpoint(when, tmp_path):
    ((left, after),) = run_ranks(killed, 1, str(tmp_path), when)
    assert left == [".writing-step-00000002", "step-00000001"]
    assert after == ["step-00000001", "step-00000003"]


# ------------------------------------------------------------------------------------------------------ what is kept


def test_keep_and_keep_every_choose_checkpoints(tmp_path):
    run = Training.of("checkpoint.keep=2", "checkpoint.keep_every=4")
    saver = run.saver(tmp_path)
    for step in range(1, 12):
        saver.save(State(step, 0, {}))
    assert [int(p.name[5:]) for p in checkpoint.list_checkpoints(tmp_path)] == [11, 10, 8, 4]


def test_save_succeeds_if_old_checkpoint_cannot_be_removed(tmp_path):
    run = Training.of("checkpoint.keep=1")
    saver = run.saver(tmp_path)
    saver.save(State(1, 0, {}))
    with mock.patch("ndtrain.checkpoint.directory.remove", side_effect=OSError(errno.EIO, "no")):
        (saved,) = saver.save(State(2, 0, {}))
    assert saved.error is None and len(checkpoint.list_checkpoints(tmp_path)) == 2


def test_ema_is_saved_and_loaded(tmp_path):
    """The EMA is saved and loaded. If the checkpoint has none it starts as the weights; if the run has none it is not
    read."""
    run, plain = Training.of(EMA), Training.of()
    with_it = checkpoint.save(tmp_path / "with", run.stages, run.mesh, run.cfg, State(1, 0, {}))
    without = checkpoint.save(tmp_path / "without", plain.stages, plain.mesh, plain.cfg, State(1, 0, {}))
    saved, averages = run.values(), [n for n in load_file(with_it / "optimizer.safetensors") if n.startswith("ema.")]
    assert sorted(n.removeprefix("ema.") for n in averages) == sorted(load_file(with_it / "model.safetensors"))
    assert not any(n.startswith("ema.") for n in load_file(without / "optimizer.safetensors"))

    (note,) = checkpoint.load(without, run.stages, run.mesh)
    assert "optim.ema" in note and str(without) in note
    assert equal(buffers(run.stages, ["ema"]), buffers(run.stages, ["master"]))
    assert checkpoint.load(with_it, run.stages, run.mesh) == [] and equal(run.values(), saved)
    assert checkpoint.load(with_it, plain.stages, plain.mesh) == []
    assert equal(buffers(plain.stages, ["master"]), saved[::4])

    flip(with_it / "optimizer.safetensors", -1)  # the last tensor is an average
    with pytest.raises(DamagedCheckpoint, match=r"the content of ema\.\S+ does not match its checksum"):
        checkpoint.load(with_it, run.stages, run.mesh)
    assert checkpoint.load(with_it, plain.stages, plain.mesh) == []


def rewrite(path: Path, change) -> None:
    """Changes a state.json and its digest."""
    body = json.loads(path.read_text())
    body.pop("digest")
    change(body)
    path.write_text(json.dumps(body | {"digest": digest(body)}))


def test_state_round_trips_and_other_format_is_refused(tmp_path):
    run, state = Training.of(), State(7, 99, {"corpus": "x", "run.seed": 1}, 2, {"epoch": 1, "at": [3, None]})
    path = checkpoint.save(tmp_path, run.stages, run.mesh, run.cfg, state)
    assert checkpoint.inspect(path, run.cfg.model) == state
    rewrite(path / "state.json", lambda body: (body.pop("skipped"), body.pop("stream")))
    assert checkpoint.inspect(path, run.cfg.model) == State(7, 99, state.order, 0, None)
    rewrite(path / "state.json", lambda body: body.update(format=1))
    with pytest.raises(CheckpointError, match="has format 1, but this version reads format 2"):
        checkpoint.inspect(path, run.cfg.model)


# --------------------------------------------------------------------------------------------------------- who has what


@pytest.mark.parametrize("mesh", [[], ["mesh.tp=2"], ["mesh.tp=4", "mesh.fsdp=2"], ["layout.rules.mlp=null"]], ids=str)
def test_rows_and_runs_cover_elements_of_shard(mesh):
    """The reference is the whole tensor, sliced."""
    cfg = load_config([*SMALL, *mesh])
    cfg = resolve(cfg, cfg.mesh.tp * cfg.mesh.fsdp)
    spec, draw = MeshSpec.of(cfg.mesh), torch.Generator().manual_seed(0)
    for rank in range(spec.world_size):
        layouts = Distribution.of(cfg).layouts(rank)
        for tensor in map(layouts.__getitem__, layouts.names()):
            for _ in range(20):
                start, stop = sorted(torch.randint(0, tensor.local_numel + 1, (2,), generator=draw).tolist())
                whole = torch.arange(tensor.numel).view(tensor.shape)
                mine = whole[tuple(slice(first, first + n) for first, n in tensor.shard)].flatten()[start:stop]
                rows = [
                    at(r.start + i * r.stride, r.length)
                    for r in tensor.row_map.rows(start, stop)
                    for i in range(r.number)
                ]
                assert torch.equal(torch.cat([mine[:0], *rows]), mine), f"rows of {tensor.name} [{start}, {stop})"
                runs = tensor.runs(start, stop)
                assert torch.equal(torch.cat([mine[:0], *(at(r.global_start, r.length) for r in runs)]), mine)
                assert [r.local_start for r in runs] == [sum(r.length for r in runs[:i]) for i in range(len(runs))]


def at(start: int, length: int) -> torch.Tensor:
    return torch.arange(start, start + length)


def save_large(folder: str, world: int) -> None:
    run = config_of(Options(ranks=world, megabytes=330))
    mesh = Mesh(MeshSpec.of(run.mesh), world_from_env()[0], torch.device("cpu"))
    stages = build_stages(run, mesh)
    initialise(stages, run.run.seed)
    checkpoint.save(Path(folder), stages, mesh, run, State(1, 0, {}))


def memory_of_loading(folder: str, world: int) -> tuple[int, int]:
    """On one rank: bytes that the process grew by at most while it loaded, beyond the buffers that it filled, and
    bytes of these."""
    cfg, cpu = config_of(Options(ranks=world, megabytes=330)), torch.device("cpu")
    mesh = Mesh(MeshSpec.of(cfg.mesh), world_from_env()[0], cpu)
    stages = build_stages(cfg, mesh)
    checkpoint.load(Path(folder) / "step-00000001", stages, mesh)  # code and process groups are there
    reset_peak_memory(cpu)
    before = peak_memory_bytes(cpu)
    checkpoint.load(Path(folder) / "step-00000001", stages, mesh)
    grown = peak_memory_bytes(cpu) - before
    return grown, sum(x.nbytes for x in buffers(stages))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 4])
def test_load_needs_little_memory_beyond_shard(ranks, tmp_path):
    run_ranks(save_large, 1, str(tmp_path), 1)
    size = sum(len(b) for b in tensor_bytes(tmp_path / "step-00000001").values())
    for grown, shard in run_ranks(memory_of_loading, ranks, str(tmp_path), ranks):
        print(f"{ranks} ranks: shard {shard / 1e6:.1f} MB, grown by {grown / 1e6:.1f} MB")
        assert size > 300e6 and abs(shard * ranks - size) < 1e6
        assert grown < 0.1 * shard


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tp", "fsdp"])
def test_bench_checkpoint_measures_and_cleans_up(axis, tmp_path, capsys):
    args = ["megabytes=2", "rounds=2", "ranks=2", f"axis={axis}", f"folder={tmp_path}", f"out={tmp_path}/results.json"]
    assert bench(["checkpoint", *args]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert 1e6 < results["bytes"] < 4e6 and results["commit"] and results["hardware"]["cores"]
    assert results["seconds"].keys() == {"save", "load", "raw write", "raw read", "stall", "copy"}
    assert all(len(s) == 2 and min(s) > 0 for s in results["seconds"].values())
    assert results["ratios"].keys() == {"raw write / save", "raw read / load", "stall / save", "copy / save"}
    assert all(0 < r["q1"] <= r["median"] <= r["q3"] for r in results["ratios"].values())
    said = capsys.readouterr().out
    assert all(name in said for name in results["ratios"])
    assert bench(["checkpoint", "folder=/no/such"]) == 2
    assert "error: folder=/no/such" in capsys.readouterr().err
