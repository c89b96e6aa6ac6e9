"""Asynchronous collectives on flat buffers and activations.

NCCL groups use NCCL's collectives. On gloo, all-gather and reduce-scatter send each peer its part directly
(isend/irecv). Between two ranks of one host this is 1.2 to 2.7 times as fast as gloo's own from 4 MiB on. Below, it is
equally fast (`bench collectives`). It needs no copy, and it sums in a fixed order. All-reduce uses gloo's own: it is
faster from 4 MB on, and its result has the same bits on every rank and in every run.

A group of `None` is a group of one rank: nothing is sent.

On CUDA every operation is launched asynchronously. `Pending.wait()` makes the caller's stream wait, never the host;
`done()` queries an event. NCCL runs the operations of one process group on one stream of that group, one at a time, in
launch order. That stream first waits for the work that the caller's stream has queued at the launch. A send occupies
its stream until it is received. Operations of different groups overlap with compute and with one another:

| operations                           | group, on NCCL              | waited for                                |
|--------------------------------------|-----------------------------|-------------------------------------------|
| fsdp: all-gathers                    | fsdp x cp                   | before use                                |
| fsdp: reduce-scatters                | the same; zero 3: a second  | one unit later, or at the end (`fsdp.py`) |
| dp: all-reduces of summed gradients  | dp                          | at the end of the step                    |
| tp: gathers and sums around matmuls  | tp                          | chunk by chunk (`tp.overlap`), or at once |
| cp: keys and values, their gradients | cp                          | one block of attention later              |
| ep: rows of experts, their gradients | ep; a second one of its own | at once; one part later (`moe.overlap`)   |
| pp: activations, their gradients     | one per (source, target)    | by the receiving action; sends at the end |
| pp: sum of tied embeddings           | the (first, last) pair's    | at once                                   |

On gloo the operations of a group do not wait for each other. There, pp needs only one group, and fsdp too. The launch
order of every rank is a list, and `ndtrain/program/launch_order.py` simulates such lists under these rules.

The memory of a tensor in flight is not reused before its wait. PyTorch's `Work` holds the tensors until then, and a
wait orders the later work of the caller's stream after the operation. Code that frees a storage by hand (zero=3) frees
it after the wait, on the stream that waited.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.device.kind import on_gpu
from ndtrain.mesh.flight_recorder import RECORDER, CollectiveRecord
from ndtrain.mesh.sharding import even_split

Group = dist.ProcessGroup | None

# torch 2.13 renamed these; 2.11 has only the old names
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """An operation in flight.

    Args:
        works: PyTorch's handles; empty if nothing is sent.
        then: called once, by the first `wait()`.
        record: the flight recorder's record of the operation; None if nothing is sent.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        then: Callable[[], None] = lambda: None,
        record: CollectiveRecord | None = None,
    ):
        self._works, self._then, self._record = [w for w in works if w is not None], then, record
        if record is not None:
            RECORDER.follow(record, self._works)

    def wait(self) -> None:
        """Wait for the operation (on CUDA the current stream waits), then call `then`. A second call does nothing."""
        if self._works:
            assert self._record is not None, "every operation is recorded"
            RECORDER.enter(self._record)
            try:
                for work in self._works:
                    work.wait()
            finally:
                RECORDER.leave(self._record)
        then, self._then = self._then, lambda: None
        self._works = []  # drops the last references to the buffers
        then()

    def done(self) -> bool:
        """Return True if `wait()` would return at once."""
        return all(work.is_completed() for work in self._works)


def size(group: Group) -> int:
    """Return the number of ranks in the group."""
    return 1 if group is None else group.size()


def send(x: Tensor, group: dist.ProcessGroup, to: int) -> Pending:
    """Send x (contiguous) to rank `to` of the group. Messages between two ranks of a group arrive in order."""
    record = RECORDER.launch("send", group, x.nbytes, to=to)
    return Pending([dist.isend(x, group=group, group_dst=to)], record=record)


def receive(x: Tensor, group: dist.ProcessGroup, source: int) -> Pending:
    """Receive the next message from rank `source` of the group into x (contiguous)."""
    record = RECORDER.launch("receive", group, x.nbytes, source=source)
    return Pending([dist.irecv(x, group=group, group_src=source)], record=record)


