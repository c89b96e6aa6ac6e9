"""A rough closed-form estimate of a candidate's step, used to choose the candidates that are worth a prediction.

The memory is a lower bound: a candidate whose bound exceeds the device cannot fit. The time ranks the others. Users see
neither.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

from ndtrain import schedule as schedules
from ndtrain.config import Config, LocalShapes, ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.mesh.mesh import EP, MeshSpec
from ndtrain.model import dim_sizes, flops
from ndtrain.model.spec import CORE, DISPATCH, OpSpec
from ndtrain.model.transformer import block_ops, kinds
from ndtrain.parallel.balance import looks_ahead
from ndtrain.parallel.build import DTYPES, state_plan
from ndtrain.parallel.pp import head_in_layers, rank_cost
from ndtrain.parallel.recompute import RecomputeOps
from ndtrain.parallel.unit import StatePlan, state_bytes
from ndtrain.plan.candidates import SPLIT, Candidate, Stages, balanced
from ndtrain.plan.events import Kernel
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.pieces import update_bytes
from ndtrain.plan.price import Prices, Rates, rates_for

_RANKS = 8  # of the longest pipeline that is simulated
_STEADY = 2  # microbatches per pipeline rank; with more, a step only gets longer


@dataclass(frozen=True)
class Estimate:
    """The estimate of a step.

    Attributes:
        seconds: time of the step.
        memory_bytes: a lower bound of what the worst rank needs.
    """

    seconds: float
    memory_bytes: float


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model that are the same on every mesh.

    Attributes:
        head: FLOPs of the head over the FLOPs of a block.
        parameters: parameters of the whole model.
        of_experts: parameters of the experts.
        hidden: parameters of hidden matrices outside of experts.
        op_flops: op of a block -> forward FLOPs per token, the mean over all blocks.
        elementwise: elements per token that a block's other kernels read and write, the mean over all blocks.
        blocks: for each kind of block its share of all blocks, and its ops.
    """

    head: float
    parameters: int
    of_experts: int
    hidden: int
    op_flops: Mapping[str, float]
    elementwise: float
    blocks: Sequence[tuple[float, Sequence[OpSpec]]]

    @classmethod
    def of(cls, cfg: Config) -> "ModelCosts":
        """Return the costs for a resolved configuration."""
        m, length = cfg.model, cfg.train.seq_len
        return cls(
            head=head_in_layers(m, length),
            parameters=flops.parameter_count(m),
            of_experts=flops.expert_parameters(m),
            hidden=flops.hidden_parameters(m) - flops.expert_parameters(m),
            op_flops=_mean_of_layers(m, lambda i: flops.op_flops(m, length, i)),
            elementwise=_mean_of_layers(m, lambda i: {"": flops.elementwise_values(m, i)})[""],
            blocks=[(len(layers) / m.num_hidden_layers, block_ops(m, layers[0])) for layers in kinds(m).values()],
        )

    @cached_property
    def ops(self) -> list[OpSpec]:
        """The ops of all kinds of blocks."""
        return [op for _, ops in self.blocks for op in ops]


