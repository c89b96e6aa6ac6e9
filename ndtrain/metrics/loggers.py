"""The loggers that ndtrain ships (importing them registers them), and how a run makes those of `logger.name`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ndtrain.config import Config
from ndtrain.config.registry import get
from ndtrain.metrics import tensorboard_logger, wandb_logger

__all__ = ["make_loggers", "tensorboard_logger", "wandb_logger"]


def make_loggers(cfg: Config, run_dir: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    """The loggers of a run by name. metrics.jsonl is none of them: every run writes it."""
    return {name: get("logger", name)(cfg, run_dir, warn) for name in cfg.logger.names if name != "jsonl"}