def all_gather(out: Tensor, part: Tensor, group: Group) -> Pending:
    """Gather the `part` [p] of each of n ranks into out [n * p], in rank order. `part` may be a view of this rank's
    part of `out`."""
    n, r = size(group), group.rank() if group else 0
    own = out.view(n, -1)[r]
    if not _same_memory(own, part):
        own.copy_(part)
    if group is None:
        return Pending(())
    record = RECORDER.launch("all_gather", group, out.nbytes)
    if _native(out):
        return Pending([gather_single(out, own, group=group, async_op=True)], record=record)
    return Pending(_exchange([own] * n, list(out.view(n, -1)), group), record=record)


def reduces_in_place(full: Tensor) -> bool:
    """Return True if `reduce_scatter` of this tensor takes no memory of its own while it is in progress."""
    return _native(full)


def reduce_scatter(full: Tensor, group: Group) -> Pending:
    """Sum `full` [p] over the ranks, in place. Each rank gets the sum of its own part, whose bounds are given by
    `even_split`. The other parts of `full` are undefined afterwards."""
    if group is None:
        return Pending(())
    n, r = size(group), group.rank()
    record = RECORDER.launch("reduce_scatter", group, full.nbytes)
    parts = [full[slice(*even_split(full.numel(), n, i))] for i in range(n)]
    if _native(full) and full.numel() % n == 0:
        return Pending([scatter_single(parts[r], full, group=group, async_op=True)], record=record)
    received = [torch.empty_like(parts[r]) if i != r else parts[r] for i in range(n)]
    works = _exchange(parts, received, group)
    return Pending(works, lambda: _sum_into(parts[r], received), record)


def _sum_into(own: Tensor, received: list[Tensor]) -> None:
    """Set own = received[0] + received[1] + ..., added in rank order on every rank."""
    if own is received[0]:
        for x in received[1:]:
            own.add_(x)
        return
    total = received[0]
    for x in received[1:]:
        total.add_(x)
    own.copy_(total)


