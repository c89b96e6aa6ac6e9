"""Learning-rate schedules."""

import math

from ndtrain.config import OptimConfig


def learning_rate(cfg: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of the update that makes step `step` (from 1).

    Linear warmup to `lr` over `warmup` steps, then by `schedule` down to `min_lr` at `decay_steps`: constant, linear,
    cosine, or wsd (constant, then linear over the last fraction `wsd_decay`; Hu et al., 2024, arXiv:2404.06395).
    """
    if step <= cfg.warmup:
        return cfg.lr * step / cfg.warmup
    end = total_steps if cfg.decay_steps is None else cfg.decay_steps
    start = cfg.warmup if cfg.schedule != "wsd" else max(cfg.warmup, end - round(cfg.wsd_decay * end))
    done = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "wsd": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }[cfg.schedule]
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left
