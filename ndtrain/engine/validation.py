"""The loss over a whole validation split, of a run or of a checkpoint."""

from collections.abc import Sequence
from typing import Any

from ndtrain.config import Config, resolved
from ndtrain.data import Batch, Data, Tokens, microbatches, rows_of
from ndtrain.data.validation import ValidationSet
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.sharding import BATCH_AXES
from ndtrain.engine.setup import packing_of
from ndtrain.engine.train_step import Evaluation
from ndtrain.parallel.build import Stages, sequence_sharding


class Validation:
    """The validation split of some data, as this rank's stages see it. Every rank makes one and calls it alike.

    Args:
        arrays: what to evaluate instead of the split, of the same kind; None: the split.

    Attributes:
        labels: how many tokens are predicted.
    """

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages, data: Data, arrays: Sequence[Any] | None = None):
        self._arrays = data.validation if arrays is None else arrays
        self._cfg, self._mesh, self._data = cfg, mesh, data
        self._evaluation = Evaluation(cfg, mesh, stages)

    def loss(self) -> float:
        """The mean loss over the tokens of the split with the stages' weights of now: the same number on every rank."""
        cfg, held = self._cfg, self._held()
        batches = lambda i: [held.readable(b) for b in rank_batches(cfg, self._mesh, self._data, held, i)]
        passes = ([b.to(self._mesh.device) for b in batches(i)] for i in range(held.passes))
        return self._evaluation.run(passes, self.labels)

    @property
    def labels(self) -> int:
        return self._held().labels(packing_of(self._cfg, self._data))

    def _held(self) -> ValidationSet:
        return self._data.validation_set(self._arrays, self._cfg)


def rank_batches(cfg: Config, mesh: Mesh, data: Data, source: Tokens, step: int) -> list[Batch]:
    """This rank's part of the global batch of a step, counted from 0."""
    t = cfg.train
    rows = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), t.global_batch)
    packing = packing_of(cfg, data)
    return microbatches(source, step, rows, resolved(t.micro_batch), sequence_sharding(cfg), mesh.index("cp"), packing)
