"""Memory of other trainers that ndtrain does not need: for gathered inputs, second gradients, more saved results and an
uncompiled loss."""

import re
from dataclasses import replace

from lab.published.cells import Row, text
from ndtrain.config import LocalShapes
from ndtrain.config.schema import resolved
from ndtrain.plan.events import Piece
from ndtrain.plan.pieces import Pieces
from ndtrain.plan.predict import StepPlan
from ndtrain.program.passes import Variant

# Trainers whose column-parallel matmuls keep their gathered input for the backward: nanotron, and trainers on PyTorch's
# DTensor. Megatron keeps the rank's part, and gathers again.
_GATHERED = re.compile(r"nanotron|torchtitan|dtensor|picotron", re.IGNORECASE)
# Trainers with an fp32 sum of gradients in addition to autograd's bf16 gradient. Megatron's matmuls add to the sum.
_TWO_GRADIENTS = re.compile(r"\bfp32 grad(ient)? acc|nanotron|deepspeed", re.IGNORECASE)
OP_LEVEL = re.compile(r"every[- ](2nd|second)|\bop[- ]level", re.IGNORECASE)  # selective recompute of single matmuls
NANOTRON = re.compile(r"nanotron", re.IGNORECASE)  # reports the memory of the first pipeline rank
_BF16 = 2  # bytes


def with_kept(plan: StepPlan, row: Row) -> StepPlan:
    """Return the plan with the memory that the row's trainer keeps."""
    says = text(row, "source") + " " + text(row, "notes")
    sizes, pieces = plan.sizes, dict(plan.pieces)
    if _TWO_GRADIENTS.search(says) and sizes.compute < sizes.gradient:
        sizes = sizes._replace(gradient=sizes.gradient + _BF16)
    graph = _gathered_bytes(plan) if _GATHERED.search(says) else 0
    saved = _every_second_bytes(plan) if OP_LEVEL.search(says) else 0
    pieces = {v: _keeping(v, piece, graph, saved) if v.layer == "block" else piece for v, piece in pieces.items()}
    return replace(plan, sizes=sizes, pieces=pieces, reported=0 if NANOTRON.search(says) else None)


def with_plain_loss(plan: StepPlan, eager: Pieces) -> StepPlan:
    """Return the plan with the uncompiled loss of the same run. Trainers compile or fuse their blocks, but leave the
    loss to PyTorch's cross-entropy, which holds the logits in fp32."""
    return replace(plan, pieces={v: eager.recorded[v] if v.layer == "head" else p for v, p in plan.pieces.items()})


def _gathered_bytes(plan: StepPlan) -> int:
    """Return the bytes of a block's two gathered inputs, without the rank's own part."""
    tp = plan.cfg.mesh.tp
    if not plan.cfg.tp.sequence_parallel:
        return 0
    tokens, hidden = LocalShapes.of(plan.cfg).stream
    return 2 * tokens * (tp - 1) * hidden * plan.sizes.compute


def _every_second_bytes(plan: StepPlan) -> int:
    """Return the additional bytes if a block keeps the results of every second matmul (q, v, gate, down) in place of
    the results that ndtrain keeps (q, k, v, o)."""
    shapes = LocalShapes.of(plan.cfg)
    width = resolved(plan.cfg.model.head_dim)
    instead = shapes.tokens * (shapes.intermediate_size - shapes.kv_heads * width)
    return (instead - shapes.stream[0] * shapes.stream[1]) * plan.sizes.compute


def _keeping(variant: Variant, piece: Piece, graph: int, saved: int) -> Piece:
    """Return the piece of a block that keeps `graph` more bytes for its backward, and `saved` until its recompute."""
    match variant.kind:
        case "F" if variant.save is None:
            more = graph
        case "F":
            more = graph - saved if variant.recompute else saved
        case "I":
            more = 0
        case _:
            more = -graph
    return piece._replace(kept_bytes=piece.kept_bytes + more, peak_bytes=piece.peak_bytes + max(0, more))
