"""Construction of a rank's part of the model: the plain model, its flat sharded units, and the ops that the mesh
replaces."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ndtrain.config import Config, ConfigError, LocalShapes, ModelConfig, OptimConfig, RecomputeConfig, TPConfig
from ndtrain.config.name_patterns import check_patterns
from ndtrain.config.registry import get
from ndtrain.config.schema import DILOCO, PrecisionConfig
from ndtrain.device.gpu import use_gpu
from ndtrain.device.kind import kind_of
from ndtrain.mesh.host_device import host_threads, using_threads
from ndtrain.mesh.mesh import EP, Mesh, MeshSpec
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.mesh.sharding import TENSOR_AXIS, FlatLayout, Layouts, TensorLayout
from ndtrain.model import Context, Ops, Transformer, params
from ndtrain.model.attention.core import attend, local_core
from ndtrain.model.families import family_of
from ndtrain.model.init import Draw, fill_all, standard_normal
from ndtrain.model.moe.exchange import Exchange
from ndtrain.model.objective import Objective, make_objective
from ndtrain.model.spec import CORE, Param
from ndtrain.model.transformer import EMBED, all_ops, fused_names
from ndtrain.optim import WholeTensorOptimizer
from ndtrain.parallel.balance import Balance
from ndtrain.parallel.compile_choice import choose_compile
from ndtrain.parallel.cp import cp_core
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.ep import (
    LANE,
    ExpertExchange,
    ExpertRanks,
    SavedExchange,
    keep_out_of_graphs,
    parts_of,
    plan_rows,
)
from ndtrain.parallel.ep_capacity import Capacity
from ndtrain.parallel.expert_slices import ExpertSlices
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.grad_sums import TiedReducer, TPReplicaReducer
from ndtrain.parallel.kernel_choice import Shape, choose_kernel
from ndtrain.parallel.linear.accumulator import FusedWeights, GradAccumulator
from ndtrain.parallel.linear.embedding_and_head import embedding, head_loss
from ndtrain.parallel.linear.fp8 import FP8_MATMUL, check_shapes, multiplies_fp8, prepare_compile
from ndtrain.parallel.linear.matmul import PLAIN_MATMUL, MatmulImpl
from ndtrain.parallel.linear.ops import LinearOps
from ndtrain.parallel.owners import Round, Work, holder_axes, plan_rounds
from ndtrain.parallel.qk_clip import QKClip
from ndtrain.parallel.recompute import (
    RecomputeOps,
    RecomputePlan,
    SavedOps,
    needs_saved_ops,
    plan_recompute,
    skipped_ops,
)
from ndtrain.parallel.recompute_budget import Choice, choose, typical_batch
from ndtrain.parallel.stages import Stages
from ndtrain.parallel.tp import TensorParallel
from ndtrain.parallel.unit import StatePlan, shard_groups
from ndtrain.parallel.whole_tensors import OwnerRounds

# dtypes of weights and activations; with fp8 only the factors of matmuls are narrower
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def state_plan(cfg: Config) -> StatePlan:
    """Return which state a rank of this resolved configuration keeps, and in which precision."""
    optimizer, master = get("optimizer", cfg.optim.name), DTYPES[cfg.precision.params]
    of_whole = issubclass(optimizer, WholeTensorOptimizer)
    return StatePlan(
        zero=cfg.mesh.zero,
        compute=DTYPES[cfg.precision.compute],
        master=master,
        spec=optimizer.state_spec(cfg.optim),
        whole=optimizer.whole if of_whole else None,
        sent=optimizer.sent(cfg.optim, master) if of_whole else master,
        ema=cfg.optim.ema is not None,
        outer=cfg.islands.count > 0 and cfg.islands.sync == DILOCO,
        offload=cfg.optim.offload,
    )


def owner_rounds(
    cfg: OptimConfig, spec: MeshSpec, rank: int, layouts: Mapping[str, FlatLayout], sent: torch.dtype
) -> list[Round]:
    """Return the rounds in which the owners of a rank's whole tensors work. Without such tensors there are none.

    Args:
        layouts: the rank's units.
        sent: the dtype in which owners get tensors.
    """
    optimizer = get("optimizer", cfg.name)
    if not issubclass(optimizer, WholeTensorOptimizer):
        return []
    workspace = lambda number, shape, rows: optimizer.workspace(cfg, (number, *shape), rows, sent)
    work = Work(optimizer.whole, lambda tensor: optimizer.flops(cfg, tensor), workspace)
    return plan_rounds(spec, rank, layouts, work)


def _make_process_groups(layouts: Layouts, mesh: Mesh, plan: StatePlan) -> None:
    """Create the process groups that any unit of the model names, in the same order on every rank."""
    for groups in dict.fromkeys(layouts.groups(name) for name in layouts.names()):
        shard_groups(plan, mesh, groups)
        mesh.group(*groups.replica_axes)
        if plan.whole is not None:
            mesh.group(*holder_axes(groups))


def weights_only(zero: int, precision: PrecisionConfig) -> StatePlan:
    """Return a `StatePlan` for forwards alone: without optimizer state, without an average and without offload."""
    return StatePlan(zero, DTYPES[precision.compute], DTYPES[precision.params], spec=())


class _Graphs(NamedTuple):
    """The parts of a run that are compiled.

    Attributes:
        blocks: True if the blocks and the loss are.
        matmuls: True if the blocks' matmuls are part of their graphs.
        core: True if the attention core of a block is.
    """

    blocks: bool
    matmuls: bool
    core: bool

    @classmethod
    def of(cls, compiled: bool, distribution: Distribution, recompute: RecomputeConfig, measured: bool) -> "_Graphs":
        """Choose the parts.

        Args:
            measured: True if the attention core measures its logits, which a compiled graph does not.
        """
        in_graph = compiled and linear_in_graph(distribution, recompute)
        core = distribution.mesh.size("cp") > 1 or not needs_saved_ops(recompute)
        return cls(compiled, in_graph, compiled and core and not measured)


@dataclass(frozen=True)
class _Weights:
    """The parameters of a rank's stages, and what the ops that use them share.

    Attributes:
        layouts: parameter -> its layout.
        saved_ops: the store of results that recomputed blocks save.
        fused: the first of the parameters that one matmul serves -> these parameters as one.
        matmul: computes the blocks' matmuls.
        objective: computes the loss.
    """

    by_name: Mapping[str, nn.Parameter]
    layouts: Mapping[nn.Parameter, TensorLayout]
    accumulator: GradAccumulator
    saved_ops: SavedOps
    fused: Mapping[nn.Parameter, FusedWeights]
    matmul: MatmulImpl
    objective: Objective


def _weights(
    units: ShardedUnits, layouts: Layouts, table: Mapping[str, Param], matmul: MatmulImpl, objective: Objective
) -> _Weights:
    by_name = {name: p for unit in units.units.values() for name, p in unit.parameters.items()}
    fused = {u.parameters[names[0]]: w for u in units.units.values() for names, w in u.fused_weights.items()}
    saved_ops = SavedOps({p: op for name, p in by_name.items() if (op := table[name].op) is not None})
    of_parameter = {p: layouts[name] for name, p in by_name.items()}
    return _Weights(by_name, of_parameter, units.accumulator, saved_ops, fused, matmul, objective)


def build_stages(cfg: Config, mesh: Mesh, plan: StatePlan | None = None, imbalance: float = 1.0) -> Stages:
    """Build this rank's part of the model, allocated but not yet filled. Every rank calls this.

    Args:
        plan: for forwards alone, the state to hold (`weights_only`); None: the model is trained, with
            `state_plan(cfg)`.
        imbalance: for a rank on the meta device, the rows that come to its experts over the mean number.

    Raises:
        ConfigError: the device cannot compute the configuration, or `recompute.budget` is too small.
    """
    m, shapes, distribution = cfg.model, LocalShapes.of(cfg), Distribution.of(cfg)
    layouts, sequences = distribution.layouts(mesh.rank), SequenceSharding.of(cfg)
    _check_patterns(m, cfg.optim, layouts.names())
    if cfg.precision.compute == "fp8":
        check_shapes(layouts, distribution.params.values(), all_ops(m))
    trains, plan = plan is None, plan or state_plan(cfg)
    compiled, compile_note = choose_compile(cfg.train, m, mesh, trains)
    graphs = _Graphs.of(compiled, distribution, cfg.recompute, measured=trains and cfg.optim.qk_clip is not None)
    models = _models(distribution, mesh, cfg.train.loss_chunk)
    names = _check_declared(models.values(), layouts)
    _make_process_groups(layouts, mesh, plan)
    parts = cfg.moe.parts if cfg.moe.overlap else 1
    units = _units(distribution, mesh, plan, layouts, names, graphs, parts)
    if plan.whole is not None:
        held = {name: unit.layout for name, unit in units.units.items()}
        of_rank = lambda rank: distribution.layouts(rank).flat(names)
        rounds = owner_rounds(cfg.optim, mesh.spec, mesh.rank, held, plan.sent)
        units.owners = OwnerRounds(mesh, plan, rounds, of_rank, {name: u.grad for name, u in units.units.items()})
    balance = Balance(m, cfg.moe, shapes, mesh)
    matmul, objective = _matmul_impl(cfg.precision.compute, mesh, compiled), make_objective(cfg.objective, compiled)
    weights = _weights(units, layouts, distribution.params, matmul, objective)
    capacity = Capacity(m, cfg.moe.capacity, mesh) if cfg.moe.capacity is not None else None
    ranks = ExpertRanks(mesh.group(EP, lane=LANE), parts, weights.saved_ops, imbalance)
    over_ep = partial(ExpertExchange, ranks, plan_rows if capacity is None else capacity.plan)
    ops = _ops(mesh, weights, graphs, over_ep, sequences, cfg.tp, distribution.rules)
    ops = replace(ops, balance=torch.compiler.disable(balance) if compiled else balance)
    kernel, attention = None, ""
    if kind_of(mesh.device) == "cuda":
        shape = Shape.of(m, shapes, cfg.data.pack, plan.compute)
        kernel, attention = choose_kernel(cfg.hardware.attention, shape, mesh)
    for model in models.values():
        _complete(model, weights.by_name, ops, kernel, graphs)
        balance.adopt(model)
    limit = cfg.optim.qk_clip if trains else None
    qk_clip = None if limit is None else QKClip(limit, list(models.values()), units, layouts, mesh)
    notes = [note for note in (attention, compile_note) if note]
    stages = Stages(
        models, units, layouts, distribution.placement, weights.saved_ops, balance, objective, notes, capacity=capacity,
        qk_clip=qk_clip,
    )  # fmt: skip
    if not trains:
        return stages
    recompute = _plan_recompute(stages, cfg.recompute, RecomputeOps.of(m, cfg.mesh), shapes, cfg.data.pack, mesh)
    return replace(stages, recompute=recompute)


def _units(
    distribution: Distribution,
    mesh: Mesh,
    plan: StatePlan,
    layouts: Layouts,
    names: list[str],
    graphs: _Graphs,
    parts: int,
) -> ShardedUnits:
    """Allocate the units of the tensors `names`.

    Args:
        parts: the number of parts in which a rank's experts are multiplied.
    """
    table = distribution.params
    return ShardedUnits(
        layouts.flat(names),
        mesh,
        plan,
        TPReplicaReducer({n: mesh.subgroup(TENSOR_AXIS, n) for n in layouts.tp_replica_counts()}),
        TiedReducer(mesh, distribution.placement.pp_coords(distribution.model)[EMBED]),
        accumulator=GradAccumulator(),
        compiled=frozenset(table[n].unit for n in names if graphs.blocks and table[n].layer is not None),
        in_graph=graphs.matmuls,
        fused_names=_fused_names(distribution, frozenset(names), parts),
    )


def _fused_names(distribution: Distribution, held: frozenset[str], parts: int) -> list[tuple[str, ...]]:
    """Return the names of weights that one matmul may serve, limited to the weights that this rank holds. The stack of
    all experts' weights is split into one for each part of the experts, which one grouped product serves."""
    fused = []
    for whole in fused_names(distribution.model):
        if names := tuple(n for n in whole if n in held):
            experts = {distribution.params[n].expert for n in names}
            each = len(names) // len(experts)
            of_names = parts_of(len(experts), 1 if None in experts else parts)
            fused += [names[part.start * each : part.stop * each] for part in of_names]
    return fused


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


