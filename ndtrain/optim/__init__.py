"""Optimizers on shards, the global gradient norm from layouts, and learning-rate schedules."""

from ndtrain.optim.schedule import learning_rate
from ndtrain.optim.update import Optimizer
from ndtrain.optim.verdict import Verdict

__all__ = ["Optimizer", "Verdict", "learning_rate"]
