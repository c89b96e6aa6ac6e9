"""fp8: the blocks' weight matmuls with factors of 8 bits (Micikevicius et al., 2022, arXiv:2209.05433).

|                 | factors                   | result                              |
|-----------------|---------------------------|-------------------------------------|
| output          | x e4m3, w e4m3            | bf16                                |
| input gradient  | dy e5m2, w e4m3           | bf16                                |
| weight gradient | dy e5m2, x e4m3           | fp32, added to the flat buffer      |

Routers, gates of one output and the experts that tokens are routed to are computed as without fp8.

Each factor is cast when it is used. Its scale is computed on the device, from its largest magnitude at that moment.
Scales are powers of two, so they move the range and not the digits: an element well inside the range becomes the same
number under any scale. A rank scales by the largest element of its own part of a tensor, which depends on the mesh.
Without any message, the numbers still agree between meshes, except for elements 2^-14 times as small as the largest.

Shape legend: N tokens, I in, O out; of any matrix R rows, C columns.
"""

from collections.abc import Iterable, Sequence
from functools import cache, partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ndtrain.config.checks import FP8_MULTIPLE
from ndtrain.config.schema import require
from ndtrain.device.kind import kind_of
from ndtrain.mesh.sharding import Layouts
from ndtrain.model.opaque import opaque
from ndtrain.model.spec import OpSpec, Param
from ndtrain.parallel.linear.accumulator import GradAccumulator, accumulator_of
from ndtrain.parallel.linear.comm import Gathered, Rows
from ndtrain.parallel.linear.matmul import PLAIN_MATMUL, MatmulImpl

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TOP = {_E4M3: 9, _E5M2: 16}  # the largest number is 0.875 * 2^this
_OUT = torch.bfloat16


def check_shapes(layouts: Layouts, table: Iterable[Param], ops: Iterable[OpSpec]) -> None:
    """Check that fp8 can multiply by all matrices of this rank that do not stay in the compute precision.

    Args:
        table: the model's parameters.
        ops: the ops of each kind of block.

    Raises:
        ConfigError: a matrix of a block has a size on this rank that no fp8 matmul accepts.
    """
    in_fp8 = {op.name for op in ops if not op.wide and not op.routed}
    for p in table:
        tensor = layouts[p.name]
        if p.op not in in_fp8 or tensor.shape[0] == 1:
            continue
        require(
            all(size % FP8_MULTIPLE == 0 for size in tensor.local_shape),
            f"precision.compute=fp8: {p.name} is {list(tensor.local_shape)} on a rank, and fp8 needs multiples of "
            f"{FP8_MULTIPLE}: change the model's size or mesh.tp, or set precision.compute=bf16",
        )


class Cast(NamedTuple):
    """A matrix in fp8.

    Attributes:
        values: [R, C], row-major unless transposed on a device that does not multiply fp8.
        unit: the number that a one in `values` represents, an fp32 scalar. NaN if an element was not finite before the
            cast.
    """

    values: Tensor
    unit: Tensor

    def t(self) -> "Cast":
        """Return the transpose [C, R]. It is row-major if the device multiplies fp8. (With torch 2.13, a transposed
        copy in compiled code for a CPU was seen to hold NaN.)"""
        values = self.values.t()
        return Cast(values.contiguous() if multiplies_fp8(values.device.type) else values, self.unit)


def cast(x_RC: Tensor, dtype: torch.dtype) -> Cast:
    """Cast a matrix to the nearest numbers in `dtype`. It is first scaled by the largest power of two with which no
    element exceeds the range."""
    largest = torch.linalg.vector_norm(x_RC, float("inf")).float()
    fraction, exponent = torch.frexp(largest)
    up = (_TOP[dtype] - exponent - (fraction > 0.875).int()).clamp(-126, 126)
    unit = torch.where(largest.isfinite(), _power_of_two(-up), float("nan"))
    return Cast((x_RC * _power_of_two(up)).to(dtype).contiguous(), unit)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to the power of an int32 in [-126, 127], exactly."""
    return ((exponent + 127) << 23).view(torch.float32)


def multiply(a_RC: Cast, b_KC: Cast, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a @ b.T, [R, K] in `dtype`. With `fast`, sums may have fewer bits than fp32's, if the device supports
    it."""
    if multiplies_fp8(a_RC.values.device.type):
        factors, units = (a_RC.values, b_KC.values.t()), {"scale_a": a_RC.unit, "scale_b": b_KC.unit}
        return torch._scaled_mm(*factors, **units, out_dtype=dtype, use_fast_accum=fast)
    product = a_RC.values.float() @ b_KC.values.float().t()
    return product.mul_(a_RC.unit).mul_(b_KC.unit).to(dtype)


def multiplies_fp8(device: str) -> bool:
    """Return True if the device has fp8 matmuls. A CPU counts as having none: PyTorch's is a plain loop, a thousand
    times as slow as the same product in fp32."""
    if device == "meta":
        return kind_of(torch.device(device)) == "cuda"
    return _tried(device)


