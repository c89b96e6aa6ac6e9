"""Optimizers and learning-rate schedules. Importing this package registers the built-in ones."""

from ndtrain.optim.adamw import AdamW
from ndtrain.optim.lr_schedule import learning_rate
from ndtrain.optim.muon import Muon
from ndtrain.optim.optimizer import (
    Optimizer,
    OptimTensor,
    PerTensorOptimizer,
    StateSpec,
    TensorSlice,
    Update,
    WholeTensorOptimizer,
    WholeTensors,
)

__all__ = [
    "AdamW",
    "Muon",
    "OptimTensor",
    "Optimizer",
    "PerTensorOptimizer",
    "StateSpec",
    "TensorSlice",
    "Update",
    "WholeTensorOptimizer",
    "WholeTensors",
    "learning_rate",
]