def _plan_recompute(
    stages: Stages, cfg: RecomputeConfig, ops: RecomputeOps, shapes: LocalShapes, packed: bool, mesh: Mesh
) -> RecomputePlan:
    """Choose which blocks of the rank's stages are recomputed. With recompute=budget all ranks call this together."""
    choice: list[Choice] = []
    if cfg.name == "budget":
        batch = typical_batch(shapes, stages.objective.columns, packed, mesh.device)
        choice = choose(cfg.budget, stages, batch, shapes, ops, mesh)
    groups, blocks, at = [], [], 0
    for stage in sorted(stages.segments):
        of_stage = [i for i, (s, segment) in enumerate(stages.in_order) if s == stage and segment.is_block]
        groups += plan_recompute(of_stage, cfg, ops, choice[at : at + len(of_stage)])
        blocks += of_stage
        at += len(of_stage)
    return RecomputePlan(groups, skipped_ops(blocks, groups, compiled=stages.units.in_graph))


def linear_in_graph(distribution: Distribution, recompute: RecomputeConfig) -> bool:
    """Return True if the matmuls of compiled blocks are part of their graphs. A compiled graph defers no gradient,
    saves no result for a recompute, sends no message and has no experts. A configuration that needs one of these is
    excluded."""
    tp, experts = distribution.mesh.size("tp") > 1, family_of(distribution.model).moe is not None
    return not (tp or needs_saved_ops(recompute) or distribution.placement.schedule.splits_backward or experts)


