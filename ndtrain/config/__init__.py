"""The typed schema of a run, its composition, and every check that needs no tensor.

Each check raises a `ConfigError` with one line that names the key and the fix. `train.py` prints it and exits with
status 2 before any process group is created.
"""

import os

from ndtrain.config.checks import check_model, resolve, resolve_epochs
from ndtrain.config.composition import compose, load_config, register_schema, to_yaml
from ndtrain.config.keys import conf_dir
from ndtrain.config.local_shapes import LocalShapes
from ndtrain.config.overrides import check_overrides
from ndtrain.config.schema import (
    AXES,
    DATA_AXES,
    EXPERT_OPS,
    SAVABLE_OPS,
    TOKEN_SOURCES,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    HardwareConfig,
    IslandsConfig,
    LoggerConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ObjectiveConfig,
    OptimConfig,
    RecomputeConfig,
    TPConfig,
    TrainConfig,
    resolved,
)
from ndtrain.config.typed import to_config

__all__ = [
    "AXES",
    "DATA_AXES",
    "EXPERT_OPS",
    "SAVABLE_OPS",
    "TOKEN_SOURCES",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "HardwareConfig",
    "IslandsConfig",
    "LocalShapes",
    "LoggerConfig",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "RecomputeConfig",
    "TPConfig",
    "TrainConfig",
    "check_model",
    "check_overrides",
    "compose",
    "conf_dir",
    "load_config",
    "register_schema",
    "resolve",
    "resolve_epochs",
    "resolved",
    "to_config",
    "to_yaml",
    "world_from_env",
]


def world_from_env() -> tuple[int, int, int]:
    """Return (rank, local rank, world size) as set by torchrun; (0, 0, 1) without a launcher."""
    env = os.environ
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def first_rank_of_host() -> int:
    """Return the lowest rank on this host. torchrun numbers the ranks of a host consecutively."""
    rank, local_rank, _ = world_from_env()
    return rank - local_rank


def log_name() -> str:
    """Return the name of this host's log file, in `logs` of the run folder."""
    return f"rank-{first_rank_of_host()}.log"
