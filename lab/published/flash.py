"""The generation of a trainer's fused attention kernel. The planner prices FlashAttention-2."""

import re
from dataclasses import replace

from lab.published.cells import Row, text
from ndtrain.plan.events import Event, Kernel
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.predict import StepPlan
from ndtrain.plan.price import FLASH2_ON_HOPPER

_FIRST = 2.0  # FlashAttention-2 is twice as fast as FlashAttention (Dao, 2023, arXiv:2307.08691)
# Publications from before FlashAttention-2, and trainers with kernels of that time
_OF_FIRST = re.compile(r"arxiv:(220[6-9]|221[0-2]|230[1-6])\d*\.|llm-foundry|flash-?attention 1", re.IGNORECASE)
# Software that uses cuDNN's attention or FlashAttention-3 on Hopper. PyTorch's own attention is FlashAttention-2.
_NEWEST = re.compile(
    r"nemo|megatron[- ]?core|mcore|dgxc|transformer engine|cudnn|flash-?attention-?3|\bfa3\b|maxtext", re.IGNORECASE
)


def with_kernel_of(plan: StepPlan, row: Row, hardware: Hardware) -> StepPlan:
    """Return the plan with the attention of the row's trainer. A slower kernel is modelled by more FLOPs."""
    says = text(row, "source") + " " + text(row, "notes")
    slower = _FIRST if _OF_FIRST.search(says) else 1.0
    if "fp8" in hardware.peak_tflops and _NEWEST.search(says):
        slower /= FLASH2_ON_HOPPER
    pieces = {
        v: piece._replace(events=tuple(_slower(e, slower) for e in piece.events)) for v, piece in plan.pieces.items()
    }
    return replace(plan, pieces=pieces)


def _slower(event: Event, times: float) -> Event:
    if isinstance(event, Kernel) and event.kind == "attention":
        return event._replace(flops=int(times * event.flops))
    return event
