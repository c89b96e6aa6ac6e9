"""The experts' matmuls: rows sorted by expert times each expert's matrix, with gradients written straight into the flat
buffers.

The matrices of all experts that read one input are neighbours in their unit's buffer. They form one tensor [X, O, I],
where O counts the rows of all these matrices of one expert (`FusedWeights`). If PyTorch has a kernel for it, one
grouped product computes all experts: in bf16 on Hopper and Blackwell. Otherwise a loop does. The gradients of weights
are a loop everywhere: each expert's product accumulates in place, in the precision of the buffer. An expert without
rows gets a gradient of zeros.

Shape legend: M rows, X experts, I in, O out.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.device.kind import on_gpu
from ndtrain.model.contiguous import cat_consecutive
from ndtrain.model.moe.exchange import ExpertRows
from ndtrain.parallel.grad_accumulator import FusedWeights, GradAccumulator
from ndtrain.parallel.recompute import SavedOps

_ALIGNMENT = 16  # bytes, for a grouped product's factors and their rows


class _GroupedLinear(torch.autograd.Function):
    """y = x @ w.T for rows sorted by expert. As in `_Linear` in `fused_grad_accumulation.py`, the Parameters are
    attributes, not inputs of autograd."""

    @staticmethod
    def forward(
        ctx,
        accumulator: GradAccumulator,
        recall: Callable | None,
        x_MI: Tensor,
        expert_rows: ExpertRows,
        stacks: Sequence[FusedWeights],
    ):
        ctx.accumulator, ctx.stacks, ctx.expert_rows = accumulator, stacks, expert_rows
        ctx.save_for_backward(x_MI)
        make = partial(_outputs, x_MI, expert_rows, stacks)
        return make() if recall is None else recall(make)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (x_MI,) = ctx.saved_tensors
        experts = len(ctx.expert_rows.sizes)
        dys_MO = cat_consecutive(grads, [len(_rows_of_first(s, experts)) for s in ctx.stacks], -1)
        dx_MI = sum_of_products(dys_MO, [_matrices(s, experts) for s in ctx.stacks], ctx.expert_rows)
        for dy_MO, s in zip(dys_MO, ctx.stacks, strict=True):
            ctx.accumulator.accumulate_by_expert(s.weight, dy_MO, x_MI, ctx.expert_rows.sizes)
        return None, None, dx_MI, None, None


def _outputs(x_MI: Tensor, expert_rows: ExpertRows, stacks: Sequence[FusedWeights]) -> tuple[Tensor, ...]:
    """Multiply each expert's rows by its matrices."""
    experts, outputs = len(expert_rows.sizes), []
    for s in stacks:
        y_MO = products(x_MI, _matrices(s, experts).transpose(1, 2), expert_rows)
        outputs += y_MO.split_with_sizes(_rows_of_first(s, experts), -1)
    return tuple(outputs)


def _matrices(stack: FusedWeights, experts: int) -> Tensor:
    """Return the stack as one matrix for each expert, [X, O, I]."""
    return stack.weight.detach().unflatten(0, (experts, -1))


def _rows_of_first(stack: FusedWeights, experts: int) -> tuple[int, ...]:
    """Return the number of rows of each matrix of the first expert. The other experts have the same numbers."""
    return stack.rows[: len(stack.rows) // experts]


def products(x_MI: Tensor, w_XIO: Tensor, expert_rows: ExpertRows) -> Tensor:
    """Multiply each expert's rows by its matrix: [M, O]."""
    return sum_of_products([x_MI], [w_XIO], expert_rows)


def sum_of_products(xs_MI: Sequence[Tensor], ws_XIO: Sequence[Tensor], expert_rows: ExpertRows) -> Tensor:
    """Multiply each expert's rows of several tensors by its matrices, and sum the products: [M, O]."""
    if all(serves_grouped(t) for t in (*xs_MI, *ws_XIO)):
        return reduce(
            Tensor.add_, (F.grouped_mm(x, w, offs=expert_rows.ends) for x, w in zip(xs_MI, ws_XIO, strict=True))
        )
    y_MO = xs_MI[0].new_empty(len(xs_MI[0]), ws_XIO[0].shape[2])
    sizes = expert_rows.sizes
    # all views of a tensor in one call: with many small experts the host's time for slices counts
    factors = (zip(x.split(sizes), w.unbind(), strict=True) for x, w in zip(xs_MI, ws_XIO, strict=True))
    for y_RO, (x_RI, w_IO), *others in zip(y_MO.split(sizes), *factors, strict=True):
        if len(y_RO):
            torch.mm(x_RI, w_IO, out=y_RO)
            for other_RI, matrix_IO in others:
                y_RO.addmm_(other_RI, matrix_IO)
    return y_MO


def serves_grouped(x: Tensor) -> bool:
    """Return True if PyTorch's kernel for grouped products accepts this factor. Its rows (or columns) must be
    aligned."""
    if not on_gpu(x) or x.dtype != torch.bfloat16 or not _has_kernel(x.device):
        return False
    *_, rows, columns = x.stride()
    starts = (max(rows, columns), x.storage_offset())
    return 1 in (rows, columns) and all(n * x.element_size() % _ALIGNMENT == 0 for n in starts)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Return True if the device has a kernel for grouped products. On other GPUs PyTorch waits until the host has read
    the offsets, and then loops as well."""
    return device.type == "meta" or torch.cuda.get_device_capability(device)[0] in (9, 10)


class GroupedLinear:
    """`Ops.grouped_linear` over stacked weights.

    Args:
        accumulator: accumulates the gradients.
        saved_ops: the results that recomputed blocks save.
        stacks: the first matrix of each stack -> all its matrices as one.
    """

    def __init__(self, accumulator: GradAccumulator, saved_ops: SavedOps, stacks: Mapping[nn.Parameter, FusedWeights]):
        self.accumulator, self.saved_ops, self.stacks = accumulator, saved_ops, stacks

    def __call__(
        self, x_MI: Tensor, expert_rows: ExpertRows, weights: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        recall = self.saved_ops.of(self.saved_ops.op_of.get(weights[0][0]))
        stacks, at = [], 0
        while at < len(weights):
            stacks.append(self.stacks[weights[at][0]])
            at += len(_rows_of_first(stacks[-1], len(weights[at])))
        return _GroupedLinear.apply(self.accumulator, recall, x_MI, expert_rows, stacks)
