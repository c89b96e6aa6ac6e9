"""Experts whose inner size tp shards: each tp rank has a slice of every expert, as of a dense MLP.

A router stays as it is. It routes the tokens of the residual stream that are on its rank, each once where sequence
parallelism shards them. Tokens, weights and choices are gathered only behind it, and behind the balance losses. So all
that counts tokens (loads, balance losses, the z-loss) knows nothing of slices.

What a rank computes with its slices is a part of each output, and the parts are summed. So the gradient of an output's
weight is also a part on each rank. The gather's backward sums the parts, as it sums those of the tokens' gradients. The
router's gradient is then that of its own tokens, which the rule for gradients knows already.

|          | sequence parallel                                   | otherwise                                       |
|----------|-----------------------------------------------------|-------------------------------------------------|
| forward  | all-gather of tokens, weights and choices           | nothing                                         |
|          | reduce-scatter of outputs                           | all-reduce of outputs                           |
| backward | all-gather of the outputs' gradients                | nothing                                         |
|          | reduce-scatter of tokens' and of weights' gradients | all-reduce of tokens' and of weights' gradients |

Without sequence parallelism every rank makes the same choices, because each computes the same logits from the same
bits. With ep the ranks of one tp coord exchange rows, so each rank sends rows of all gathered tokens.

Shape legend: S tokens of the residual stream on this rank, N tokens of all ranks, E hidden_size, K experts of a token.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ndtrain.model import Ops
from ndtrain.model.moe.permutation import Permutation
from ndtrain.model.moe.router import Routing
from ndtrain.model.spec import OUTPUT
from ndtrain.parallel.fused_grad_accumulation import StreamComm
from ndtrain.parallel.mappings import gather_tokens, reduce_tokens
from ndtrain.parallel.recompute import SavedOps


class ExpertSlices:
    """`Ops.gather_routed` and `Ops.reduce_routed` over slices of experts.

    Args:
        comm: between the residual stream's tokens and those of all tp ranks.
        sequence_parallel: whether these differ.
        saved_ops: where the sums are saved, so that no recompute sends them again.
    """

    def __init__(self, comm: StreamComm, sequence_parallel: bool, saved_ops: SavedOps):
        self.comm, self.sequence_parallel, self.saved_ops = comm, sequence_parallel, saved_ops

    def over(self, ops: Ops, compiled: bool) -> Ops:
        """`ops` with both calls replaced.

        Args:
            compiled: whether blocks are; communication cannot be part of a graph.
        """
        outside = torch.compiler.disable if compiled else lambda op: op
        return replace(ops, gather_routed=outside(self.gather), reduce_routed=outside(self.reduce))

    def gather(self, x_SE: Tensor, routing: Routing, permutation: Permutation) -> tuple[Tensor, Tensor, Permutation]:
        x_NE, weights_NK = gather_tokens(x_SE, self.comm), gather_tokens(routing.weights, self.comm)
        if self.sequence_parallel:
            experts_NK = self.comm.gather(routing.experts).all()
            permutation = Permutation.of(experts_NK, len(permutation.counts))
        return x_NE, weights_NK, permutation

    def reduce(self, y_NE: Tensor) -> Tensor:
        return reduce_tokens(y_NE, self.comm, self.saved_ops.of(OUTPUT))
