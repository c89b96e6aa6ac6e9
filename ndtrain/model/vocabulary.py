"""The targets of the head, and how its tokens and logits are sharded.

Shape legend: N tokens, C tokens of a chunk, E hidden_size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

WEIGHTS = "weights"  # name of the data column with the weight of each token in the loss
IGNORE = -100  # the label of a token without a loss, as in torch.nn.functional.cross_entropy


class Targets(NamedTuple):
    """The targets that the head's logits are compared with.

    Attributes:
        labels: int64, the next token at each position. `IGNORE`: the position has no loss.
        columns: name -> a tensor whose first dims are the dims of the labels, such as the weights of the tokens.
    """

    labels: Tensor
    columns: Mapping[str, Tensor] = {}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Targets":
        """Return the targets with every tensor changed."""
        return Targets(change(self.labels), {name: change(x) for name, x in self.columns.items()})

    def flatten(self) -> "Targets":
        """Flatten [B, T, ...] to [N, ...]."""
        dims = self.labels.dim() - 1
        return self.map(lambda x: x.flatten(0, dims))


class Vocabulary:
    """How the tokens and logits of the head are sharded. This base class is for one device, which holds all of them."""

    def chunks(self, x_NE: Tensor, targets_N: Targets, chunk: int) -> Iterator[tuple[slice, Tensor, Targets]]:
        """Yield (rows of x, hidden states of those tokens [C, E], their targets [C]), `chunk` tokens at a time."""
        for start in range(0, len(x_NE), chunk):
            rows = slice(start, start + chunk)
            yield rows, x_NE[rows], targets_N.map(lambda x, rows=rows: x[rows])

    def log_softmax(
        self, logits_CV: Tensor, ids_C1: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the log-probabilities of the local columns [C, V], followed by the results of `local`."""
        return logits_CV.log_softmax(dim=-1, dtype=dtype), *self.local(ids_C1)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the local column of each token id, and True if this device has it. None: it has all of them."""
        return ids, None

    def log_sum_exp(self, lse_C: Tensor) -> Callable[[], Tensor]:
        """Start to combine the ranks' log-sum-exps over their columns. The returned function waits for the result."""
        return lambda: lse_C

    def add_input_gradient(self, out_CE: Tensor, dlogits_CV: Tensor, weight_VE: Tensor, share_C1: Tensor) -> None:
        """Compute out = share * (dlogits @ weight). `out` is complete on return, or after `finish`."""
        torch.mm(dlogits_CV, weight_VE, out=out_CE)
        out_CE *= share_C1

    def finish(self) -> None:
        """Wait for all operations that were started."""

    def report(self, sums: Tensor) -> Tensor:
        """Return this device's terms of the loss and of the other sums. The caller sums the terms of all devices."""
        return sums


LOCAL = Vocabulary()
