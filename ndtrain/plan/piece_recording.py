"""Runs a small model as one rank of a mesh, pass by pass, and records the piece of each pass."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.config import Config, LocalShapes
from ndtrain.config.schema import (
    CheckpointConfig,
    DataConfig,
    LoggerConfig,
    OptimConfig,
    RecomputeConfig,
    RunConfig,
    ScheduleConfig,
    resolved,
)
from ndtrain.device.kind import meta_stands_for
from ndtrain.engine.executor import Executor, TokenCount
from ndtrain.engine.train_step import contexts
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import SHARD_AXES
from ndtrain.model import Context, params
from ndtrain.model.transformer import BLOCKS, is_sparse
from ndtrain.parallel import compile_choice
from ndtrain.parallel.build import DTYPES, build_stages
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.pp import Pipeline
from ndtrain.parallel.recompute import RecomputeGroup, RecomputeOps, needs_saved_ops
from ndtrain.parallel.recompute_budget import typical_batch
from ndtrain.parallel.stages import Stages
from ndtrain.parallel.unit import Residency, StatePlan
from ndtrain.plan.event_log import EventLog
from ndtrain.plan.events import Piece
from ndtrain.plan.variants import Save, Variant
from ndtrain.plan.world import pretended_world
from ndtrain.program.ops import Open, RankProgram, Run, Turn
from ndtrain.program.passes import Layer, line_up
from ndtrain.schedule import Action, Schedule

COMPILED_KINDS = (*BLOCKS, "head")  # kinds of layers that are compiled
# Autograd nodes outside of compiled graphs: attention and its messages, which a compiled graph calls as one operator or
# not at all, and matmuls with messages.
_EAGER_NODES = frozenset({"_TiledBackward", "_RingBackward", "_ToHeadsBackward", "_ToTokensBackward"})
_EAGER_LINEAR = frozenset({"_LinearBackward"})


class Recorded(NamedTuple):
    """The result of a recording.

    Attributes:
        pieces: variant -> its piece.
        context_bytes: bytes that each microbatch holds from the beginning of the step to its end.
    """

    pieces: dict[Variant, Piece]
    context_bytes: int


def compiles(cfg: Config, device: str) -> bool:
    """Return True if a run on devices of this kind compiles its blocks."""
    with meta_stands_for(device):
        return compile_choice.compiles(cfg.train, cfg.model, MeshSpec.of(cfg.mesh), torch.device("meta"))


class Fresh(NamedTuple):
    """Determines which weight gradients a microbatch overwrites instead of adding to them.

    It overwrites a gradient if the ranks have reduced and sharded it after the previous microbatch.

    Attributes:
        experts, others: True if it overwrites the gradients of experts' units, and of all other units.
    """

    experts: bool
    others: bool

    @classmethod
    def of(cls, cfg: Config) -> "Fresh":
        plan = StatePlan(resolved(cfg.mesh.zero), DTYPES[cfg.precision.compute], DTYPES[cfg.precision.params], ())
        spec = MeshSpec.of(cfg.mesh)
        shards = spec.size(*map(spec.beside_ep, SHARD_AXES)), spec.size(*SHARD_AXES)
        return cls(*(not Residency.of(plan, n).holds_full_grad for n in shards))


def reduced(cfg: Config, blocks: int, compiled: bool) -> Config:
    """Return the configuration of the small model.

    Settings that affect no piece are the same for all runs. There are two replicas: with one, the executor would
    join layers.

    Args:
        blocks: number of blocks of each kind in the model. Blocks without experts come first.
    """
    small = cfg.unfrozen()
    splits = Distribution.of(cfg).placement.schedule.splits_backward
    mesh, m, t = small.mesh, small.model, small.train
    small.run, small.optim, small.checkpoint = RunConfig(), OptimConfig(), CheckpointConfig()
    small.logger, small.data = LoggerConfig(), DataConfig(pack=cfg.data.pack)
    small.resume, small.init_from, small.moe.upcycle, small.callbacks, m.name = "none", None, False, {}, ""
    small.schedule = ScheduleConfig(name="zb_h1" if splits else "1f1b", chunks=1)
    small.recompute = RecomputeConfig(name="selective" if needs_saved_ops(cfg.recompute) else "none")
    m.tie_word_embeddings = m.tie_word_embeddings and mesh.pp == 1
    sparse = sum(is_sparse(m, i) for i in range(m.num_hidden_layers))
    mixed = 0 < sparse < m.num_hidden_layers
    m.num_hidden_layers = 2 * blocks if mixed else blocks
    if sparse:
        m.decoder_sparse_step, m.first_k_dense_replace = 1, 0
        m.mlp_only_layers = list(range(blocks)) if mixed else []
    mesh.pp, mesh.dp, mesh.fsdp, mesh.zero = 1, 2 * mesh.ep, 1, 1
    t.compile, t.global_batch, t.steps = compiled, mesh.dp * resolved(t.micro_batch) * (3 if splits else 2), 1
    small.freeze()
    return small


def record(
    cfg: Config, device: str, groups: Sequence[tuple[Save, ...]], fresh: Fresh, imbalance: float = 1.0
) -> Recorded:
    """Record the rank of the reduced configuration that holds the last part of the sequence.

    Args:
        device: "cpu" or "cuda".
        groups: for each group of neighbouring blocks, what each block saves for its recompute; None: not recomputed.
        fresh: which weight gradients are overwritten.
        imbalance: as in `Rates`.
    """
    spec, meta = MeshSpec.of(cfg.mesh), torch.device("meta")
    last = spec.rank({"pp": 0, "dp": 0, "fsdp": 0, "cp": cfg.mesh.cp - 1, "tp": 0})
    log = EventLog()
    with (
        pretended_world(last, spec.world_size, device),
        torch.compiler.set_stance("force_eager"),
        _no_collection_by_chance(),
        log,
        log.with_collectives(),
    ):
        return _record(cfg, Mesh(spec, last, meta), groups, fresh, log, imbalance)


@contextmanager
def _no_collection_by_chance() -> Iterator[None]:
    """Turn Python's automatic garbage collection off within the block.

    It runs after a certain number of allocations. So the size of a piece would depend on the allocations before it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # exclude existing objects, so that a collection takes little time
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _record(
    cfg: Config, mesh: Mesh, groups: Sequence[tuple[Save, ...]], fresh: Fresh, log: EventLog, imbalance: float
) -> Recorded:
    stages = build_stages(cfg, mesh, imbalance=imbalance)
    if cfg.train.compile:
        _leave_eager(stages, log)
    layers = line_up(stages.segments, stages.placement.last)
    stepper = _Stepper(cfg, stages, mesh, layers, groups, log, fresh)
    for name in stages.units.units:
        stages.units.unshard(name)
    scale = torch.ones((), dtype=torch.float64, device=mesh.device)
    shapes, columns = LocalShapes.of(cfg), stages.objective.columns
    batches = [typical_batch(shapes, columns, cfg.data.pack, mesh.device) for _ in range(cfg.microbatches)]
    made = [contexts(stages, [batch], lambda: scale) for batch in batches[:-1]]
    before = log.now
    made.append(contexts(stages, batches[-1:], lambda: scale))
    context_bytes = log.now - before
    with stages.capacity.in_use() if stages.capacity else nullcontext():
        stepper.run([ctx for each in made for ctx in each])
    return Recorded(stepper.pieces, context_bytes)


