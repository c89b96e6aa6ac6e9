"""Collectives on flat buffers and activations, launched now and finished later.

NCCL has its own. On gloo, gather and reduce-scatter send each peer its piece directly (isend/irecv): on two ranks of
one host that is 1.2 to 2.7 times as fast as gloo's own from 4 MiB on, and as fast for less (`bench collectives`);
it needs no copy, and sums in a fixed order. gloo's all_reduce is the faster one from 4 MB on, and its bits are the same
on every rank and run.

A group of `None` is a group of one rank: nothing moves.

On CUDA everything here is launched asynchronously, and `Pending.wait()` makes the caller's stream wait, never the host
(`done()` asks an event). NCCL runs what goes over one process group on one stream of that group's, which first waits
for what the caller's stream has queued at the launch. So beside compute, and beside one another, run:

| what                                   | group                   | waited for                                  |
|----------------------------------------|-------------------------|---------------------------------------------|
| fsdp: gathers, reduce-scatters         | fsdp x cp               | before use; one unit later (`fsdp.py`)      |
| dp: all-reduces of finished gradients  | dp                      | at the end of the step                      |
| tp: gathers and sums around matmuls    | tp                      | share by share (`tp.overlap`), or at once   |
| cp: keys and values, their gradients   | cp                      | one block of attention later                |
| pp: activations, their gradients       | one group for each way  | by the action that takes them; sends at the end |

The memory of a tensor in flight is not given away before its wait: PyTorch's `Work` holds the tensors until then, and a
wait orders what the caller's stream does next after the operation. Who frees a storage by hand (zero=3) does it after
the wait, on the stream that waited.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.distributed.flight_recorder import RECORDER, CollectiveRecord
from ndtrain.distributed.sharding import even_cut

Group = dist.ProcessGroup | None


class Pending:
    """An operation in flight. `wait()` finishes it (on CUDA: makes the current stream wait) and runs what follows
    once; a second `wait()` does nothing.

    Args:
        flight: what the recorder calls it; None where nothing moves.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        then: Callable[[], None] = lambda: None,
        record: CollectiveRecord | None = None,
    ):
        self._works, self._then, self._record = works, then, record

    def wait(self) -> None:
        if self._works:
            RECORDER.enter(self._record)
            try:
                for work in self._works:
                    work.wait()
            finally:
                RECORDER.leave(self._record)
        then, self._then = self._then, lambda: None
        self._works = ()  # with `then`, all that held the buffers
        then()

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return all(work.is_completed() for work in self._works)


def size(group: Group) -> int:
    return 1 if group is None else group.size()


def send(x: Tensor, group: dist.ProcessGroup, to: int) -> Pending:
    """Sends x, contiguous, to rank `to` of the group. Messages between two ranks of a group arrive in order."""
    record = RECORDER.launch("send", group, x.nbytes, to=to)
    return Pending([dist.isend(x, group=group, group_dst=to)], record=record)


def receive(x: Tensor, group: dist.ProcessGroup, source: int) -> Pending:
    """x, contiguous, becomes the next message from rank `source` of the group."""
    record = RECORDER.launch("receive", group, x.nbytes, source=source)
    return Pending([dist.irecv(x, group=group, group_src=source)], record=record)


def all_gather(out: Tensor, part: Tensor, group: Group) -> Pending:
    """out [n * p] becomes every rank's `part` [p], by rank. `part` may be this rank's own piece of `out`."""
    n, r = size(group), group.rank() if group else 0
    own = out.view(n, -1)[r]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    if group is None:
        return Pending(())
    record = RECORDER.launch("all_gather", group, out.nbytes)
    if _native(out):
        return Pending([dist.all_gather_into_tensor(out, own, group=group, async_op=True)], record=record)
    return Pending(_exchange([own] * n, list(out.view(n, -1)), group), record=record)


def reduce_scatter(full: Tensor, group: Group) -> Pending:
    """This rank's piece of `full` becomes the sum of that piece over the ranks, in place. Pieces are `even_cut`s;
    the other pieces are left undefined."""
    if group is None:
        return Pending(())
    n, r = size(group), group.rank()
    record = RECORDER.launch("reduce_scatter", group, full.nbytes)
    pieces = [full[slice(*even_cut(full.numel(), n, i))] for i in range(n)]
    if _native(full) and full.numel() % n == 0:
        return Pending([dist.reduce_scatter_tensor(pieces[r], full, group=group, async_op=True)], record=record)
    received = [torch.empty_like(pieces[r]) if i != r else pieces[r] for i in range(n)]
    works = _exchange(pieces, received, group)
    return Pending(works, lambda: _sum_into(pieces[r], received), record)


