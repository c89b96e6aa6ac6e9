"""The loss of a run or a checkpoint over a whole validation split."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndtrain.config import Config, resolved
from ndtrain.data import Batch, Data, Tokens, microbatches, rows_of
from ndtrain.data.token_array import Packing
from ndtrain.data.validation import ValidationSet
from ndtrain.engine.train_step import Evaluated, Evaluation, total_weight
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.mesh.sharding import BATCH_AXES
from ndtrain.model.objective import Objective, column_names
from ndtrain.parallel.build import Stages


class Validation:
    """Computes the validation loss with this rank's stages.

    Create one on every rank, and call the same methods in the same order.

    Args:
        arrays: the arrays to evaluate, of the same kind as the validation split; None: the validation split.
    """

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages, data: Data, arrays: Sequence[Any] | None = None):
        self._arrays = data.validation if arrays is None else arrays
        self._cfg, self._mesh, self._data = cfg, mesh, data
        self._evaluation = Evaluation(cfg, mesh, stages)

    def run(self) -> Evaluated:
        """Return the mean loss per token with the current weights, and the number of tokens.

        Every rank returns the same numbers.
        """
        cfg, held, rows = self._cfg, self._held(), range(self._cfg.train.global_batch)
        batches = lambda i: [held.readable(b) for b in rank_batches(cfg, self._mesh, self._data, held, i, rows)]
        passes = ([b.to(self._mesh.device) for b in batches(i)] for i in range(held.passes))
        return self._evaluation.run(passes)

    def _held(self) -> ValidationSet:
        return self._data.validation_set(self._arrays, self._cfg)


def rank_batches(cfg: Config, mesh: Mesh, data: Data, source: Tokens, step: int, rows: Sequence[int]) -> list[Batch]:
    """Return this rank's part of the global batch of a step. Steps are counted from 0.

    Args:
        rows: the rows that all ranks together compute.
    """
    mine = rows_here(mesh, rows)
    return _batches(cfg, mesh, data, source, step, mine, resolved(cfg.train.micro_batch))


def rows_here(mesh: Mesh, rows: Sequence[int]) -> Sequence[int]:
    """Return the part of some rows that this rank computes."""
    part = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), len(rows))
    return rows[part.start : part.stop]


def weight_here(cfg: Config, mesh: Mesh, data: Data, source: Tokens, step: int, objective: Objective) -> Tensor:
    """Return the sum of the weights of this rank's part of the whole global batch, fp64 [1].

    The batch need not divide into equal parts. Ranks that have the same tokens return the same number.
    """
    rows = range(cfg.train.global_batch)[mesh.index(*BATCH_AXES) :: mesh.size(*BATCH_AXES)]
    weight = torch.zeros(1, dtype=torch.float64)
    if rows:
        weight += total_weight(objective, _batches(cfg, mesh, data, source, step, rows, 1))
    return weight.to(mesh.device)


def _batches(
    cfg: Config, mesh: Mesh, data: Data, source: Tokens, step: int, rows: Sequence[int], micro_batch: int
) -> list[Batch]:
    packing, sharding, columns = packing_of(cfg, data), SequenceSharding.of(cfg), column_names(cfg.objective)
    return microbatches(source, step, rows, micro_batch, sharding, mesh.index("cp"), packing, columns)


def packing_of(cfg: Config, data: Data) -> Packing | None:
    """Return how the documents of a sequence are separated, or None without packing."""
    return Packing(data.eos_id) if cfg.data.pack else None
