"""Gradients that are written straight into the flat buffers, without autograd."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ndtrain.device.kind import on_gpu
from ndtrain.model.contiguous import cat
from ndtrain.model.matmul_accumulate import accumulate_by_expert, accumulate_product


class FusedWeights(NamedTuple):
    """Several weight matrices that share an input, stored as one.

    Attributes:
        weight: [O, I], a Parameter: a view of the gathered weights. Its `.grad` is a view of the gradient buffer.
        rows: the number of rows of each matrix in it.
    """

    weight: nn.Parameter
    rows: tuple[int, ...]


def split_outputs(ys: Iterable[Tensor], fused: Sequence[FusedWeights]) -> list[Tensor]:
    """Split the outputs of fused weights into the outputs of their matrices."""
    split = (y.split_with_sizes(s.rows, -1) if len(s.rows) > 1 else (y,) for y, s in zip(ys, fused, strict=True))
    return [y for of_matrices in split for y in of_matrices]


def join_gradients(grads: Sequence[Tensor], fused: Sequence[FusedWeights]) -> list[Tensor]:
    """Concatenate the gradients of the matrices' outputs into the gradients of the fused weights' outputs. This is the
    inverse of `split_outputs`."""
    rest = iter(grads)
    parts = [[next(rest) for _ in s.rows] for s in fused]
    return [some[0] if len(some) == 1 else cat(some, -1) for some in parts]


class GradAccumulator:
    """Writes gradients into parameters' `.grad`. A *fresh* gradient holds nothing yet: the first write overwrites
    it."""

    def __init__(self) -> None:
        self._fresh: set[int] = set()  # ids, because hashing a tensor calls Python code
        self._later: list[Callable[[], None]] | None = None

    @contextmanager
    def deferred(self, later: list[Callable[[], None]]) -> Iterator[None]:
        """Defer all writes within the context: append them to `later`, for the caller to run. A backward then computes
        only the gradients of its inputs (and of vectors, which autograd adds)."""
        self._later = later
        try:
            yield
        finally:
            self._later = None

    def open(self, parameters: Sequence[nn.Parameter]) -> None:
        self._fresh.update(map(id, parameters))

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        """Zero the gradients that nothing was written to."""
        for p in parameters:
            if self._take(p):
                p.grad.zero_()

    def accumulate_product(self, p: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """Compute p.grad += a @ b."""
        if self._later is not None:
            # detached: a factor saved by the forward would keep alive its graph, the block's input and its gradient
            self._later.append(partial(self.accumulate_product, p, a.detach(), b.detach()))
            return
        accumulate_product(p.grad, a, b, fresh=self._take(p))

    def accumulate_by_expert(self, p: nn.Parameter, a_MO: Tensor, b_MI: Tensor, sizes: Sequence[int]) -> None:
        """Compute grad[x] += a[rows].T @ b[rows] for the rows of each expert x. `p.grad` holds a matrix [O, I] for each
        expert, and `sizes` has the number of rows of each expert."""
        if self._later is not None:
            self._later.append(partial(self.accumulate_by_expert, p, a_MO.detach(), b_MI.detach(), sizes))
            return
        total_XOI = p.grad.view(len(sizes), a_MO.shape[1], b_MI.shape[1])
        accumulate_by_expert(total_XOI, a_MO, b_MI, sizes, fresh=self._take(p))

    def add_made(self, p: nn.Parameter, make: Callable[[], Tensor]) -> None:
        """Compute p.grad += make()."""
        if self._later is not None:
            self._later.append(partial(self.add_made, p, make))
        elif self._take(p):
            p.grad.copy_(make())
        else:
            p.grad.add_(make())

    def add_rows(self, p: nn.Parameter, index_N: Tensor, rows_NE: Tensor) -> None:
        """Compute p.grad[index] += rows, in a fixed order."""
        if self._later is not None:
            self._later.append(partial(self.add_rows, p, index_N, rows_NE))
            return
        if self._take(p):
            p.grad.zero_()
        rows_NE = rows_NE.to(p.grad.dtype)
        if on_gpu(rows_NE):
            p.grad.index_put_((index_N,), rows_NE, accumulate=True)  # sorts; index_add_ would race
        else:
            p.grad.index_add_(0, index_N, rows_NE)

    def _take(self, p: nn.Parameter) -> bool:
        fresh = id(p) in self._fresh
        if fresh:
            self._fresh.remove(id(p))
        return fresh


# Parameter -> the accumulator of its gradient. A compiled graph calls its custom ops with tensors and constants, so an
# op has no other way to find the accumulator. (A key of it, as a constant, would compile a graph for each accumulator.)
_ACCUMULATORS = WeakIdKeyDictionary()


def register(parameters: Iterable[nn.Parameter], accumulator: GradAccumulator) -> None:
    """Register the accumulator through which compiled graphs accumulate the gradients of these matrices."""
    for p in parameters:
        _ACCUMULATORS[p] = accumulator


def accumulator_of(weights: Sequence[Tensor]) -> GradAccumulator:
    """Return the accumulator of the weights' gradients, which is the same for all.

    Raises:
        RuntimeError: the graph passes a tensor that is not the Parameter that it was called with.
    """
    for w in weights:
        if w not in _ACCUMULATORS:
            raise RuntimeError(f"a compiled graph accumulates the gradient of an unknown weight {list(w.shape)}")
    return _ACCUMULATORS[weights[0]]
