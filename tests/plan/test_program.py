"""The program of every pipeline rank launches what the real one launches."""

from collections.abc import Iterable

import pytest

from ndtrain.config import load_config, resolve
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.plan.dry import dry_run
from ndtrain.plan.program import Gather, Reduce, Send, StepProgram
from ndtrain.plan.step import Traffic

SHAPE = ["recipe=llama_debug", "train.global_batch=16", "train.micro_batch=2", "precision.compute=bf16"]
COUNTS = 8  # bytes of a rank's number of valid tokens, which all ranks with other tokens gather
WIDTH = {"compute": 2, "master": 4}

MESHES = {
    "mesh.fsdp=2 mesh.tp=2 mesh.zero=1": 4,
    "mesh.pp=2 mesh.fsdp=2 mesh.zero=3 recompute=full": 4,
    "mesh.pp=2 mesh.dp=2 mesh.fsdp=2 mesh.zero=2 schedule=zb_h1": 8,
}
MORE_MESHES = {
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


def _wide(spec: MeshSpec, axes: Iterable[str]) -> str:
    """The axes of more than one rank, as the dry run names their group."""
    return "+".join(a for a in spec.order if a in axes and spec.size(a) > 1)


def _of(real: dict[tuple[str, str], Traffic], axis: str, op: str) -> tuple[int, int]:
    """(number, bytes) of the real collectives."""
    traffic = real.get((axis, op))
    return (traffic.count, traffic.bytes) if traffic else (0, 0)