def reduce_shares(full: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start a reduce-scatter of `full` [n * s, ...] over the ranks. Return a function that waits for it and returns
    this rank's part of the sum, a new tensor [s, ...]."""
    n, r = group.size(), group.rank()
    record = RECORDER.launch("reduce_scatter", group, full.nbytes)
    shares = list(full.view(n, -1, *full.shape[1:]))
    if _native(full):
        out = torch.empty_like(shares[r])
        pending = Pending([scatter_single(out, full, group=group, async_op=True)], record=record)
        return _after(pending, lambda: out)
    received = [shares[r] if i == r else torch.empty_like(shares[r]) for i in range(n)]
    pending = Pending(_exchange(shares, received, group), record=record)
    return _after(pending, lambda: sum_in_order(received))


def _after(pending: Pending, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that waits for `pending` and then returns the result of `make`."""

    def finish() -> Tensor:
        pending.wait()
        return make()

    return finish


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return parts[0] + parts[1] + ... (two or more) as a new tensor of the parts' dtype. The sum is computed in fp32
    or wider."""
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    total = parts[0].to(wide) + parts[1]
    for x in parts[2:]:
        total += x
    return total.to(dtype)


def all_reduce(full: Tensor, group: Group) -> Pending:
    """Sum `full` over the ranks, in place. The result has the same bits on every rank."""
    if group is None:
        return Pending(())
    record = RECORDER.launch("all_reduce", group, full.nbytes)
    return Pending([dist.all_reduce(full, group=group, async_op=True)], record=record)


def all_reduce_max(full: Tensor, group: Group) -> Pending:
    """Replace each element of `full` by the largest one over the ranks, in place."""
    if group is None:
        return Pending(())
    record = RECORDER.launch("all_reduce", group, full.nbytes)
    return Pending([dist.all_reduce(full, dist.ReduceOp.MAX, group=group, async_op=True)], record=record)


def all_gather_row(row: Tensor, group: Group) -> tuple[Tensor, Pending]:
    """Gather a small vector `row` [k] from each of n ranks. Return (a new tensor [n, k], the operation in flight)."""
    out = row.new_empty(size(group), row.numel())
    return out, all_gather(out.view(-1), row, group)


def all_gather_around(row: Tensor, group: Group) -> tuple[Tensor, Pending]:
    """Gather as `all_gather_row` does. On gloo rows go around a ring, so that the group may connect on use."""
    if group is None:
        return all_gather_row(row, group)
    out = row.new_empty(size(group), row.numel())
    record = RECORDER.launch("all_gather", group, out.nbytes)
    return out, Pending([gather_single(out.view(-1), row, group=group, async_op=True)], record=record)


def shift(send: Tensor, receive: Tensor, group: dist.ProcessGroup, to: int, source: int) -> Pending:
    """Send `send` to rank `to` of the group and receive `receive` from rank `source`. Both tensors are contiguous."""
    record = RECORDER.launch("shift", group, send.nbytes, to, source)
    if _native(send):  # one batch: single sends around a ring would deadlock on NCCL
        ops = [
            dist.P2POp(dist.isend, send, group=group, group_peer=to),
            dist.P2POp(dist.irecv, receive, group=group, group_peer=source),
        ]
        return Pending(dist.batch_isend_irecv(ops), record=record)
    return Pending(_pair(send, receive, group, to, source), record=record)


def all_to_all(
    sends: Sequence[Tensor], receives: Sequence[Tensor], group: dist.ProcessGroup, members: range
) -> Pending:
    """Send `sends[i]` to rank `members[i]` of the group and receive `receives[i]` from it. This rank is one of the
    members; its own tensor is copied. All tensors are contiguous."""
    record = RECORDER.launch("all_to_all", group, sum(x.nbytes for x in sends), among=members)
    n, me = len(members), members.index(group.rank())
    receives[me].copy_(sends[me])
    peers = [((me + step) % n, (me - step) % n) for step in range(1, n)]
    if _native(sends[me]):
        ops = [dist.P2POp(dist.isend, sends[to], group=group, group_peer=members[to]) for to, _ in peers]
        ops += [dist.P2POp(dist.irecv, receives[i], group=group, group_peer=members[i]) for _, i in peers]
        return Pending(dist.batch_isend_irecv(ops), record=record)
    pair = lambda to, source: _pair(sends[to], receives[source], group, members[to], members[source])
    return Pending([work for peer in peers for work in pair(*peer)], record=record)


def all_to_all_rows(
    sends: Sequence[Tensor], receives: Sequence[Tensor], group: dist.ProcessGroup, nbytes: int
) -> Pending:
    """Send `sends[i]` to rank i of the group and receive `receives[i]` from it. All tensors are contiguous. A message
    may be empty if it is empty on both ranks.

    Args:
        nbytes: the size that is recorded. It is the same on all ranks, although each sends and receives a different
            number of rows.
    """
    record = RECORDER.launch("all_to_all", group, nbytes)
    me = group.rank()
    if _native(sends[me]):
        return Pending([dist.all_to_all(list(receives), list(sends), group=group, async_op=True)], record=record)
    receives[me].copy_(sends[me])
    return Pending(_exchange(sends, receives, group), record=record)


def by_distance(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Return (rank to send to, rank to receive from) for every peer, next neighbours first. The first sends of all
    ranks then go to different ranks."""
    n, r = group.size(), group.rank()
    return [((r + step) % n, (r - step) % n) for step in range(1, n)]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors begin at the same place of one storage. (On the meta device no storage has an
    address.)"""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def _native(x: Tensor) -> bool:
    """Return True if the backend's own collectives are used (NCCL's)."""
    return on_gpu(x)


def _pair(send: Tensor, receive: Tensor, group: dist.ProcessGroup, to: int, source: int) -> list[dist.Work | None]:
    """Post one send and one receive. Skip a tensor without elements."""
    works: list[dist.Work | None] = []
    if receive.numel():
        works.append(dist.irecv(receive, group=group, group_src=source))
    if send.numel():
        works.append(dist.isend(send, group=group, group_dst=to))
    return works


def _exchange(sends: Sequence[Tensor], receives: Sequence[Tensor], group: dist.ProcessGroup) -> list[dist.Work | None]:
    """Post a send of `sends[i]` to every other rank i of the group, and a receive of `receives[i]` from it."""
    return [w for to, source in by_distance(group) for w in _pair(sends[to], receives[source], group, to, source)]
