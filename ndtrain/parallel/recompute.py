"""Activation recompute: which blocks drop their autograd graph and run their forward again before the backward (Chen et
al., 2016, arXiv:1604.06174), and which results they save for it (Korthikanti et al., 2022, arXiv:2205.05198).

A recomputed block runs its forward twice. The first run keeps no graph, but saves the results of the ops that are worth
their memory. The second run makes the graph and replays the saved results, for which it computes and sends nothing.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from ndtrain.config import MeshConfig, ModelConfig, RecomputeConfig
from ndtrain.model.spec import Joins, OpSpec
from ndtrain.model.transformer import all_ops
from ndtrain.parallel.allocations import storage_id

T = TypeVar("T")
NOTHING: frozenset[str] = frozenset()


class SavedOps:
    """The op results that recomputed blocks save in their first run and replay in their second.

    Args:
        op_of: weight -> the op that multiplies by it, named as in `flops.op_flops`. A matmul of several weights has the
            op of the first weight.
    """

    def __init__(self, op_of: Mapping[nn.Parameter, str] | None = None):
        self.op_of = op_of or {}
        self._runs: dict[Hashable, dict[str, deque]] = {}  # key -> op -> its results, in the order they were made
        self._run: dict[str, deque] | None = None  # the results of the block that is running
        self._replaying = False
        self._shape_only = NOTHING

    @contextmanager
    def saving(self, at: Hashable, names: frozenset[str], shape_only: frozenset[str] = NOTHING) -> Iterator[None]:
        """Save the results of the ops `names` under the key `at`. Of the ops `shape_only` only the shape of the results
        is saved: the recompute needs no values."""
        self._shape_only = shape_only
        self._runs[at] = {name: deque() for name in names | shape_only}
        with self._running(self._runs[at], replaying=False):
            yield

    @contextmanager
    def replaying(self, at: Hashable) -> Iterator[None]:
        """Replay the results saved under `at`, and free them.

        Raises:
            RuntimeError: at the end, a saved result was not used.
        """
        run = self._runs.pop(at)
        with self._running(run, replaying=True):
            yield
        left = [name for name, results in run.items() if results]
        if left:
            raise RuntimeError(f"the recompute of {at} did not use the saved results of {', '.join(left)}")

    def __call__(self, name: str | None, make: Callable[[], T]) -> T:
        """Return the result of op `name`, a tensor or a tuple of tensors: the result of `make()`, or the saved one when
        replaying."""
        if self._run is None or name not in self._run:
            return make()
        if self._replaying:
            return self._run[name].popleft()
        made = make()
        self._run[name].append(_stand_in(made) if name in self._shape_only else made)
        return made

    def of(self, name: str) -> Callable | None:
        """Return this object bound to the op `name`, or None if its result is neither being saved nor replayed."""
        return partial(self, name) if self._run is not None and name in self._run else None

    def replays(self, name: str) -> bool:
        """Return True if the saved result of the op `name` is being replayed."""
        return self._replaying and self.of(name) is not None

    def drop(self, at: Hashable) -> dict[str, int]:
        """Free the results saved under `at`. Return the bytes of each op's results."""
        return {name: sum(_storages(results).values()) for name, results in self._runs.pop(at).items()}

    @contextmanager
    def _running(self, run: dict[str, deque], replaying: bool) -> Iterator[None]:
        self._run, self._replaying = run, replaying
        try:
            yield
        finally:
            self._run = None


def _stand_in(made: Any) -> Any:
    """Return tensors of the same shapes that take no memory."""
    if isinstance(made, Tensor):
        return made.new_zeros(()).expand(made.shape)
    return tuple(_stand_in(x) for x in made)


def _storages(made: Any) -> dict[int, int]:
    """Return id -> bytes of each storage."""
    if isinstance(made, Tensor):
        return {storage_id(made): made.untyped_storage().nbytes()}
    return {at: size for x in made for at, size in _storages(x).items()}


# --------------------------------------------------------------------------------------- which blocks are recomputed


@dataclass(frozen=True)
class RecomputeGroup:
    """Consecutive blocks that are recomputed together, from the input of the first one.

    Attributes:
        layers: their indices, in order.
        save: the ops whose results each block saves.
        unread: the ops whose results the recompute of the last block does not read.
        last: the ops in `unread` whose results are read by the recompute of the other blocks.
    """

    layers: list[int]
    save: frozenset[str]
    unread: frozenset[str] = NOTHING
    last: frozenset[str] = NOTHING

    def shape_only(self, layer: int) -> frozenset[str]:
        """Return the ops of which the recompute of this layer needs only the shape."""
        return self.unread if layer == self.layers[-1] else self.unread - self.last


