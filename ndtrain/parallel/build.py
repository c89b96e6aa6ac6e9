"""Construction of a rank's part of the model: the layouts from the tables, the plain model, its flat sharded units, and
the ops that the mesh replaces."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ndtrain.config import DATA_AXES, Config, ConfigError, shards_stream
from ndtrain.config.name_patterns import check_patterns
from ndtrain.config.registry import get
from ndtrain.config.schema import resolved
from ndtrain.device.gpu import use_gpu
from ndtrain.device.kind import kind_of
from ndtrain.mesh.host_device import host_threads, using_threads
from ndtrain.mesh.mesh import EP, Mesh, MeshSpec
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.mesh.sharding import TENSOR_AXIS, Dim, FlatLayout, Layouts, TensorLayout
from ndtrain.model import Context, Ops, Transformer, dim_sizes, params
from ndtrain.model.attention.core import attend, local_core
from ndtrain.model.families import family_of
from ndtrain.model.init import Draw, fill_all, standard_normal
from ndtrain.model.moe.exchange import Exchange
from ndtrain.model.objective import Objective, make_objective
from ndtrain.model.spec import CORE, Param
from ndtrain.model.transformer import EMBED, all_ops, fused_names
from ndtrain.parallel.balance import Balance
from ndtrain.parallel.compile_choice import choose_compile
from ndtrain.parallel.cp import cp_core
from ndtrain.parallel.ep import LANE, ExpertExchange, SavedExchange, keep_out_of_graphs, parts_of
from ndtrain.parallel.ep_capacity import Capacity
from ndtrain.parallel.expert_slices import ExpertSlices
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.grad_sums import TiedReducer, TPReplicaReducer
from ndtrain.parallel.kernel_choice import choose_kernel
from ndtrain.parallel.linear.accumulator import FusedWeights, GradAccumulator
from ndtrain.parallel.linear.embedding_and_head import embedding, head_loss
from ndtrain.parallel.linear.fp8 import FP8_MATMUL, check_shapes, multiplies_fp8, prepare_compile
from ndtrain.parallel.linear.matmul import PLAIN_MATMUL, MatmulImpl
from ndtrain.parallel.linear.ops import LinearOps
from ndtrain.parallel.pp import Placement
from ndtrain.parallel.recompute import (
    RecomputeOps,
    RecomputePlan,
    SavedOps,
    needs_saved_ops,
    plan_recompute,
    skipped_ops,
)
from ndtrain.parallel.recompute_budget import choose
from ndtrain.parallel.stages import Stages
from ndtrain.parallel.tp import TensorParallel
from ndtrain.parallel.unit import StatePlan, shard_groups
from ndtrain.parallel.whole_tensors import WholeTensors

# dtypes of weights and activations; with fp8 only the factors of matmuls are narrower
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def state_plan(cfg: Config) -> StatePlan:
    """Return which state a rank of this resolved configuration keeps, and in which precision.

    Raises:
        ConfigError: the optimizer needs whole tensors, and `optim.offload` is set.
    """
    optimizer = get("optimizer", cfg.optim.name)
    if optimizer.whole_tensors and cfg.optim.offload:
        raise ConfigError(
            f"optim.offload=true: optim={cfg.optim.name} updates unsharded tensors on the device: set it to false"
        )
    return StatePlan(
        zero=cfg.mesh.zero,
        compute=DTYPES[cfg.precision.compute],
        master=DTYPES[cfg.precision.params],
        spec=optimizer.state_spec(cfg.optim),
        sharded_spec=not optimizer.whole_tensors,
        ema=cfg.optim.ema is not None,
        offload=cfg.optim.offload,
    )


def layouts_of(
    cfg: Config,
    mesh: MeshSpec,
    rank: int,
    placement: Placement | None = None,
    table: Mapping[str, Param] | None = None,
) -> Layouts:
    """Return the layout of every tensor of the configured model, as `rank` holds it.

    Args:
        placement: the placement of the stages; None: it is made from `cfg`.
        table: the model's parameters; None: they are collected here.
    """
    table = params(cfg.model) if table is None else table
    sizes = dim_sizes(cfg.model)
    tensors = {name: tuple(Dim(d, *sizes[d]) for d in p.dims) for name, p in table.items()}
    used = {d.name for dims in tensors.values() for d in dims}  # a model whose blocks all have experts has no dim `mlp`
    rules = {dim: axis for dim, axis in cfg.layout.rules.items() if dim in used}
    residual_axes = (*DATA_AXES, "tp") if shards_stream(cfg) else DATA_AXES
    coords_of_unit = (placement or Placement.of(cfg)).pp_coords(cfg.model)
    units = {name: p.unit for name, p in table.items()}
    pp_coords = {name: coords_of_unit[unit] for name, unit in units.items()}
    ep_coords = {name: p.expert // experts_each(cfg) for name, p in table.items() if p.expert is not None}
    return Layouts(tensors, rules, mesh, rank, residual_axes, pp_coords, ep_coords, units)


def experts_each(cfg: Config) -> int:
    """Return the number of experts of each layer that a rank holds. The ranks along ep hold them in order."""
    return resolved(cfg.model.num_experts) // cfg.mesh.ep


def sequence_sharding(cfg: Config) -> SequenceSharding:
    """Return the sharding of the sequences over cp, for a resolved configuration."""
    return SequenceSharding(cfg.train.seq_len, cfg.mesh.cp // cfg.cp.ulysses, cfg.cp.ulysses, cfg.cp.balance)


def flat_layouts(layouts: Layouts, names: list[str]) -> dict[str, FlatLayout]:
    """Return unit -> its flat buffer, for the tensors `names` of one rank's stages.

    Raises:
        ValueError: the tensors of a unit are not split and replicated over the same ranks.
    """
    by_unit: dict[str, list[str]] = {}
    for name in names:
        by_unit.setdefault(layouts.units[name], []).append(name)
    flat = {}
    for unit, own in by_unit.items():
        groups = {layouts.groups(name) for name in own}
        if len(groups) > 1:
            raise ValueError(f"unit {unit}: its tensors belong to different groups of ranks: split it into two units")
        flat[unit] = FlatLayout.of([layouts[name] for name in own], groups.pop())
    return flat


def _make_process_groups(layouts: Layouts, mesh: Mesh, plan: StatePlan) -> None:
    """Create the process groups that any unit of the model names, in the same order on every rank."""
    for groups in dict.fromkeys(layouts.groups(name) for name in layouts.names()):
        shard_groups(plan, mesh, groups)
        mesh.group(*groups.replica_axes)
        if not plan.sharded_spec:  # the groups of `WholeTensors`
            mesh.group(*groups.shard_axes, TENSOR_AXIS)


def weights_only(cfg: Config) -> StatePlan:
    """Return a `StatePlan` for forwards alone: without optimizer state, without an average and without offload."""
    return StatePlan(cfg.mesh.zero, DTYPES[cfg.precision.compute], DTYPES[cfg.precision.params], spec=())


class _Graphs(NamedTuple):
    """The parts of a run that are compiled.

    Attributes:
        blocks: True if the blocks and the loss are.
        matmuls: True if the blocks' matmuls are part of their graphs.
    """

    blocks: bool
    matmuls: bool


@dataclass(frozen=True)
class _Weights:
    """The parameters of a rank's stages, and what the ops that use them share.

    Attributes:
        layouts: parameter -> its layout.
        saved_ops: the store of results that recomputed blocks save.
        fused: the first of the parameters that one matmul serves -> these parameters as one.
    """

    by_name: Mapping[str, nn.Parameter]
    layouts: Mapping[nn.Parameter, TensorLayout]
    accumulator: GradAccumulator
    saved_ops: SavedOps
    fused: Mapping[nn.Parameter, FusedWeights]

    @classmethod
    def of(cls, units: ShardedUnits, layouts: Layouts, table: Mapping[str, Param]) -> "_Weights":
        by_name = {name: p for unit in units.units.values() for name, p in unit.parameters.items()}
        fused = {u.parameters[names[0]]: w for u in units.units.values() for names, w in u.fused_weights.items()}
        saved_ops = SavedOps({p: op for name, p in by_name.items() if (op := table[name].op) is not None})
        return cls(by_name, {p: layouts[name] for name, p in by_name.items()}, units.accumulator, saved_ops, fused)


def build_stages(cfg: Config, mesh: Mesh, plan: StatePlan | None = None, imbalance: float = 1.0) -> Stages:
    """Build this rank's part of the model, allocated but not yet filled. Every rank calls this.

    Args:
        plan: for forwards alone, the state to hold (`weights_only`); None: the model is trained, with
            `state_plan(cfg)`.
        imbalance: for a rank on the meta device, the rows that come to its experts over the mean number.

    Raises:
        ConfigError: the device cannot compute the configuration, or `recompute.budget` is too small.
    """
    placement, table = Placement.of(cfg), params(cfg.model)
    layouts = layouts_of(cfg, mesh.spec, mesh.rank, placement, table)
    _check_patterns(cfg, layouts)
    if cfg.precision.compute == "fp8":
        check_shapes(layouts, table.values(), all_ops(cfg.model))
    trains, plan = plan is None, plan or state_plan(cfg)
    compiled, compile_note = choose_compile(cfg, mesh, trains)
    graphs = _Graphs(compiled, compiled and linear_in_graph(cfg, placement))
    models = _models(cfg, placement, mesh)
    names = _check_declared(models.values(), layouts)
    _make_process_groups(layouts, mesh, plan)
    units = _units(cfg, mesh, plan, layouts, names, placement, table, graphs)
    weights = _Weights.of(units, layouts, table)
    balance, objective = Balance(cfg, mesh), make_objective(cfg.objective, compiled)
    capacity = Capacity(cfg, mesh) if cfg.moe.capacity is not None else None
    ops = _ops(cfg, mesh, weights, graphs, capacity, objective, imbalance)
    ops = replace(ops, balance=torch.compiler.disable(balance) if compiled else balance)
    kernel, attention = choose_kernel(cfg, mesh, plan.compute) if kind_of(mesh.device) == "cuda" else (None, "")
    for model in models.values():
        _complete(model, weights.by_name, ops, kernel, graphs)
        balance.adopt(model)
    segments = {s: m.segments() for s, m in models.items()}
    notes = [note for note in (attention, compile_note) if note]
    saved_ops = weights.saved_ops
    stages = Stages(
        models, segments, units, layouts, placement, saved_ops, balance, objective, notes, capacity=capacity
    )
    if trains:
        stages.recompute = _plan_recompute(cfg, mesh, stages)
    return stages


def _units(
    cfg: Config,
    mesh: Mesh,
    plan: StatePlan,
    layouts: Layouts,
    names: list[str],
    placement: Placement,
    table: Mapping[str, Param],
    graphs: _Graphs,
) -> ShardedUnits:
    """Allocate the units of the tensors `names`, with whole tensors for an optimizer that needs them."""
    units = ShardedUnits(
        flat_layouts(layouts, names),
        mesh,
        plan,
        TPReplicaReducer({n: mesh.subgroup(TENSOR_AXIS, n) for n in layouts.tp_replica_counts()}),
        TiedReducer(mesh, placement.pp_coords(cfg.model)[EMBED]),
        accumulator=GradAccumulator(),
        compiled=frozenset(table[n].unit for n in names if graphs.blocks and table[n].layer is not None),
        in_graph=graphs.matmuls,
        fused_names=_fused_names(cfg, table, frozenset(names)),
    )
    if not plan.sharded_spec:
        units.whole_tensors = _whole_tensors(cfg, mesh, units, names, placement)
    return units


def _fused_names(cfg: Config, table: Mapping[str, Param], held: frozenset[str]) -> list[tuple[str, ...]]:
    """Return the names of weights that one matmul may serve, limited to the weights that this rank holds."""
    here = (tuple(n for n in names if n in held) for names in fused_names(cfg.model))
    return [part for names in here if names for part in _in_parts(cfg, table, names)]


def _in_parts(cfg: Config, table: Mapping[str, Param], names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Split the stack of all experts' weights into a stack for each part of the experts, which one grouped product
    serves. Other weights stay whole."""
    if not cfg.moe.overlap or table[names[0]].expert is None:
        return [names]
    each = len(names) // len({table[n].expert for n in names})
    parts = parts_of(len(names) // each, cfg.moe.parts)
    return [names[part.start * each : part.stop * each] for part in parts]


def _complete(
    model: Transformer,
    parameters: Mapping[str, nn.Parameter],
    ops: Ops,
    kernel: str | None,
    graphs: _Graphs,
) -> None:
    """Give a stage its parameters (views of the units' buffers), its ops and its attention kernel, and compile its
    blocks."""
    for name, _ in list(model.named_parameters()):
        _set_parameter(model, name, parameters[name])
    model.use(ops)
    model.kernel = kernel
    if graphs.blocks:
        for block in model.model.layers.values():
            if not graphs.matmuls:  # otherwise the compiler makes an empty graph for each number of weights
                block.linear = torch.compiler.disable(block.linear)
            block.compile()


def _plan_recompute(cfg: Config, mesh: Mesh, stages: Stages) -> RecomputePlan:
    """Choose which blocks of the rank's stages are recomputed. With recompute=budget all ranks call this together."""
    ops = RecomputeOps.of(cfg)
    choice = choose(cfg, mesh, stages, ops) if cfg.recompute.name == "budget" else []
    groups, blocks, at = [], [], 0
    for stage in sorted(stages.segments):
        of_stage = [i for i, (s, segment) in enumerate(stages.in_order) if s == stage and segment.is_block]
        groups += plan_recompute(of_stage, cfg.recompute, ops, choice[at : at + len(of_stage)])
        blocks += of_stage
        at += len(of_stage)
    return RecomputePlan(groups, skipped_ops(blocks, groups, compiled=stages.units.in_graph))


def linear_in_graph(cfg: Config, placement: Placement) -> bool:
    """Return True if the matmuls of compiled blocks are part of their graphs. A compiled graph defers no gradient,
    saves no result for a recompute, sends no message and has no experts. A configuration that needs one of these is
    excluded."""
    experts = family_of(cfg.model).moe is not None
    outside_graph = cfg.mesh.tp > 1, needs_saved_ops(cfg), placement.schedule.splits_backward, experts
    return not any(outside_graph)


def _models(cfg: Config, placement: Placement, mesh: Mesh) -> dict[int, Transformer]:
    """Create the stages of this rank, on the meta device."""
    chunk, experts = cfg.train.loss_chunk, None
    if cfg.mesh.ep > 1:
        first = mesh.index(EP) * experts_each(cfg)
        experts = range(first, first + experts_each(cfg))
    with torch.device("meta"):
        return {
            s: Transformer(cfg.model, placement.layers[s], s == 0, s == placement.last, chunk, experts)
            for s in placement.schedule.stages_of(mesh.coords["pp"])
        }


def _ops(
    cfg: Config,
    mesh: Mesh,
    weights: _Weights,
    graphs: _Graphs,
    capacity: Capacity | None,
    objective: Objective,
    imbalance: float,
) -> Ops:
    """Return the model's ops on this mesh: cp replaces the attention core, ep the exchange with the experts, tp the ops
    with weights.

    Args:
        capacity: the capacity of the exchanges with `moe.capacity`; None: without it.
        imbalance: as in `build_stages`.
    """
    compiled, saved_ops, accumulator = graphs.blocks, weights.saved_ops, weights.accumulator
    outside = torch.compiler.disable if compiled else lambda op: op
    matmul = _matmul_impl(cfg, mesh, compiled)
    linear = LinearOps(accumulator, saved_ops, weights.fused, matmul)
    exchange, core = _exchange(cfg, mesh, saved_ops, capacity, imbalance), _core(cfg, mesh, saved_ops, compiled)
    tensor_parallel = None
    if cfg.mesh.tp > 1:
        shards_heads = cfg.layout.rules.get("heads") == "tp"
        tensor_parallel = TensorParallel(weights.layouts, mesh.group("tp"), cfg.tp, shards_heads)
        linear = replace(linear, comm_of=tensor_parallel.comm_of)
    if compiled:
        keep_out_of_graphs()
    ops = Ops(
        linear=matmul.in_graph if graphs.matmuls else outside(linear.linear),
        wide_linear=outside(linear.wide_linear),
        grouped_linear=outside(linear.grouped_linear),
        exchange=outside(exchange),
        embedding=partial(embedding, accumulator),
        core=core,
        head_loss=partial(head_loss, accumulator, objective),
    )
    if tensor_parallel is not None:
        ops = tensor_parallel.over(ops, compiled)
        if cfg.layout.rules.get("expert_mlp") == "tp":
            ops = ExpertSlices(tensor_parallel.comm, cfg.tp.sequence_parallel, saved_ops).over(ops, compiled)
    return ops


def _exchange(
    cfg: Config, mesh: Mesh, saved_ops: SavedOps, capacity: Capacity | None, imbalance: float
) -> Callable[..., Exchange]:
    """Return the exchange with the experts."""
    if cfg.mesh.ep == 1:
        return partial(SavedExchange, saved_ops)
    exchange = ExpertExchange if capacity is None else capacity.exchange
    parts = cfg.moe.parts if cfg.moe.overlap else 1
    return partial(exchange, mesh.group(EP, lane=LANE), parts, saved_ops, imbalance=imbalance)


def _core(cfg: Config, mesh: Mesh, saved_ops: SavedOps, compiled: bool) -> Callable[..., Tensor]:
    """Return the attention core."""

    def core(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx: Context) -> Tensor:
        return attend(q_BTND, k_BTKD, v_BTKD, ctx.scores, saved_ops.of(CORE))

    if cfg.mesh.cp > 1:
        return cp_core(sequence_sharding(cfg), mesh.group("cp"), mesh.index("cp"), saved_ops=saved_ops)
    if not compiled:
        return core
    return torch.compiler.disable(core) if needs_saved_ops(cfg) else local_core


def _matmul_impl(cfg: Config, mesh: Mesh, compiled: bool) -> MatmulImpl:
    """Return the implementation of the blocks' matmuls."""
    if cfg.precision.compute != "fp8":
        return PLAIN_MATMUL
    if mesh.device.type == "cuda" and not multiplies_fp8("cuda"):
        raise ConfigError(
            f"precision.compute=fp8: {torch.cuda.get_device_name(mesh.device)} has no fp8 matmuls (they need compute "
            "capability 8.9): set precision.compute=bf16"
        )
    if compiled:
        prepare_compile()
    return FP8_MATMUL


def initialise(stages: Stages, cfg: Config, draw: Draw = standard_normal, only: Collection[str] | None = None) -> None:
    """Fill this rank's shards with their elements of the model that `run.seed` determines.

    Args:
        draw: draws N(0, 1) elements, as `standard_normal` does. Any other function is called in one thread.
        only: the tensors to fill; None: all tensors.
    """
    table = params(cfg.model)
    pieces = (
        (unit.master[run.local_start : run.local_start + run.length], table[tensor.name], run.global_start)
        for unit in stages.units.units.values()
        for tensor, runs in unit.layout.runs(*unit.layout.own)
        if only is None or tensor.name in only
        for run in runs
    )
    threads = host_threads(stages.units.device) if draw is standard_normal else 1
    with using_threads(1):  # each of the `threads` draws a block of its own
        fill_all(pieces, cfg.model, cfg.run.seed, draw, threads, partial(use_gpu, stages.units.device))
    stages.units.weights_changed()
    stages.units.start_average()


def _whole_tensors(
    cfg: Config, mesh: Mesh, units: ShardedUnits, names: list[str], placement: Placement
) -> WholeTensors:
    """Return the whole tensors of this rank's stages, with every rank's layout of them."""
    of_rank = lambda rank: flat_layouts(layouts_of(cfg, mesh.spec, rank, placement), names)
    shards = {name: (unit.master, unit.grad) for name, unit in units.units.items()}
    return WholeTensors(mesh, of_rank, shards, units.plan.spec, units.master)


def _check_declared(models: Iterable[nn.Module], layouts: Layouts) -> list[str]:
    """Check the parameters of the model against the layouts. Return their names, each once, in the order of the dim
    table.

    Raises:
        KeyError: a parameter has no row in the dim table.
        ValueError: a parameter has another shape there, or the layouts place other parameters on this rank.
    """
    shapes = {name: tuple(p.shape) for model in models for name, p in model.named_parameters()}
    for name, shape in shapes.items():
        if shape != layouts[name].shape:
            raise ValueError(f"{name}: the model has shape {shape}, but its dims give {layouts[name].shape}")
    names = [name for name in layouts.names() if layouts.holds(name)]
    if differ := set(names) ^ set(shapes):
        raise ValueError(f"{min(differ)}: the model and its layouts place it on different ranks")
    return names


def _check_patterns(cfg: Config, layouts: Layouts) -> None:
    """Check that every pattern of the configuration matches a parameter of the model."""
    for key, factors in (
        ("model.init_mult", cfg.model.init_mult),
        ("optim.lr_mult", cfg.optim.lr_mult),
        ("optim.wd_mult", cfg.optim.wd_mult),
    ):
        check_patterns(key, factors, layouts.names())


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)
