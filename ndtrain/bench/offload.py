"""`bench offload`: the update of optimizer state in host memory, compared with PyTorch's fused AdamW with fp32 moments.

Both update the same weights in turn, on the same number of threads. Copies over the link are not included, because a
GPU makes them during the update. The bench also measures how fast initial weights are drawn, on one thread and on all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ndtrain.arguments import option
from ndtrain.config import OptimConfig, load_config, resolve
from ndtrain.config.registry import get
from ndtrain.measure.results import require_folder, save
from ndtrain.measure.rounds import BlockTimer, in_round, quartiles, ratio, run_rounds
from ndtrain.mesh.host_device import using_threads
from ndtrain.mesh.sharding import Dim, TensorLayout
from ndtrain.model import params
from ndtrain.model.init import fill_all, standard_normal
from ndtrain.optim import OptimTensor, TensorSlice, Update

NAME = "model.layers.0.mlp.up_proj.weight"
Weights = list[tuple[torch.Tensor, torch.Tensor]]  # (weight, gradient) of each tensor


@dataclass(frozen=True)
class Options:
    """Options of `bench offload`. It needs 20 bytes an element, and 24 with moments in fp32; `apart` at most 16."""

    elements: int = option("number of elements of all tensors", 1 << 27)
    tensors: int = option("number of tensors that hold the elements, like the units of a model", 4)
    moments: Literal["fp32", "bf16"] = option("precision of our moments", "fp32")
    threads: int = option("CPU threads", 2)
    rounds: int = option("timed blocks of each optimizer", 10)
    steps: int = option("updates per block", 1)
    warmup: int = option("untimed updates before the timed ones", 1)
    apart: bool = option("allocate the tensors of each optimizer only for its block, to measure more elements", False)
    out: str = option("JSON file for all results", "")


def run(options: Options) -> None:
    """Measure, print and write `options.out`."""
    require_folder("out", options.out)
    with using_threads(options.threads):
        timers = measure_apart(options) if options.apart else measure(options)
    ns = {name: quartiles([ms * 1e6 / options.elements for ms in t.block_ms]) for name, t in timers.items()}
    speed = ratio(timers["fused"], timers["ours"])
    drawn = {n: draw_rate(n) for n in (1, options.threads)}
    print(f"update of {options.elements:,} elements, {options.moments} moments, {options.threads} threads")
    for name, of in ns.items():
        print(f"  {name:6} {of['median']:7.3f} ns an element ({of['q1']:.3f} to {of['q3']:.3f})")
    print(f"  fused AdamW / ours: {speed['median']:.2f} ({speed['q1']:.2f} to {speed['q3']:.2f})")
    for threads, rate in drawn.items():
        print(f"initial weights, {threads} threads: {rate / 1e6:.1f} M elements a second")
    save("offload", options, ns_per_element=ns, ratio=speed, drawn_per_s=drawn)


def measure(options: Options) -> dict[str, BlockTimer]:
    """Measure both sides on the same weights."""
    weights = make_weights(options)
    timers = {"ours": BlockTimer(ours(options, weights)), "fused": BlockTimer(fused(weights))}
    run_rounds(timers, options)
    return timers


def measure_apart(options: Options) -> dict[str, BlockTimer]:
    """Measure each block on tensors of its own, after untimed updates that touch all of them."""
    timers = {name: BlockTimer(lambda: None) for name in ("ours", "fused")}
    for i in range(options.rounds):
        for name in in_round(timers, i):
            weights = make_weights(options)
            timer = BlockTimer(ours(options, weights) if name == "ours" else fused(weights))
            timer.run(options.warmup)
            timer.time_block(options.steps)
            timers[name].block_ms += timer.block_ms
            del weights, timer  # before the next side's tensors are made
    return timers


def make_weights(options: Options) -> Weights:
    n = options.elements // options.tensors
    return [(torch.randn(n), torch.randn(n).mul_(1e-3)) for _ in range(options.tensors)]


def ours(options: Options, weights: Weights) -> Callable[[], Any]:
    """Return our update, with one optimizer per unit, as `OffloadCopier.run` calls them."""
    cfg = OptimConfig(state_dtype=options.moments)
    kind, dtype = get("optimizer", "adamw"), {"fp32": torch.float32, "bf16": torch.bfloat16}[options.moments]
    units = []
    for weight, grad in weights:
        n = weight.numel()
        layout = TensorLayout(NAME, (Dim("mlp", n),), ((0, n),), frozenset())
        state = {spec.name: torch.zeros(n, dtype=dtype) for spec in kind.state_spec(cfg)}
        tensor = OptimTensor(weight, grad, state, cfg.weight_decay, (TensorSlice(slice(0, n), layout, 0),))
        units.append((kind(cfg), tensor))
    update = Update(1, torch.zeros(()), 1e-3, torch.zeros(()), torch.tensor(1.5))
    return lambda: [optimizer.step([tensor], update) for optimizer, tensor in units]


def fused(weights: Weights) -> Callable[[], Any]:
    """Return PyTorch's fused update, with the same clipping and check for non-finite values."""
    adamws = []
    for weight, grad in weights:
        weight.grad = grad
        adamws.append(torch.optim.AdamW([weight], lr=1e-3, fused=True))
        adamws[-1].grad_scale, adamws[-1].found_inf = torch.tensor(1.5), torch.zeros(())
    return lambda: [adamw.step() for adamw in adamws]


def draw_rate(threads: int, elements: int = 1 << 24) -> float:
    """Return the number of initial weights drawn per second."""
    model, out = resolve(load_config([]), 1).model, torch.empty(elements)
    param = params(model)[NAME]
    with using_threads(1):
        began = time.perf_counter()
        fill_all([(out, param, 0)], model, 0, standard_normal, threads)
        return elements / (time.perf_counter() - began)
