"""pp: each rank holds some stages of the model. Ranks send activations and their gradients to one another.

The schedule's table says which rank holds which stage, and in what order it computes the microbatches. Both ranks
therefore know the order of the messages between them, and a message needs no header.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ndtrain import schedule as schedules
from ndtrain.config import Config, ModelConfig
from ndtrain.distributed.collectives import Pending, receive, send
from ndtrain.distributed.mesh import Mesh
from ndtrain.model.flops import block_flops, head_flops, over_layers
from ndtrain.model.transformer import EMBED, HEAD, NORM, layer_units
from ndtrain.schedule import Action, Message, Schedule

AHEAD = 1  # a message's receive is posted at least this many actions before the one that needs it


# ---------------------------------------------------------------------------------------------------------- placement


@dataclass(frozen=True)
class Placement:
    """Which layers each stage has. The schedule says which rank has the stage."""

    schedule: Schedule
    layers: tuple[range, ...]

    @classmethod
    def of(cls, cfg: Config) -> "Placement":
        """Of a resolved configuration."""
        s = cfg.schedule
        schedule = schedules.build(s.name, cfg.mesh.pp, cfg.microbatches, s.chunks, s.path)
        return cls(schedule, tuple(split_layers(cfg.model, cfg.train.seq_len, schedule.rank_of, s.split)))

    @property
    def last(self) -> int:
        return len(self.layers) - 1

    def pp_coords(self, m: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Unit -> the pp coords that hold it, the first of which owns it. Tied embeddings are on the first and the last
        stage."""
        first, last = self.schedule.rank_of[0], self.schedule.rank_of[-1]
        coords = [(i, (self.schedule.rank_of[s],)) for s, layers in enumerate(self.layers) for i in layers]
        blocks = {unit: coord for i, coord in coords for unit in layer_units(m, i)}
        ends = (first, last) if m.tie_word_embeddings and first != last else (first,)
        return blocks | {EMBED: ends, NORM: (last,), HEAD: (last,)}


def split_layers(m: ModelConfig, seq_len: int, rank_of: tuple[int, ...], split: Sequence[int] | None) -> list[range]:
    """The layers of each stage: those of `split`; None: balanced by FLOPs.

    Args:
        rank_of: stage -> pp rank.
    """
    sizes = split
    if sizes is None:
        sizes = balanced_sizes(m.num_hidden_layers, head_in_layers(m, seq_len), rank_of)
    ends = list(accumulate(sizes))
    return [range(end - n, end) for end, n in zip(ends, sizes, strict=True)]


def head_in_layers(m: ModelConfig, seq_len: int) -> float:
    """FLOPs of the head over those of a block, the mean of all."""
    blocks = over_layers(m, lambda i: block_flops(m, seq_len, i))
    return head_flops(m) * m.num_hidden_layers / blocks


@lru_cache(maxsize=4096)
def balanced_sizes(layers: int, head: float, rank_of: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of layers of the stages. The costliest rank costs least, and then the costliest stage, among the splits
    with as many layers in every stage but the last one, or one more in the later ones of them.

    Each stage has one at least. The embedding is a look-up and costs nothing. Earlier stages
    get fewer layers than later ones, since their ranks hold more microbatches; and as those with one more are
    neighbours, they are spread over all ranks, however many stages a rank has.

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
    """The costliest rank's layers, with those that the head counts for."""
    costs = [0.0] * (max(rank_of) + 1)
    for rank, size in zip(rank_of, sizes, strict=True):
        costs[rank] += size
    costs[rank_of[-1]] += head
    return max(costs)


# ----------------------------------------------------------------------------------------------------------- messages


class Pipeline:
    """The messages that this rank receives from other stages and sends to them.

    A rank receives the messages of another rank in the order in which the sender's row of the table sends them. NCCL
    runs the operations of one group one by one, in the order of their launches, and a send until it is received. So
    each pair (source, target) has a group of its own there (`Mesh.links`). Both ends launch the messages of a pair in
    the same order, and no message waits for another pair's: a legal table runs.

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
        """Starts to receive messages, each from its pp rank, and frees those that have left."""
        for message, source in messages:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._coming[message] = buffer, receive(buffer, *self._links[source, self.rank])
        self._leaving = [(x, work) for x, work in self._leaving if not work.done()]

    def recv(self, message: Message) -> Tensor:
        """Waits for a message. Returns its tensor."""
        x, work = self._coming.pop(message)
        work.wait()
        return x

    def send(self, message: Message, x: Tensor) -> None:
        """Sends x [shape] to the rank of the stage that needs it."""
        x = x.contiguous()
        target = self.schedule.rank_of[message.stage]
        self._leaving.append((x, send(x, *self._links[self.rank, target])))

    def finish(self) -> None:
        """Waits until every message is sent."""
        for _, work in self._leaving:
            work.wait()
        self._leaving.clear()


def receives(schedule: Schedule, rank: int) -> list[list[tuple[Message, int]]]:
    """For each action of a rank's row: the messages whose receive is posted before it, each with its source."""
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
    """The message that an action needs from another stage; None: it needs none."""
    if a.kind == "F" and a.stage > 0:
        return Message("F", a.microbatch, a.stage)
    if a.kind in "BI" and a.stage < schedule.stages - 1:
        return Message("B", a.microbatch, a.stage)
    return None
