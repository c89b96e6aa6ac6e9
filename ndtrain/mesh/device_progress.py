"""The operations that are queued on a GPU and have not completed.

NCCL's `Work.wait()` makes a stream wait, not the host. If a GPU hangs, its host goes on, step after step, until CUDA's
queue of launches is full. The host's waits therefore do not show a hang, and the operations themselves have to be
checked.

PyTorch's own thread checks the end event of every NCCL operation each 100 ms, and then sets the operation's result
(`Work.get_future_result`). Reading that result only reads memory. `Work.is_completed` and `Event.query` are no
substitute. They call CUDA, which may block in a hang, and they hold Python's global lock meanwhile, so no other thread
could report the hang. In a thread of its own such a call would also create a context on GPU 0.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ndtrain.mesh.collective_record import CollectiveRecord

_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class _Launched(NamedTuple):
    record: CollectiveRecord
    results: Sequence  # futures, done when the device has completed the operation

    def done(self) -> bool:
        return all(result.done() for result in self.results)


class DeviceProgress:
    """The pending operations of the device, in launch order for each channel. One thread polls them, others add to
    them.

    Attributes:
        moved: when an operation was last seen to be complete, in seconds of the monotonic clock.
        completed: channel -> number of operations seen to be complete.
    """

    def __init__(self) -> None:
        self.moved = time.monotonic()
        self.completed: dict[str, int] = {}
        self._pending: dict[str, deque[_Launched]] = {}
        self._asynchronous: dict[str, bool] = {}

    def runs(self, group: dist.ProcessGroup) -> bool:
        """Return True if the operations of the group run on the device. A wait for them then does not block the
        host."""
        name = group.group_name
        if name not in self._asynchronous:
            self._asynchronous[name] = dist.get_backend(group) == "nccl" and not _waits_block()
        return self._asynchronous[name]

    def add(self, record: CollectiveRecord, works: Iterable[Any]) -> None:
        """Follow an operation until it is complete.

        Args:
            works: PyTorch's handles of the operation. Only their results are kept, not their buffers.
        """
        launched = _Launched(record, [work.get_future_result() for work in works])
        self._pending.setdefault(record.channel, deque()).append(launched)

    def poll(self) -> None:
        """Forget the operations that are complete. NCCL completes the operations of a channel in launch order."""
        for channel, queue in list(self._pending.items()):
            while queue and queue[0].done():
                self.completed[channel] = queue.popleft().record.number
                self.moved = time.monotonic()

    def incomplete(self) -> list[CollectiveRecord]:
        """Return all pending operations, the oldest launch first."""
        queues = [tuple(queue) for queue in list(self._pending.values())]
        return sorted((op.record for queue in queues for op in queue), key=lambda record: record.launched)

    def blocking(self) -> list[tuple[CollectiveRecord, float]]:
        """Return (first incomplete operation, start of the oldest wait) for each channel with a wait that the device
        has not passed. The oldest launch comes first. A message that is posted early blocks nothing until a wait needs
        it."""
        blocking = []
        for queue in list(self._pending.values()):
            ops = tuple(queue)  # one call, because other threads add to the queue
            waited = [op.record.waited for op in ops if op.record.waited]
            if waited:
                blocking.append((ops[0].record, min(waited)))
        return sorted(blocking, key=lambda first: first[0].launched)

    def waits(self, host: Sequence[CollectiveRecord]) -> list[tuple[CollectiveRecord, float]]:
        """Return (operation that the device has not completed, since when), the oldest launch first. Time counts from
        the last completion: a device that completes something does not hang, however long the host waits for it.

        Args:
            host: the host's own waits for the device. They are returned if no operation blocks the device.
        """
        waits = self.blocking() or [(record, record.waited) for record in host]
        return [(record, max(since, self.moved)) for record, since in waits]


def _waits_block() -> bool:
    """Return True if NCCL is configured to block the host in a wait. PyTorch's thread then sets no results."""
    return any(os.environ.get(name, "").lower() in ("1", "y", "yes", "t", "true") for name in _BLOCKING_WAIT)
