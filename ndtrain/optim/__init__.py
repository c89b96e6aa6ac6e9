"""Optimizers and learning-rate schedules. Importing this package registers the built-in ones."""

from ndtrain.optim.adamw import AdamW
from ndtrain.optim.lion import Lion
from ndtrain.optim.lr_schedule import learning_rate
from ndtrain.optim.muon import Muon
from ndtrain.optim.of_torch import TorchOptimizer
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
from ndtrain.optim.sgd import SGD

__all__ = [
    "SGD",
    "AdamW",
    "Lion",
    "Muon",
    "OptimTensor",
    "Optimizer",
    "PerTensorOptimizer",
    "StateSpec",
    "TensorSlice",
    "TorchOptimizer",
    "Update",
    "WholeTensorOptimizer",
    "WholeTensors",
    "learning_rate",
]
