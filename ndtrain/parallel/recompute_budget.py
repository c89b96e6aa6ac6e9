"""recompute=budget: the least recompute with which a rank's activations stay under a number of bytes.

The sizes are measured on one block of each kind and on the head. The peak of a plan is computed from these sizes. A
live microbatch holds, for each block, the block's input and the tensors that the block saves. The backward of a block
adds its whole autograd graph and the temporaries of its gradients, whether or not the block is recomputed. The backward
runs from the last block to the first. The last blocks of a stage therefore save most: their graphs are freed before the
other blocks are recomputed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtrain.config import AXES, EXPERT_OPS, SAVABLE_OPS, ConfigError, LocalShapes, ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.data import Batch
from ndtrain.device.kind import kind_of
from ndtrain.mesh.host_device import gather_numbers
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import Context, Segment
from ndtrain.model.flops import elementwise_values, over_layers, recompute_flops
from ndtrain.model.objective import Column
from ndtrain.parallel.allocations import Allocations
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.recompute import RecomputeOps, SavedOps
from ndtrain.parallel.stages import Stages
from ndtrain.schedule import Action, most_alive

Choice = frozenset[str] | None  # the ops that a recomputed block saves; None: it is not recomputed
MESSAGES = 4  # messages that wait on a rank at one time, to be sent or to be used
_SIZED = (*SAVABLE_OPS, *EXPERT_OPS)  # the ops whose results may be saved
_FLOPS_A_BYTE = {"cpu": 10, "cuda": 200}  # rough FLOPs of a device in the time it reads or writes a byte


class Load(NamedTuple):
    """The load of one stage.

    Attributes:
        blocks: its number of blocks.
        live: the largest number of microbatches between their forward and their backward.
        waiting: the largest number of microbatches between the backward of inputs and the backward of weights.
    """

    blocks: int
    live: int
    waiting: int = 0


@dataclass(frozen=True)
class BlockSizes:
    """Bytes on one rank.

    Attributes:
        boundary: a block's input.
        graph: the tensors that a block saves for its backward if it is not recomputed, without its input.
        saved: the result of each op that can be saved.
        backward: the peak of a block's forward with a graph and its backward, without its input.
        waiting: the tensors that a block holds for the backward of its weights, if that is an action of its own.
        tail: the tensors of a live microbatch at the end of the last stage: the input of the final norm and its graph.
        head: the peak of the loss and the backward down to the blocks, without `tail`.
        besides: the tensors of a step with any plan: contexts, gathered weights, and gradients and messages in flight.
    """

    boundary: int
    graph: int
    saved: Mapping[str, int]
    backward: int
    waiting: int = 0
    tail: int = 0
    head: int = 0
    besides: int = 0

    def held(self, choice: Choice) -> int:
        """Return the bytes that one block of one live microbatch holds."""
        return self.boundary + (self.graph if choice is None else sum(self.saved[op] for op in choice))


# --------------------------------------------------------------------------------------------------------- the plan


def peak_bytes(loads: Sequence[Load], plan: Sequence[Choice], sizes: BlockSizes) -> int:
    """Return the peak bytes of activations on a rank in a step, if block i of its stages follows plan[i].

    The last of `loads` is the stage with the head, if the rank has it. With several stages this is an upper bound: it
    assumes that all reach their peak at the same time.
    """
    held = [sizes.held(choice) for choice in plan]
    everything, peak, at = sizes.besides, sizes.head, 0
    for number, load in enumerate(loads, 1):
        done = sizes.tail if number == len(loads) else 0  # bytes that the microbatch in backward holds up to here
        for h in reversed(held[at : at + load.blocks]):
            done += h
            peak = max(peak, sizes.boundary + sizes.backward - done)
        everything += load.live * done + load.waiting * load.blocks * sizes.waiting
        at += load.blocks
    return (everything + peak) * 51 // 50  # 2 % for allocations too small to be followed


def choices(always: frozenset[str], ops: Sequence[str] = SAVABLE_OPS) -> list[Choice]:
    """Return all options of a block: keep its graph (None), or be recomputed with `always` and any subset of `ops`
    saved."""
    free = [op for op in ops if op not in always]
    return [None, *(always | set(some) for n in range(len(free) + 1) for some in combinations(free, n))]


def plan(
    loads: Sequence[Load], sizes: BlockSizes, budget: int, cost: Callable[[Choice], float], always: frozenset[str]
) -> list[Choice]:
    """Choose an option for each block of the rank's stages, in order. The plan has at most two kinds of blocks, and is
    the fastest that stays under `budget` bytes. Among equally fast plans it has the lowest peak.

    Args:
        cost: the cost of a block's recompute, in any unit; 0 for None.
        always: the ops that are saved in any case.

    Raises:
        ConfigError: no plan stays under the budget.
    """
    options = _useful(choices(always, [op for op, size in sizes.saved.items() if size]), sizes, cost)
    pairs = list(combinations(options, 2)) or [(options[0], options[0])]
    blocks = sum(load.blocks for load in loads)
    ways = [
        (sum(heavy) * cost(b) + (blocks - sum(heavy)) * cost(a), a, b, heavy)
        for a, b in pairs
        for heavy in product(*(range(load.blocks + 1) for load in loads))
    ]
    best: tuple[float, int, list[Choice]] | None = None
    for seconds, a, b, heavy in sorted(ways, key=lambda way: way[0]):
        if best and seconds > best[0]:
            break
        assigned = [c for load, n in zip(loads, heavy, strict=True) for c in [a] * (load.blocks - n) + [b] * n]
        needed = peak_bytes(loads, assigned, sizes)
        if needed <= budget and (best is None or needed < best[1]):
            best = seconds, needed, assigned
    if best is None:
        least = peak_bytes(loads, [options[0]] * blocks, sizes)
        raise ConfigError(
            f"recompute.budget={budget}: the activations of this rank need at least {least} bytes, even with full "
            "recompute: raise it, or lower train.micro_batch"
        )
    return best[2]


def _useful(options: Sequence[Choice], sizes: BlockSizes, cost: Callable[[Choice], float]) -> list[Choice]:
    """Return the options for which no other option is both smaller and faster, smallest first."""
    frontier: list[Choice] = []
    for option in sorted(options, key=lambda o: (sizes.held(o), cost(o))):
        if not frontier or cost(option) < cost(frontier[-1]):
            frontier.append(option)
    return frontier


def recompute_cost(
    m: ModelConfig, seq_len: int, compute: torch.dtype, ops: RecomputeOps, device: str
) -> Callable[[Choice], float]:
    """Return a function that gives the cost of a block's recompute in FLOPs a token, the mean of all layers. Matmuls
    and attention count their FLOPs. The elementwise ops between them count the FLOPs that the device could compute
    while it reads and writes their values."""
    a_value = compute.itemsize * _FLOPS_A_BYTE.get(device, _FLOPS_A_BYTE["cpu"])

    def of_layer(skipped: frozenset[str], i: int) -> int:
        return recompute_flops(m, seq_len, skipped, i) + elementwise_values(m, i) * a_value

    # a plan needs the cost of the same few choices thousands of times
    mean = cache(lambda skipped: over_layers(m, partial(of_layer, skipped)) / m.num_hidden_layers)
    return lambda choice: 0 if choice is None else mean(choice | ops.unread(choice))


# -------------------------------------------------------------------------------------------------------- the sizes


class _CudaAllocations:
    """`Allocations` from the allocator's counters, which see every allocation. `peak_bytes` is set at the end."""

    def __enter__(self) -> "_CudaAllocations":
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_) -> None:
        self.peak_bytes = torch.cuda.max_memory_allocated() - self._before

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated() - self._before


