"""The model's linear ops."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ndtrain.model.moe.exchange import ExpertRows
from ndtrain.parallel.linear.accumulator import FusedWeights, GradAccumulator
from ndtrain.parallel.linear.comm import LinearComm
from ndtrain.parallel.linear.grouped import GroupedProduct
from ndtrain.parallel.linear.matmul import PLAIN_MATMUL, WIDE_MATMUL, MatmulImpl
from ndtrain.parallel.linear.product import CommProduct, LocalProduct, Product
from ndtrain.parallel.recompute import SavedOps

_LOCAL = LinearComm()


@dataclass(eq=False)
class LinearOps:
    """`linear`, `wide_linear` and `grouped_linear` of `Ops`.

    Args:
        accumulator: accumulates the gradients of matrices. Biases stay with autograd.
        saved_ops: the results that recomputed blocks save.
        fused_weights: the first matrix of each fused weight -> the fused weight.
        matmul: computes the products of `linear`.
        comm_of: weight -> the communication around its product in `linear`.
    """

    accumulator: GradAccumulator
    saved_ops: SavedOps
    fused_weights: Mapping[nn.Parameter, FusedWeights]
    matmul: MatmulImpl = PLAIN_MATMUL
    comm_of: Callable[[nn.Parameter], LinearComm] = lambda weight: _LOCAL
    _products: dict[int, tuple[Product, str | None]] = field(default_factory=dict, init=False)  # by id of first weight

    def linear(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        first = weights[0]
        product, op = self._products.get(id(first)) or self._plan(
            weights, self.comm_of(first), self.matmul.of_weight(first)
        )
        return product(x, biases, self.saved_ops.of(op))

    def wide_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x @ w.T in fp32 or wider, for the tokens on this rank. Every rank holds the whole weight."""
        product, op = self._products.get(id(weight)) or self._plan([weight], _LOCAL, WIDE_MATMUL)
        return product(x.to(torch.promote_types(x.dtype, torch.float32)), [None], self.saved_ops.of(op))[0]

    def grouped_linear(
        self, x_MI: Tensor, expert_rows: ExpertRows, weights: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        firsts = [of_experts[0] for of_experts in weights]
        product = GroupedProduct(self.accumulator, self._fuse(firsts, len(weights[0])), expert_rows)
        return product(x_MI, [None] * len(weights), self.saved_ops.of(self.saved_ops.op_of.get(firsts[0])))

    def _plan(self, weights: Sequence[Tensor], comm: LinearComm, matmul: MatmulImpl) -> tuple[Product, str | None]:
        """Return the product with the weights, and the op whose result it is."""
        shared, first = (self.accumulator, self._fuse(weights)), weights[0]
        local = comm == _LOCAL and matmul is PLAIN_MATMUL
        product = LocalProduct(*shared) if local else CommProduct(*shared, comm, matmul)
        self._products[id(first)] = planned = product, self.saved_ops.op_of.get(first)
        return planned

    def _fuse(self, weights: Sequence[Tensor], experts: int = 1) -> list[FusedWeights]:
        """Return the fused weights that `weights` are in, in order.

        Args:
            experts: the number of experts in each fused weight. `weights` are then matrices of the first one, and so
                are the `rows` of the result.
        """
        fused, at = [], 0
        while at < len(weights):
            whole = self.fused_weights.get(weights[at]) or FusedWeights(weights[at], (len(weights[at]),))
            of_first, left = divmod(len(whole.rows), experts)
            assert not left, "the matrices of all experts are one fused weight"
            fused.append(whole._replace(rows=whole.rows[:of_first]))
            at += of_first
        return fused
