"""Activation recompute: which blocks keep their autograd graph, what is run again before a backward (Chen et al., 2016,
arXiv:1604.06174), and what of its first run a block finds again in the second (Korthikanti et al., 2022,
arXiv:2205.05198).

A block that runs twice runs first without a graph. The results of the ops that are worth their memory are kept then. In
the second run, which makes the graph, they stand where an op would be computed, or its messages sent, once more.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from ndtrain.config import Config, RecomputeConfig

T = TypeVar("T")
NOTHING: frozenset[str] = frozenset()
LAST = "down_proj"  # the op that ends a block: what follows in its group can keep it
_OP_OF_LEAF = {"q_proj": "qkv_proj", "o_proj": "o_proj", "gate_proj": "gate_up_proj", "down_proj": "down_proj"}


def op_of(parameter: str) -> str | None:
    """The op (as in `cost.op_flops`) whose matmuls start with the weight of this global name; None: none of a block."""
    path, _, leaf = parameter.rpartition(".")
    return _OP_OF_LEAF.get(path.rpartition(".")[2]) if leaf == "weight" else None


class SavedOps:
    """What a block that runs twice keeps from its first run, so that the second need not make it again.

    Args:
        op_of: the first weight of each matmul -> the op's name.
    """

    def __init__(self, op_of: Mapping[nn.Parameter, str] | None = None):
        self.op_of = op_of or {}
        self._runs: dict[Hashable, dict[str, deque]] = {}  # results of each op in the order they were made
        self._run: dict[str, deque] | None = None  # that of the block that is running
        self._replaying = False
        self._unneeded = NOTHING

    @contextmanager
    def saving(self, at: Hashable, names: frozenset[str], unneeded: frozenset[str] = NOTHING) -> Iterator[None]:
        """Inside, the results of the ops `names` are kept under `at`. Those of `unneeded` will be asked for, but their
        values not be used: only their shapes are kept."""
        self._unneeded = unneeded
        self._runs[at] = {name: deque() for name in names | unneeded}
        with self._running(self._runs[at], replaying=False):
            yield

    @contextmanager
    def replaying(self, at: Hashable) -> Iterator[None]:
        """Inside, what was kept under `at` is given back, and kept no longer.

        Raises:
            RuntimeError: at the end, something that was kept was not asked for.
        """
        run = self._runs.pop(at)
        with self._running(run, replaying=True):
            yield
        left = [name for name, results in run.items() if results]
        if left:
            raise RuntimeError(f"the second run of {at} did not ask for the kept results of {', '.join(left)}")

    def __call__(self, name: str | None, make: Callable[[], T]) -> T:
        """The result of op `name` (a tensor or a tuple of them): `make()`'s, or, in a second run that finds it kept,
        what that came to in the first."""
        if self._run is None or name not in self._run:
            return make()
        if self._replaying:
            return self._run[name].popleft()
        made = make()
        self._run[name].append(_stand_in(made) if name in self._unneeded else made)
        return made

    def of(self, name: str) -> Callable | None:
        """This for the op `name`; None where it is neither being recorded nor replayed."""
        return partial(self, name) if self._run is not None and name in self._run else None

    def drop(self, at: Hashable) -> dict[str, int]:
        """There will be no second run. Returns what the results of each op held, in bytes."""
        return {name: sum(_storages(results).values()) for name, results in self._runs.pop(at).items()}

    @contextmanager
    def _running(self, run: dict[str, deque], replaying: bool) -> Iterator[None]:
        self._run, self._replaying = run, replaying
        try:
            yield
        finally:
            self._run = None


def _stand_in(made: Any) -> Any:
    """Of the same shapes and no memory."""
    if isinstance(made, Tensor):
        return made.new_zeros(()).expand(made.shape)
    return tuple(_stand_in(x) for x in made)


def _storages(made: Any) -> dict[int, int]:
    """Address -> bytes of what the tensors lie in."""
    if isinstance(made, Tensor):
        return {made.untyped_storage().data_ptr(): made.untyped_storage().nbytes()}
    return {at: size for x in made for at, size in _storages(x).items()}


# ------------------------------------------------------------------------------------------- which blocks run again


@dataclass(frozen=True)
class RecomputeGroup:
    """Consecutive blocks that are run again together, from the first one's input.

    Attributes:
        segments: their places in the stage.
        keep: the ops whose results each of them keeps. The last op of the last block is left out of the second run in
            any case: nothing reads its result.
    """

    segments: list[int]
    keep: frozenset[str]

    def unneeded(self, segment: int) -> frozenset[str]:
        return frozenset({LAST}) if segment == self.segments[-1] else NOTHING


def needs_saved_ops(cfg: Config) -> bool:
    """Whether the first run of a block hands results that it does not end with to the second."""
    return cfg.recompute.name in ("selective", "budget")


def always_saved_ops(cfg: Config) -> frozenset[str]:
    """The ops whose results took messages to make. They are kept in every mode: the second run sends none but those
    that bring its matmuls' inputs together, which the backward does not keep either."""
    by_tp, by_cp = {"o_proj", LAST} if cfg.mesh.tp > 1 else (), {"core"} if cfg.mesh.cp > 1 else ()
    return frozenset({*by_tp, *by_cp})


def plan_recompute(
    blocks: Sequence[int],
    cfg: RecomputeConfig,
    always: frozenset[str] = NOTHING,
    choice: Sequence[frozenset[str] | None] | None = None,
) -> list[RecomputeGroup]:
    """Which of a stage's segments `blocks` are run again, in order; none with recompute=none.

    Args:
        always: what is kept in every mode (`always_saved_ops`).
        choice: with recompute=budget, for each block what it keeps, None where it is not run again.
    """
    if cfg.name == "none":
        return []
    if cfg.name == "budget":
        chosen = zip(blocks, choice, strict=True)
        return [RecomputeGroup([block], always | keep) for block, keep in chosen if keep is not None]
    keep = always | frozenset(cfg.keep if cfg.name == "selective" else ())
    each = blocks_a_group(len(blocks), cfg)
    return [RecomputeGroup(list(blocks[i : i + each]), keep) for i in range(0, len(blocks), each)]


def blocks_a_group(blocks: int, cfg: RecomputeConfig) -> int:
    """`recompute.every`, where auto is the square root of the number of blocks (Chen et al., 2016, section 4.1: the
    inputs of all groups and the graphs of one are then least together, if a block's graph is no larger than its
    input)."""
    if cfg.name != "every":
        return 1
    return max(1, round(blocks**0.5)) if cfg.every == "auto" else cfg.every


def skipped_ops(
    blocks: Sequence[int], found: Sequence[RecomputeGroup], compiled: bool = False
) -> list[frozenset[str] | None]:
    """For each block the ops that its second run leaves out, None where there is none: what
    `cost.hardware_flops_per_token` asks for.

    Args:
        compiled: whether blocks are compiled with their matmuls inside, where nothing is left out.
    """
    of_block = {i: g.keep if compiled else g.keep | g.unneeded(i) for g in found for i in g.segments}
    return [of_block.get(i) for i in blocks]
