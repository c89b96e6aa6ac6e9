"""Experts whose inner size tp shards: each tp rank has a slice of every expert, as in a dense MLP.

A router stays as it is. It routes the tokens of the residual stream that are on its rank. With sequence parallelism the
ranks have different tokens, so each token is routed once. Tokens, weights and choices are gathered only behind the
router and the balance losses. Code that counts tokens (loads, balance losses, the z-loss) therefore need not know about
slices.

A rank computes a part of each output with its slices, and the parts are summed. The gradient of an output's weight is
therefore also a part on each rank. The gather's backward sums these parts, as it sums the parts of the tokens'
gradients. The router's gradient then comes from its own tokens alone, a case that the rule for gradients covers
already.

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
from ndtrain.parallel.linear.comm import StreamComm
from ndtrain.parallel.mappings import gather_tokens, reduce_tokens
from ndtrain.parallel.recompute import SavedOps


class ExpertSlices:
    """`Ops.gather_routed` and `Ops.reduce_routed` over slices of experts.

    Args:
        comm: the communication between the residual stream's tokens on this rank and the tokens of all tp ranks.
        sequence_parallel: True if these tokens differ.
        saved_ops: the store of the saved sums, which no recompute sends again.
    """

    def __init__(self, comm: StreamComm, sequence_parallel: bool, saved_ops: SavedOps):
        self.comm, self.sequence_parallel, self.saved_ops = comm, sequence_parallel, saved_ops

    def over(self, ops: Ops, compiled: bool) -> Ops:
        """Return `ops` with both calls replaced.

        Args:
            compiled: True if blocks are compiled; communication cannot be part of a graph.
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
