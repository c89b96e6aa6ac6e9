"""Adds parts to ndtrain: `plugins=[example_package.parts]`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.config import DataConfig, ModelConfig, OptimConfig
from ndtrain.data import Corpus, IterableCorpus
from ndtrain.engine.callbacks import Callback
from ndtrain.engine.train_step import StepReport
from ndtrain.model.attention import AttentionMod
from ndtrain.model.block import Block, Weights
from ndtrain.model.families import Family
from ndtrain.model.spec import OpSpec
from ndtrain.optim import StateSpec, Update, WholeTensorOptimizer, WholeTensors
from ndtrain.plugins import (
    register_attention_mod,
    register_callback,
    register_family,
    register_lr_schedule,
    register_optimizer,
    register_source,
)

# ------------------------------------------------------------------------------------------------------------ a family


@dataclass
class SquaredReluConfig(ModelConfig):
    """Keys of `model` beside the usual ones, written to config.json."""

    relu_power: float = 2.0


class SquaredReluBlock(Block):
    """An MLP without a gate, whose activation is a power of ReLU (So et al., 2021, arXiv:2109.08668)."""

    def make_mlp(self, m: ModelConfig, family: Family) -> nn.Module:
        mlp = nn.Module()
        mlp.up_proj = Weights(m, "mlp", "embed")
        mlp.down_proj = Weights(m, "embed", "mlp")
        return mlp

    @classmethod
    def mlp_ops(cls, m: SquaredReluConfig, family: Family) -> tuple[OpSpec, ...]:
        _, down = super().mlp_ops(m, family)
        return OpSpec("up_proj", (("mlp.up_proj",),)), down

    def feed_forward(self, x_NE: Tensor) -> Tensor:
        (up_NF,) = self.linear(x_NE, self.mlp.up_proj)
        return self.linear(F.relu(up_NF) ** self.m.relu_power, self.mlp.down_proj)[0]


register_family(
    Family("squared_relu", "SquaredRelu", block=SquaredReluBlock, fields=("relu_power",)), config=SquaredReluConfig
)

# ----------------------------------------------------------------------------------------------------- attention scores


@dataclass
class SpacedConfig(ModelConfig):
    """Keys of `model` beside the usual ones, written to config.json."""

    spacing: int = 3


@register_attention_mod("spaced", config=SpacedConfig)
def spaced(m: SpacedConfig) -> AttentionMod:
    """Heads of odd number see the last `spacing` tokens and every `spacing`-th one before (Child et al., 2019,
    arXiv:1904.10509). Scores fall with the logarithm of the distance, by a slope that differs from head to head."""

    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - 0.1 * (head + 1) * torch.log1p((query - key).clamp(min=0).to(score.dtype))

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        return (head % 2 == 0) | (distance < m.spacing) | (distance % m.spacing == 0)

    return AttentionMod(score, mask)


# --------------------------------------------------------------------------------------------------------- an optimizer


@dataclass
class FactoredConfig(OptimConfig):
    """Keys of `optim` beside the usual ones."""

    beta: float = 0.9


@register_optimizer("factored", config=FactoredConfig)
class Factored(WholeTensorOptimizer):
    """The second moment of a matrix as one number a row and one a column (Adafactor: Shazeer and Stern, 2018,
    arXiv:1804.04235); of a vector, one number an element."""

    cfg: FactoredConfig

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        return StateSpec("row", shape=lambda shape: shape[:1]), StateSpec("column", shape=lambda shape: shape[1:])

    def direction(self, whole: WholeTensors, update: Update) -> Tensor:
        row, column = whole.state["row"], whole.state["column"]
        if update.found_inf.item():
            return torch.zeros_like(whole.grads)
        squares, beta = whole.grads.square() + 1e-30, self.cfg.beta
        if whole.grads.ndim == 2:  # vectors
            row.lerp_(squares, 1 - beta)
            second = row
        else:
            row.lerp_(squares.mean(2), 1 - beta)
            column.lerp_(squares.mean(1), 1 - beta)
            second = row[:, :, None] * column[:, None] / row.mean(1)[:, None, None]
        corrected = second / (1 - beta ** (update.made + 1))
        return whole.grads / (corrected.sqrt() + self.cfg.eps)


@register_lr_schedule("staircase")
def staircase(step: int, cfg: OptimConfig, end: int) -> float:
    """Half the rate in the second half."""
    return 1.0 if 2 * step <= end else 0.5


# -------------------------------------------------------------------------------------------------------- a data source


@dataclass
class CountingConfig(DataConfig):
    """Keys of `data` beside the usual ones."""

    documents: int = 40


@register_source("counting", config=CountingConfig)
def counting(data: CountingConfig) -> Corpus:
    """Documents of consecutive numbers."""
    setting = f"data=counting of {data.documents} documents"
    return IterableCorpus(setting, data.validation, partial(texts, data.documents), "1", 600 * data.documents)


def texts(documents: int) -> Iterator[tuple[str, str]]:
    """Yields (name, text). A function of the module: `prepare` sends it to another process."""
    for i in range(documents):
        yield f"document {i}", " ".join(str(i * j % 97) for j in range(200))


# ----------------------------------------------------------------------------------------------------------- a callback


@dataclass
class LossFileConfig:
    """Keys of `callbacks.loss_file`."""

    every: int = 1
    name: str = "losses.json"


@register_callback("loss_file", config=LossFileConfig)
class LossFile(Callback):
    """Writes every so many losses into a file of the run folder."""

    def __init__(self, cfg: LossFileConfig):
        self._cfg, self._losses = cfg, {}

    def on_report(self, report: StepReport, metrics: dict[str, float]) -> None:
        if report.step % self._cfg.every == 0:
            self._losses[report.step] = report.loss

    def after_step(self) -> dict[str, float]:
        return {"weight_norm": float(sum(torch.linalg.vector_norm(u.master) for u in self._units()))}

    def on_train_end(self) -> None:
        if self.trainer.mesh.rank == 0:
            (Path(self.trainer.cfg.run.dir) / self._cfg.name).write_text(json.dumps(self._losses))

    def _units(self):
        return self.trainer.stages.units.units.values()
