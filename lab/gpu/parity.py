"""Compares training on a device with the CPU: the same steps from the same weights, with every gradient compared."""

from typing import Any

import torch
from torch import Tensor

from ndtrain.config import Config
from ndtrain.engine.train_step import TrainingStep
from ndtrain.measure.training import batches_of
from ndtrain.mesh.mesh import Mesh
from ndtrain.parallel.build import Stages, build_stages, initialise


def compare_with_cpu(cfg: Config, mesh: Mesh, steps: int) -> dict[str, Any]:
    """Compare the mesh's device with the CPU, which runs without compiled code.

    Returns:
        "loss": the largest relative difference of the losses over `steps` steps. "gradient": for the first step, the
        largest relative difference (norm of the difference over the norm) of any tensor. "tensor": the name of that
        tensor. "losses": (device's, CPU's).
    """
    on_cpu = cfg.unfrozen()
    on_cpu.train.compile, on_cpu.hardware.attention = False, "auto"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # otherwise the test would measure TF32
    try:
        losses, gradients = trained(cfg, mesh, steps)
        expected, references = trained(on_cpu, Mesh(mesh.spec, 0, torch.device("cpu")), steps)
    finally:
        torch.set_float32_matmul_precision(before)
    off = {name: _off(gradients[name], reference) for name, reference in references.items()}
    worst = max(off, key=lambda name: off[name])
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return {"loss": loss, "gradient": off[worst], "tensor": worst, "losses": list(zip(losses, expected, strict=True))}


def trained(cfg: Config, mesh: Mesh, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train on the mesh's device. Return the losses, and the first step's gradients as fp64 on the CPU."""
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, losses, gradients = TrainingStep(cfg, mesh, stages), [], {}
    for number in range(1, steps + 1):
        own = step.forward_backward(number, batches_of(cfg, mesh, number))
        gradients = gradients or gradients_of(stages)
        losses.append(step.update(number, own).wait().loss)
    return losses, gradients


def gradients_of(stages: Stages) -> dict[str, Tensor]:
    """Return tensor name -> this rank's elements of its gradient, flat, as fp64 on the CPU."""
    gradients = {}
    for unit in stages.units.units.values():
        for tensor, runs in unit.layout.runs(*unit.layout.own):
            pieces = [unit.grad[run.local_start : run.local_start + run.length] for run in runs]
            gradients[tensor.name] = torch.cat(pieces).double().cpu()
    return gradients


def _off(x: Tensor, reference: Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()
