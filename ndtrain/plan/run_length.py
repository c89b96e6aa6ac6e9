"""The length of a whole run in which nothing fails. (`plan goodput` adds failures and checkpoints.)"""

from typing import NamedTuple

from ndtrain.config import Config

DAY_S, HOUR_S = 86_400.0, 3_600.0


class RunLength(NamedTuple):
    """A run from its first to its last step.

    Attributes:
        tokens: number of tokens in all steps.
        gpu_hours: hours of all devices together.
    """

    tokens: int
    tokens_per_day: float
    days: float
    gpu_hours: float


def run_length(cfg: Config, step_time_s: float, devices: int) -> RunLength | None:
    """Return the length of a run, or None if `train.steps` is not set."""
    if not cfg.train.steps:
        return None
    tokens_a_step, seconds = cfg.train.global_batch * cfg.train.seq_len, cfg.train.steps * step_time_s
    return RunLength(
        tokens=cfg.train.steps * tokens_a_step,
        tokens_per_day=tokens_a_step * DAY_S / step_time_s,
        days=seconds / DAY_S,
        gpu_hours=devices * seconds / HOUR_S,
    )
