"""Custom ops: functions that compiled code calls without the compiler looking into them."""

from collections.abc import Callable

import torch
from torch._ops import OpOverload

FUNCTIONS: dict[OpOverload, Callable] = {}  # op -> the function that it calls


def opaque(function: Callable) -> torch.library.CustomOpDef:
    """Return the function as the custom op `ndtrain::<its name>`. The function must not change its arguments."""
    op = torch.library.custom_op(f"ndtrain::{function.__name__}", function, mutates_args=())
    FUNCTIONS[getattr(torch.ops.ndtrain, function.__name__).default] = function
    return op