def prepare_compile() -> None:
    """Mark `multiplies_fp8` as a constant for the compiler. A decorator would import the compiler together with this
    module, which takes about a second."""
    torch.compiler.assume_constant_result(multiplies_fp8)


@cache
def _tried(device: str) -> bool:
    if device == "cpu":
        return False
    unit = torch.ones((), device=device)
    a, b = (torch.zeros(16, 16, device=device).to(dtype) for dtype in (_E5M2, _E4M3))
    try:
        torch._scaled_mm(a, b.t(), scale_a=unit, scale_b=unit, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


class _Casts(Gathered):
    """Gathered rows, cast to fp8. Each slice of rows is cast once."""

    def __init__(self, gathered: Gathered, dtype: torch.dtype):
        self._gathered, self._dtype, self.order = gathered, dtype, gathered.order
        self._n = max(rows.stop for rows in self.order)
        self._made: dict[tuple[int, int], Cast] = {}

    def rows(self, wanted: Rows) -> Cast:
        start, stop, _ = wanted.indices(self._n)
        if (start, stop) not in self._made:
            x_NC = self._gathered.all() if stop - start == self._n else self._gathered.rows(wanted)
            self._made[start, stop] = cast(x_NC, self._dtype)
        return self._made[start, stop]

    def all(self) -> Cast:
        return self.rows(slice(None))


class Fp8Matmul(MatmulImpl):
    """`MatmulImpl` with factors in fp8."""

    def of_weight(self, w_OI: Tensor) -> MatmulImpl:
        """Return the implementation that multiplies by this weight. A gate has one output, and fp8 has no product of
        such a matrix."""
        return PLAIN_MATMUL if w_OI.shape[0] == 1 else self

    def input(self, x: Gathered) -> Gathered:
        return _Casts(x, _E4M3)

    def gradient(self, dy: Gathered) -> Gathered:
        return _Casts(dy, _E5M2)

    def weight(self, w_OI: Tensor, backward: bool) -> Cast:
        w = cast(w_OI, _E4M3)
        return w.t() if backward else w

    def output(self, x_NI: Cast, w_OI: Cast) -> Tensor:
        return multiply(x_NI, w_OI, _OUT, fast=True)

    def input_gradient(self, dys: Sequence[Cast], weights: Sequence[Cast]) -> Tensor:
        return reduce(Tensor.add_, (multiply(dy_NO, w_IO, _OUT) for dy_NO, w_IO in zip(dys, weights, strict=True)))

    def weight_gradient(self, accumulator: GradAccumulator, w: nn.Parameter, dy_NO: Cast, x_NI: Cast) -> None:
        accumulator.add_made(w, lambda: multiply(dy_NO.t(), x_NI.t(), torch.float32))

    def outputs(self, x_NI: Tensor, weights_OI: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return super().outputs(cast(x_NI, _E4M3), weights_OI)

    def backward(self, dys_NO: Sequence[Tensor], x_NI: Tensor, weights_OI: Sequence[Tensor]) -> Tensor:
        """Compute both kinds of gradients in one custom op, except for the casts. The compiler makes each cast in the
        kernel that computes its input, once for all readers. It also decides what is kept for backward."""
        dys = [cast(dy_NO, _E5M2) for dy_NO in dys_NO]
        factors_IO = [self.weight(w_OI, backward=True) for w_OI in weights_OI]
        casts = [*dys, *factors_IO, *(dy.t() for dy in dys), cast(x_NI, _E4M3).t()]
        values, units = [c.values for c in casts], [c.unit for c in casts]
        return linear_backward_fp8(values, units, weights_OI)


FP8_MATMUL = Fp8Matmul()


class _CompiledFp8Linear(torch.autograd.Function):
    """y_i = x @ w_i.T with factors in fp8, in a compiled graph."""

    @staticmethod
    def forward(ctx, x_NI: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_NI, *weights_OI)
        return FP8_MATMUL.outputs(x_NI, weights_OI)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *weights_OI = ctx.saved_tensors
        return FP8_MATMUL.backward(grads, x_NI, weights_OI), *[None] * len(weights_OI)


Fp8Matmul.compiled = _CompiledFp8Linear


@opaque
def linear_backward_fp8(values: Sequence[Tensor], units: Sequence[Tensor], weights_OI: Sequence[Tensor]) -> Tensor:
    """Compute `plain_gradients` with factors in fp8, in a compiled graph.

    Args:
        values, units: of the casts, in this order: each dy [N, O], each w [I, O], each dy [O, N], x [I, N].
    """
    casts, n, accumulator = list(map(Cast, values, units)), len(weights_OI), accumulator_of(weights_OI)
    dx_NI = FP8_MATMUL.input_gradient(casts[:n], casts[n : 2 * n])
    for w_OI, left_ON in zip(weights_OI, casts[2 * n : -1], strict=True):
        accumulator.add_made(w_OI, partial(multiply, left_ON, casts[-1], torch.float32))
    return dx_NI


@linear_backward_fp8.register_fake
def _(values, units, weights_OI):
    return values[0].new_empty(values[0].shape[0], weights_OI[0].shape[1], dtype=_OUT)
