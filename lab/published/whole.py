"""Full recompute as in other trainers: the whole forward of a block runs twice.

ndtrain never repeats a result that took messages. With tp it keeps the outputs of the last matmul of attention and of
the MLP (`parallel/recompute.py`). `torch.utils.checkpoint` and Megatron keep only the block's input. They repeat these
two matmuls and their sums over tp, and with cp the exchanges of the attention too.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from lab.published.cells import Row, text
from ndtrain.config import LocalShapes
from ndtrain.plan.events import Event, Kernel, Piece
from ndtrain.plan.predict import StepPlan
from ndtrain.program.passes import Variant

# PyTorch's non-reentrant checkpoint stops once it has all tensors that the backward needs. This spares eager blocks the
# last matmul (`early_stop`, since torch 2.1). A compiled block runs as a whole. Megatron's checkpoint is reentrant.
_STOPS_EARLY = re.compile(r"torchtitan|llm-foundry|kempnerforge", re.IGNORECASE)
_KEEPS_ATTENTION = re.compile(r"attention-aware|no flash fwd recompute", re.IGNORECASE)


def with_whole_recompute(plan: StepPlan, row: Row) -> StepPlan:
    """Return the plan with full recompute as in the row's trainer."""
    says = text(row, "source") + " " + text(row, "notes")
    if plan.cfg.recompute.name != "full" or (plan.cfg.mesh.cp > 1 and _KEEPS_ATTENTION.search(says)):
        return plan
    early = _STOPS_EARLY.search(says) is not None and plan.cfg.train.compile_asked is False
    tokens, hidden = LocalShapes.of(plan.cfg).stream
    kept = tokens * hidden * plan.sizes.compute if plan.cfg.mesh.tp > 1 else 0  # attention's last matmul
    pieces = dict(plan.pieces)
    for variant, piece in plan.pieces.items():
        if variant.layer == "block" and variant.save is not None:
            pieces[variant] = _repeated(variant, piece, plan.pieces, early, kept)
    return replace(plan, pieces=pieces)


def _repeated(variant: Variant, piece: Piece, pieces: Mapping[Variant, Piece], early: bool, kept: int) -> Piece:
    if not variant.recompute:
        return piece._replace(kept_bytes=piece.kept_bytes - kept)
    forward = pieces[variant._replace(recompute=False, drop_input=False)].events
    return piece._replace(events=_before_last_matmul(forward) if early else forward, kept_bytes=piece.kept_bytes + kept)


def _before_last_matmul(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return events[: max(i for i, e in enumerate(events) if isinstance(e, Kernel) and e.kind == "matmul")]
