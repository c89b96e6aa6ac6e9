"""Identifies passes of layers that do the same work."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ndtrain.parallel.recompute import NOTHING
from ndtrain.program.ops import Run

Save = frozenset[str] | None


class Variant(NamedTuple):
    """Everything that the work of a pass depends on.

    Attributes:
        kind: F, B, I or W.
        layer: the kind of the layer, as `Segment.kind`.
        save, shape_only: (F) of the block's recompute group, for its forward and its recompute; None: not recomputed.
        drop_input, recompute: as in `Run`.
    """

    kind: str
    layer: str
    save: Save = None
    shape_only: frozenset[str] = NOTHING
    drop_input: bool = False
    recompute: bool = False

    @classmethod
    def of(cls, run: Run, layer: str) -> "Variant":
        """Return the variant of a pass of a layer of this kind."""
        return cls(run.kind, layer, run.save, run.shape_only, run.drop_input, run.recompute)


def variants(runs: Iterable[Run], layers: Sequence[str]) -> Iterator[Variant]:
    """Yield the variant of each pass.

    Args:
        layers: the kind of each of the rank's layers.
    """
    return (Variant.of(run, layers[run.layer]) for run in runs)
