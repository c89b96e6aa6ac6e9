"""DiLoCo in one process, written down plainly. It is the reference for `islands.sync=diloco`, and draws its curves.

Every island is a Trainer of this process. They train one after the other, each on its part of the global batch.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ndtrain.config import load_config, resolve
from ndtrain.engine.trainer import Trainer
from ndtrain.engine.validation import rank_batches
from ndtrain.mesh.sharding import FlatLayout

_LEVELS = {"int8": 127, "int4": 7}


@dataclass(frozen=True)
class Result:
    """The end of a run.

    Attributes:
        weights: tensor -> the outer weights.
        losses: step -> the loss that `evaluate` has returned after it.
        errors: for each exchange, the norm of the rounding errors divided by the norm of the outer gradients.
    """

    weights: dict[str, Tensor]
    losses: dict[int, float]
    errors: list[float]


def train(
    folder: Path,
    args: Sequence[str],
    islands: int,
    rates: tuple[float, float],
    evaluate: Callable[[Trainer], float] | None = None,
    moments: Collection[int] = (),
) -> Result:
    """Train `islands` models, and average them as the overrides say.

    Args:
        rates: outer learning rate and momentum.
        evaluate: returns the loss of a Trainer's weights.
        moments: the steps after which it is called. After an exchange of all weights they are the outer ones.
    """
    trainers = [_trainer(folder / f"island-{i}", args) for i in range(islands)]
    run, losses = _Run(trainers, rates), {}
    for step in range(1, run.last + 1):
        run.inner_step(step)
        run.outer_step(step)
        if evaluate and step in moments:
            losses[step] = evaluate(trainers[0])
    weights = run.named_weights()
    for trainer in trainers:
        trainer.close()
    return Result(weights, losses, run.error_norms)


class _Run:
    def __init__(self, trainers: Sequence[Trainer], rates: tuple[float, float]):
        self.trainers, cfg = trainers, trainers[0].cfg
        self.islands, self.last = cfg.islands, cfg.train.steps
        self.every, self.share = (
            self.islands.inner_steps // self.islands.fragments,
            cfg.train.global_batch // len(trainers),
        )
        self.units = list(trainers[0].stages.units.units)
        self.outer = {name: self.local(trainers[0], name).clone().requires_grad_() for name in self.units}
        lr, momentum = rates
        self.sgd = {n: torch.optim.SGD([x], lr=lr, momentum=momentum, nesterov=True) for n, x in self.outer.items()}
        self.errors = [{name: torch.zeros_like(x) for name, x in self.outer.items()} for _ in trainers]
        self.error_norms: list[float] = []
        self.pending: list[tuple[int, str, Tensor, list[Tensor]]] = []  # step, unit, mean, weights at the offer

    def local(self, trainer: Trainer, name: str) -> Tensor:
        return trainer.stages.units.units[name].master

    def layout(self, name: str) -> FlatLayout:
        return self.trainers[0].stages.units.units[name].layout

    def inner_step(self, step: int) -> None:
        for n, t in enumerate(self.trainers):
            rows = range(n * self.share, (n + 1) * self.share)
            t.train_step.run(step, rank_batches(t.cfg, t.mesh, t.data, t.source, step - 1, rows))

    def outer_step(self, step: int) -> None:
        k, rest = divmod(step, self.every)
        if step == self.last:
            self.offer(step, self.units)
        elif not rest and step + self.islands.delay < self.last:
            fragment = (k - 1) % self.islands.fragments
            self.offer(step + self.islands.delay, self.units[fragment :: self.islands.fragments])
        for due in [p for p in self.pending if p[0] == step]:
            self.pending.remove(due)
            self.use(*due[1:])
        for t in self.trainers:
            t.stages.units.weights_changed()

    def offer(self, due: int, units: Sequence[str]) -> None:
        """Average the outer gradients of some units, to be used after step `due`."""
        squares = torch.zeros(2, dtype=torch.float64)
        for name in units:
            sent = []
            for t, error in zip(self.trainers, self.errors, strict=True):
                wanted = self.outer[name].detach() - self.local(t, name) + error[name]
                sent.append(rounded(self.islands.codec, wanted, self.layout(name)))
                error[name] = wanted - sent[-1]
                squares += torch.stack([error[name].double().square().sum(), wanted.double().square().sum()])
            base = [self.local(t, name).clone() for t in self.trainers]
            self.pending.append((due, name, torch.stack(sent).mean(0), base))
        self.error_norms.append(float(squares[0] / squares[1].clamp(min=1e-300)) ** 0.5)

    def use(self, name: str, mean: Tensor, base: Sequence[Tensor]) -> None:
        self.outer[name].grad = mean
        self.sgd[name].step()
        for t, start in zip(self.trainers, base, strict=True):
            self.local(t, name).copy_(self.outer[name].detach() + (self.local(t, name) - start))

    def named_weights(self) -> dict[str, Tensor]:
        found = {}
        for name in self.units:
            layout = self.layout(name)
            for tensor in layout.tensors:
                at = layout.offsets[tensor.name]
                found[tensor.name] = self.outer[name].detach()[at : at + tensor.local_numel].view(tensor.local_shape)
        return found


def rounded(codec: str, x: Tensor, layout: FlatLayout) -> Tensor:
    """Return a unit's outer gradient as the codec sends it."""
    if codec == "fp32":
        return x.clone()
    if codec == "bf16":
        return x.bfloat16().to(x.dtype)
    out = x.clone()
    for tensor in layout.tensors:
        at = layout.offsets[tensor.name]
        rows = out[at : at + tensor.local_numel].view(-1, tensor.local_shape[-1])
        step = (rows.float().abs().amax(1, keepdim=True) / _LEVELS[codec]).clamp(min=1e-30)
        rows.copy_((rows.float() / step).round() * step)
    return out


def _trainer(folder: Path, args: Sequence[str]) -> Trainer:
    return Trainer(resolve(load_config([*args, f"run.dir={folder}"]), 1))
