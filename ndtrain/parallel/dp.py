"""dp: the replicas hold the same parameter shards and see different tokens. Finished gradients are all-reduced in
buckets while the backward continues."""

from torch import Tensor

from ndtrain.distributed.collectives import Group, Pending, all_reduce

BUCKET_BYTES = 4 << 20  # smaller neighbours are merged: below this size, latency dominates gloo's all_reduce


class ReplicaReducer:
    """Sums gradient slices over the replicas, in place.

    Slices are added in backward order, so a slice usually ends where the previous one begins. Such neighbours are
    merged into one message of up to BUCKET_BYTES.
    """

    def __init__(self, group: Group):
        self._group = group
        self._buffer: Tensor | None = None
        self._span = (0, 0)
        self._works: list[Pending] = []

    @property
    def alone(self) -> bool:
        """Whether there are no other replicas."""
        return self._group is None

    def add(self, buffer: Tensor, start: int, stop: int) -> None:
        """buffer[start:stop] is final on this rank. Every rank must call in the same order."""
        if self._group is None:
            return
        if self._buffer is buffer and stop == self._span[0]:
            self._span = (start, self._span[1])
        else:
            self._launch()
            self._buffer, self._span = buffer, (start, stop)
        if (self._span[1] - self._span[0]) * buffer.element_size() >= BUCKET_BYTES:
            self._launch()

    def _launch(self) -> None:
        if self._buffer is None:
            return
        self._works.append(all_reduce(self._buffer[slice(*self._span)], self._group))
        self._buffer = None

    def finish(self) -> None:
        """Waits until every slice holds the sum."""
        self._launch()
        for work in self._works:
            work.wait()
        self._works.clear()
