"""The one composition order: layouts from the tables, the plain model, its units flat and sharded, replicas on top."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ndtrain.config import Config
from ndtrain.layout import CUT_AXIS, DATA_AXES, SHARD_AXES, Dim, FlatLayout, Layouts, TensorLayout
from ndtrain.mesh import Mesh, MeshSpec
from ndtrain.model import Ops, Segment, Transformer, dim_sizes, tensor_dims
from ndtrain.model.init import fill
from ndtrain.model.transformer import unit_of
from ndtrain.parallel.cp import cp_core
from ndtrain.parallel.direct import Gradients, direct_ops
from ndtrain.parallel.dp import ReplicaReducer
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.tp import CopyReducer, TensorParallel
from ndtrain.sequence import SequenceCut

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def layouts_of(cfg: Config, mesh: MeshSpec, rank: int) -> Layouts:
    """The layout of every tensor of the configured model as `rank` holds it."""
    sizes = dim_sizes(cfg.model)
    tensors = {name: tuple(Dim(d, *sizes[d]) for d in dims) for name, dims in tensor_dims(cfg.model).items()}
    stream = (*DATA_AXES, "tp") if cfg.mesh.tp > 1 and cfg.tp.sequence_parallel else DATA_AXES
    return Layouts(tensors, cfg.layout.rules, mesh, rank, stream)


def sequence_cut(cfg: Config) -> SequenceCut:
    """How cp cuts the sequences of a resolved configuration."""
    return SequenceCut(cfg.train.seq_len, cfg.mesh.cp // cfg.cp.ulysses, cfg.cp.ulysses, cfg.cp.balance)


def flat_layouts(layouts: Layouts, names: list[str]) -> dict[str, FlatLayout]:
    """Unit -> its flat buffer, for the tensors `names` of one stage."""
    by_unit: dict[str, list] = {}
    for name in names:
        by_unit.setdefault(unit_of(name), []).append(layouts[name])
    parts = layouts.mesh.size(*SHARD_AXES)
    return {unit: FlatLayout.of(tensors, parts) for unit, tensors in by_unit.items()}


@dataclass
class Stage:
    """What this rank computes and holds."""

    model: Transformer
    segments: list[Segment]
    units: ShardedUnits
    layouts: Layouts


def build_stage(cfg: Config, mesh: Mesh) -> Stage:
    """This rank's part of the model, allocated but not yet filled."""
    layouts = layouts_of(cfg, mesh.spec, mesh.rank)
    compute = DTYPES[cfg.precision.compute]
    # inside a compiled graph a gradient cannot be written past autograd
    gradients = None if cfg.train.compile else Gradients()
    with torch.device("meta"):
        model = Transformer(cfg.model, loss_chunk=cfg.train.loss_chunk)
    _check_declared(model, layouts)
    names = [name for name, _ in model.named_parameters()]
    units = ShardedUnits(
        flat_layouts(layouts, names),
        group=mesh.group(*SHARD_AXES),
        index=mesh.index(*SHARD_AXES),
        replicas=ReplicaReducer(mesh.group(*_replica_axes(layouts, names))),
        copies=CopyReducer({n: mesh.subgroup(CUT_AXIS, n) for n in _copies(layouts, names)}),
        gradients=gradients,
        zero=cfg.mesh.zero,
        compute=compute,
        master=DTYPES[cfg.precision.params],
        device=mesh.device,
    )
    cut = {}
    for unit in units.units.values():
        for name, parameter in unit.parameters.items():
            _set_parameter(model, name, parameter)
            cut[parameter] = layouts[name]
    model.use(_ops(cfg, mesh, cut, gradients))
    if cfg.train.compile:
        for block in model.model.layers.values():
            block.compile()
    return Stage(model, model.segments(), units, layouts)


def _ops(cfg: Config, mesh: Mesh, cut: dict[nn.Parameter, TensorLayout], gradients: Gradients | None) -> Ops:
    """The model's calls as this mesh makes them: cp replaces the core, tp those over weights."""
    ops = direct_ops(gradients) if gradients else Ops()
    if cfg.mesh.cp > 1:
        ops = replace(ops, core=cp_core(sequence_cut(cfg), mesh.group("cp"), mesh.index("cp")))
    if cfg.mesh.tp > 1:
        ops = TensorParallel(cut, gradients, mesh.group("tp"), cfg.train.micro_batch, cfg.tp).over(ops)
    return ops


def initialise(stage: Stage, cfg: Config) -> None:
    """Fills this rank's shards with their elements of the model that `run.seed` names."""
    for unit in stage.units.units.values():
        for tensor, runs in unit.layout.runs(*unit.layout.bounds(stage.units.index)):
            for run in runs:
                piece = unit.master[run.local_start : run.local_start + run.length]
                fill(piece, cfg.model, cfg.run.seed, tensor.name, run.global_start)
    stage.units.weights_changed()


def _replica_axes(layouts: Layouts, names: list[str]) -> frozenset[str]:
    """The axes that whole shards of gradients are summed over, beside those that the flat buffers' reduce-scatter sums
    and tp, over which only copies are."""
    (axes,) = {layouts[name].partial - {*SHARD_AXES, CUT_AXIS} for name in names}  # a unit's gradients travel together
    return axes


def _copies(layouts: Layouts, names: list[str]) -> list[int]:
    """Over how many copies some tensor's gradient is summed, the same list on every rank."""
    return sorted({layouts[n].copies for n in names if CUT_AXIS in layouts[n].partial and layouts[n].copies > 1})


def _check_declared(model: nn.Module, layouts: Layouts) -> None:
    """A parameter without a row in the dim table, or a row of another shape, is an error by name."""
    for name, parameter in model.named_parameters():
        if tuple(parameter.shape) != layouts[name].shape:
            raise ValueError(f"{name}: the model has {tuple(parameter.shape)}, its dims say {layouts[name].shape}")


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)
