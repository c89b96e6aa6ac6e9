"""`bench moe`: a layer of experts, forward and backward, as in a training step.

It alternates with a loop over the experts, with `transformers`' eager experts, and with the layer's grouped matmuls
alone on balanced rows, a lower bound. All have the same weights and rows, and their results are compared. Attention is
not included.

Shape legend: N tokens, M rows (each token once for each of its experts), E hidden_size, F an expert's intermediate
size, X experts, K experts of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ndtrain.arguments import option
from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.measure.ranks import DEVICE_HELP, Device, WrongResult, choose_device, rank_device
from ndtrain.measure.results import require_folder, save
from ndtrain.measure.rounds import BlockTimer, quartiles, ratio, run_rounds
from ndtrain.mesh.host_device import using_threads
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.block import Block
from ndtrain.model.moe.exchange import ExpertRows
from ndtrain.model.moe.router import softmax_top_k
from ndtrain.observe import keep_freed_memory
from ndtrain.parallel.build import DTYPES, build_stages, initialise
from ndtrain.parallel.linear.grouped import products

OURS, LOOP, PRODUCTS = "ours", "loop", "products"
TRANSFORMERS = {"transformers": "eager", "transformers, grouped": "grouped_mm"}  # -> its implementation of experts
# largest differences, relative to the norm; for some tokens, a router in bf16 chooses other experts than one in fp32
BOUNDS = {"fp32": 1e-4, "bf16": 0.1}
Layer = Callable[[Tensor], Tensor]  # [N, E] -> [N, E]


@dataclass(frozen=True)
class Options:
    """Options of `bench moe`."""

    experts: str = option("numbers of experts, one case each", "8,64")
    tokens: int = option("tokens of a microbatch", 4096)
    hidden: int = option("hidden_size", 512)
    intermediate: int = option("moe_intermediate_size", 256)
    top_k: int = option("experts per token", 2)
    dtype: Literal["fp32", "bf16"] = option("compute precision", "fp32")
    device: Device = option(DEVICE_HELP, "auto")
    threads: int = option("threads on a CPU", 1)
    rounds: int = option("timed blocks of each implementation", 10)
    steps: int = option("passes per block", 2)
    warmup: int = option("untimed passes before the timed ones", 2)
    out: str = option("JSON file for all results", "")

    @property
    def numbers(self) -> list[int]:
        """The numbers of experts.

        Raises:
            ConfigError: they cannot be read, or one is below `top_k`.
        """
        words = self.experts.replace(",", " ").split()
        if not words or not all(word.isdecimal() and int(word) >= self.top_k for word in words):
            raise ConfigError(f'experts={self.experts}: must be numbers of at least top_k={self.top_k}, e.g. "8,64"')
        return [int(word) for word in words]


def run(options: Options) -> None:
    """Measure, print and write `options.out`.

    Raises:
        ConfigError: options that do not go together.
        WrongResult: the results differ.
    """
    require_folder("out", options.out)
    keep_freed_memory()  # as train.py does; here for every implementation
    measured = {}
    with using_threads(options.threads):
        for number in options.numbers:
            measured[number] = of_case(options, number)
    save("moe", options, cases=measured)


def of_case(options: Options, experts: int) -> dict[str, Any]:
    """Measure one number of experts."""
    torch.manual_seed(0)
    device, dtype = rank_device(0, choose_device(options.device)), DTYPES[options.dtype]
    x_NE, grad_NE = (torch.randn(options.tokens, options.hidden, device=device, dtype=dtype) for _ in range(2))
    block = our_block(options, experts, device)
    layers: dict[str, Layer] = {OURS: block.feed_forward, LOOP: loop_over(block)}
    for name, implementation in TRANSFORMERS.items():
        if peer := transformers_layer(options, experts, block, implementation):
            layers[name] = peer
    compare({name: passes(layer, x_NE, grad_NE) for name, layer in layers.items()}, BOUNDS[options.dtype])
    steps: dict[str, Callable[[], object]] = {
        name: lambda layer=layer: passes(layer, x_NE, grad_NE) for name, layer in layers.items()
    }
    steps[PRODUCTS] = balanced_products(options, experts, device)
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    timers = {name: BlockTimer(step, finish) for name, step in steps.items()}
    run_rounds(timers, options)
    return report(options, experts, timers)


def report(options: Options, experts: int, timers: dict[str, BlockTimer]) -> dict[str, Any]:
    rows, k = options.tokens, options.top_k
    print(f"{experts} experts, {rows} tokens to {k} each, {options.hidden} x {options.intermediate}, {options.dtype}")
    of_case: dict[str, Any] = {}
    for name, timer in timers.items():
        ms, over = quartiles(timer.block_ms), ratio(timer, timers[OURS])
        of_case[name] = {"ms": ms, "over_ours": over}
        relative = "" if name == OURS else f"   over ours {over['median']:.2f} ({over['q1']:.2f} to {over['q3']:.2f})"
        print(f"  {name:21} {ms['median']:9.2f} ms ({ms['q1']:.2f} to {ms['q3']:.2f}){relative}")
    return of_case


def passes(layer: Layer, x_NE: Tensor, grad_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Run forward and backward. Return the output and the gradient of the input."""
    x_NE = x_NE.detach().requires_grad_()
    y_NE = layer(x_NE)
    y_NE.backward(grad_NE)
    return y_NE.detach(), x_NE.grad


