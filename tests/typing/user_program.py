"""A user's program and plugin, with types. mypy reads this file; nothing runs it.

The last function is wrong. Each of its errors is expected: mypy reports an `ignore` that hides none.
"""

from dataclasses import dataclass
from typing import assert_type

from torch import Tensor, nn

from ndtrain import Trainer, compose
from ndtrain.config import Config, OptimConfig
from ndtrain.engine.callbacks import Callback
from ndtrain.engine.train_step import StepReport
from ndtrain.optim import OptimTensor, PerTensorOptimizer, StateSpec
from ndtrain.plugins import register_callback, register_lr_schedule, register_optimizer


@dataclass
class LionConfig(OptimConfig):
    beta: float = 0.9


@register_optimizer("lion", config=LionConfig)
class Lion(PerTensorOptimizer):
    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        return (StateSpec("exp_avg"),)

    def update(self, tensor: OptimTensor, lr: float, step: int) -> None:
        average: Tensor = tensor.state["exp_avg"]
        average.lerp_(tensor.grad, 0.1)
        tensor.weight.sub_(lr * average.sign())


@register_lr_schedule("half")
def half(step: int, cfg: OptimConfig, end: int) -> float:
    return 0.5


@register_callback("watch")
class Watch(Callback):
    def on_report(self, report: StepReport, metrics: dict[str, float]) -> None:
        print(report.step, report.loss, self.trainer.state.tokens)


def main() -> None:
    cfg = compose("recipe=llama_debug", "train.steps=2")
    assert_type(cfg, Config)
    trainer = Trainer(cfg, callbacks=[Watch()])
    trainer.train()
    assert_type(trainer.loss, float | None)
    assert_type(trainer.model, nn.ModuleList)
    assert_type(Lion, type[Lion])
    assert_type(half(1, cfg.optim, 2), float)


def wrong() -> None:
    Trainer("recipe=llama_debug")  # type: ignore[arg-type]
    compose(3)  # type: ignore[arg-type]
    Trainer(compose(), callbacks=[half])  # type: ignore[list-item]
    compose().train.stepz = 3  # type: ignore[attr-defined]
    half("1", compose().optim, 2)  # type: ignore[arg-type]
