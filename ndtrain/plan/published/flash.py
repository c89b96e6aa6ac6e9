"""The generation of a trainer's fused attention kernel. `Rates.attention` is of the newest one for each GPU:
FlashAttention-2 on Ampere, FlashAttention-3 or cuDNN's on Hopper and later."""

import re
from dataclasses import replace

from ndtrain.plan.events import Event, Kernel
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.predict import StepPlan
from ndtrain.plan.published.cells import Row, text

# FlashAttention-2 is twice as fast as the first one (Dao, 2023, arXiv:2307.08691), FlashAttention-3 on Hopper 1.5 to 2
# times as fast as the second (Shah et al., 2024, arXiv:2407.08608).
_FIRST, _SECOND_ON_HOPPER = 2.0, 1.75
# Publications between the first two, and trainers with kernels of that time
_OF_FIRST = re.compile(r"arxiv:(220[6-9]|221[0-2]|230[1-6])\d*\.|llm-foundry|flash-?attention 1", re.IGNORECASE)
# Software whose attention is cuDNN's or FlashAttention-3 on Hopper; that of PyTorch's users is FlashAttention-2
_NEWEST = re.compile(
    r"nemo|megatron[- ]?core|mcore|dgxc|transformer engine|cudnn|flash-?attention-?3|\bfa3\b|maxtext", re.IGNORECASE
)


def with_kernel_of(plan: StepPlan, row: Row, hardware: Hardware) -> StepPlan:
    """The plan with the attention of the row's trainer, as so many times the FLOPs."""
    says = text(row, "source") + " " + text(row, "notes")
    slower = _FIRST if _OF_FIRST.search(says) else 1.0
    if "fp8" in hardware.peak_tflops and not _NEWEST.search(says):
        slower *= _SECOND_ON_HOPPER
    pieces = {
        v: piece._replace(events=tuple(_slower(e, slower) for e in piece.events)) for v, piece in plan.pieces.items()
    }
    return replace(plan, pieces=pieces)


def _slower(event: Event, times: float) -> Event:
    if isinstance(event, Kernel) and event.kind == "attention":
        return event._replace(flops=int(times * event.flops))
    return event
