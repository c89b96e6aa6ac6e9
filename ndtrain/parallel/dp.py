"""dp: the replicas hold the same parameter shards and see different tokens. Finished gradients are all-reduced in
buckets while the backward continues. The rank's program says which shards are one bucket."""

from torch import Tensor

from ndtrain.distributed.collectives import Group, Pending, all_reduce

BUCKET_BYTES = 4 << 20  # smaller neighbours are merged: below this size, latency dominates gloo's all_reduce


class ReplicaReducer:
    """Sums gradient slices over the replicas, in place. Every rank must call in the same order."""

    def __init__(self, group: Group):
        self._group = group
        self._works: list[Pending] = []

    def launch(self, grad: Tensor) -> None:
        """Starts the sum of a slice that is complete on this rank."""
        self._works.append(all_reduce(grad, self._group))

    def wait(self) -> None:
        """Waits until every slice holds the sum."""
        for work in self._works:
            work.wait()
        self._works.clear()