class Place:
    """Estimates candidates that differ only in zero, schedule and recompute. It computes their common part once.

    Args:
        cfg: the resolved configuration of one of these candidates.
        costs: the costs of its model; None: computed here.
    """

    def __init__(self, cfg: Config, hardware: Hardware, rates: Rates, costs: ModelCosts | None = None):
        self.cfg, self.hardware, self.rates = cfg, hardware, rates_for(rates, cfg)
        self.costs = costs or ModelCosts.of(cfg)
        self.recompute_ops = RecomputeOps.of(cfg.model, cfg.mesh, self.costs.ops)
        self.shapes, self.prices = LocalShapes.of(cfg), Prices(hardware, rates, MeshSpec.of(cfg.mesh))
        self.pp, self.cp, self.tp = cfg.mesh.pp, cfg.mesh.cp, cfg.mesh.tp
        self.microbatches = cfg.microbatches
        self.layers = cfg.model.num_hidden_layers / self.pp
        self.forwards = 2 if looks_ahead(cfg.model, cfg.moe) else 1
        self.held = _held(cfg, self.costs)
        self.forward_s = self.layers * sum(self._op_seconds.values()) + self._head_seconds
        self.message_s = self.layers * (self._tp_seconds + self._cp_seconds + self._ep_seconds)
        # cached: the candidates are all combinations of these three
        self._of_stages = cache(self._stages)
        self._of_zero = cache(self._zero)
        self._of_recompute = cache(self._recompute)

    def estimate(self, candidate: Candidate) -> Estimate:
        s, z, r = (
            self._of_stages(candidate.stages), self._of_zero(candidate.zero), self._of_recompute(candidate.recompute)
        )  # fmt: skip
        of_microbatch = s.slower * ((self.forwards + 2) * self.forward_s + r.again_s + self.message_s)
        seconds = (self.microbatches + s.idle / 3) * of_microbatch
        memory = z.state_bytes + s.live_blocks * r.block_bytes
        return Estimate(seconds + self._sharding_seconds(candidate.zero, z.moved_s, of_microbatch), memory)

    def unit_seconds(self, zero: int) -> float:
        """Return the seconds of all gathers, reductions and sums of units in a step, as if compute hid none."""
        return self._zero(zero).moved_s + self._unit_seconds[2]

    def _stages(self, stages: Stages) -> "_OfStages":
        cut = _Cut.of(stages, self.cfg, self.costs.head)
        idle, live = pipeline(stages.schedule, self.pp, self.microbatches, stages.chunks, self.cfg.schedule.path)
        return _OfStages(cut.slower, idle, live * cut.least_blocks)

    def _zero(self, zero: int) -> "_OfZero":
        gather, scatter, _, _ = self._unit_seconds
        each = self.microbatches
        gathers, scatters = {1: (1, 1), 2: (1, each), 3: ((self.forwards + 1) * each, each)}[zero]
        return _OfZero(self._state_bytes(zero), gathers * gather + scatters * scatter)

    def _recompute(self, recompute: tuple[str, Sequence[str]]) -> "_OfRecompute":
        factor = 1.0 if self.hardware.device == "cpu" else self.rates.memory_factor
        nbytes = self._kept_elements(recompute) * DTYPES[self.cfg.precision.compute].itemsize
        return _OfRecompute(self._recompute_seconds(recompute), factor * nbytes)

    @cached_property
    def _plan(self) -> StatePlan:
        return state_plan(self.cfg)

    # --------------------------------------------------------------------------------------------------------- memory

    def _state_bytes(self, zero: int) -> float:
        """Return the bytes that a rank holds between steps, and the CUDA context on a GPU."""
        plan = replace(self._plan, zero=zero)
        state = sum(state_bytes(plan, h.shards, h.parameters, h.hidden // h.shards).on_device for h in self.held)
        return state + (0.0 if self.hardware.device == "cpu" else 1e9 * self.rates.memory_gb)

    def _kept_elements(self, recompute: tuple[str, Sequence[str]]) -> float:
        """Return the elements that a block keeps: its input and the results of the ops that `recompute` keeps. Other
        results are not counted, since a compiler may recompute them."""
        name, kept = recompute
        ops, boundary = self._op_elements, math.prod(self.shapes.stream)
        if name == "none":
            return boundary + sum(ops.values())
        saved = set(kept if name == "selective" else ()) | self.recompute_ops.always
        return boundary + sum(size for op, size in ops.items() if op in saved)

    @cached_property
    def _op_elements(self) -> Mapping[str, float]:
        """Op whose result may be kept -> elements of the result on a rank, the mean over all blocks."""
        elements: dict[str, float] = {}
        for share, ops in self.costs.blocks:
            for op in ops:
                if op.savable:
                    elements[op.name] = elements.get(op.name, 0.0) + share * self._result_elements(op)
        return elements

    def _result_elements(self, op: OpSpec) -> int:
        """Return the elements on a rank. If tp shards a dim of the result, the rank holds its part for all tokens.
        Otherwise it holds the whole result for its own tokens."""
        s, sizes, rules = self.shapes, dim_sizes(self.cfg.model), self.cfg.layout.rules
        rows = s.routed_tokens * resolved(self.cfg.model.num_experts_per_tok) if op.routed else None
        elements = 0
        for dim in op.outputs:
            units, width = sizes[dim]
            parts = self.tp if rules.get(dim) == "tp" else 1
            elements += (rows or (s.stream[0] if parts == 1 else s.tokens)) * max(1, units // parts) * width
        return elements

    # ------------------------------------------------------------------------------------------------------------ time

    @cached_property
    def _op_seconds(self) -> dict[str, float]:
        """Op of a block -> seconds of the forward of a microbatch on a rank."""
        tokens, dtype, ops = self.shapes.tokens, self.cfg.precision.compute, self.costs.ops
        attention, routed = {op.name for op in ops if op.multiply_adds_a_key}, {op.name for op in ops if op.routed}
        kind = lambda op: (
            ("attention", 0.5, "bf16" if dtype == "fp8" else dtype) if op in attention else ("matmul", 1, dtype)
        )
        seconds = {}
        for op, count in self.costs.op_flops.items():
            name, visible, of = kind(op)
            seconds[op] = self.prices.arithmetic(Kernel(name, int(tokens * count * visible / self.tp), 0, of))
        if experts := {op: op_s for op, op_s in seconds.items() if op in routed}:
            slower = self._experts_factor(sum(experts.values()))
            seconds |= {op: slower * balanced_s for op, balanced_s in experts.items()}
        values = self.costs.elementwise * tokens / self.tp * DTYPES[dtype].itemsize
        return seconds | {"elementwise": self.prices.kernel(Kernel("memory", 0, int(values), dtype))}

    def _experts_factor(self, balanced_s: float) -> float:
        """Return how many times longer a block's grouped matmuls take than the FLOPs of balanced rows alone. The
        fullest rank holds up the others, a buffer with a capacity is computed in full, and weights are read once."""
        experts = next((h for h in self.held if h.of_experts), None)
        if experts is None:
            return 1.0
        read = experts.parameters / self.layers * DTYPES[self.cfg.precision.compute].itemsize
        read_s = self.prices.kernel(Kernel("memory", 0, int(read), self.cfg.precision.compute))
        return max(self._rows_over_mean, read_s / balanced_s)

    @property
    def _rows_over_mean(self) -> float:
        """Rows of the rank whose experts get the most (or of its buffers, with a capacity), over the mean."""
        return self.rates.imbalance * (self.cfg.moe.capacity or 1.0) if self.cfg.mesh.ep > 1 else 1.0

    @cached_property
    def _ep_seconds(self) -> float:
        """Seconds for a block: its rows travel to the experts and back, and their gradients do the same."""
        if self.cfg.mesh.ep == 1:
            return 0.0
        nbytes = int(self._op_elements[DISPATCH] * DTYPES[self.cfg.precision.compute].itemsize)
        return 4 * self._rows_over_mean * self.prices.collective(EP, "all_to_all", nbytes)

    @cached_property
    def _head_seconds(self) -> float:
        count = flops.head_flops(self.cfg.model) * self.shapes.tokens / self.tp / self.pp
        return self.prices.arithmetic(Kernel("matmul", int(count), 0, "bf16"))

    def _recompute_seconds(self, recompute: tuple[str, Sequence[str]]) -> float:
        name, kept = recompute
        if name == "none":
            return 0.0
        saved = set(kept if name == "selective" else ()) | self.recompute_ops.always | self.recompute_ops.last
        return self.layers * sum(seconds for op, seconds in self._op_seconds.items() if op not in saved)

    @cached_property
    def _stream_bytes(self) -> int:
        """Bytes of a microbatch's residual stream, unsharded over tp."""
        return self.shapes.tokens * self.cfg.model.hidden_size * DTYPES[self.cfg.precision.compute].itemsize

    @cached_property
    def _tp_seconds(self) -> float:
        """Seconds for a block: two gathers and two reductions in the forward, four and two in the backward."""
        if self.tp == 1:
            return 0.0
        gather, scatter = (
            self.prices.collective("tp", op, self._stream_bytes) for op in ("all_gather", "reduce_scatter")
        )
        return 6 * gather + 4 * scatter

    @cached_property
    def _cp_seconds(self) -> float:
        """Seconds for a block. A ring hides its messages behind attention; the exchanges of Ulysses are not hidden."""
        if self.cp == 1:
            return 0.0
        s, width = self.shapes, DTYPES[self.cfg.precision.compute].itemsize * resolved(self.cfg.model.head_dim)
        rows = s.tokens * width
        if self.cfg.cp.kind == "ulysses":
            return 3 * self.prices.collective("cp", "all_to_all", rows * 2 * (s.heads + s.kv_heads))
        ring = 3 * (self.cp - 1) * self.prices.collective("cp", "send_recv", rows * 2 * s.kv_heads)
        return max(0.0, ring - 3 * self._op_seconds[CORE])

    def _sharding_seconds(self, zero: int, moved: float, of_microbatch: float) -> float:
        """Return the seconds that sharding adds to a step: messages that compute does not hide, and the update.

        Args:
            moved: seconds of the units' gathers and reductions.
        """
        _, _, total, update = self._unit_seconds
        beside = of_microbatch * (1 if zero == 1 else self.microbatches)
        return self.rates.interference * moved + max(0.0, moved + total - beside) + update

    @cached_property
    def _unit_seconds(self) -> tuple[float, float, float, float]:
        """Seconds for all units of a rank: of a gather, a reduction, a sum over replicas, and an update."""
        compute, master = (DTYPES[d].itemsize for d in (self.cfg.precision.compute, self.cfg.precision.params))
        moved = self.prices.collective
        shards = [h.parameters // h.shards for h in self.held]
        return (
            sum(moved(h.shard_axes, "all_gather", h.parameters * compute) for h in self.held),
            sum(moved(h.shard_axes, "reduce_scatter", h.parameters * master) for h in self.held),
            sum(moved(h.replica_axes, "all_reduce", n * master) for h, n in zip(self.held, shards, strict=True)),
            self.prices.kernel(Kernel("memory", 0, sum(shards) * update_bytes(self.cfg), "fp32")),
        )


class _OfStages(NamedTuple):
    """The effects of a way to split the model over pp.

    Attributes:
        slower: as in `_Cut`.
        idle: idle time of a rank, as `pipeline` returns it.
        live_blocks: a lower bound of the blocks that keep activations, summed over all live microbatches.
    """

    slower: float
    idle: float
    live_blocks: float


class _OfZero(NamedTuple):
    """The costs of a ZeRO stage.

    Attributes:
        state_bytes: bytes of a rank, without activations.
        moved_s: seconds of all gathers and reductions of units in a step.
    """

    state_bytes: float
    moved_s: float


class _OfRecompute(NamedTuple):
    """The costs of a recompute mode.

    Attributes:
        again_s: seconds of a microbatch's recompute.
        block_bytes: a lower bound of what a block keeps for a microbatch.
    """

    again_s: float
    block_bytes: float


class _Held(NamedTuple):
    """Parameters of a rank that are sharded alike.

    Attributes:
        parameters: their number on a rank, before they are cut into `shards`.
        hidden: how many of them belong to hidden matrices.
        shard_axes, replica_axes: the axes in the form that `Prices.collective` takes.
    """

    parameters: int
    hidden: int
    shards: int
    shard_axes: str
    replica_axes: str
    of_experts: bool


def _held(cfg: Config, costs: ModelCosts) -> list[_Held]:
    """Return the parameters of a rank, without and with experts. Experts are split over ep, and over tp only by a rule.
    They are sharded over the data ranks that ep leaves."""
    spec, experts = MeshSpec.of(cfg.mesh), costs.of_experts
    cut = cfg.mesh.pp * cfg.mesh.tp
    others, hidden = (costs.parameters - experts) // cut, costs.hidden // cut
    held = [_Held(others, hidden, cfg.mesh.fsdp * cfg.mesh.cp, "fsdp+cp", "dp", of_experts=False)]
    if experts:
        axes = [spec.beside_ep(axis) for axis in ("fsdp", "cp")]
        mine = experts // (cfg.mesh.pp * cfg.mesh.ep * LocalShapes.of(cfg).expert_parts)
        held.append(_Held(mine, mine, spec.size(*axes), "+".join(axes), spec.beside_ep("dp"), of_experts=True))
    return held


def _mean_of_layers(m: ModelConfig, of_layer: Callable[[int], Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over all layers. It calls `of_layer` for one layer of each kind."""
    mean: dict[str, float] = {}
    for layers in kinds(m).values():
        for name, value in of_layer(layers[0]).items():
            mean[name] = mean.get(name, 0.0) + value * len(layers) / m.num_hidden_layers
    return mean


class _Cut(NamedTuple):
    """The balance of the stages.

    Attributes:
        slower: work of the busiest rank over the mean.
        least_blocks: a lower bound of the blocks per live microbatch, on the rank that keeps the most activations.
    """

    slower: float
    least_blocks: float

    @classmethod
    def of(cls, stages: Stages, cfg: Config, head: float) -> "_Cut":
        """Return the balance of a way to split the model.

        Args:
            cfg: the resolved configuration, on this mesh.
            head: cost of the head, in layers.
        """
        layers, pp = cfg.model.num_hidden_layers, cfg.mesh.pp
        sizes = stages.split or (SPLIT in cfg.given and cfg.schedule.split) or balanced(stages, pp, layers, head)
        rank_of = schedules.stage_ranks(stages.schedule, pp, stages.chunks)
        if not rank_of or len(sizes) != len(rank_of):
            return cls(1.0, 0.0)
        each, inner = len(sizes) // pp, min(sizes[1:-1], default=0)
        slower = rank_cost(sizes, head, rank_of) / ((layers + head) / pp)
        # with one stage per rank, the first rank holds the most microbatches
        first = sizes[0] if each == 1 and stages.schedule != "csv" else 0
        return cls(slower, max(min(sizes) * each, inner * (each - 1), first))


def pipeline(name: str, pp: int, microbatches: int, chunks: int | None, path: str | None) -> tuple[float, float]:
    """Simulate a schedule. Return (idle time of a rank in forwards of a microbatch, most live microbatches of a rank).

    Both grow with the pipeline. So a long pipeline is scaled up from a short one, which runs only until it is full.
    """
    ranks, few = (pp, microbatches) if name == "csv" else _shortened(pp, microbatches)
    idle, live = _simulated(name, ranks, few, chunks or schedules.default_chunks(name) or 1, path)
    live = microbatches if live == few else live * pp / ranks
    return idle * (pp - 1) / max(1, ranks - 1), min(live, float(microbatches))


@lru_cache(maxsize=4096)
def _simulated(name: str, pp: int, microbatches: int, chunks: int, path: str | None) -> tuple[float, float]:
    """Simulate a schedule without shortening it. Return the same pair as `pipeline`."""
    timeline = schedules.simulate(
        schedules.build(name, pp, microbatches, chunks, path),
        {kind: cost / chunks for kind, cost in schedules.COST.items()},
    )
    return timeline.makespan - 3 * microbatches, max(timeline.peak_shares)


def _shortened(pp: int, microbatches: int) -> tuple[int, int]:
    ranks = min(pp, _RANKS)
    return ranks, max(1, min(microbatches * ranks // pp, _STEADY * ranks))
