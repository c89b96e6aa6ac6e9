"""The built-in loggers, which importing this module registers, and `make_loggers`, which creates a run's loggers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ndtrain.config import Config
from ndtrain.config.registry import get
from ndtrain.observe import tensorboard_logger, wandb_logger

__all__ = ["make_loggers", "tensorboard_logger", "wandb_logger"]


def make_loggers(cfg: Config, run_dir: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    """Create the loggers of a run, by name. Leaves out "jsonl": every run writes metrics.jsonl anyway."""
    return {name: get("logger", name)(cfg, run_dir, warn) for name in cfg.logger.names if name != "jsonl"}