@contextmanager
def _follow(device: torch.device) -> Iterator[Allocations | _CudaAllocations]:
    """Follow the memory that the block allocates. On a CPU nothing is compiled inside, because the allocations of
    compiled code cannot be followed there."""
    if device.type == "cuda":
        with _CudaAllocations() as made:
            yield made
    elif kind_of(device) == "cuda":
        with Allocations() as made:
            yield made
    else:
        with torch.compiler.set_stance("force_eager"), Allocations() as made:
            yield made


def measure(
    segments: Sequence[Segment],
    units: ShardedUnits,
    saved_ops: SavedOps,
    last: frozenset[str],
    context: Callable[[], Context],
    x: Tensor,
) -> BlockSizes:
    """Measure the sizes of a rank with at least one block. This runs one block of each kind and, if the rank has it,
    the head, and takes the largest of each size. All ranks that hold the same layers call this together. Gradients that
    a step has collected are lost.

    Args:
        segments: the segments of all the rank's stages, in order.
        last: the last op of each kind of block.
        context: makes the context of a microbatch.
        x: a tensor like a block's input.
    """
    for name, unit in units.units.items():
        if unit.residency.holds_full_grad:
            units.open(name)
    with _follow(x.device) as made:
        ctx = context()
    blocks = [i for i, s in enumerate(segments) if s.is_block]
    kinds = list({segments[i].kind: segments[i] for i in blocks}.values())  # all blocks of a kind are alike
    end = segments[blocks[-1] + 1 :]
    sizes = _largest_of([_measure_block(block, units, saved_ops, last, ctx, x) for block in kinds])
    sizes |= _measure_end(*end, units, ctx, x) if end else {}
    for name in dict.fromkeys(name for s in (*kinds, *end) for name in s.units):
        units.close(name)
        units.discard(name)
    units.weights_changed()
    return BlockSizes(boundary=_bytes(x), besides=made.peak_bytes, **sizes)


