"""The balance of experts on a mesh: their loads over a whole step, the selection biases that follow from the loads
(Wang et al., 2024, arXiv:2408.15664), and the gradients of balance losses.

A token is counted when its autograd graph is made: once a step under every recompute mode, and never in an evaluation.
The loads of a step are summed over all ranks. They are whole numbers, so every mesh gets the same bits. Losses are sums
over tokens, divided by the number of tokens of the whole global batch, like the loss of the model. Their gradients are
therefore summed with all other gradients, and nothing is averaged.

Shape legend: N tokens of a microbatch on this rank, K experts of a token, X experts, L layers with experts, S sequences
of a microbatch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ndtrain.config import LocalShapes, ModelConfig, MoEConfig
from ndtrain.config.schema import resolved
from ndtrain.mesh.collectives import Pending, all_reduce
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import Transformer
from ndtrain.model.families import family_of
from ndtrain.model.families.moe import softmax
from ndtrain.model.moe.losses import balance_loss, load_entropy, load_max_over_mean, with_gradient_of, z_loss
from ndtrain.model.moe.router import Routing
from ndtrain.model.transformer import sparse_layers

LOSSES = 2  # columns of a step's sums in addition to the loads: the balance loss and the z-loss


def looks_ahead(m: ModelConfig, moe: MoEConfig) -> bool:
    """Return True if a forward of the whole batch runs before each step. `moe.balance=hf` needs it: its loss depends on
    the loads of the whole batch."""
    return moe.balance == "hf" and bool(sparse_layers(m))


# -------------------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class BalanceLoss:
    """A loss that evens out the loads.

    Attributes:
        factor: the factor of its gradient, for the mean over tokens and layers.
        shares: routing -> the experts' shares, [X] or [N, X], as in `balance_loss`.
        scores: logits [N, X] -> the experts' probabilities, as in `balance_loss`.
    """

    factor: float
    shares: Callable[[Routing], Tensor]
    scores: Callable[[Tensor], Tensor] = softmax


class SequenceShares:
    """The shares of each token's own sequence, which may be spread over ranks of cp and tp (DeepSeek-AI, 2024,
    arXiv:2412.19437, equations 17 to 20). An expert's share is the fraction of the sequence's choices that it got."""

    def __init__(self, shapes: LocalShapes, experts: int, mesh: Mesh):
        spread = ("cp", "tp") if shapes.shards_stream else ("cp",)
        self.group, self.part = mesh.group(*spread), mesh.index("tp") if shapes.shards_stream else 0
        self.length, self.length_here = shapes.seq_len, shapes.length
        self.shape = shapes.sequences, experts

    def __call__(self, routing: Routing) -> Tensor:
        """Return the shares of each token's sequence, [N, X]."""
        N, K = routing.experts.shape
        places_N = torch.arange(self.part * N, (self.part + 1) * N, device=routing.experts.device)
        of_N = places_N // self.length_here
        chosen = (of_N[:, None] * self.shape[1] + routing.experts).flatten()
        counts_SX = torch.zeros(self.shape, dtype=torch.int64, device=chosen.device)
        counts_SX.view(-1).scatter_add_(0, chosen, torch.ones_like(chosen))
        all_reduce(counts_SX, self.group).wait()
        return counts_SX[of_N].double() / (K * self.length)


class PooledShares:
    """The shares of the whole global batch and of all layers together, as in Hugging Face's loss. They are known only
    after a forward of the whole batch, which therefore runs before each step.

    Attributes:
        loads_LX: the loads in that forward.
    """

    def __init__(self, loads_LX: Tensor):
        self.loads_LX = loads_LX
        self._shares_X = loads_LX.sum(0)

    def fix(self, tokens: int) -> None:
        """Compute the shares from the loads of this many tokens, once these are summed over all ranks."""
        self._shares_X = self.loads_LX.sum(0) / (len(self.loads_LX) * tokens)

    def __call__(self, routing: Routing) -> Tensor:
        """Return the shares, [X]."""
        return self._shares_X


# ---------------------------------------------------------------------------------------------------------- the balance


