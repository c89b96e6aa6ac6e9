"""The ops of a rank's program.

An op does not name its microbatch, because its action does. Actions that differ only in their microbatch share their
ops.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ndtrain.schedule import Action, Message

NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Run:
    """A forward or a backward of a layer.

    Attributes:
        kind: F forward | B backward | I backward that defers the gradients of matrices | W the deferred gradients.
        layer: the index of the layer on this rank.
        keep_graph: (F) True if autograd keeps a graph, because the backward follows without a recompute.
        drop_input: (F) True if its input is freed afterwards.
        feed: (F) True if its output becomes the input of the next layer or stage.
        save: (F) the ops whose results the forward saves and the recompute reuses. None: the block is not recomputed.
        shape_only: (F) the ops of whose results the recompute needs only the shape.
        recompute: (F) True if this is the recompute.
    """

    kind: str
    layer: int
    keep_graph: bool = True
    drop_input: bool = False
    feed: bool = True
    save: frozenset[str] | None = None
    shape_only: frozenset[str] = NOTHING
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the action's message from another rank."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Take the action's input from another stage of this rank."""


@dataclass(frozen=True, slots=True)
class Send:
    """Launch the action's message to another rank."""


@dataclass(frozen=True, slots=True)
class Hand:
    """Give the action's result to another stage of this rank."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Launch the all-gather of a unit's weights. If the unit is not sharded, copy its master weights instead."""

    unit: str


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the all-gather of a unit. Its weights are unsharded from now on."""

    unit: str


@dataclass(frozen=True, slots=True)
class Free:
    """Free the unsharded weights of a unit."""

    unit: str


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a unit's unsharded gradient. It is allocated here, unless the rank keeps it for the whole step."""

    unit: str


@dataclass(frozen=True, slots=True)
class Close:
    """Complete a unit's unsharded gradient: set to zero the parts that no backward has written."""

    unit: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Launch the reduce-scatter of a unit's gradient."""

    unit: str


@dataclass(frozen=True, slots=True)
class Collect:
    """Wait for the reduce-scatter of a unit's gradient, and add the result to the rank's shard.

    Attributes:
        first: True if it is the unit's first reduction of the step. The result then replaces the shard's gradient.
    """

    unit: str
    first: bool


@dataclass(frozen=True, slots=True)
class Sum:
    """Launch the all-reduce of adjacent gradient shards over their replicas.

    Attributes:
        axes: the mesh axes along which the replicas are, "dp" or "dp+fsdp".
    """

    axes: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitSums:
    """Wait for all launched all-reduces over the replicas along these axes."""

    axes: str


@dataclass(frozen=True, slots=True)
class SumTPReplicas:
    """Sum the gradients of the tensors in these units that several tp ranks hold."""

    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SumTied:
    """Sum the gradient of a unit over the stages that hold it."""

    unit: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer the rank's shard of a unit's gradient to the other islands. It does not change any more in this step."""

    unit: str


@dataclass(frozen=True, slots=True)
class FinishSends:
    """Wait until all messages of this rank are sent."""


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Launch the gather of the weights of all ranks' tokens, by whose sum the loss is divided."""


@dataclass(frozen=True, slots=True)
class AwaitTokens:
    """Wait for the weights of all ranks' tokens."""


@dataclass(frozen=True, slots=True)
class SumLoads:
    """Launch the sum of the experts' loads over all ranks."""


@dataclass(frozen=True, slots=True)
class AwaitLoads:
    """Wait for the sum of the experts' loads."""


@dataclass(frozen=True, slots=True)
class CheckCapacity:
    """Sum over all ranks whether rows of experts did not fit, and let the host wait for the result."""


@dataclass(frozen=True, slots=True)
class GatherStats:
    """Sum all ranks' losses and squared gradient norms."""


@dataclass(frozen=True, slots=True)
class GatherLogits:
    """Take the maximum over all ranks of the attention logits of each head."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Begin the update: get the factor of clipping, and prepare the gradients of whole tensors for their owners."""


@dataclass(frozen=True, slots=True)
class GatherWhole:
    """Launch the exchange that brings the gradients of some whole tensors to their owners.

    Attributes:
        round: the number of the round of these tensors.
    """

    round: int


@dataclass(frozen=True, slots=True)
class AwaitWhole:
    """Wait for the gradients of the round's tensors that this rank owns."""

    round: int


@dataclass(frozen=True, slots=True)
class ComputeWhole:
    """Compute the directions of the round's tensors that this rank owns."""

    round: int


@dataclass(frozen=True, slots=True)
class ScatterWhole:
    """Launch the exchange that brings the directions of the round's tensors to the shards."""

    round: int


@dataclass(frozen=True, slots=True)
class AwaitScatter:
    """Wait for the directions of the round's tensors. They replace the gradients of this rank's shards."""

    round: int


@dataclass(frozen=True, slots=True)
class Update:
    """Update the weights and the optimizer state."""


@dataclass(frozen=True, slots=True)
class UpdateBiases:
    """Update the selection biases of experts from their loads."""


@dataclass(frozen=True, slots=True)
class Report:
    """Launch the maximum over all ranks' signals, and the copy of the step's numbers to the host."""


Op = (
    Run | Receive | Accept | Send | Hand | Gather | Await | Free | Open | Close | Reduce | Collect | Sum | AwaitSums
    | SumTPReplicas | SumTied | Offer | FinishSends | CountTokens | AwaitTokens | SumLoads | AwaitLoads
    | CheckCapacity | GatherStats | GatherLogits | Prepare | GatherWhole | AwaitWhole | ComputeWhole | ScatterWhole
    | AwaitScatter | Update | UpdateBiases | Report
)  # fmt: skip


class Turn(NamedTuple):
    """An action of a rank's row, with its messages and ops.

    Attributes:
        posts: the messages whose receive is posted before the action, each with the pp rank that sends it.
        needs: the message with the action's input from another stage, or None.
        gives: the message with the action's result for another stage, or None.
    """

    action: Action
    posts: tuple[tuple[Message, int], ...]
    needs: Message | None
    gives: Message | None
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class RankProgram:
    """The ops of a rank for one step. In an evaluation there are only forwards.

    Attributes:
        begin, end: ops before the first action and after the last one. The gradients are then summed over the mesh.
        update: ops from the summed gradients to the report of the step.
        unsharded: the units whose weights are unsharded before the update.
    """

    begin: tuple[Op, ...]
    turns: tuple[Turn, ...]
    end: tuple[Op, ...]
    update: tuple[Op, ...]
    unsharded: frozenset[str]

    @property
    def update_at(self) -> int:
        """The index of the first op of the update."""
        return len(self.begin) + sum(len(turn.ops) for turn in self.turns) + len(self.end)

    def __iter__(self):
        """Yield (action or None, op) for each op in order."""
        yield from ((None, op) for op in self.begin)
        yield from ((turn.action, op) for turn in self.turns for op in turn.ops)
        yield from ((None, op) for op in (*self.end, *self.update))