def _largest_of(sizes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    largest = {name: max(s[name] for s in sizes) for name in sizes[0] if name != "saved"}
    return largest | {"saved": {op: max(s["saved"][op] for s in sizes) for op in sizes[0]["saved"]}}


def _measure_block(
    block: Segment, units: ShardedUnits, saved_ops: SavedOps, last: frozenset[str], ctx: Context, x: Tensor
) -> dict[str, Any]:
    _open(block, units)
    with torch.no_grad(), saved_ops.saving("sizes", frozenset(_SIZED), last):
        block.run(x, ctx)
    saved = saved_ops.drop("sizes")
    _, y = _run(block, ctx, x)  # warm-up: the first run also allocates memory that is not activations
    _backward(block, units, y)
    del y
    with _follow(x.device) as made:
        _, y = _run(block, ctx, x)
        graph = made.now - _bytes(y)
        _backward(block, units, y)
    backward, later = made.peak_bytes, []
    with _follow(x.device) as made, units.accumulator.deferred(later):
        x, y = _run(block, ctx, x)
        _backward(block, units, y)
        del y
        waiting = made.now - _bytes(x.grad)
    return {"graph": graph, "backward": backward, "waiting": waiting, "saved": {op: saved[op] for op in _SIZED}}


def _measure_end(norm: Segment, head: Segment, units: ShardedUnits, ctx: Context, x: Tensor) -> dict[str, Any]:
    _open(norm, units)
    _open(head, units)
    with _follow(x.device) as made:
        x, h = _run(norm, ctx, x)
        tail = _bytes(x) + made.now
    with _follow(x.device) as made:
        into, loss = _run(head, ctx, h)
        loss.backward()
        h.backward(into.grad)
    return {"tail": tail, "head": made.peak_bytes}


def _open(segment: Segment, units: ShardedUnits) -> None:
    """Make the segment's weights and gradients resident from now on, so that no size includes them."""
    for unit in segment.units:
        units.unshard(unit)
        if not units.units[unit].residency.holds_full_grad:
            units.open(unit)


def _backward(segment: Segment, units: ShardedUnits, y: Tensor) -> None:
    """Run the segment's backward as the executor does. The gradients of a compiled block are attached only
    meanwhile."""
    for unit in segment.units:
        units.attach(unit)
    y.backward(torch.empty_like(y))
    for unit in segment.units:
        units.detach(unit)


def _run(segment: Segment, ctx: Context, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run the segment. Return (its input as the executor would hand it over, its output)."""
    x = x.detach().requires_grad_()
    return x, segment.run(x, ctx)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def sharding_bytes(units: ShardedUnits) -> int:
    """Return the most that gathers and reductions hold in addition to the state. Weights of two units count if they are
    resharded after use. Gradients of two units count if the ranks hold shards. The parts that two units receive from
    other ranks always count."""
    held = 0
    for unit in sorted(units.units.values(), key=lambda u: u.layout.numel)[-2:]:
        numel, shards = unit.layout.numel, unit.layout.groups.shards
        weights = numel if unit.residency.reshard_after_forward else 0
        gradients = (0 if unit.residency.holds_full_grad else numel) + numel * (shards - 1) // shards
        held += weights * units.compute.itemsize + gradients * units.master.itemsize
    return held


# ------------------------------------------------------------------------------------------------------- the choice


def choose(
    budget: int, stages: Stages, batch: Batch, shapes: LocalShapes, ops: RecomputeOps, mesh: Mesh
) -> list[Choice]:
    """Choose an option for each block of the rank's stages under `recompute.budget`. All ranks that hold the same
    layers call this together, and get the same choices.

    Args:
        budget: bytes.
        batch: a microbatch like the rank's own (`typical_batch`).
        shapes: the sizes of the rank's tensors.
        ops: the properties of the run's ops.

    Raises:
        ConfigError: the budget is less than the least that works.
    """
    units, schedule, kind = stages.units, stages.placement.schedule, kind_of(mesh.device)
    segments = [segment for _, segment in stages.in_order]
    if not any(segment.is_block for segment in segments):
        return []
    x = torch.zeros(shapes.stream, dtype=units.compute, device=mesh.device)
    sizes = _largest(measure(segments, units, stages.saved_ops, ops.last, _context(stages, batch), x), mesh)
    besides = sizes.besides * schedule.microbatches + sharding_bytes(units)
    besides += MESSAGES * sizes.boundary if mesh.size("pp") > 1 else 0
    besides += _unseen(shapes, resolved(stages.model.head_dim), units.compute) if kind == "cpu" else 0
    row = schedule.table[mesh.coords["pp"]]
    loads = [load(row, stage, len(stages.placement.layers[stage])) for stage in schedule.stages_of(mesh.coords["pp"])]
    cost = recompute_cost(stages.model, shapes.seq_len, units.compute, ops, kind)
    return plan(loads, replace(sizes, besides=besides), budget, cost, ops.always - ops.last)


def load(row: Sequence[Action], stage: int, blocks: int) -> Load:
    """Return the load of a stage of `blocks` blocks when its rank runs its row."""
    own = [a for a in row if a.stage == stage]
    return Load(blocks, most_alive(own, "F", "BI"), most_alive(own, "I", "W"))


def typical_batch(shapes: LocalShapes, columns: Sequence[Column], packed: bool, device: torch.device) -> Batch:
    """Return a microbatch of zeros, shaped like the microbatches of this rank.

    Args:
        columns: the columns that the objective reads.
        packed: as `data.pack`. Each row then has two documents, which end at another place in each row. Positions and
            tiles differ as they do in training.
    """
    batch, length, whole = shapes.sequences, shapes.length, shapes.seq_len
    tokens, labels = (torch.zeros(batch, length, dtype=torch.long, device=device) for _ in range(2))
    zeros = lambda c: torch.zeros(batch, length, *c.shape, dtype=c.dtype, device=device)
    named = {column.name: zeros(column) for column in columns}
    places = torch.arange(length, device=device) if length < whole or packed else None
    if not packed or whole <= batch:
        return Batch(tokens, labels, places, columns=named)
    documents = tuple((0, whole * (i + 1) // (batch + 1)) for i in range(batch))
    return Batch(tokens, labels, places.expand(batch, length), documents, named)


def _context(stages: Stages, b: Batch) -> Callable[[], Context]:
    """Return a function that makes the context of a microbatch."""
    places = torch.arange(b.tokens.shape[1], device=b.tokens.device) if b.positions is None else b.positions
    return lambda: stages.context(b.tokens, b.labels, stages.units.compute, None, places, b.documents, b.columns)


def _unseen(shapes: LocalShapes, head_dim: int, compute: torch.dtype) -> int:
    """Return the most that PyTorch's attention allocates internally on CPU. Each thread has two tiles of scores (up to
    256 x 512) and one in lower precision. All threads share one gradient of the queries' size, fp32 or wider."""
    rows = 256 if shapes.seq_len >= 768 else 64 if shapes.seq_len >= 192 else 32
    tile = rows * min(512, shapes.seq_len)
    wide = torch.promote_types(compute, torch.float32).itemsize
    return (3 * torch.get_num_threads() * tile + shapes.tokens * shapes.heads * head_dim) * wide


def _largest(sizes: BlockSizes, mesh: Mesh) -> BlockSizes:
    """Return the largest of each size on any rank that holds the same layers."""
    names = [f.name for f in fields(sizes) if f.name != "saved"]
    row = [*(getattr(sizes, n) for n in names), *sizes.saved.values()]
    rows = gather_numbers(row, mesh.group(*(a for a in AXES if a != "pp")), mesh.device)
    largest = [int(n) for n in rows.amax(0)]
    saved = dict(zip(sizes.saved, largest[len(names) :], strict=True))
    return BlockSizes(**dict(zip(names, largest, strict=False)), saved=saved)
