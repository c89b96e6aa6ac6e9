"""What each kind of instruction does with each kind of layer, recorded.

    pieces = record_pieces(cfg, "cuda")
    pieces.of("F", "block")                         # a forward that keeps its graph
    pieces.of("F", "block", save=frozenset())       # that of a block that is recomputed
    pieces.of("F", "block", save=frozenset(), recompute=True)   # its recompute
    pieces.along(program, layers)                   # of a rank's instructions, one by one

The executor runs a small model of a few layers on the meta device, as one rank of a mesh of tp and cp alone. What
follows from a piece and from the rank it runs on:

- Gathers, reductions and the optimizer are not part of a piece: `parallel/build.flat_layouts` has the units' elements,
  `update_bytes` the optimizer's work for each.
- `kept_bytes` counts a layer's output, which the next layer takes. That of a stage's last layer is sent and freed
  instead, and that of another rank is received: `Pieces.boundary_bytes` each.
- Weights, gradients of weights and what belongs to a microbatch (tokens, rotary tables) are not counted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.config import Config, LocalShapes
from ndtrain.config.registry import get
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
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.engine.executor import Executor
from ndtrain.engine.instructions import Instruction, line_up
from ndtrain.engine.train_step import contexts
from ndtrain.model import Context
from ndtrain.parallel.build import DTYPES, build_stages
from ndtrain.parallel.compile_choice import LONG_RUN, rank_flops
from ndtrain.parallel.pp import Pipeline, Placement
from ndtrain.parallel.recompute import RecomputeGroup, always_saved_ops, blocks_a_group, needs_saved_ops
from ndtrain.parallel.recompute_budget import typical_batch
from ndtrain.parallel.unit import Residency, StatePlan
from ndtrain.plan.event_log import EventLog
from ndtrain.plan.events import Piece
from ndtrain.plan.world import pretended_world
from ndtrain.schedule import Action, Schedule

Save = frozenset[str] | None
NOTHING: frozenset[str] = frozenset()


class Variant(NamedTuple):
    """What an instruction's piece depends on.

    Attributes:
        layer: "embed", "block", "norm" or "head".
        save, shape_only: of the block's recompute group, for its forward and its recompute; None: it is not recomputed.
        drop_input, recompute: as in `Instruction`.
    """

    kind: str
    layer: str
    save: Save = None
    shape_only: frozenset[str] = NOTHING
    drop_input: bool = False
    recompute: bool = False


@dataclass(frozen=True)
class Pieces:
    """The pieces of a rank.

    Attributes:
        recorded: variant -> its piece.
        boundary_bytes: of the residual stream of a microbatch, which layers hand on.
        compiled: whether the blocks are.
    """

    recorded: Mapping[Variant, Piece]
    boundary_bytes: int
    compiled: bool

    def of(
        self,
        kind: str,
        layer: str,
        save: Save = None,
        shape_only: frozenset[str] = NOTHING,
        drop_input: bool = False,
        recompute: bool = False,
    ) -> Piece:
        """The piece of an instruction, whose arguments are as in `Variant`.

        Raises:
            KeyError: the configuration has no such instruction.
        """
        return self.recorded[Variant(kind, layer, save, shape_only, drop_input, recompute)]

    def along(self, program: Iterable[Instruction], layers: Sequence[str]) -> Iterator[Piece]:
        """The piece of each instruction of a program of whole steps.

        Args:
            layers: the kind of each of the rank's layers (`kind_of_unit`).
        """
        return (self.recorded[v] for v in variants(program, layers))


def variants(program: Iterable[Instruction], layers: Sequence[str]) -> Iterator[Variant]:
    """The variant of each instruction. What a recompute replays, its forward has said."""
    saved: dict[tuple[int, int], tuple[Save, frozenset[str]]] = {}
    for ins in program:
        at = ins.microbatch, ins.layer
        if ins.kind == "F" and not ins.recompute:
            saved[at] = ins.save, ins.shape_only
        of_group = saved[at] if ins.kind == "F" else (None, NOTHING)
        yield Variant(ins.kind, layers[ins.layer], *of_group, ins.drop_input, ins.recompute)


def record_pieces(cfg: Config, device: str) -> Pieces:
    """The pieces of a run on devices of this kind, of the rank that has the last part of the sequence.

    Args:
        cfg: resolved.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: a rank cannot be built.
    """
    groups = _groups(cfg)
    small = _reduced(cfg, max(1, sum(len(g) for g in groups)), _compiles(cfg, device))
    return _cached(_Key(small, repr(small), device, _accumulates(cfg), tuple(groups)))


def kind_of_unit(unit: str, loss: bool) -> str:
    """The kind of the layer that reads a unit, which is the loss or not."""
    if loss:
        return "head"
    return "block" if ".layers." in unit else "norm" if unit.endswith("norm") else "embed"


def update_bytes(cfg: Config) -> int:
    """Bytes that the optimizer's update reads and writes for each element of a rank's shard: the gradient once, and the
    master weight and each state tensor twice."""
    master = DTYPES[cfg.precision.params]
    state = get("optimizer", cfg.optim.name).state_spec(cfg.optim)
    average = 2 * master.itemsize if cfg.optim.ema is not None else 0
    return 3 * master.itemsize + sum(2 * (s.dtype or master).itemsize for s in state) + average


# ------------------------------------------------------------------------------------------------- the reduced model

Group = tuple[Save, int]  # what each block of a recompute group saves (None: no recompute), and how many blocks it has


def _groups(cfg: Config) -> list[tuple[Save, ...]]:
    """The recompute groups of which a rank may have blocks, each as what its blocks save. Longer groups are like those
    of three blocks: a first one, a last one, and others."""
    r = cfg.recompute
    if r.name == "none":
        return [(None,)]
    save = always_saved_ops(cfg) | frozenset(r.keep if r.name == "selective" else ())
    most = min(3, blocks_a_group(cfg.model.num_hidden_layers, r))
    return [(save,) * n for n in range(1, most + 1)]


def _compiles(cfg: Config, device: str) -> bool:
    """Whether a run on such devices compiles its blocks."""
    asked = cfg.train.compile_asked
    return asked if asked is not None else device == "cuda" or rank_flops(cfg) >= LONG_RUN


def _accumulates(cfg: Config) -> bool:
    """Whether the matmuls of weight gradients add to those of earlier microbatches."""
    plan = StatePlan(resolved(cfg.mesh.zero), DTYPES[cfg.precision.compute], DTYPES[cfg.precision.params], ())
    return Residency.of(plan, cfg.mesh.fsdp * cfg.mesh.cp).holds_full_grad


def _reduced(cfg: Config, blocks: int, compiled: bool) -> Config:
    """The small model's configuration. What no piece depends on is the same for all. Two replicas, so that the executor
    leaves every layer to itself."""
    small = cfg.unfrozen()
    splits = Placement.of(cfg).schedule.splits_backward
    mesh, m, t = small.mesh, small.model, small.train
    small.run, small.optim, small.checkpoint, small.logger = (
        RunConfig(),
        OptimConfig(),
        CheckpointConfig(),
        LoggerConfig(),
    )
    small.data = DataConfig(pack=cfg.data.pack)
    small.resume, small.init_from, small.callbacks, m.name = "none", None, {}, ""
    small.schedule = ScheduleConfig(name="zb_h1" if splits else "1f1b", chunks=1)
    small.recompute = RecomputeConfig(name="selective" if needs_saved_ops(cfg) else "none")
    m.tie_word_embeddings = m.tie_word_embeddings and mesh.pp == 1
    m.num_hidden_layers = blocks
    mesh.pp, mesh.dp, mesh.fsdp, mesh.zero = 1, 2, 1, 1
    t.compile, t.global_batch, t.steps = compiled, 2 * resolved(t.micro_batch) * (3 if splits else 2), 1
    small.freeze()
    return small


class _Key(NamedTuple):
    """A recording. Equal texts are equal configurations."""

    cfg: Config
    text: str
    device: str
    accumulates: bool
    groups: tuple[tuple[Save, ...], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self[1:] == other[1:]

    def __hash__(self) -> int:
        return hash(self[1:])


@lru_cache(maxsize=256)
def _cached(key: _Key) -> Pieces:
    cfg, spec = key.cfg, MeshSpec.of(key.cfg.mesh)
    meta, last = torch.device("meta"), spec.rank({"pp": 0, "dp": 0, "fsdp": 0, "cp": cfg.mesh.cp - 1, "tp": 0})
    with pretended_world(last, spec.world_size, key.device):
        log = EventLog()
        with torch.compiler.set_stance("force_eager"), log, log.with_collectives():
            recorded = _record(cfg, Mesh(spec, last, meta), key, log)
    width = DTYPES[cfg.precision.compute].itemsize
    tokens, hidden = LocalShapes.of(cfg).stream
    return Pieces(recorded, tokens * hidden * width, bool(cfg.train.compile))


def _record(cfg: Config, mesh: Mesh, key: _Key, log: EventLog) -> dict[Variant, Piece]:
    stages = build_stages(cfg, mesh)
    layers = line_up(stages.segments, 0)
    kinds = [kind_of_unit(layer.units[0], layer.loss) for layer in layers]
    row = _row(cfg)
    schedule = Schedule("pieces", [row], cfg.microbatches, (0,))
    pipeline = Pipeline(schedule, mesh, LocalShapes.of(cfg).stream, stages.units.compute)
    groups = _recompute_groups(key.groups, kinds.index("block"))
    executor = _Stepper(row, layers, stages.units, pipeline, stages.saved_ops, groups)
    executor.log, executor.fresh = log, not key.accumulates
    executor.fused = [bool(cfg.train.compile) and kind in ("block", "head") for kind in kinds]
    scale = torch.ones((), dtype=torch.float64, device=mesh.device)
    batches = [typical_batch(cfg, mesh.device) for _ in range(cfg.microbatches)]
    for name in stages.units.units:
        stages.units.unshard(name)
    executor.run(contexts(stages, batches, lambda: scale))
    flat = [ins for action in executor.program for ins in action]
    return dict(zip(variants(flat, kinds), executor.made, strict=True))


def _row(cfg: Config) -> list[Action]:
    """A warm-up, in which constants are made, a microbatch with whole backwards, and one with split ones where the
    schedule has some."""
    row = [Action(kind, m, 0) for m in range(2) for kind in "FB"]
    return row + [Action(kind, 2, 0) for kind in "FIW"] * (cfg.microbatches > 2)


def _recompute_groups(groups: Sequence[tuple[Save, ...]], at: int) -> list[RecomputeGroup]:
    """The groups of the small model, whose first block is layer `at`."""
    made = []
    for saves in groups:
        if saves[0] is not None:
            made.append(RecomputeGroup(list(range(at, at + len(saves))), saves[0]))
        at += len(saves)
    return made


class _Stepper(Executor):
    """Runs the instructions one by one, without the units' gathers and reductions.

    Attributes:
        log: where to record.
        fused: for each layer, whether its operators are.
        fresh: whether gradients of weights overwrite those of the microbatch before.
        made: the piece of each instruction.
    """

    log: EventLog
    fused: list[bool]
    fresh: bool
    made: list[Piece]

    def run(self, contexts: Sequence[Context]) -> Tensor:
        self.made = []
        return super().run(contexts)

    def _enter(self, a: Action) -> None:
        if self.fresh and a.kind == "F":
            self.units.begin_step()
        super()._enter(a)

    def _run(self, ins: Instruction) -> None:
        with self.log.piece(self.fused[ins.layer]) as piece:
            self._passes[ins.kind](ins)
        self.made += piece
