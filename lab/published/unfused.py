"""Attention as trainers computed it before FlashAttention (Dao et al., 2022, arXiv:2205.14135).

The scores of all pairs of tokens, masked ones too, are written to memory and read again. The softmax, its dropout mask
and the dropped softmax are kept for the backward: 5 bytes per score (Korthikanti et al., 2022, arXiv:2205.05198,
section 4.1).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from lab.published.cells import Row, text
from ndtrain.model.spec import CORE
from ndtrain.plan.events import Event, Kernel, Piece
from ndtrain.plan.pieces import Variant
from ndtrain.plan.predict import StepPlan

KEPT = 5  # bytes per score
_PRODUCTS = {False: 2, True: 4}  # backward or not -> matmuls with the scores, which are kept
# backward or not -> bytes per score that are read and written: by scale, mask and softmax in one kernel, by dropout
_ELEMENTWISE = {False: 4 + 5, True: 6 + 5}
# publications before June 2022, by number or year, and later ones whose stated memory includes the scores
_BEFORE = re.compile(
    r"arxiv:(0\d|1\d|20|21|220[1-5])\d*\.|\b(2019|2020|2021)\b|bigscience|zero bubble pp", re.IGNORECASE
)


def is_unfused(row: Row) -> bool:
    """Return True if the trainer of a row had no fused attention."""
    return _BEFORE.search(text(row, "source")) is not None


def with_unfused_attention(plan: StepPlan) -> StepPlan:
    """Return the plan with each fused attention kernel replaced by the unfused kernels."""
    return replace(plan, pieces={variant: _piece(variant, piece) for variant, piece in plan.pieces.items()})


def _piece(variant: Variant, piece: Piece) -> Piece:
    scores = sum(_scores(e) for e in piece.events if isinstance(e, Kernel) and e.kind == "attention")
    stays = variant.save is None or variant.recompute or CORE in variant.save
    kept = KEPT * scores * (0 if variant.kind == "F" and not stays else 1 if variant.kind == "F" else -1)
    peak = KEPT * scores if variant.kind == "F" else 0
    return Piece(tuple(_events(piece)), piece.kept_bytes + kept, piece.peak_bytes + peak)


def _events(piece: Piece) -> Iterator[Event]:
    for event in piece.events:
        if not isinstance(event, Kernel) or event.kind != "attention":
            yield event
            continue
        batch, heads, queries, keys, width = event.shape
        scores, backward = _scores(event), event.flops > 6 * _scores(event) * width / 2
        for _ in range(_PRODUCTS[backward]):
            shape = (batch * heads, queries, keys, width)
            yield Kernel("matmul", 2 * scores * width, 2 * scores, event.dtype, shape)
        yield Kernel("memory", 0, _ELEMENTWISE[backward] * scores, event.dtype)


def _scores(attention: Kernel) -> int:
    return math.prod(attention.shape[:4])