def _models(distribution: Distribution, mesh: Mesh, loss_chunk: int) -> dict[int, Transformer]:
    """Create the stages of this rank, on the meta device."""
    m, placement = distribution.model, distribution.placement
    experts = distribution.experts(mesh.index(EP)) if mesh.spec.ep > 1 else None
    with torch.device("meta"):
        return {
            s: Transformer(m, placement.layers[s], s == 0, s == placement.last, loss_chunk, experts)
            for s in placement.schedule.stages_of(mesh.coords["pp"])
        }


def _ops(
    mesh: Mesh,
    weights: _Weights,
    graphs: _Graphs,
    exchange: Callable[..., Exchange],
    sequences: SequenceSharding,
    tp: TPConfig,
    rules: Mapping[str, str | None],
) -> Ops:
    """Return the model's ops on this mesh: cp replaces the attention core, ep the exchange with the experts, tp the ops
    with weights.

    Args:
        exchange: makes an exchange with experts of other ranks.
        sequences: the sharding of the sequences over cp.
        rules: `layout.rules`.
    """
    w, saved_ops, compiled = weights, weights.saved_ops, graphs.blocks
    outside = torch.compiler.disable if compiled else lambda op: op
    linear, tensor_parallel = LinearOps(w.accumulator, saved_ops, w.fused, w.matmul), None
    if mesh.size("tp") > 1:
        shards_heads = rules.get("heads") == "tp"
        tensor_parallel = TensorParallel(w.layouts, mesh.group("tp"), tp, shards_heads)
        linear = replace(linear, comm_of=tensor_parallel.comm_of)
    if compiled:
        keep_out_of_graphs()
    ops = Ops(
        linear=w.matmul.in_graph if graphs.matmuls else outside(linear.linear),
        wide_linear=outside(linear.wide_linear),
        grouped_linear=outside(linear.grouped_linear),
        exchange=outside(exchange if mesh.spec.ep > 1 else partial(SavedExchange, saved_ops)),
        embedding=partial(embedding, w.accumulator),
        core=_core(mesh, saved_ops, graphs, sequences),
        head_loss=partial(head_loss, w.accumulator, w.objective),
    )
    if tensor_parallel is not None:
        ops = tensor_parallel.over(ops, compiled)
        if rules.get("expert_mlp") == "tp":
            ops = ExpertSlices(tensor_parallel.comm, tp.sequence_parallel, saved_ops).over(ops, compiled)
    return ops