def _leave_eager(stages: Stages, log: EventLog) -> None:
    """Mark the ops of the blocks that are not part of compiled graphs in the log."""
    in_graph = stages.units.in_graph
    log.eager_nodes = _EAGER_NODES | (frozenset() if in_graph else _EAGER_LINEAR)
    for model in stages.models.values():
        linear = model.ops.linear if in_graph else log.apart(model.ops.linear)
        model.use(replace(model.ops, linear=linear, core=log.apart(model.ops.core)))


class _Stepper(Executor):
    """Runs the passes one by one, without the units' gathers and reductions.

    The first microbatch is a warm-up, in which constants are made. The second has whole backwards. If the schedule
    splits backwards, a third one has split backwards.

    Attributes:
        pieces: variant -> its piece, in the last microbatch that has it.
    """

    def __init__(
        self,
        cfg: Config,
        stages: Stages,
        mesh: Mesh,
        layers: Sequence[Layer],
        groups: Sequence[tuple[Save, ...]],
        log: EventLog,
        fresh: Fresh,
    ):
        row = [Action(kind, m, 0) for m in range(2) for kind in "FB"]
        row += [Action(kind, 2, 0) for kind in "FIW"] if cfg.microbatches > 2 else []
        pipeline = Pipeline(
            Schedule("pieces", [row], cfg.microbatches, (0,)), mesh, LocalShapes.of(cfg).stream, stages.units.compute
        )
        self.kinds = [layer.kind for layer in layers]
        first = [self.kinds.index(kind) for kind in BLOCKS if kind in self.kinds]
        ops = RecomputeOps.of(cfg.model, cfg.mesh)
        recomputed = [group for at in first for group in _recompute_groups(groups, at, ops)]
        super().__init__(layers, stages, pipeline, recomputed)
        self.log, self.fresh, self.pieces = log, fresh, dict[Variant, Piece]()
        self._of_experts = frozenset(p.unit for p in params(cfg.model).values() if p.expert is not None)
        self._compiled = [bool(cfg.train.compile) and kind in COMPILED_KINDS for kind in self.kinds]

    @property
    def program(self) -> RankProgram:
        """The rank's program, reduced to the passes of layers."""
        whole = super().program
        opens = tuple(op for op in whole.begin if isinstance(op, Open))
        turns = (turn._replace(ops=tuple(op for op in turn.ops if isinstance(op, Run))) for turn in whole.turns)
        return replace(whole, begin=opens, turns=tuple(turns), end=(), update=())

    def run(self, contexts: Sequence[Context], tokens: TokenCount | None = None) -> Tensor:
        with self.log.with_collectives():
            return super().run(contexts, tokens)

    def run_turn(self, turn: Turn, number: int) -> None:
        for name, unit in self.units.units.items() if turn.action.kind == "F" else ():
            if self.fresh.experts if name in self._of_experts else self.fresh.others:
                self.units.accumulator.open(unit.accumulated)
        super().run_turn(turn, number)

    def run_pass(self, run: Run, a: Action) -> None:
        variant = Variant.of(run, self.kinds[run.layer])
        with self.log.piece(variant, self._compiled[run.layer]) as made:
            super().run_pass(run, a)
            gc.collect()
        self.pieces[variant] = made[0]


def _recompute_groups(groups: Sequence[tuple[Save, ...]], at: int, ops: RecomputeOps) -> list[RecomputeGroup]:
    """Return the recompute groups of consecutive blocks, of which the first block is layer `at`."""
    made = []
    for saves in groups:
        if saves[0] is not None:
            made.append(ops.group(range(at, at + len(saves)), saves[0]))
        at += len(saves)
    return made