@dataclass(frozen=True)
class RecomputeOps:
    """The properties of the blocks' ops that a recompute depends on.

    Attributes:
        always: the ops whose results are sent over the mesh. Every mode saves them, so that a recompute sends nothing
            twice. The gathered inputs of matmuls are an exception: they are never saved.
        last: the last op of each kind of block. The next layer saves its result as an input anyway.
        read_by: op -> the only op that reads its result, for ops with one reader.
    """

    always: frozenset[str] = NOTHING
    last: frozenset[str] = NOTHING
    read_by: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, m: ModelConfig, mesh: MeshConfig, ops: Sequence[OpSpec] | None = None) -> "RecomputeOps":
        """Return the properties of a model's ops on a resolved mesh.

        Args:
            ops: the ops of each kind of block; None: they are read from the model's classes here.
        """
        ranks = {Joins.SLICES: mesh.tp, Joins.POSITIONS: mesh.cp, Joins.EXPERTS: mesh.ep, None: 1}
        ops = all_ops(m) if ops is None else ops
        return cls(
            frozenset(op.name for op in ops if ranks[op.joins] > 1),
            frozenset(op.name for op in ops if op.last),
            {op.name: op.read_by for op in ops if op.read_by is not None},
        )

    def unread(self, save: frozenset[str]) -> frozenset[str]:
        """Return the ops whose results the recompute of a group's last block does not read, if it saves the ops in
        `save`."""
        return self.last | {op for op, reader in self.read_by.items() if reader in save}

    def group(self, layers: Sequence[int], save: frozenset[str]) -> RecomputeGroup:
        return RecomputeGroup(list(layers), save, self.unread(save), self.last)


@dataclass(frozen=True)
class RecomputePlan:
    """The blocks of a rank that are recomputed.

    Attributes:
        groups: the recomputed groups. `layers` are indices in the rank's segments, stage after stage.
        skipped_ops: for each block the ops that its recompute skips, or None if it is not recomputed.
    """

    groups: list[RecomputeGroup] = field(default_factory=list)
    skipped_ops: list[frozenset[str] | None] = field(default_factory=list)


def needs_saved_ops(cfg: RecomputeConfig) -> bool:
    """Return True if recomputed blocks save results of ops inside the block."""
    return cfg.name in ("selective", "budget")


def plan_recompute(
    blocks: Sequence[int],
    cfg: RecomputeConfig,
    ops: RecomputeOps,
    choice: Sequence[frozenset[str] | None] | None = None,
) -> list[RecomputeGroup]:
    """Return the recomputed groups of a stage's layers `blocks`, in order. There are none with recompute=none.

    Args:
        ops: the properties of the run's ops.
        choice: with recompute=budget, for each block the ops it saves, or None if it is not recomputed.
    """
    if cfg.name == "none":
        return []
    if cfg.name == "budget":
        chosen = zip(blocks, choice, strict=True)
        return [ops.group([block], ops.always | save) for block, save in chosen if save is not None]
    save = ops.always | frozenset(cfg.keep if cfg.name == "selective" else ())
    each = blocks_a_group(len(blocks), cfg)
    return [ops.group(blocks[i : i + each], save) for i in range(0, len(blocks), each)]


def blocks_a_group(blocks: int, cfg: RecomputeConfig) -> int:
    """Return `recompute.every`, or 1 for other modes. Auto is the square root of the number of blocks (Chen et al.,
    2016, section 4.1). It minimizes the sum of all group inputs and one group's graph, if a block's graph is no larger
    than its input."""
    if cfg.name != "every":
        return 1
    return max(1, round(blocks**0.5)) if cfg.every == "auto" else cfg.every


def skipped_ops(
    blocks: Sequence[int], groups: Sequence[RecomputeGroup], compiled: bool = False
) -> list[frozenset[str] | None]:
    """Return for each block the ops that its recompute skips, or None if it is not recomputed.
    `flops.hardware_flops_per_token` takes this list.

    Args:
        compiled: True if blocks are compiled with their matmuls inside the graph. The graph computes the `shape_only`
            ops too.
    """
    of_block = {i: g.save if compiled else g.save | g.shape_only(i) for g in groups for i in g.layers}
    return [of_block.get(i) for i in blocks]