def _sum_into(own: Tensor, received: list[Tensor]) -> None:
    """own = received[0] + received[1] + ...: rank order, whoever sums."""
    if own is received[0]:
        for x in received[1:]:
            own.add_(x)
        return
    total = received[0]
    for x in received[1:]:
        total.add_(x)
    own.copy_(total)


def reduce_shares(full: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Starts to sum `full` [n * s, ...] over the ranks. Returns what gives this rank's share [s, ...], a tensor of its
    own."""
    n, r = group.size(), group.rank()
    record = RECORDER.launch("reduce_scatter", group, full.nbytes)
    shares = list(full.view(n, -1, *full.shape[1:]))
    if _native(full):
        out = torch.empty_like(shares[r])
        pending = Pending([dist.reduce_scatter_tensor(out, full, group=group, async_op=True)], record=record)
        return lambda: (pending.wait(), out)[1]
    received = [shares[r] if i == r else torch.empty_like(shares[r]) for i in range(n)]
    pending = Pending(_exchange(shares, received, group), record=record)
    return lambda: (pending.wait(), sum_in_order(received))[1]


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """parts[0] + parts[1] + ... (two or more) as a new tensor; taken in fp32 or wider, returned in the parts' dtype."""
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    total = parts[0].to(wide) + parts[1]
    for x in parts[2:]:
        total += x
    return total.to(dtype)


def all_reduce(full: Tensor, group: Group) -> Pending:
    """`full` becomes its sum over the ranks, in place, with the same bits on each."""
    if group is None:
        return Pending(())
    record = RECORDER.launch("all_reduce", group, full.nbytes)
    return Pending([dist.all_reduce(full, group=group, async_op=True)], record=record)


def all_gather_row(row: Tensor, group: Group) -> tuple[Tensor, Pending]:
    """A small vector [k] of every rank -> ([n, k], in flight)."""
    out = row.new_empty(size(group), row.numel())
    return out, all_gather(out.view(-1), row, group)


def shift(send: Tensor, receive: Tensor, group: dist.ProcessGroup, to: int, source: int) -> Pending:
    """Sends `send` to rank `to` of the group and receives `receive` from rank `source`; both contiguous."""
    record = RECORDER.launch("shift", group, send.nbytes, to, source)
    if _native(send):  # NCCL runs what is sent and received as one, or a ring of ranks would wait for itself
        ops = [
            dist.P2POp(dist.isend, send, group=group, group_peer=to),
            dist.P2POp(dist.irecv, receive, group=group, group_peer=source),
        ]
        return Pending(dist.batch_isend_irecv(ops), record=record)
    return Pending(_pair(send, receive, group, to, source), record=record)


def all_to_all(
    sends: Sequence[Tensor], receives: Sequence[Tensor], group: dist.ProcessGroup, members: range
) -> Pending:
    """Sends `sends[i]` to rank `members[i]` of the group and receives `receives[i]` from it; this rank is a member, and
    its own is copied. All contiguous."""
    record = RECORDER.launch("all_to_all", group, sum(x.nbytes for x in sends))
    n, me = len(members), members.index(group.rank())
    receives[me].copy_(sends[me])
    turns = [((me + step) % n, (me - step) % n) for step in range(1, n)]
    if _native(sends[me]):
        ops = [dist.P2POp(dist.isend, sends[to], group=group, group_peer=members[to]) for to, _ in turns]
        ops += [dist.P2POp(dist.irecv, receives[i], group=group, group_peer=members[i]) for _, i in turns]
        return Pending(dist.batch_isend_irecv(ops), record=record)
    pair = lambda to, source: _pair(sends[to], receives[source], group, members[to], members[source])
    return Pending([work for turn in turns for work in pair(*turn)], record=record)


def by_distance(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """(rank to send to, rank to receive from), next neighbours first, so that no rank is everyone's first target."""
    n, r = group.size(), group.rank()
    return [((r + step) % n, (r - step) % n) for step in range(1, n)]


def _native(x: Tensor) -> bool:
    return x.is_cuda


def _pair(send: Tensor, receive: Tensor, group: dist.ProcessGroup, to: int, source: int) -> list[dist.Work]:
    works = []
    if receive.numel():
        works.append(dist.irecv(receive, group=group, group_src=source))
    if send.numel():
        works.append(dist.isend(send, group=group, group_dst=to))
    return works


def _exchange(sends: Sequence[Tensor], receives: Sequence[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Sends `sends[i]` to rank i of the group and receives `receives[i]` from it, for all i but this rank."""
    return [w for to, source in by_distance(group) for w in _pair(sends[to], receives[source], group, to, source)]