class Balance:
    """`Ops.balance` of all layers of the model, and the state of their balance. Every rank has the state of every
    layer.

    Attributes:
        layers: the indices of the layers with experts, in order.
        bias_LX: fp32, the selection biases of these layers.
        pooled: the shares that the forward before each step computes; None: there is no such forward.
        names: the names of the `numbers`.
    """

    def __init__(self, m: ModelConfig, moe: MoEConfig, shapes: LocalShapes, mesh: Mesh):
        self.mesh, self.layers, experts = mesh, sparse_layers(m), m.num_experts or 0
        zeros = lambda width, dtype: torch.zeros(len(self.layers), width, dtype=dtype, device=mesh.device)
        self.bias_LX = zeros(experts, torch.float32)
        self._rate = moe.bias_rate
        self._sums = zeros(experts + LOSSES, torch.float64)  # the sums of this step: loads, then losses
        self._rows: dict[Tensor, int] = {}  # bias of a block -> its row in the sums
        self._counts_here = shapes.shards_stream or mesh.coords["tp"] == 0
        self.pooled = PooledShares(zeros(experts, torch.float64)) if looks_ahead(m, moe) else None
        self._looks_ahead, self._pending = False, Pending(())
        self._loss = self._make_loss(m, moe, shapes)
        self._z_factor = moe.z_loss * len(self.layers)
        self._tokens = 1  # of the step, on all ranks together
        self.names = self._names()

    def _make_loss(self, m: ModelConfig, moe: MoEConfig, shapes: LocalShapes) -> BalanceLoss | None:
        if self.pooled is not None:
            return BalanceLoss(m.router_aux_loss_coef, self.pooled)
        if self.layers and moe.aux_coef:
            shares = SequenceShares(shapes, resolved(m.num_experts), self.mesh)
            return BalanceLoss(moe.aux_coef * len(self.layers), shares, resolved(family_of(m).moe).affinities)
        return None

    def adopt(self, model: Transformer) -> None:
        """Give the blocks of a stage their selection biases."""
        model.use_biases(self.bias_LX)
        blocks = model.model.layers
        self._rows |= {blocks[str(i)].selection_bias: n for n, i in enumerate(self.layers) if str(i) in blocks}

    @property
    def loads_LX(self) -> Tensor:
        """The number of tokens that each expert got in this step, fp64. It counts the tokens of all ranks after
        `await_loads`."""
        return self._sums[:, :-LOSSES]

    # --------------------------------------------------------------------------------------------------- in a forward

    def __call__(self, logits_NX: Tensor, routing: Routing, counts_X: Tensor, bias_X: Tensor) -> Tensor:
        row = self._rows[bias_X]
        if self.pooled is not None and self._looks_ahead:
            self.pooled.loads_LX[row] += counts_X
        if not torch.is_grad_enabled():
            return routing.weights
        self.loads_LX[row] += counts_X
        weights_NK, of_layer = routing.weights, self._sums[row, -LOSSES:]
        if self._loss is not None:
            mean = balance_loss(self._loss.shares(routing), self._loss.scores(logits_NX)) * self._per_token
            weights_NK = with_gradient_of(weights_NK, mean * self._loss.factor)
            of_layer[0] += mean.detach()
        if self._z_factor:
            mean = z_loss(logits_NX) * self._per_token
            weights_NK = with_gradient_of(weights_NK, mean * self._z_factor)
            of_layer[1] += mean.detach()
        return weights_NK

    # ------------------------------------------------------------------------------------------------------ in a step

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Run the block as the forward of the whole batch before a step, which computes the pooled shares."""
        resolved(self.pooled).loads_LX.zero_()
        self._looks_ahead = True
        try:
            yield
        finally:
            self._looks_ahead = False

    @property
    def _per_token(self) -> float:
        """The factor of a sum over tokens and layers that makes it a mean."""
        return 1 / (len(self.layers) * self._tokens)

    def begin_step(self, tokens: int) -> None:
        """Start the sums of a step from zero.

        Args:
            tokens: of the step, on all ranks together.
        """
        self._tokens = tokens
        self._sums.zero_()

    def sum_loads(self) -> None:
        """Start to sum the loads over all ranks: the loads of the forward before the step while it runs, otherwise the
        loads and losses of the step."""
        mine = resolved(self.pooled).loads_LX if self._looks_ahead else self._sums
        if not self._counts_here:  # all tp ranks have computed the same sums, and only the first one counts them
            mine.zero_()
        self._pending = all_reduce(mine, self.mesh.world)

    def await_loads(self) -> None:
        """Wait for the sum of the loads."""
        self._pending.wait()
        if self._looks_ahead:
            resolved(self.pooled).fix(self._tokens)

    def sums_here(self) -> Tensor:
        """Return this rank's loads and losses of the step, fp64 [L, X + LOSSES]. The ranks' numbers add up."""
        return self._sums if self._counts_here else torch.zeros_like(self._sums)

    def set_sums(self, sums: Tensor) -> None:
        """Replace this rank's loads and losses of the step, as `sums_here` returns them, flattened."""
        self._sums.copy_(sums.view_as(self._sums))

    def update(self, finite: Tensor) -> None:
        """Move the biases towards equal loads, each by the same amount.

        Args:
            finite: True if the step's update was made, a scalar on the device; otherwise nothing changes.
        """
        loads_LX = self.loads_LX
        missing_LX = loads_LX.sum(1, keepdim=True) - loads_LX * loads_LX.shape[1]  # X times (mean - load), exact
        self.bias_LX.add_((missing_LX.sign() * finite).float(), alpha=self._rate)

    def numbers(self) -> Tensor:
        """Return the numbers of the step that are logged, fp64 [len(names)], the same on every rank."""
        if not self.layers:
            return self._sums.flatten()[:0]
        loads_LX, bias_LX = self.loads_LX, self.bias_LX.double()
        largest_L, dropped_L = load_max_over_mean(loads_LX), torch.zeros_like(loads_LX[:, 0])
        each = [largest_L, load_entropy(loads_LX), dropped_L, bias_LX.amax(1) - bias_LX.amin(1)]
        losses = self._sums[:, -LOSSES:].sum(0)
        wanted = [losses[:1]] * (self._loss is not None) + [losses[1:]] * bool(self._z_factor)
        return torch.cat([*wanted, largest_L.amax().view(1), torch.stack(each, 1).flatten()])

    def _names(self) -> tuple[str, ...]:
        if not self.layers:
            return ()
        of_layer = ("load_max_over_mean", "load_entropy", "dropped", "bias_range")
        each = [f"moe/layer_{i}/{name}" for i in self.layers for name in of_layer]
        losses = ["aux_loss"] * (self._loss is not None) + ["z_loss"] * bool(self._z_factor)
        return *losses, "moe/load_max_over_mean", *each
