"""N-D parallel training of transformers on PyTorch: any mesh, the same training.

from ndtrain import Trainer, compose
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtrain.config import compose
    from ndtrain.engine.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Trainer", "compose"]

_MODULES = {"Trainer": "ndtrain.engine.trainer", "compose": "ndtrain.config"}


def __getattr__(name: str) -> Any:
    """Import an attribute on first access, because `python -m ndtrain.data` does not need torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
