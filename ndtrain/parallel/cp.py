"""Context parallelism: attention over a sequence that is sharded over the ranks of cp.

Ring (Liu et al., 2023, arXiv:2310.01889): queries stay on their rank, keys and values are sent around the ring. Each
step of attention is computed while the keys and values of the next step are sent.

Ulysses (Jacobs et al., 2023, arXiv:2309.14509): the ranks of a group exchange tokens for heads. Each rank computes
attention over all the group's tokens for some of the heads, and sends the outputs back.

Both can be combined: Ulysses inside groups of neighbouring ranks, and a ring between the groups.

Shape legend: B batch, T local time, N query heads, K key/value heads, D head_dim, U ranks of a Ulysses group, H heads
of a message.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.mesh.collectives import Pending, all_to_all, shift
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.model.attention.core import Merged, Recall, add_gradients, attend, raise_to, total_like
from ndtrain.model.attention.custom_op import AttentionOp, as_custom_op
from ndtrain.model.attention.kernels import Pieces, half_pieces, pieces_for
from ndtrain.model.attention.scores import Scores
from ndtrain.model.attention.tiles import Slices
from ndtrain.model.spec import CORE
from ndtrain.parallel.recompute import SavedOps

Core = Callable[..., Tensor]


class Links:
    """The communication of a rank of cp: with its neighbours in the ring, and within its Ulysses group.

    A benchmark that measures or leaves out the communication passes a subclass to `cp_core`.
    """

    def __init__(self, sharding: SequenceSharding, group: dist.ProcessGroup, index: int):
        ring_index, slice_index = divmod(index, sharding.ulysses)
        neighbour = lambda step: (ring_index + step) % sharding.ring * sharding.ulysses + slice_index
        self._group, self._to, self._source = group, neighbour(1), neighbour(-1)
        self._members = range(ring_index * sharding.ulysses, (ring_index + 1) * sharding.ulysses)

    def shift(self, send: Tensor, receive: Tensor) -> Pending:
        """Send `send` to the next rank of the ring and receive `receive` from the previous one. Both are contiguous."""
        return shift(send, receive, self._group, self._to, self._source)

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Pending:
        """Send `sends[u]` to rank u of the Ulysses group and receive `receives[u]` from it. All are contiguous."""
        return all_to_all(sends, receives, self._group, self._members)


def cp_core(
    sharding: SequenceSharding,
    group: dist.ProcessGroup,
    index: int,
    links: Links | None = None,
    saved_ops: SavedOps | None = None,
) -> Core:
    """Return the attention core of cp coordinate `index` of `group`, for tokens that are sharded as in `sharding`.

    The core takes q [B, T, N, D], k and v [B, T, K, D] and a `Context`, and returns [B, T, N, D]. It reads
    `ctx.scores`, whose first head is the first of the N heads. It raises `largest_N`, as `local_core` does, by the
    queries and heads that it computes here.

    With `saved_ops`, the recompute of the core runs no ring. With Ulysses it sends only the inputs again, not the
    outputs.

    Raises:
        ValueError: (when the core is called) sharding.ulysses does not divide N, or neither of sharding.ulysses and K
            divides the other.
    """
    ring_index, slice_index = divmod(index, sharding.ulysses)
    links, saved_ops = links or Links(sharding, group, index), saved_ops or SavedOps()
    ring = Ring(sharding, ring_index, links, saved_ops)

    def whole_heads(q: Tensor, k: Tensor, v: Tensor, scores: Scores, largest_N: Tensor | None) -> Tensor:
        if sharding.ring == 1:
            return attend(q, k, v, scores, saved_ops.of(CORE), largest_N)
        return _Ring.apply(q, k, v, scores, ring, partial(saved_ops, CORE), largest_N)

    @torch.compiler.disable  # the exchanges of heads for tokens are a break in a compiled graph
    def head_shares(q: Tensor, k: Tensor, v: Tensor, scores: Scores, largest_N: Tensor | None) -> Tensor:
        shares = _head_shares(q.shape[2], k.shape[2], sharding.ulysses)
        own, _ = shares[slice_index]
        heads = _ToHeads.apply(q, k, v, shares, links)
        scores = replace(scores, first_head=scores.first_head + own.start)
        out = whole_heads(*heads, scores, None if largest_N is None else largest_N[own])
        return _ToTokens.apply(out, sharding.ulysses, links, partial(saved_ops, CORE))

    def core(q: Tensor, k: Tensor, v: Tensor, ctx, largest_N: Tensor | None = None) -> Tensor:
        if sharding.ulysses > 1:
            return head_shares(q, k, v, ctx.scores, largest_N)
        if torch.compiler.is_compiling():
            return as_custom_op(ring, q, k, v, ctx.scores, ctx.handle)
        return whole_heads(q, k, v, ctx.scores, largest_N)

    return core


# --------------------------------------------------------------------------------------------------------------- ring


class Ring(AttentionOp):
    """Attention of this rank's queries over the keys and values of all ranks of the ring.

    The backward sends keys and values around the ring again. The sum of their gradients starts at the rank after their
    owner, and follows them one step behind. It reaches the owner while the owner computes the second half of its own
    block.
    """

    def __init__(self, sharding: SequenceSharding, ring_index: int, links: Links, saved_ops: SavedOps):
        super().__init__()
        self.sharding, self.ring_index, self.links, self.saved_ops = sharding, ring_index, links, saved_ops

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Compute the attention as a custom op of a compiled graph. The graph may overwrite a result once it has read
        it, so saved results are copied."""
        recall, make = self.saved_ops.of(CORE), lambda: self.send_round(q, _stacked(k, v), scores)
        return make() if recall is None else tuple(x.clone() for x in recall(make))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores):
        dq, dkv = self.send_back(grad, q, _stacked(k, v), out, lse, scores)
        return dq, *(x.clone() for x in _heads_first(dkv))  # two tensors, not two views of one

    def plan(self, scores: Scores, q: Tensor) -> list[Pieces]:
        """Return the pieces of each step. At step s the keys come from the rank s places before this one."""
        own = self._tokens(0)
        return [
            pieces_for(scores, own, self._tokens(step), self.sharding.length, q) for step in range(self.sharding.ring)
        ]

    def _tokens(self, step: int) -> Slices:
        """Return the tokens of a step's keys. At step 0 they are this rank's own."""
        return self.sharding.pieces((self.ring_index - step) % self.sharding.ring)

    def send_round(self, q: Tensor, kv: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (output, log-sum-exp) of the queries q [B, N, T, D], over the keys and values of all ranks. `kv`
        [2, B, T, K, D] are this rank's own."""
        merged, plan = Merged(q), self.plan(scores, q)
        for pieces, held in zip(plan, _around(kv, len(plan), self.links), strict=True):
            merged.attend(*_heads_first(held), pieces, scores)
        return merged.result()

    def send_back(
        self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of `send_round`'s q and kv, in fp32 or wider. `grad` [B, N, T, D] is the gradient of its
        output."""
        plan, links = self.plan(scores, q), self.links
        now, late = half_pieces(scores, self._tokens(0), self._tokens(0), self.sharding.length, q)
        dq, own = total_like(q), kv.new_zeros(kv.shape, dtype=torch.promote_types(kv.dtype, torch.float32))
        sums, coming, work = [torch.empty_like(own) for _ in plan[1:3]], torch.empty_like(own), None

        def add(kv: Tensor, pieces: Pieces, dkv: Tensor) -> None:
            add_gradients(grad, (q, *_heads_first(kv), out, lse), pieces, scores, dq, *_heads_first(dkv))

        for step, held in enumerate(_around(kv, len(plan), links)):
            if step == 0:
                add(held, now, own)
                continue
            going = sums[step % len(sums)].zero_()
            add(held, plan[step], going)
            if work:
                work.wait()
                going.add_(coming)
            work = links.shift(going, coming)
        add(kv, late, own)
        work.wait()
        return dq, own.add_(coming)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, scores: Scores, ring: Ring, recall: Recall, largest_N: Tensor | None
    ):
        q, kv = q.transpose(1, 2), torch.stack([k, v])
        out, lse = recall(lambda: ring.send_round(q, kv, scores))
        raise_to(largest_N, lse)
        ctx.scores, ctx.ring = scores, ring
        ctx.save_for_backward(q, kv, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, *saved = ctx.saved_tensors
        dq, dkv = ctx.ring.send_back(grad.transpose(1, 2), q, *saved, ctx.scores)
        dk, dv = dkv.to(q.dtype)
        return dq.transpose(1, 2).to(q.dtype), dk, dv, *(None,) * 4


def _around(kv: Tensor, steps: int, links: Links) -> Iterator[Tensor]:
    """Yield this rank's kv, then the kv of the rank before it, and so on around the ring. Each is sent on before it is
    yielded. The wait for the next one comes only when the caller requests it."""
    spare = [torch.empty_like(kv) for _ in range(min(2, steps - 1))]
    for step in range(steps - 1):
        coming = spare[step % len(spare)]
        work = links.shift(kv, coming)
        yield kv
        work.wait()
        kv = coming
    yield kv


def _stacked(k: Tensor, v: Tensor) -> Tensor:
    """Stack k and v: [B, K, T, D] each -> [2, B, T, K, D]."""
    return torch.stack([k.transpose(1, 2), v.transpose(1, 2)])


def _heads_first(kv_2BTKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v as [B, K, T, D]."""
    return tuple(kv_2BTKD.transpose(2, 3))


# ------------------------------------------------------------------------------------------------------------ Ulysses


def _head_shares(N: int, K: int, U: int) -> list[tuple[slice, slice]]:
    """Return the query heads and the key/value heads of each rank of a Ulysses group. If the group has more ranks than
    there are key/value heads, several ranks get the same key/value head."""
    if N % U or (K % U and U % K):
        raise ValueError(f"{N} query and {K} key/value heads cannot be distributed over a Ulysses group of {U} ranks")
    kv = max(1, K // U)
    return [(slice(u * N // U, (u + 1) * N // U), slice(u * K // U, u * K // U + kv)) for u in range(U)]


class _ToHeads(torch.autograd.Function):
    """An exchange of tokens for heads. The input is q [B, T, N, D], k and v [B, T, K, D] of this rank's tokens. The
    output is this rank's share of the heads, for the tokens of the whole group."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, shares: list[tuple[slice, slice]], links: Links):
        ctx.shares, ctx.links, ctx.kv_heads = shares, links, k.shape[2]
        messages = [torch.cat([q[:, :, n], k[:, :, m], v[:, :, m]], 2) for n, m in shares]
        return _to_heads(messages, links).split(_sizes(shares), 2)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        messages = [m.split(_sizes(ctx.shares), 2) for m in _to_tokens(torch.cat(grads, 2), len(ctx.shares), ctx.links)]
        dq, dk, dv = zip(*messages, strict=True)
        kv_shares = [m for _, m in ctx.shares]
        return torch.cat(dq, 2), *(_summed(x, kv_shares, ctx.kv_heads) for x in (dk, dv)), None, None


class _ToTokens(torch.autograd.Function):
    """The inverse exchange, for the outputs: some heads of all the group's tokens -> all heads of this rank's
    tokens."""

    @staticmethod
    def forward(ctx, out: Tensor, members: int, links: Links, recall: Callable):
        ctx.members, ctx.links = members, links
        return recall(lambda: torch.cat(list(_to_tokens(out, members, links)), 2))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _to_heads([x.contiguous() for x in grad.chunk(ctx.members, 2)], ctx.links), None, None, None


def _sizes(shares: list[tuple[slice, slice]]) -> list[int]:
    """Return the numbers of heads of q, k and v in a message."""
    return [s.stop - s.start for s in (shares[0][0], shares[0][1], shares[0][1])]


def _to_heads(messages: Sequence[Tensor], links: Links) -> Tensor:
    """Send a message [B, T, H, D] to each rank of the group. Return the messages of all ranks for this one,
    [B, U*T, H, D]."""
    received_UBTHD = messages[0].new_empty(len(messages), *messages[0].shape)
    links.exchange(messages, received_UBTHD.unbind()).wait()
    return received_UBTHD.transpose(0, 1).flatten(1, 2)


def _to_tokens(x: Tensor, members: int, links: Links) -> tuple[Tensor, ...]:
    """Send x [B, U*T, H, D] to the ranks that own its tokens. Return this rank's tokens [B, T, H, D] from each rank of
    the group."""
    messages = [m.contiguous() for m in x.chunk(members, 1)]
    received = x.new_empty(members, *messages[0].shape).unbind()
    links.exchange(messages, received).wait()
    return received


def _summed(parts: Sequence[Tensor], heads: Sequence[slice], count: int) -> Tensor:
    """Return the gradients of `count` heads, given the gradients of the heads that each rank had. Replicated heads are
    summed."""
    if sum(p.shape[2] for p in parts) == count:
        return torch.cat(list(parts), 2)
    B, T, _, D = parts[0].shape
    total = parts[0].new_zeros(B, T, count, D, dtype=torch.promote_types(parts[0].dtype, torch.float32))
    for part, h in zip(parts, heads, strict=True):
        total[:, :, h] += part
    return total.to(parts[0].dtype)