def _core(mesh: Mesh, saved_ops: SavedOps, graphs: _Graphs, sequences: SequenceSharding) -> Callable[..., Tensor]:
    """Return the attention core."""

    def local(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx: Context, largest_N: Tensor | None = None) -> Tensor:
        return attend(q_BTND, k_BTKD, v_BTKD, ctx.scores, saved_ops.of(CORE), largest_N)

    core = local_core if graphs.core else local
    if sequences.parts > 1:
        core = cp_core(sequences, mesh.group("cp"), mesh.index("cp"), saved_ops=saved_ops)
    return torch.compiler.disable(core) if graphs.blocks and not graphs.core else core


def _matmul_impl(compute: str, mesh: Mesh, compiled: bool) -> MatmulImpl:
    """Return the implementation of the blocks' matmuls."""
    if compute != "fp8":
        return PLAIN_MATMUL
    if mesh.device.type == "cuda" and not multiplies_fp8("cuda"):
        raise ConfigError(
            f"precision.compute=fp8: {torch.cuda.get_device_name(mesh.device)} has no fp8 matmuls (they need compute "
            "capability 8.9): set precision.compute=bf16"
        )
    if compiled:
        prepare_compile()
    return FP8_MATMUL


def initialise(stages: Stages, seed: int, draw: Draw = standard_normal, only: Collection[str] | None = None) -> None:
    """Fill this rank's shards with their elements of the model that the seed determines.

    Args:
        draw: draws N(0, 1) elements, as `standard_normal` does. Any other function is called in one thread.
        only: the tensors to fill; None: all tensors.
    """
    table = params(stages.model)
    pieces = (
        (unit.master[run.local_start : run.local_start + run.length], table[tensor.name], run.global_start)
        for unit in stages.units.units.values()
        for tensor, runs in unit.layout.runs(*unit.layout.own)
        if only is None or tensor.name in only
        for run in runs
    )
    threads = host_threads(stages.units.device) if draw is standard_normal else 1
    with using_threads(1):  # each of the `threads` draws a block of its own
        fill_all(pieces, stages.model, seed, draw, threads, partial(use_gpu, stages.units.device))
    stages.units.weights_changed()
    stages.units.start_average()
    stages.units.start_outer()


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


def _check_patterns(m: ModelConfig, optim: OptimConfig, names: list[str]) -> None:
    """Check that every pattern of the configuration matches a parameter of the model."""
    check_patterns("model.init_mult", m.init_mult, names)
    check_patterns("optim.lr_mult", optim.lr_mult, names)
    check_patterns("optim.wd_mult", optim.wd_mult, names)


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)
