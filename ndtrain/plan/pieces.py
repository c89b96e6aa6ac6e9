"""Records the work of each kind of pass on each kind of layer.

    record_pieces(cfg, "cuda").recorded[Variant("F", "block")]   # a forward of a block that keeps its graph

The executor runs a small model of a few layers on the meta device, as one rank of a mesh of tp and cp. A caller has to
know what the pieces leave out:

- Gathers, reductions and the optimizer are not part of a piece. `Layouts.flat` returns the number of
  elements of each unit on a rank, `update_bytes` the optimizer's memory traffic per element of its shard.
- `kept_bytes` includes a layer's output, because the next layer reads it. Two tensors are exceptions: the output of a
  stage's last layer is sent and freed, and the input of its first layer is received. Each has `boundary_bytes`, and so
  has its gradient.
- Weights and weight gradients are not counted. Of the memory that a microbatch holds over the whole step, only
  `context_bytes` is counted.
"""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ndtrain.config import Config, LocalShapes
from ndtrain.config.schema import (
    CheckpointConfig,
    DataConfig,
    LoggerConfig,
    OptimConfig,
    RecomputeConfig,
    RunConfig,
    ScheduleConfig,
    require,
    resolved,
)
from ndtrain.device.kind import meta_stands_for
from ndtrain.engine.executor import Executor
from ndtrain.engine.train_step import contexts
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import SHARD_AXES, Tensors
from ndtrain.model import params
from ndtrain.model.transformer import BLOCKS, is_sparse
from ndtrain.parallel import compile_choice
from ndtrain.parallel.balance import looks_ahead
from ndtrain.parallel.build import DTYPES, build_stages, state_plan
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.pp import Pipeline
from ndtrain.parallel.recompute import NOTHING, RecomputeGroup, RecomputeOps, blocks_a_group, needs_saved_ops
from ndtrain.parallel.recompute_budget import typical_batch
from ndtrain.parallel.stages import Stages
from ndtrain.parallel.unit import Residency
from ndtrain.plan.event_log import EventLog, Journal
from ndtrain.plan.events import Piece
from ndtrain.plan.world import journalled, pretended_world
from ndtrain.program.ops import Open, RankProgram, Run, Turn
from ndtrain.program.passes import Save, Variant, line_up
from ndtrain.schedule import Action, Schedule

COMPILED_KINDS = (*BLOCKS, "head")  # kinds of layers that are compiled
# Autograd nodes outside of compiled graphs: attention and its messages, which a compiled graph calls as one operator or
# not at all, and matmuls with messages.
_EAGER_NODES = frozenset({"_TiledBackward", "_RingBackward", "_ToHeadsBackward", "_ToTokensBackward"})
_EAGER_LINEAR = frozenset({"_LinearBackward"})


@dataclass(frozen=True)
class Pieces:
    """The pieces of a rank.

    Attributes:
        recorded: variant -> its piece.
        boundary_bytes: size of a microbatch's residual stream, which each layer passes on to the next.
        context_bytes: bytes that each microbatch holds from the beginning of the step to its end.
        compiled: True if the blocks are compiled.
    """

    recorded: Mapping[Variant, Piece]
    boundary_bytes: int
    context_bytes: int
    compiled: bool


def record_pieces(cfg: Config, device: str, imbalance: float = 1.0) -> Pieces:
    """Record the pieces of a run on devices of this kind, for the rank that holds the last part of the sequence.

    Args:
        cfg: resolved.
        device: "cpu" or "cuda".
        imbalance: as in `Rates`.

    Raises:
        ConfigError: a rank cannot be built, or its work can only be determined on the machine itself.
    """
    _check(cfg, device)
    groups = _groups(cfg)
    small = _reduced(cfg, sum(map(len, groups)), compiles(cfg, device))
    return _recorded(_Recording(small, repr(small), device, groups, _Fresh.of(cfg), imbalance))


def _check(cfg: Config, device: str) -> None:
    m = cfg.model
    require(
        cfg.recompute.name != "budget",
        "recompute=budget: the blocks to recompute are chosen on the training machine: plan recompute=none, "
        "selective and full instead",
    )
    changed = m.alibi or m.attn_logit_softcapping is not None or m.attention is not None
    require(
        device == "cpu" or not changed or cfg.hardware.attention == "math",
        "model.alibi, model.attn_logit_softcapping and model.attention: they use a kernel generated on the GPU, "
        "which cannot be planned without one: set hardware.attention=math",
    )


def update_bytes(cfg: Config) -> int:
    """Return the bytes that the optimizer's update reads and writes per element of a rank's shard.

    The gradient counts once. The master weight, each state tensor and the average count twice. If there are whole
    tensors, all elements count as elements of hidden matrices. Their gradient is also read and written for the owners,
    and replaced by a direction.
    """
    plan = state_plan(cfg)
    states = (s for s in plan.sharded if plan.whole is None or s.tensors is not Tensors.OTHER)
    twice = [plan.master, *(s.dtype or plan.master for s in states), *[plan.master] * plan.ema]
    exchanged = 3 * plan.master.itemsize + 2 * plan.sent.itemsize if plan.whole is not None else 0
    return plan.master.itemsize + exchanged + sum(2 * dtype.itemsize for dtype in twice)


