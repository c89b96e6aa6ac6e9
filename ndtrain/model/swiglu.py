"""SwiGLU (Shazeer, 2020, arXiv:2002.05202), between the gate and up projections and the down projection."""

import torch
from torch import Tensor
from torch.nn import functional as F

_silu_backward = torch.ops.aten.silu_backward.grad_input  # looked up once, because the lookup is slow


class _SwiGLU(torch.autograd.Function):
    """SwiGLU as one autograd node instead of two. Its backward stores both gradients adjacent in one storage, since one
    matmul may have computed gate and up."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        activated = F.silu(gate)
        ctx.save_for_backward(gate, up, activated)
        return activated * up

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up, activated = ctx.saved_tensors
        width = gate.shape[-1]
        both = grad.new_empty(*gate.shape[:-1], 2 * width)
        d_gate, d_up = both.split_with_sizes((width, width), -1)
        torch.mul(grad, activated, out=d_up)
        torch.mul(grad, up, out=d_gate)
        _silu_backward(d_gate, gate, grad_input=d_gate)
        return d_gate, d_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, both [..., F]."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)
