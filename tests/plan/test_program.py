"""The program of every pipeline rank launches what the real one launches."""

from collections.abc import Iterable, Iterator

import pytest
import torch

from ndtrain.config import Config, load_config, resolve
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.engine.train_step import TrainingStep
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.plan.dry import dry_run
from ndtrain.plan.program import RankProgram, StepProgram
from ndtrain.plan.step import Traffic
from ndtrain.plan.walk import Await, Gather, Receive, Reduce, Send
from tests.lib.launches import on_fake_ranks
from tests.lib.parity import make_batches
from tests.lib.rendezvous import Op, Step, Wait

SHAPE = ["recipe=llama_debug", "train.global_batch=16", "train.micro_batch=2", "precision.compute=bf16"]
COUNTS = 8  # bytes of a rank's number of valid tokens, which all ranks with other tokens gather
WIDTH = {"compute": 2, "master": 4}

MESHES = {
    "mesh.fsdp=2 mesh.tp=2 mesh.zero=1": 4,
    "mesh.pp=2 mesh.dp=2 mesh.fsdp=2 mesh.zero=2 schedule=zb_h1": 8,
}
MORE_MESHES = {
    "mesh.pp=2 mesh.fsdp=2 mesh.zero=3 recompute=full": 4,
    "mesh.fsdp=2 mesh.tp=2 mesh.zero=2": 4,
    "mesh.fsdp=2 mesh.tp=2 mesh.zero=3 recompute=every model.num_hidden_layers=8": 4,
    "mesh.dp=2 mesh.tp=2 mesh.zero=1": 4,
    "mesh.pp=2 mesh.fsdp=2 mesh.cp=2 schedule=interleaved model.num_hidden_layers=8": 8,
    "mesh.pp=2 mesh.fsdp=2 schedule=zb_v mesh.zero=3 model.num_hidden_layers=8": 4,
    "mesh.pp=4 mesh.fsdp=2 schedule=dualpipe_v model.num_hidden_layers=8 model.tie_word_embeddings=true": 8,
}


@pytest.mark.parametrize(
    ("mesh", "ranks"), [*MESHES.items(), *(pytest.param(*c, marks=pytest.mark.full) for c in MORE_MESHES.items())]
)
def test_gathers_reductions_and_messages_are_those_of_the_dry_run(mesh, ranks):
    cfg = resolve(load_config([*SHAPE, "train.compile=false", *mesh.split()]), ranks)
    program, spec = StepProgram.of(cfg), MeshSpec.of(cfg.mesh)
    for pp, own in enumerate(program.ranks):
        dry = dry_run(cfg, spec.rank(dict.fromkeys(spec.order, 0) | {"pp": pp}), "cuda")
        ops = [op for turn in own.turns for op in turn.ops]
        sharded = _wide(spec, next(iter(program.units.values())).axes.split("+"))
        gathers = [program.units[op.unit].numel for op in ops if isinstance(op, Gather)] if sharded else []
        reductions = [program.units[op.unit].numel for op in ops if isinstance(op, Reduce)] if sharded else []
        real = {(t.axis, t.op): t for t in dry.traffic}
        assert _of(real, sharded, "reduce_scatter") == (len(reductions), sum(reductions) * WIDTH["master"])
        count, nbytes = _of(real, sharded, "all_gather")
        counted = _wide(spec, ("dp", "fsdp", "cp")) == sharded
        assert count - counted == len(gathers)
        assert nbytes - counted * COUNTS * spec.size("dp", "fsdp", "cp") == sum(gathers) * WIDTH["compute"]
        assert _of(real, "pp", "send")[0] == sum(isinstance(op, Send) for op in ops)
        assert _of(real, "pp", "receive")[0] == sum(len(turn.receives) for turn in own.turns)
        assert sum(turn.sends is not None for turn in own.turns) == sum(isinstance(op, Send) for op in ops)


@pytest.mark.parametrize(
    "how",
    ["mesh.zero=1 schedule=interleaved", *(pytest.param(h, marks=pytest.mark.full) for h in (
        "mesh.zero=2 schedule=zb_h1", "mesh.zero=3 schedule=1f1b recompute=full", "mesh.zero=3 schedule=zb_v",
        "model=moe_debug moe.balance=hf mesh.zero=2 schedule=interleaved",
    )), "model=moe_debug moe.balance=hf mesh.zero=3 recompute=full"],
)  # fmt: skip
def test_launches_and_waits_are_in_the_executors_order(how):
    """Gathers, messages and the waits for them, on real stages whose collectives carry nothing. A balance loss over the
    whole batch has a forward before the step."""
    overrides = [*SHAPE, "model.num_hidden_layers=8", "mesh.pp=2", "mesh.fsdp=2", "precision.compute=fp32"]
    cfg = resolve(load_config([*overrides, "train.compile=false", *how.split()]), 4)
    ran, program = on_fake_ranks(lambda rank, entries: _run_step(cfg, rank, entries), 4), StepProgram.of(cfg)
    for pp, own in enumerate(program.ranks):
        rank = 2 * pp  # its first one
        assert list(_as_ran(ran[rank][0])) == list(_as_planned(own))
        assert "wait for a message" in _as_planned(own), "a pipeline"


def _run_step(cfg: Config, rank: int, entries: list) -> None:
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg)
    entries.clear()
    TrainingStep(cfg, mesh, stages).run(1, make_batches(cfg, mesh, 1, "none")).wait()


def _as_planned(own: RankProgram) -> Iterator[str]:
    names = {Gather: "gather", Await: "wait for a gather", Receive: "wait for a message", Send: "send"}
    for turn in (*own.look_ahead, *own.turns):
        yield from ("receive" for _ in turn.receives)
        yield from (names[type(op)] for op in turn.ops if type(op) in names)


def _as_ran(steps: Iterable[Step]) -> Iterator[str]:
    """Without what is as small as a few counts, and without waits for messages that this rank sent."""
    launches = {"all_gather": "gather", "receive": "receive", "send": "send"}
    waits = {"all_gather": "wait for a gather", "receive": "wait for a message"}
    for step in steps:
        op, names = (step.op, waits) if isinstance(step, Wait) else (step, launches)
        if isinstance(op, Op) and op.nbytes > 64 and op.name in names:
            yield names[op.name]


def _wide(spec: MeshSpec, axes: Iterable[str]) -> str:
    """The axes of more than one rank, as the dry run names their group."""
    return "+".join(a for a in spec.order if a in axes and spec.size(a) > 1)


def _of(real: dict[tuple[str, str], Traffic], axis: str, op: str) -> tuple[int, int]:
    """(number, bytes) of the real collectives."""
    traffic = real.get((axis, op))
    return (traffic.count, traffic.bytes) if traffic else (0, 0)