def compare(results: dict[str, tuple[Tensor, Tensor]], bound: float) -> None:
    """Compare all results with ours.

    Raises:
        WrongResult: one differs from ours.
    """
    for name, (y, dx) in results.items():
        for what, own, other in zip(("output", "input's gradient"), results[OURS], (y, dx), strict=True):
            off = float((own.float() - other.float()).norm() / own.float().norm())
            if not off < bound:
                raise WrongResult(f"{name}: its {what} is {off:.1e} off ours")


# ----------------------------------------------------------------------------------------------------------------- ours


def our_config(options: Options, experts: int) -> Config:
    return resolve(
        load_config(
            [
                "recipe=moe_debug", "mesh.zero=1", "train.global_batch=1", "train.micro_batch=1",
                "model.num_hidden_layers=1",
                f"model.hidden_size={options.hidden}", f"model.moe_intermediate_size={options.intermediate}",
                f"model.num_experts={experts}", f"model.num_experts_per_tok={options.top_k}",
                f"model.initializer_range={options.hidden**-0.5}", f"precision.compute={options.dtype}",
            ]
        ),
        1,
    )  # fmt: skip


def our_block(options: Options, experts: int, device: torch.device) -> Block:
    """Return a block of a trainer's stage. Its weights are gathered, and its gradients accumulate in flat buffers."""
    cfg = our_config(options, experts)
    stages = build_stages(cfg, Mesh(MeshSpec.of(cfg.mesh), 0, device))
    initialise(stages, cfg.run.seed)
    for name in stages.units.units:
        stages.units.unshard(name)
    (model,) = stages.models.values()
    return model.model.layers["0"]


# ---------------------------------------------------------------------------------------------------------------- peers


def stacked(block: Block) -> list[Tensor]:
    """Return copies of the router's matrix and of all experts' gate, up and down, as autograd leaves. Gate and up are
    [X, F, E], down is [X, E, F]."""
    experts = block.mixture.experts.values()
    weights = [torch.stack([getattr(e, p).weight.detach() for e in experts]) for p in block.moe.projections]
    return [block.mixture.gate.weight.detach().clone().requires_grad_(), *(w.requires_grad_() for w in weights)]


def loop_over(block: Block) -> Layer:
    """Return a layer that runs one expert after another, as in a textbook."""
    router_XE, gate_XFE, up_XFE, down_XEF = stacked(block)
    each = [[w.detach().clone().requires_grad_() for w in of] for of in zip(gate_XFE, up_XFE, down_XEF, strict=True)]
    k = block.m.num_experts_per_tok

    def layer(x_NE: Tensor) -> Tensor:
        weights_NK, experts_NK = softmax_top_k(F.linear(x_NE.float(), router_XE.float()), k, renormalise=True)
        y_NE = torch.zeros_like(x_NE)
        for x, (gate_FE, up_FE, down_EF) in enumerate(each):
            tokens, choice = torch.where(experts_NK == x)
            rows_ME = x_NE[tokens]
            out_ME = F.linear(F.silu(F.linear(rows_ME, gate_FE)) * F.linear(rows_ME, up_FE), down_EF)
            y_NE = y_NE.index_add(0, tokens, (out_ME * weights_NK[tokens, choice, None]).to(x_NE.dtype))
        return y_NE

    return layer


def transformers_layer(options: Options, experts: int, block: Block, implementation: str) -> Layer | None:
    """Return Qwen3's layer, or None if `transformers` is not installed."""
    try:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock
    except ImportError:
        return None
    config = Qwen3MoeConfig(
        hidden_size=options.hidden,
        moe_intermediate_size=options.intermediate,
        num_experts=experts,
        num_experts_per_tok=options.top_k,
        norm_topk_prob=True,
        experts_implementation=implementation,
    )
    router_XE, gate_XFE, up_XFE, down_XEF = stacked(block)
    module = Qwen3MoeSparseMoeBlock(config).to(gate_XFE.device, gate_XFE.dtype)
    with torch.no_grad():
        module.gate.weight.copy_(router_XE)
        module.experts.gate_up_proj.copy_(torch.cat([gate_XFE, up_XFE], 1))
        module.experts.down_proj.copy_(down_XEF)
    return lambda x_NE: module(x_NE[None])[0]


def balanced_products(options: Options, experts: int, device: torch.device) -> Callable[[], object]:
    """Return the six grouped matmuls of a layer, with gate and up as one, for experts with equal numbers of rows. Two
    are the forward, two give input gradients and two give weight gradients."""
    rows, wide, narrow = options.tokens * options.top_k, options.hidden, options.intermediate
    make = lambda *shape: torch.randn(*shape, device=device, dtype=DTYPES[options.dtype])
    counts = torch.full((experts,), rows // experts, device=device)
    counts[: rows % experts] += 1
    groups = ExpertRows.of(counts, rows)
    x_ME, both_MB, h_MF = make(rows, wide), make(rows, 2 * narrow), make(rows, narrow)
    gate_up_XBE, down_XEF = make(experts, 2 * narrow, wide), make(experts, wide, narrow)

    def step() -> None:
        products(x_ME, gate_up_XBE.transpose(1, 2), groups)
        products(h_MF, down_XEF.transpose(1, 2), groups)
        products(x_ME, down_XEF, groups)
        products(both_MB, gate_up_XBE, groups)
        for grad_MO, input_MI in ((x_ME, h_MF), (both_MB, x_ME)):
            for grad_RO, input_RI in zip(grad_MO.split(groups.sizes), input_MI.split(groups.sizes), strict=True):
                grad_RO.t() @ input_RI

    return step
