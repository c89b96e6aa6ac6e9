"""FlexAttention on a GPU: softcap, ALiBi and a user's mod, in one kernel that PyTorch generates for them.

One call computes all scores between the queries of one shard of a sequence and the keys of another. The mods get
positions in the whole sequence, so sharding does not change the result. Blocks of scores without a visible pair are
skipped: above the diagonal, beyond the window, and between documents. (A user's mask skips no blocks.)

PyTorch's public interface has no backward that accepts an output and log-sum-exp over more keys than the call's. The
backward therefore runs the forward again and differentiates the merge of its result. Let
w = exp(lse_here - lse), where lse and out are over all keys. The gradient of out_here is w grad. The gradient of
lse_here is w grad . (out_here - out).

Shape legend: B batch, T time, S time of the keys, N query heads, K key/value heads, D head_dim, I and J blocks of
queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ndtrain.model.attention.math_kernel import on_device
from ndtrain.model.attention.mods import recording_autograd
from ndtrain.model.attention.scores import AttentionMod, Scores
from ndtrain.model.attention.tiles import Documents, Slices
from ndtrain.model.attention.uploads import upload_array

aten = torch.ops.aten
BLOCK_SIZE = 128  # queries and keys of a block of scores. A block is skipped or computed as a whole
compile_kernel = partial(torch.compile, dynamic=False, fullgraph=True)


class Operations(NamedTuple):
    """The constants of a generated kernel. The attributes are as in `Scores`."""

    window: int | None
    softcap: float | None
    mod: AttentionMod
    first_head: int


class Inputs(NamedTuple):
    """The tensors that a generated kernel reads. They may change from batch to batch without a recompilation.

    Attributes:
        query, key: positions in the sequence, [T] and [S].
        query_document, key_document: the document of each token, [B, T] and [B, S]. None: each row is one document.
        slopes: the slopes of the local heads, [N]. None: no ALiBi.
        blocks: the arguments of `BlockMask` that are tensors.
    """

    query: Tensor
    key: Tensor
    query_document: Tensor | None
    key_document: Tensor | None
    slopes: Tensor | None
    blocks: dict[str, Tensor]


@dataclass(frozen=True)
class FlexCall:
    """One call of the kernel.

    Attributes:
        inputs: None on the meta device.
        rows, q, k: the part of the shard that it reads and returns, as in `Tile`. It is the whole shard.
        first: as in `Tile`.
    """

    inputs: Inputs | None
    rows = q = k = slice(None)
    first = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Compute `forward_piece` for this call."""
        with torch.no_grad():
            return self._kernel(scores)(q, k, v, self._inputs(q, scores))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `backward_piece` for this call."""
        with recording_autograd():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out_here, lse_here = self._kernel(scores)(*leaves, self._inputs(q, scores))
            with torch.no_grad():
                weight = (lse_here - lse).exp().masked_fill_(lse_here == -torch.inf, 0)
                grad_lse = ((out_here.to(lse.dtype) - out) * grad).sum(-1).mul_(weight)
                grad_out = (grad * weight[..., None]).to(out_here.dtype)
            return torch.autograd.grad((out_here, lse_here), leaves, (grad_out, grad_lse))

    @staticmethod
    def _kernel(scores: Scores) -> Callable:
        return _compiled(Operations(scores.window, scores.softcap, scores.mod or AttentionMod(), scores.first_head))

    def _inputs(self, q: Tensor, scores: Scores) -> Inputs:
        slopes = scores.local_slopes(q.shape[1])
        wide = torch.promote_types(q.dtype, torch.float32)
        return self.inputs._replace(slopes=None if slopes is None else on_device(slopes, wide, q.device))


class MetaFlexCall(FlexCall):
    """A call on the meta device, where PyTorch has no FlexAttention. It uses the operators of causal flash attention
    instead: their results have the same shapes, and they compute the same number of causal scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:2]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        again, none = self.forward(q, k, v, scores), torch.empty(2, dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, *again, None, None, q.shape[2], k.shape[2], 0.0, True, none, none
        )


@lru_cache(maxsize=64)
def _compiled(operations: Operations) -> Callable:
    def kernel(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return attention(operations, q, k, v, inputs)

    kernel.__code__ = kernel.__code__.replace()  # PyTorch limits the number of graphs of one code object
    return compile_kernel(kernel)


def attention(
    operations: Operations, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, with_lse: bool = True
) -> tuple[Tensor, Tensor] | Tensor:
    """Return (output [B, N, T, D], log-sum-exp [B, N, T]), or the output alone. This function is compiled."""
    score, mask = _functions(operations, inputs)
    blocks = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]), BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE), mask_mod=mask, **inputs.blocks
    )
    aux = AuxRequest(lse=True) if with_lse else None
    result = flex_attention(q, k, v, score, blocks, enable_gqa=q.shape[1] != k.shape[1], return_aux=aux)
    return (result[0], result[1].lse) if with_lse else result


