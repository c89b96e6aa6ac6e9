"""Optimizers on shards, the global gradient norm from layouts, and learning-rate schedules."""

from ndtrain.optim.grad_stats import GradStats
from ndtrain.optim.lr_schedule import learning_rate
from ndtrain.optim.optimizer import Optimizer

__all__ = ["GradStats", "Optimizer", "learning_rate"]
