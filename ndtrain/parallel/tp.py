"""tp: every weight matrix is sharded over the ranks (Shoeybi et al., 2019, arXiv:1909.08053). With sequence parallelism
the residual stream between matmuls is sharded too, along its tokens (Korthikanti et al., 2022, arXiv:2205.05198).

Where tp meets the model, and what each rank does there:

| weights                     | role         | on a rank                                                             |
|-----------------------------|--------------|-----------------------------------------------------------------------|
| q_proj, k_proj, v_proj      | column       | all tokens in, its heads out                                          |
| the attention core          | local heads  | attention of its own heads: nothing is sent                           |
| o_proj                      | row          | its heads in, a partial sum of every output out                       |
| gate_proj, up_proj          | column       | all tokens in, its columns of the MLP out                             |
| down_proj                   | row          | its columns in, a partial sum of every output out                     |
| experts                     | replicated   | each rank's tokens of the stream; as an option a slice of each expert |
| projections into a latent   | replicated   | each rank's tokens of the stream; every head reads the rotated key    |
| latent's q_b_proj, kv_b_proj| column       | all tokens' latents in, its heads out                                 |
| norms, biases of row weights| replicated   | every rank holds them; under sequence parallelism gradients are summed|
| embed_tokens, lm_head       | vocabulary   | its rows of the table; one number a token crosses the ranks in a loss |

The layouts define the role of a weight (`TensorParallel.role_of`). Each role needs this communication:

|                   | residual stream       | before a column    | after a row      |
|-------------------|-----------------------|--------------------|------------------|
| sequence parallel | N / tp tokens a rank  | all-gather         | reduce-scatter   |
| otherwise         | all tokens everywhere | nothing            | all-reduce       |

Gradients need it in the opposite direction. The tokens of the residual stream are a microbatch [B, T], flattened to N.
A rank's share is therefore contiguous, and nothing is copied on the way in or out.

Shape legend: B batch, T time, N tokens (B T), S tokens of one rank's share (N / tp), C tokens of a chunk, E
hidden_size, I in, O out, V rows of the vocabulary on this rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndtrain.config import TPConfig
from ndtrain.mesh.collectives import (
    Pending,
    all_gather,
    all_gather_row,
    all_reduce,
    by_distance,
    reduce_shares,
    shift,
    sum_in_order,
)
from ndtrain.mesh.sharding import TensorLayout, balanced_split
from ndtrain.model import Ops
from ndtrain.model.vocabulary import LOCAL, Targets, Vocabulary
from ndtrain.parallel.linear.comm import Gathered, LinearComm, Rows, StreamComm
from ndtrain.parallel.mappings import gather_tokens
from ndtrain.parallel.norm_of_heads import norm_of_heads

# --------------------------------------------------------------------------------------- communication around a matmul


class _Arriving(Gathered):
    """Rows gathered from all ranks, as one message each or all at once.

    Args:
        works: (rows, the operation that receives them), in the order they arrive.
    """

    def __init__(self, x_NI: Tensor, works: Sequence[tuple[Rows, Pending]]):
        self._x_NI, self._works = x_NI, works
        self.order = [rows for rows, _ in works]

    def rows(self, wanted: Rows) -> Tensor:
        start, stop, _ = wanted.indices(len(self._x_NI))
        for rows, work in self._works:
            if rows.start < stop and start < rows.stop:
                work.wait()
        return self._x_NI[wanted]

    def all(self) -> Tensor:
        return self.rows(slice(None))


class SequenceComm(StreamComm):
    """Sequence parallelism: the residual stream holds this rank's share of the matmul's tokens.

    Args:
        overlap: send share by share, so that a matmul runs on one share while the next one is in flight.
    """

    def __init__(self, group: dist.ProcessGroup, overlap: bool):
        self.group, self.overlap = group, overlap
        self.n, self.r = group.size(), group.rank()

    def gather(self, x: Tensor) -> Gathered:
        x_SI = x.contiguous()
        x_NI = x_SI.new_empty(self.n * len(x_SI), x_SI.shape[-1])
        if not self.overlap:
            work = all_gather(x_NI.view(-1), x_SI.view(-1), self.group)
            return _Arriving(x_NI, [(slice(0, len(x_NI)), work)])
        shares = self._shares(len(x_NI))
        x_NI[shares[self.r]] = x_SI
        works = [(shares[self.r], Pending(()))]
        for to, source in by_distance(self.group):
            works.append((shares[source], shift(x_SI, x_NI[shares[source]], self.group, to, source)))
        return _Arriving(x_NI, works)

    def reduce(self, produce: Callable[[Rows], Tensor], order: Sequence[Rows]) -> Callable[[], Tensor]:
        if not self.overlap:
            return reduce_shares(produce(slice(None)), self.group)
        n_rows = max(rows.stop for rows in order)
        shares = self._shares(n_rows)
        received: dict[int, Tensor] = {}
        works = []
        for to, source in by_distance(self.group):
            y_SO = produce(shares[to])
            received[source] = torch.empty_like(y_SO)
            works.append(shift(y_SO, received[source], self.group, to, source))
        received[self.r] = produce(shares[self.r])

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return sum_in_order([received[i] for i in range(self.n)])

        return wait

    def _shares(self, n_rows: int) -> list[Rows]:
        each = n_rows // self.n
        return [slice(i * each, (i + 1) * each) for i in range(self.n)]


class ReplicatedComm(StreamComm):
    """No sequence parallelism: every rank holds the whole residual stream.

    Args:
        overlap: sum in parts, one for each rank, so that a matmul runs while the previous part is in flight.
    """

    sums_in_place = True

    def __init__(self, group: dist.ProcessGroup, overlap: bool):
        self.group, self.parts = group, group.size() if overlap else 1

    def reduce(self, produce: Callable[[Rows], Tensor], order: Sequence[Rows]) -> Callable[[], Tensor]:
        n_rows = max(rows.stop for rows in order)
        bounds = [balanced_split(n_rows, self.parts, i) for i in range(self.parts)]
        sums, works = [], []
        for start, stop in bounds:
            sums.append(produce(slice(start, stop)))
            works.append(all_reduce(sums[-1], self.group))

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return torch.cat(sums) if len(sums) > 1 else sums[0]

        return wait


# --------------------------------------------------------------------------------------------- the vocabulary in parts


class VocabParallel(Vocabulary):
    """A vocabulary of which each rank holds some rows of the table, and computes the logits of these rows. The logits
    of all ranks are never gathered. Only their log-sum-exp is exchanged, one number a token from each rank.

    Args:
        held: the rows of the table on this rank.
        comm: the communication between the residual stream's tokens and the head's tokens.
    """

    def __init__(self, held: range, comm: StreamComm, group: dist.ProcessGroup):
        self.held, self.comm, self.group = held, comm, group
        self._last: Callable[[], None] = lambda: None

    def chunks(self, x_SE: Tensor, targets_N: Targets, chunk: int) -> Iterator[tuple[slice, Tensor, Targets]]:
        shares = len(targets_N.labels) // len(x_SE)  # 1 without sequence parallelism
        targets_PS = targets_N.map(lambda x: x.unflatten(0, (shares, -1)))
        starts = range(0, len(x_SE), max(1, chunk // shares))
        rows = [slice(a, min(a + starts.step, len(x_SE))) for a in starts]
        arriving = self.comm.gather(x_SE[rows[0]])
        for i, now in enumerate(rows):
            x_CE = arriving.all()
            if i + 1 < len(rows):  # in flight while this chunk is computed
                arriving = self.comm.gather(x_SE[rows[i + 1]])
            yield now, x_CE, targets_PS.map(lambda x, now=now: x[:, now].flatten(0, 1))

    def log_softmax(self, logits_CV: Tensor, ids_C1: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        logits_CV = logits_CV.to(dtype)
        lse = self.log_sum_exp(logits_CV.logsumexp(dim=1))
        columns = self.local(ids_C1)  # while the sums are in flight
        return logits_CV.sub_(lse()[:, None]), *columns

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        here = (ids >= self.held.start) & (ids < self.held.stop)
        return (ids - self.held.start).where(here, 0), here

    def log_sum_exp(self, lse_C: Tensor) -> Callable[[], Tensor]:
        rows, work = all_gather_row(lse_C, self.group)

        def whole() -> Tensor:
            work.wait()
            return rows.logsumexp(dim=0)

        return whole

    def add_input_gradient(self, out_SE: Tensor, dlogits_CV: Tensor, weight_VE: Tensor, share_C1: Tensor) -> None:
        produce = lambda rows: (dlogits_CV[rows] @ weight_VE).mul_(share_C1[rows])
        total = self.comm.reduce(produce, [slice(0, len(dlogits_CV))])
        self.finish()
        self._last = lambda: out_SE.copy_(total())

    def finish(self) -> None:
        last, self._last = self._last, lambda: None
        last()


class ReplicatedVocab(Vocabulary):
    """A vocabulary that every rank holds. Every rank computes the same loss from the same tokens, and only the first
    one reports it."""

    def __init__(self, first: bool):
        self.first = first

    def report(self, sums: Tensor) -> Tensor:
        return sums if self.first else torch.zeros_like(sums)


# ----------------------------------------------------------------------------------------------------------- the ops


class Role(Enum):
    """How a weight is sharded over tp."""

    COLUMN = "along its outputs"
    ROW = "along its inputs"
    REPLICATED = "not at all"


class TensorParallel:
    """The model's ops over weights that the layouts have sharded.

    Args:
        layouts: each parameter with its layout.
        shards_heads: True if each rank has some of the query heads, and not all.
    """

    def __init__(
        self,
        layouts: Mapping[nn.Parameter, TensorLayout],
        group: dist.ProcessGroup,
        cfg: TPConfig,
        shards_heads: bool = True,
    ):
        self.layouts, self.group, self.sequence_parallel = layouts, group, cfg.sequence_parallel
        self.shards_heads = shards_heads
        self.comm = (SequenceComm if cfg.sequence_parallel else ReplicatedComm)(group, cfg.overlap)

    def over(self, ops: Ops, compiled: bool = False) -> Ops:
        """Return `ops` with the calls replaced that depend on how weights are sharded. `linear` has `comm_of` already.

        Args:
            compiled: True if blocks are compiled; communication cannot be part of a graph.
        """
        outside = torch.compiler.disable if compiled else lambda op: op
        if self.shards_heads:
            norm, shared = partial(norm_of_heads, group=self.group), partial(gather_tokens, comm=self.comm)
            ops = replace(ops, norm_of_heads=outside(norm), for_all_heads=outside(shared))
        embedding, head_loss = partial(self.embedding, ops.embedding), partial(self.head_loss, ops.head_loss)
        return replace(ops, embedding=embedding, core=self.local_heads(ops.core), head_loss=head_loss)

    def role_of(self, weight: nn.Parameter) -> Role:
        """Return the role of a weight [out, in] or of a table [vocabulary, E]. A table is sharded like a column
        weight."""
        match self.layouts[weight].shard_dim:
            case None:
                return Role.REPLICATED
            case 0:
                return Role.COLUMN
            case _:
                return Role.ROW

    def comm_of(self, weight: nn.Parameter) -> LinearComm:
        """Return the communication around a weight's matmul."""
        match self.role_of(weight):
            case Role.COLUMN:
                return LinearComm(gather_input=self.comm)
            case Role.ROW:
                return LinearComm(reduce_output=self.comm)
            case Role.REPLICATED:
                return LinearComm()

    def embedding(self, look_up: Callable, tokens: Tensor, weight: nn.Parameter) -> Tensor:
        if self.role_of(weight) is Role.REPLICATED:
            return look_up(self._own_tokens(tokens.flatten()), weight)
        return look_up(tokens, weight, self.comm, self._sharded(weight))

    def head_loss(
        self, loss: Callable, x: Tensor, weight: nn.Parameter, targets: Targets, scale: Tensor, chunk: int
    ) -> Tensor:
        targets = targets.flatten()
        if self.role_of(weight) is Role.REPLICATED:
            targets = targets.map(self._own_tokens)
            vocabulary = LOCAL if self.sequence_parallel else ReplicatedVocab(self.group.rank() == 0)
        else:
            vocabulary = self._sharded(weight)
        return loss(x, weight, targets, scale, chunk, vocabulary)

    def local_heads(self, core: Callable) -> Callable:
        """Return the attention core for this rank's heads. The number of heads follows from q, k and v, and their place
        in the model from the rank."""
        place = self.group.rank() if self.shards_heads else 0

        def local(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx, *largest: Tensor | None) -> Tensor:
            first = place * q_BTND.shape[2]
            return core(q_BTND, k_BTKD, v_BTKD, ctx._replace(scores=replace(ctx.scores, first_head=first)), *largest)

        return local

    def _sharded(self, weight: nn.Parameter) -> VocabParallel:
        """Return the vocabulary of a table whose rows are sharded."""
        start, rows = self.layouts[weight].shard[0]
        return VocabParallel(range(start, start + rows), self.comm, self.group)

    def _own_tokens(self, x_N: Tensor) -> Tensor:
        """Return the tokens of this rank's share of the residual stream: [S, ...] of [N, ...]."""
        return x_N.chunk(self.group.size())[self.group.rank()] if self.sequence_parallel else x_N
