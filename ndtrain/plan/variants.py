"""Passes of layers that do the same."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ndtrain.parallel.recompute import NOTHING, results_unread
from ndtrain.program.ops import Run

Save = frozenset[str] | None
BLOCKS = ("block", "sparse")  # the kinds of layers that may be recomputed


class Variant(NamedTuple):
    """What the work of a pass depends on.

    Attributes:
        kind: F, B, I or W.
        layer: "embed", "block", "sparse" (a block with experts), "norm" or "head".
        save, shape_only: (F) of the block's recompute group, for its forward and its recompute; None: it is not
            recomputed.
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
        if run.kind == "F" and not run.keep_graph and run.save is None:  # of forwards alone
            return cls("F", layer, NOTHING, results_unread(NOTHING)) if layer in BLOCKS else cls("F", layer)
        return cls(run.kind, layer, run.save, run.shape_only, run.drop_input, run.recompute)


def variants(runs: Iterable[Run], layers: Sequence[str]) -> Iterator[Variant]:
    """Yield the variant of each pass.

    Args:
        layers: the kind of each of the rank's layers.
    """
    return (Variant.of(run, layers[run.layer]) for run in runs)


def kind_of_layer(units: Sequence[str], loss: bool) -> str:
    """The kind of the layer that reads these units, which is the loss or not. Experts are a unit of their own."""
    if loss:
        return "head"
    if ".layers." in units[0]:
        return BLOCKS[len(units) > 1]
    return "norm" if units[0].endswith("norm") else "embed"
