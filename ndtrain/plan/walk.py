"""What an action of a pipeline rank does, in order: the walk through its instructions, which says which gathers and
reductions the executor really launches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ndtrain.distributed.sharding import TENSOR_AXIS, FlatLayout
from ndtrain.engine.instructions import Instruction, Layer
from ndtrain.parallel.unit import Residency, StatePlan
from ndtrain.plan.variants import Variant


class Run(NamedTuple):
    """Passes of layers, one after another."""

    variants: tuple[Variant, ...]


class Gather(NamedTuple):
    """The launch of a unit's all-gather."""

    unit: str


class Await(NamedTuple):
    """The wait for it."""

    unit: str


class Reshard(NamedTuple):
    """A unit's unsharded weights are freed."""

    unit: str


class Open(NamedTuple):
    """The gradient of a whole unit is allocated, unless it is there."""

    unit: str


class Reduce(NamedTuple):
    """A unit's gradient is complete.

    Attributes:
        first, final: whether it is the step's first reduction of the unit, or its last.
    """

    unit: str
    first: bool
    final: bool


class Receive(NamedTuple):
    """The wait for the action's message from another pipeline rank."""


class Send(NamedTuple):
    """The launch of the action's message to another pipeline rank."""


Op = Run | Gather | Await | Reshard | Open | Reduce | Receive | Send
_AFTER_MICROBATCH = Instruction._fields.index("microbatch") + 1  # what an instruction does, whichever it is of


@dataclass(frozen=True)
class UnitFacts:
    """What a rank holds of a unit.

    Attributes:
        numel: elements of its flat buffer, after the cut over tp.
        shards, axes: the number of parts that the buffer is cut into, and along which axes, "fsdp+cp".
        replicas, replica_axes: ranks that hold the same part, along which axes.
        tp_replicated: elements whose gradients are summed over the ranks of tp.
        tied: whether another stage holds it too.
    """

    numel: int
    shards: int
    axes: str
    replicas: int
    replica_axes: str
    residency: Residency
    tp_replicated: int
    tied: bool

    @classmethod
    def of(cls, layout: FlatLayout, plan: StatePlan) -> "UnitFacts":
        groups = layout.groups
        summed = sum(t.local_numel for t in layout.tensors if t.tp_replicas > 1 and TENSOR_AXIS in t.partial)
        return cls(
            numel=layout.numel,
            shards=groups.shards,
            axes="+".join(groups.shard_axes),
            replicas=groups.replicas,
            replica_axes="+".join(groups.replica_axes),
            residency=Residency.of(plan, groups.shards),
            tp_replicated=summed,
            tied=any(t.pp_replicas > 1 for t in layout.tensors),
        )

    @property
    def shard(self) -> int:
        """Elements of a part."""
        return self.numel // self.shards


class Walk:
    """Follows a rank's program, as `Executor` and `ShardedUnits` do: which gathers and reductions it really launches.

    Attributes:
        whole, coming: units that are unsharded, or being gathered.
        reduced: units that have been reduced in this step.
    """

    def __init__(self, layers: Sequence[Layer], units: Mapping[str, UnitFacts]):
        self.layers, self.units = layers, units
        self.whole: frozenset[str] = frozenset()
        self.coming: frozenset[str] = frozenset()
        self.reduced: frozenset[str] = frozenset()
        self._known: dict[tuple, tuple] = {}

    def turn(
        self, instructions: Sequence[Instruction], passes: tuple[Variant, ...], receives: bool, sends: bool
    ) -> tuple[Op, ...]:
        """What an action does. Most actions differ in their microbatch alone, which nothing here depends on: those that
        begin alike are walked through once.

        Args:
            passes: the variant of each instruction. receives, sends: whether messages go between ranks.
        """
        facts = tuple((ins.kind, *ins[_AFTER_MICROBATCH:]) for ins in instructions)
        begin = facts, passes, receives, sends, self.whole, self.coming, self.reduced
        if begin not in self._known:
            ops = [*self.gathers(instructions[0]), *([Receive()] if receives else [])]
            for ins, variant in zip(instructions, passes, strict=True):
                ops += self.ops(ins, variant, sends)
            self._known[begin] = tuple(_joined(ops)), self.whole, self.coming, self.reduced
        done, self.whole, self.coming, self.reduced = self._known[begin]
        return done

    def gathers(self, ins: Instruction) -> Iterator[Op]:
        """The gathers that an instruction starts, of its own weights and of later ones."""
        for unit in (*ins.weights, *ins.prefetch):
            if unit not in self.whole and unit not in self.coming:
                self.coming |= {unit}
                yield Gather(unit)

    def ops(self, ins: Instruction, variant: Variant, sends: bool) -> Iterator[Op]:
        """What one instruction launches, runs and waits for, in order."""
        yield from self.gathers(ins)
        for unit in ins.weights:
            if unit not in self.whole:
                yield Await(unit)
                self.coming -= {unit}
                self.whole |= {unit}
        layer = self.layers[ins.layer]
        if ins.kind != "F" or layer.loss:
            yield from (Open(u) for u in layer.units if not self._residency(u).holds_full_grad)
        yield Run((variant,))
        if sends and self._sends(ins, layer):
            yield Send()
        for unit in ins.weights if ins.reshard else ():
            if self._residency(unit).reshard_after_forward:
                self.whole -= {unit}
                yield Reshard(unit)
        for unit, final in ins.reduce:
            if final or not self._residency(unit).holds_full_grad:
                yield Reduce(unit, unit not in self.reduced, final)
                self.reduced |= {unit}

    def _sends(self, ins: Instruction, layer: Layer) -> bool:
        """Whether the result of an instruction leaves its stage."""
        return layer.last and ins.feed and not layer.loss if ins.kind == "F" else layer.first and ins.kind in "BI"

    def _residency(self, unit: str) -> Residency:
        return self.units[unit].residency


def _joined(ops: Sequence[Op]) -> Iterator[Op]:
    """The same with neighbouring passes as one `Run`."""
    passes: list[Variant] = []
    for op in ops:
        if isinstance(op, Run):
            passes += op.variants
            continue
        if passes:
            yield Run(tuple(passes))
            passes = []
        yield op
    if passes:
        yield Run(tuple(passes))
