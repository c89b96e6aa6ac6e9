"""Learning-rate schedules."""

import math

from ndtrain.config import OptimConfig
from ndtrain.config.registry import get
from ndtrain.plugins import register_lr_schedule


def learning_rate(cfg: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the update that makes step `step` (from 1).

    The rate rises linearly to `lr` over `warmup` steps, then follows `schedule` down to `min_lr` at `decay_steps`
    (null: `total_steps`). It stays at `lr` if `min_lr` is above `lr`.
    """
    if step <= cfg.warmup:
        return cfg.lr * step / cfg.warmup
    end = total_steps if cfg.decay_steps is None else cfg.decay_steps
    last = min(cfg.min_lr, cfg.lr)  # a recipe's min_lr may be above the lr that a user gives
    return last + (cfg.lr - last) * get("lr_schedule", cfg.schedule)(step, cfg, end)


def idle_steps(cfg: OptimConfig, total_steps: int, last_step: int) -> str | None:
    """Return one line about updates of the plan that change nothing or never reach `optim.lr`; None if there are none.

    Args:
        total_steps: the steps of the plan, `train.steps`.
        last_step: the last step of this run, which may stop earlier.
    """
    if cfg.warmup >= last_step and cfg.warmup > 1 and last_step == total_steps:
        return (
            f"optim.warmup={cfg.warmup}: all {last_step} steps of the run are warmup, below optim.lr={cfg.lr:g}: lower "
            "it, or raise train.steps"
        )
    if cfg.lr_mult and "*" in cfg.lr_mult and not any(cfg.lr_mult.values()):
        return "optim.lr_mult: every factor is 0, so no step changes a weight: remove the pattern '*'"
    end = total_steps if cfg.decay_steps is None else cfg.decay_steps
    if learning_rate(cfg, last_step, total_steps) > 0:
        return None
    first = min(end, last_step)
    while first > 1 and learning_rate(cfg, first - 1, total_steps) == 0:
        first -= 1
    which = f"step {first}, the last," if first == last_step else f"steps {first} to {last_step}"
    return (
        f"optim.schedule={cfg.schedule} has learning rate 0 at {which} of train.steps={total_steps}, so no weight "
        f"changes there: set optim.min_lr above 0, or optim.decay_steps={last_step + 1}"
    )


def progress(step: int, start: int, end: int) -> float:
    """Return the fraction of the way from `start` to `end` that a step has reached, between 0 and 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


@register_lr_schedule("constant")
def constant(step: int, cfg: OptimConfig, end: int) -> float:
    """Do not decay."""
    return 1.0


@register_lr_schedule("linear")
def linear(step: int, cfg: OptimConfig, end: int) -> float:
    """Decay on a straight line from the end of warmup."""
    return 1 - progress(step, cfg.warmup, end)


@register_lr_schedule("cosine")
def cosine(step: int, cfg: OptimConfig, end: int) -> float:
    """Decay along half a cosine from the end of warmup (Loshchilov and Hutter, 2017, arXiv:1608.03983)."""
    return (1 + math.cos(math.pi * progress(step, cfg.warmup, end))) / 2


@register_lr_schedule("wsd")
def wsd(step: int, cfg: OptimConfig, end: int) -> float:
    """Stay constant, then decay linearly over the last fraction `wsd_decay` (Hu et al., 2024, arXiv:2404.06395)."""
    return 1 - progress(step, max(cfg.warmup, end - round(cfg.wsd_decay * end)), end)
