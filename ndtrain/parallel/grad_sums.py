"""Sums of gradients over ranks that hold the same elements: the replicas of a shard (dp), the ranks of tp that hold the
same tensor, and the two stages with tied embeddings. Reduce-scatters are in `fsdp.py`. The rank's program defines when
a sum is launched, and which shards are one bucket."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.mesh.collectives import Group, Pending, all_reduce, shift
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.sharding import TENSOR_AXIS, FlatLayout

BUCKET_BYTES = 4 << 20  # smaller neighbours are merged: below this size, latency dominates gloo's all_reduce
SMALL = 2**14  # elements of the largest gradient that shares a message with others


class ReplicaReducer:
    """Sums gradient slices over the replicas, in place. Every rank must launch the same slices in the same order."""

    def __init__(self, group: Group):
        self._group = group
        self._works: list[Pending] = []

    def launch(self, grad: Tensor) -> None:
        """Start the sum of a slice that is complete on this rank."""
        self._works.append(all_reduce(grad, self._group))

    def wait(self) -> None:
        """Wait until every slice holds the sum."""
        for work in self._works:
            work.wait()
        self._works.clear()


class TPReplicaReducer:
    """Sums the gradients of tp replicas once a step: norms over a share of the tokens, K/V heads that several ranks'
    query heads read, and experts. If gradients are offered to other islands, it sums unit by unit. Small gradients are
    sent in one message for each number of replicas. Others are summed in place, because a message would need a copy of
    the gradients of all experts.

    Args:
        groups: number of replicas -> the process group of the ranks that hold them.
    """

    def __init__(self, groups: Mapping[int, dist.ProcessGroup]):
        self.groups = groups
        self._pending: dict[int, list[Tensor]] = {n: [] for n in groups}

    def add(self, layout: FlatLayout, start: int, grad: Tensor) -> None:
        """Add the finished gradient of the flat buffer's elements from `start` on."""
        for n, pending in self._pending.items():
            summed = lambda t, n=n: t.tp_replicas == n and TENSOR_AXIS in t.partial
            pending += [grad[s] for s in layout.slices(start, start + grad.numel(), summed)]

    def finish(self) -> None:
        """Sum every gradient that was added over its replicas, in place."""
        for n, pending in self._pending.items():
            small = [x for x in pending if x.numel() <= SMALL]
            works = [all_reduce(x, self.groups[n]) for x in pending if x.numel() > SMALL]
            if small:
                message = torch.cat(small)
                all_reduce(message, self.groups[n]).wait()
                torch._foreach_copy_(small, list(message.split([x.numel() for x in small])))
            for work in works:
                work.wait()
            pending.clear()


class TiedReducer:
    """Sums the gradients of the tied embeddings, which the first and the last stage both hold.

    Args:
        holders: the pp coords that hold the embeddings.
    """

    def __init__(self, mesh: Mesh, holders: Sequence[int]):
        self._link = next(iter(mesh.links("pp", pairwise(holders)).values()), None)

    def add(self, grad: Tensor) -> None:
        """Add the other stage's gradient to `grad` in place. Both stages get the same bits."""
        theirs = torch.empty_like(grad)
        assert self._link, "this rank holds them"
        group, peer = self._link
        shift(grad, theirs, group, peer, peer).wait()
        grad += theirs
