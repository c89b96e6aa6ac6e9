"""DiLoCo as the papers write it down, in one process: the reference for `islands.sync=diloco`."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ndtrain.config import load_config, resolve
from ndtrain.engine.trainer import Trainer
from ndtrain.engine.validation import rank_batches

LEVELS = {"int8": 127, "int4": 7}


def reference(folder: Path, args: Sequence[str], islands: int, rates: tuple[float, float]) -> dict[str, torch.Tensor]:
    """Train `islands` models one after the other, each on its part of the global batch. Return the outer weights.

    Args:
        rates: outer learning rate and momentum.
    """
    trainers = [_trainer(folder / f"island-{i}", args) for i in range(islands)]
    cfg = trainers[0].cfg
    i, batch, last = cfg.islands, cfg.train.global_batch, cfg.train.steps
    every, share = i.inner_steps // i.fragments, batch // islands
    units = list(trainers[0].stages.units.units)
    local = lambda t, name: t.stages.units.units[name].master
    outer = {name: local(trainers[0], name).clone().requires_grad_() for name in units}
    lr, momentum = rates
    sgd = {name: torch.optim.SGD([x], lr=lr, momentum=momentum, nesterov=True) for name, x in outer.items()}
    errors = [{name: torch.zeros_like(x) for name, x in outer.items()} for _ in trainers]
    pending: list[tuple[int, str, torch.Tensor, list[torch.Tensor]]] = []
    for step in range(1, last + 1):
        for n, t in enumerate(trainers):
            rows = range(n * share, (n + 1) * share)
            t.train_step.run(step, rank_batches(cfg, t.mesh, t.data, t.source, step - 1, rows))
        k, rest = divmod(step, every)
        is_last = step == last
        if (not rest and step + i.delay < last) or is_last:
            for name in units if is_last else units[(k - 1) % i.fragments :: i.fragments]:
                sent = []
                for t, error in zip(trainers, errors, strict=True):
                    wanted = outer[name].detach() - local(t, name) + error[name]
                    sent.append(_rounded(i.codec, wanted, trainers[0].stages.units.units[name].layout))
                    error[name] = wanted - sent[-1]
                base = [local(t, name).clone() for t in trainers]
                pending.append((step if is_last else step + i.delay, name, torch.stack(sent).mean(0), base))
        for due in [p for p in pending if p[0] == step]:
            pending.remove(due)
            _, name, grad, base = due
            outer[name].grad = grad
            sgd[name].step()
            for t, start in zip(trainers, base, strict=True):
                local(t, name).copy_(outer[name].detach() + (local(t, name) - start))
        for t in trainers:
            t.stages.units.weights_changed()
    for t in trainers:
        t.close()
    return {
        tensor.name: outer[name].detach()[at : at + tensor.local_numel].view(tensor.local_shape)
        for name in units
        for layout in [trainers[0].stages.units.units[name].layout]
        for tensor, at in [(x, layout.offsets[x.name]) for x in layout.tensors]
    }


def _trainer(folder: Path, args: Sequence[str]) -> Trainer:
    alone = [x for x in args if not x.startswith("islands.count=")]
    return Trainer(resolve(load_config([*alone, f"run.dir={folder}"]), 1))


def _rounded(codec: str, x: torch.Tensor, layout) -> torch.Tensor:
    if codec == "fp32":
        return x.clone()
    if codec == "bf16":
        return x.bfloat16().to(x.dtype)
    out = x.clone()
    for tensor in layout.tensors:
        at = layout.offsets[tensor.name]
        rows = out[at : at + tensor.local_numel].view(-1, tensor.local_shape[-1])
        step = (rows.float().abs().amax(1, keepdim=True) / LEVELS[codec]).clamp(min=1e-30)
        rows.copy_((rows.float() / step).round() * step)
    return out