def _functions(operations: Operations, inputs: Inputs) -> tuple[Callable, Callable]:
    """Return `score_mod` and `mask_mod` for PyTorch's `flex_attention`. Their indices count from the shards' starts."""
    window, softcap, mod, first_head = operations
    positions, key_positions, query_document, key_document, slopes, _ = inputs

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = positions[i], key_positions[j]
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            s = s - slopes[h] * (query - key)
        return s if mod.score is None else mod.score(s, b, h + first_head, query, key)

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = positions[i], key_positions[j]
        seen = key <= query
        if window is not None:
            seen = seen & (query - key < window)
        if query_document is not None:
            seen = seen & (query_document[b, i] == key_document[b, j])
        return seen if mod.mask is None else seen & mod.mask(b, h + first_head, query, key)

    return score, mask


# --------------------------------------------------------------------------------------------------------- its blocks


def flex_call(scores: Scores, queries: Slices, keys: Slices, length: int, like: Tensor) -> FlexCall:
    """Return the call for these slices of queries and keys of a sequence of `length` tokens, on `like`'s device."""
    if like.is_meta:
        return MetaFlexCall(None)
    masked = scores.mod is not None and scores.mod.mask is not None
    return _flex_call(queries, keys, scores.documents, scores.window, masked, like.device)


@lru_cache(maxsize=256)  # every block of a model makes the same calls
def _flex_call(
    queries: Slices, keys: Slices, documents: Documents, window: int | None, masked: bool, device: torch.device
) -> FlexCall:
    query, key = _positions(queries), _positions(keys)
    starts = documents or ((0,),)
    document = lambda position: np.stack([np.searchsorted(row, position, side="right") for row in starts])
    of_query, of_key = document(query), document(key)
    blocks = _blocks(_Span.of(query, of_query), _Span.of(key, of_key), window, masked)
    up = lambda x: upload_array(x.astype(np.int32), device)
    packed = (up(of_query), up(of_key)) if documents else (None, None)
    transposed = BlockMask.from_kv_blocks(*map(up, blocks), BLOCK_SIZE=BLOCK_SIZE, seq_lengths=(len(query), len(key)))
    tensors = {name: getattr(transposed, name) for name in _BLOCK_TENSORS}
    return FlexCall(Inputs(up(query), up(key), *packed, None, tensors))


_BLOCK_TENSORS = tuple(
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
)


class _Span(NamedTuple):
    """The smallest and largest values in each block of tokens: positions [I], documents [rows, I]."""

    first: np.ndarray
    last: np.ndarray
    first_document: np.ndarray
    last_document: np.ndarray

    @classmethod
    def of(cls, position: np.ndarray, document: np.ndarray) -> "_Span":
        """Return the span of tokens that are in the order of the sequence."""
        begin = np.arange(0, len(position), BLOCK_SIZE)
        end = np.append(begin[1:], len(position)) - 1
        return cls(position[begin], position[end], document[:, begin], document[:, end])


def _blocks(q: _Span, k: _Span, window: int | None, masked: bool) -> tuple[np.ndarray, ...]:
    """Return the blocks of keys that each block of queries needs, in each row.

    There are two kinds of blocks: those that need a mask, and those in which every pair is visible. For each kind the
    result has the number of key blocks [rows, 1, I] and their indices [rows, 1, I, J].

    Args:
        masked: whether a user's mask applies, so that every block needs a mask.
    """
    apart = lambda x, y: x[..., :, None] - y[..., None, :]
    seen = (apart(q.last, k.first) >= 0) & (apart(q.first_document, k.last_document) <= 0)
    seen = seen & (apart(q.last_document, k.first_document) >= 0)
    one = (apart(q.first_document, k.last_document) == 0) & (apart(q.last_document, k.first_document) == 0)
    free = one & (apart(q.first, k.last) >= 0) & (not masked)
    if window is not None:
        seen, free = seen & (apart(q.first, k.last) < window), free & (apart(q.last, k.first) < window)
    ordered = lambda which: np.argsort(~which, axis=-1, kind="stable")
    lists = [(which.sum(-1), ordered(which)) for which in (seen & ~free, seen & free)]
    return tuple(x[:, None] for pair in lists for x in pair)


def _positions(pieces: Slices) -> np.ndarray:
    return np.concatenate([p.first + p.stride * np.arange(p.count) for p in pieces])
