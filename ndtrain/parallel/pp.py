"""pp: each rank holds some stages of the model. Ranks send activations and their gradients to one another.

The schedule's table defines which rank holds which stage, and in what order it computes the microbatches. Both ranks
therefore know the order of the messages between them, and a message needs no header.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ndtrain.config import ModelConfig
from ndtrain.mesh.collectives import Pending, receive, send
from ndtrain.mesh.mesh import Mesh
from ndtrain.model.flops import block_flops, head_flops, over_layers
from ndtrain.model.transformer import EMBED, HEAD, NORM, layer_units
from ndtrain.schedule import Action, Message, Schedule

AHEAD = 1  # a receive is posted at least this number of actions before the action that needs the message


# ---------------------------------------------------------------------------------------------------------- placement


@dataclass(frozen=True)
class Placement:
    """The layers of each stage. The schedule defines which rank holds a stage."""

    schedule: Schedule
    layers: tuple[range, ...]

    @property
    def last(self) -> int:
        return len(self.layers) - 1

    def pp_coords(self, m: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return unit -> the pp coords that hold it, of which the first one owns it. Tied embeddings are on the first
        and the last stage."""
        first, last = self.schedule.rank_of[0], self.schedule.rank_of[-1]
        coords = [(i, (self.schedule.rank_of[s],)) for s, layers in enumerate(self.layers) for i in layers]
        blocks = {unit: coord for i, coord in coords for unit in layer_units(m, i)}
        ends = (first, last) if m.tie_word_embeddings and first != last else (first,)
        return blocks | {EMBED: ends, NORM: (last,), HEAD: (last,)}


def split_layers(m: ModelConfig, seq_len: int, rank_of: tuple[int, ...], split: Sequence[int] | None) -> list[range]:
    """Return the layers of each stage.

    Args:
        rank_of: stage -> pp rank.
        split: the number of layers of each stage; None: they are balanced by FLOPs.
    """
    sizes = split
    if sizes is None:
        sizes = balanced_sizes(m.num_hidden_layers, head_in_layers(m, seq_len), rank_of)
    ends = list(accumulate(sizes))
    return [range(end - n, end) for end, n in zip(ends, sizes, strict=True)]


def head_in_layers(m: ModelConfig, seq_len: int) -> float:
    """Return the FLOPs of the head, as a multiple of the mean FLOPs of a block."""
    blocks = over_layers(m, lambda i: block_flops(m, seq_len, i))
    return head_flops(m) * m.num_hidden_layers / blocks


@lru_cache(maxsize=4096)
def balanced_sizes(layers: int, head: float, rank_of: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of layers of each stage. Minimize the cost of the slowest rank, then of the slowest stage. All
    stages but the last one get n layers, and the later of them may get n + 1.

    Each stage has at least one layer. The embedding is a look-up and costs nothing. Earlier stages get fewer layers
    than later ones, since their ranks hold more microbatches. Stages with n + 1 layers are neighbours. They are
    therefore spread over all ranks, however many stages a rank has.

    Args:
        head: cost of the head and the loss, in layers.
        rank_of: stage -> pp rank.
    """
    others = len(rank_of) - 1
    if not others:
        return (layers,)
    splits = []
    for last in range(layers - others, 0, -1):
        each, more = divmod(layers - last, others)
        splits.append((each,) * (others - more) + (each + 1,) * more + (last,))
    return min(splits, key=lambda sizes: (rank_cost(sizes, head, rank_of), max(*sizes[:-1], sizes[-1] + head)))


def rank_cost(sizes: Sequence[int], head: float, rank_of: Sequence[int]) -> float:
    """Return the cost of the slowest rank in layers, including the cost of the head."""
    costs = [0.0] * (max(rank_of) + 1)
    for rank, size in zip(rank_of, sizes, strict=True):
        costs[rank] += size
    costs[rank_of[-1]] += head
    return max(costs)


# ----------------------------------------------------------------------------------------------------------- messages


class Pipeline:
    """The messages that this rank receives from other stages and sends to them.

    A rank receives the messages of another rank in the order in which the sender's row of the table sends them. NCCL
    runs the operations of one group one by one, in launch order. A send lasts until it is received. On NCCL each pair
    (source, target) therefore has a group of its own (`Mesh.links`). Both ends launch the messages of a pair in the
    same order, and no message waits for another pair's. A legal table thus never deadlocks.

    Args:
        shape, dtype: of every activation that passes between stages, and of its gradient.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype):
        self.schedule, self.rank, self.device = schedule, mesh.coords["pp"], mesh.device
        self.shape, self.dtype = shape, dtype
        self._links = mesh.links("pp", schedule.messages)
        self._coming: dict[Message, tuple[Tensor, Pending]] = {}
        self._leaving: list[tuple[Tensor, Pending]] = []

    def post(self, messages: Sequence[tuple[Message, int]]) -> None:
        """Start to receive messages, each from its pp rank. Free the messages that have been sent."""
        for message, source in messages:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._coming[message] = buffer, receive(buffer, *self._links[source, self.rank])
        self._leaving = [(x, work) for x, work in self._leaving if not work.done()]

    def recv(self, message: Message) -> Tensor:
        """Wait for a message. Return its tensor."""
        x, work = self._coming.pop(message)
        work.wait()
        return x

    def send(self, message: Message, x: Tensor) -> None:
        """Send x [shape] to the rank of the stage that needs it."""
        x = x.contiguous()
        target = self.schedule.rank_of[message.stage]
        self._leaving.append((x, send(x, *self._links[self.rank, target])))

    def finish(self) -> None:
        """Wait until every message is sent."""
        for _, work in self._leaving:
            work.wait()
        self._leaving.clear()


def receives(schedule: Schedule, rank: int) -> list[list[tuple[Message, int]]]:
    """Return for each action of a rank's row the messages whose receive is posted before it, each with its source."""
    queues = {source: queue for (source, target), queue in schedule.messages.items() if target == rank}
    position = {m: (source, i) for source, queue in queues.items() for i, m in enumerate(queue)}
    posted = dict.fromkeys(queues, 0)
    needs = [input_of(schedule, a) for a in schedule.table[rank]]
    plan = []
    for k in range(len(needs)):
        now: list[tuple[Message, int]] = []
        for message in needs[k : k + 1 + AHEAD]:
            if message in position:
                source, i = position[message]
                now += [(m, source) for m in queues[source][posted[source] : i + 1]]
                posted[source] = max(posted[source], i + 1)
        plan.append(now)
    return plan


def input_of(schedule: Schedule, a: Action) -> Message | None:
    """Return the message that an action needs from another stage, or None if it needs none."""
    if a.kind == "F" and a.stage > 0:
        return Message("F", a.microbatch, a.stage)
    if a.kind in "BI" and a.stage < schedule.stages - 1:
        return Message("B", a.microbatch, a.stage)
    return None