def compiles(cfg: Config, device: str) -> bool:
    """Return True if a run on devices of this kind compiles its blocks."""
    with meta_stands_for(device):
        return compile_choice.compiles(cfg.train, cfg.model, MeshSpec.of(cfg.mesh), torch.device("meta"))


class _Fresh(NamedTuple):
    """Determines which weight gradients a microbatch overwrites instead of adding to them.

    It overwrites a gradient if the ranks have reduced and sharded it after the previous microbatch.

    Attributes:
        experts, others: True if it overwrites the gradients of experts' units, and of all other units.
    """

    experts: bool
    others: bool

    @classmethod
    def of(cls, cfg: Config) -> "_Fresh":
        plan, spec = state_plan(cfg), MeshSpec.of(cfg.mesh)
        shards = spec.size(*map(spec.beside_ep, SHARD_AXES)), spec.size(*SHARD_AXES)
        return cls(*(not Residency.of(plan, n).holds_full_grad for n in shards))


def _groups(cfg: Config) -> tuple[tuple[Save, ...], ...]:
    """Return the recompute groups whose blocks a rank may have. A group lists what each of its blocks saves.

    Three blocks represent longer groups as well: a first block, a last block, and the others. In a forward before the
    step, a block keeps as little as a recomputed block that saves nothing.
    """
    r, ahead = cfg.recompute, [(NOTHING,)] if looks_ahead(cfg.model, cfg.moe) else []
    if r.name == "none":
        return ((None,), *ahead)
    save = RecomputeOps.of(cfg.model, cfg.mesh).always | frozenset(r.keep if r.name == "selective" else ())
    most = min(3, blocks_a_group(cfg.model.num_hidden_layers, r))
    return tuple(dict.fromkeys([*((save,) * n for n in range(1, most + 1)), *ahead]))


def _reduced(cfg: Config, blocks: int, compiled: bool) -> Config:
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
    t.batch_ramp = []
    small.freeze()
    return small


# ------------------------------------------------------------------------------------------------------- the recording


class _Recording(NamedTuple):
    """Everything that the pieces of a run depend on. `text` represents `cfg` in comparisons.

    Attributes:
        cfg: the configuration of the small model.
        device: "cpu" or "cuda".
        groups: for each group of neighbouring blocks, what each block saves for its recompute; None: not recomputed.
        fresh: which weight gradients are overwritten.
        imbalance: as in `Rates`.
    """

    cfg: Config
    text: str
    device: str
    groups: tuple[tuple[Save, ...], ...]
    fresh: _Fresh
    imbalance: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Recording) and self[1:] == other[1:]

    def __hash__(self) -> int:
        return hash(self[1:])


@lru_cache(maxsize=256)
def _recorded(of: _Recording) -> Pieces:
    """Record the rank that holds the last part of the sequence."""
    spec, meta = MeshSpec.of(of.cfg.mesh), torch.device("meta")
    last = spec.rank({"pp": 0, "dp": 0, "fsdp": 0, "cp": of.cfg.mesh.cp - 1, "tp": 0})
    log = EventLog()
    with (
        pretended_world(last, spec.world_size, of.device),
        torch.compiler.set_stance("force_eager"),
        _no_collection_by_chance(),
        log,
        journalled(Journal(log)),
    ):
        return _record(of, Mesh(spec, last, meta), log)


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


def _record(of: _Recording, mesh: Mesh, log: EventLog) -> Pieces:
    cfg = of.cfg
    stages = build_stages(cfg, mesh, imbalance=of.imbalance)
    if cfg.train.compile:
        _leave_eager(stages, log)
    stepper = _Stepper(of, stages, mesh, log)
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
    boundary_bytes = math.prod(shapes.stream) * DTYPES[cfg.precision.compute].itemsize
    return Pieces(stepper.pieces, boundary_bytes, context_bytes, bool(cfg.train.compile))


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

    def __init__(self, of: _Recording, stages: Stages, mesh: Mesh, log: EventLog):
        cfg, layers = of.cfg, line_up(stages.segments, stages.placement.last)
        row = [Action(kind, m, 0) for m in range(2) for kind in "FB"]
        row += [Action(kind, 2, 0) for kind in "FIW"] if cfg.microbatches > 2 else []
        pipeline = Pipeline(
            Schedule("pieces", [row], cfg.microbatches, (0,)), mesh, LocalShapes.of(cfg).stream, stages.units.compute
        )
        self.kinds = [layer.kind for layer in layers]
        first = [self.kinds.index(kind) for kind in BLOCKS if kind in self.kinds]
        ops = RecomputeOps.of(cfg.model, cfg.mesh)
        recomputed = [group for at in first for group in _recompute_groups(of.groups, at, ops)]
        super().__init__(layers, stages, pipeline, recomputed)
        self.log, self.fresh, self.pieces = log, of.fresh, dict[Variant, Piece]()
        self._of_experts = frozenset(p.unit for p in params(cfg.model).values() if p.expert is not None)
        self._compiled = [bool(cfg.train.compile) and kind in COMPILED_KINDS for kind in self.kinds]

    @property
    def program(self) -> RankProgram:
        """The rank's program, reduced to the passes of layers."""
        whole = super().program
        opens = tuple(op for op in whole.begin if isinstance(op, Open))
        turns = (turn._replace(ops=tuple(op for op in turn.ops if isinstance(op, Run))) for turn in whole.turns)
        return replace(whole, begin=opens, turns=tuple(turns), end=(), update=())

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
