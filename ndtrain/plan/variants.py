"""What the work of an instruction depends on."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ndtrain.engine.instructions import Instruction

Save = frozenset[str] | None
NOTHING: frozenset[str] = frozenset()
BLOCKS = ("block", "sparse")  # the kinds of layers that may be recomputed


class Variant(NamedTuple):
    """Instructions of one variant do the same.

    Attributes:
        kind: F, B, I or W.
        layer: "embed", "block", "sparse" (a block with experts), "norm" or "head".
        save, shape_only: (F) of the block's recompute group, for its forward and its recompute; None: it is not
            recomputed.
        drop_input, recompute: as in `Instruction`.
    """

    kind: str
    layer: str
    save: Save = None
    shape_only: frozenset[str] = NOTHING
    drop_input: bool = False
    recompute: bool = False


def variants(program: Iterable[Instruction], layers: Sequence[str]) -> Iterator[Variant]:
    """The variant of each instruction of a program of whole steps.

    Args:
        layers: the kind of each of the rank's layers.
    """
    saved: dict[tuple[int, int], tuple[Save, frozenset[str]]] = {}  # what a recompute replays, its forward has said
    for ins in program:
        at = ins.microbatch, ins.layer
        if ins.kind == "F" and not ins.recompute:
            saved[at] = ins.save, ins.shape_only
        of_group = saved[at] if ins.kind == "F" else (None, NOTHING)
        yield Variant(ins.kind, layers[ins.layer], *of_group, ins.drop_input, ins.recompute)


def kind_of_layer(units: Sequence[str], loss: bool) -> str:
    """The kind of the layer that reads these units, which is the loss or not. Experts are a unit of their own."""
    if loss:
        return "head"
    if ".layers." in units[0]:
        return BLOCKS[len(units) > 1]
    return "norm" if units[0].endswith("norm") else "embed"
