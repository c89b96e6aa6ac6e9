"""The training objective: the weight of each token, and the loss and gradient of a chunk of logits.

The head (`model/loss.py`) multiplies, shards and accumulates, and knows no formula of a loss. An objective is one
class, registered under the name that `objective=name` selects. It knows nothing of the mesh.

Shape legend: C tokens of a chunk, V columns of the vocabulary on this device, S sums: the loss and `Objective.sums`.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.config import ObjectiveConfig
from ndtrain.config.registry import get, register
from ndtrain.model.vocabulary import IGNORE, WEIGHTS, Targets, Vocabulary


class Column(NamedTuple):
    """A column of the data that an objective reads. A microbatch of it is [B, T, *shape]."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


class Objective(ABC):
    """A loss that is a sum over tokens. The loss of a step is sum(weight * loss) / sum(weight) over the tokens of the
    global batch. It does not depend on the mesh or on the microbatches.

    A subclass implements `read` and `losses`. Its only state is its configuration.

    Attributes:
        columns: the columns of the data that it reads, besides the labels.
        sums: names of further weighted means over the tokens, which are logged along with the loss.
    """

    columns: tuple[Column, ...] = ()
    sums: tuple[str, ...] = ()

    def __init__(self, cfg: ObjectiveConfig):
        self.cfg = cfg

    def weights(self, targets: Targets) -> Tensor:
        """Return the weight of each token, with the shape of the labels: at least 0, and 0 where they are `IGNORE`."""
        return targets.labels != IGNORE

    @abstractmethod
    def read(self, targets_C: Targets, vocabulary: Vocabulary) -> tuple[Tensor, ...]:
        """Return the tensors that `losses` needs from the targets. Token ids are converted to local columns
        (`vocabulary.local`)."""

    @abstractmethod
    def losses(
        self, logits_CV: Tensor, lse_C: Tensor, weight_C1: Tensor, wanted: bool, *read: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums over the tokens [S], and the gradient of each token's loss [C, V]. The gradient does
        not include the token's weight.

        The columns of the vocabulary may be sharded over devices. Each device sums the terms of its own columns.
        `train.compile` compiles this function, so it must not communicate.

        Args:
            lse_C: the log-sum-exp over all columns, fp32 or wider.
            weight_C1: the tokens' weights, divided by the sum of all weights, in the precision of `lse_C`.
            wanted: whether to compute the gradient. If False, it is None.
            read: the tensors that `read` returned.
        """

    def of_chunk(
        self, logits_CV: Tensor, targets_C: Targets, weight_C1: Tensor, vocabulary: Vocabulary, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the results of `losses` from the logits alone. A subclass may override it with a faster form, which
        is used if the loss is not compiled."""
        lse = vocabulary.log_sum_exp(self.row_lse(logits_CV, weight_C1.dtype))
        read = self.read(targets_C, vocabulary)  # runs while the ranks combine their log-sum-exps
        return self.losses(logits_CV, lse(), weight_C1, wanted, *read)

    def row_lse(self, logits_CV: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the log-sum-exp of the local columns [C], in `dtype`."""
        return _row_lse(logits_CV, dtype)


def _row_lse(logits_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log-sum-exp [C] of each row."""
    wide_CV = logits_CV.to(dtype)
    top_C1 = wide_CV.amax(1, keepdim=True)
    return ((wide_CV - top_C1).exp().sum(1, keepdim=True).log() + top_C1).squeeze(1)


# ------------------------------------------------------------------------------------------------- shipped objectives


class CrossEntropy(Objective):
    """The cross-entropy of each label. `objective.z_loss` adds a gradient that pulls the log-sum-exp of the logits to 0
    (Chowdhery et al., 2022, arXiv:2204.02311, section 5). The reported loss does not include it."""

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.z_loss = cfg.z_loss
        self.sums = ("head_z_loss",) if cfg.z_loss else ()

    def read(self, targets_C: Targets, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        """Return each label's local column, and True if this device holds it: both [C, 1]."""
        column_C1, here_C1 = vocabulary.local(targets_C.labels[:, None])
        return column_C1, torch.ones_like(column_C1, dtype=torch.bool) if here_C1 is None else here_C1

    def losses(
        self, logits_CV: Tensor, lse_C: Tensor, weight_C1: Tensor, wanted: bool, *read: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        (column_C1, here_C1), wide_CV, lse_C1 = read, logits_CV.to(lse_C.dtype), lse_C[:, None]
        hit_C1 = here_C1.to(weight_C1.dtype)
        sums = [-((wide_CV.gather(1, column_C1) - lse_C1) * weight_C1 * hit_C1).sum()]
        if self.z_loss:
            sums.append((lse_C1.square() * weight_C1 * hit_C1).sum())
        if not wanted:
            return torch.stack(sums), None
        p_CV = (wide_CV - lse_C1).exp()
        if self.z_loss:
            p_CV = p_CV * (1 + 2 * self.z_loss * lse_C1)
        columns_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
        return torch.stack(sums), torch.where(columns_V == column_C1, p_CV - hit_C1, p_CV).to(logits_CV.dtype)

    def of_chunk(
        self, logits_CV: Tensor, targets_C: Targets, weight_C1: Tensor, vocabulary: Vocabulary, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self.z_loss:
            return super().of_chunk(logits_CV, targets_C, weight_C1, vocabulary, wanted)
        logp_CV, column_C1, here_C1 = vocabulary.log_softmax(logits_CV, targets_C.labels[:, None], weight_C1.dtype)
        hit_C1 = torch.ones_like(weight_C1) if here_C1 is None else here_C1.to(weight_C1.dtype)
        total = -(logp_CV.gather(1, column_C1) * weight_C1 * hit_C1).sum()
        if not wanted:
            return total.view(1), None
        dlogits_CV = logp_CV.exp_()  # in place: it saves two passes over the widest tensor of the model
        dlogits_CV.scatter_add_(1, column_C1, -hit_C1)
        return total.view(1), dlogits_CV.to(logits_CV.dtype)


class WeightedCrossEntropy(CrossEntropy):
    """The cross-entropy of each label, multiplied by the token's weight in the data."""

    columns = (Column(WEIGHTS, torch.float32),)

    def weights(self, targets: Targets) -> Tensor:
        return targets.columns[WEIGHTS].where(targets.labels != IGNORE, 0)


register("objective", "cross_entropy", CrossEntropy)
register("objective", "weighted", WeightedCrossEntropy)
CROSS_ENTROPY = CrossEntropy(ObjectiveConfig())


# ------------------------------------------------------------------------------------------------------- making one


def column_names(cfg: ObjectiveConfig) -> list[str]:
    """Return the names of the data columns that the configured objective reads."""
    return [column.name for column in make_objective(cfg).columns]


def make_objective(cfg: ObjectiveConfig, compiled: bool = False) -> Objective:
    """Return the objective that `objective.name` selects.

    Args:
        compiled: whether to compile its two pieces. Objectives with equal settings share the compiled functions.
    """
    made = get("objective", cfg.name)(cfg)
    if not compiled:
        return made
    return COMPILED.setdefault(repr(cfg), CompiledObjective(made))


class CompiledObjective(Objective):
    """An objective in two compiled pieces. Between them, the ranks of a sharded vocabulary exchange sums.

    Each piece reads the logits in their own precision, so no fp32 copy of them exists. With gradients, two passes read
    the logits and one writes. Without compilation there are four of each, over tensors twice as wide."""

    def __init__(self, objective: Objective):
        super().__init__(objective.cfg)
        self.columns, self.sums = objective.columns, objective.sums
        self._objective = objective
        self._row_lse, self._losses = torch.compile(_row_lse), torch.compile(objective.losses)

    def weights(self, targets: Targets) -> Tensor:
        return self._objective.weights(targets)

    def read(self, targets_C: Targets, vocabulary: Vocabulary) -> tuple[Tensor, ...]:
        return self._objective.read(targets_C, vocabulary)

    def row_lse(self, logits_CV: Tensor, dtype: torch.dtype) -> Tensor:
        return self._row_lse(logits_CV, dtype)

    def losses(
        self, logits_CV: Tensor, lse_C: Tensor, weight_C1: Tensor, wanted: bool, *read: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self._losses(logits_CV, lse_C, weight_C1, wanted, *read)


COMPILED: dict[str, CompiledObjective] = {}
