"""Recomputed results in the backward of compiled code do not depend on the ids of storages."""

import pytest
import torch

from ndtrain.plan.event_log import Recomputed
from ndtrain.plan.operators import Access, Part

MUL = torch.ops.aten.mul.Tensor
OPERAND, RESULT = 3, 7  # ids of storages
SIZES = {OPERAND: 8, RESULT: 8}


def again(operand_is_freed: bool) -> bool:
    """Whether a fusible operator's result, which the backward frees, is made again in the next run of the piece."""
    recomputed = Recomputed()
    access = Access((Part(OPERAND, 0, 8),), (Part(RESULT, 0, 8),))
    recomputed.begin("forward")
    recomputed.calling(MUL)
    recomputed.allocated(RESULT)
    recomputed.called(MUL, access, fuses=True)
    if operand_is_freed:
        recomputed.freed(OPERAND)
        recomputed.allocated(OPERAND)  # another tensor's storage, of the same id
    recomputed.end(SIZES)
    recomputed.freed(RESULT)
    recomputed.begin("forward")
    recomputed.calling(MUL)
    return recomputed.allocated(RESULT)


@pytest.mark.parametrize("freed", [False, True])
def test_result_with_freed_operand_is_kept(freed):
    assert again(freed) is not freed
