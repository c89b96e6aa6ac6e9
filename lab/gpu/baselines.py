"""The baselines of `bench gpu` on one device: a Llama in plain PyTorch, trained as torchtitan trains its own, and
`transformers`' Llama. They share our weights, tokens, fp32 master weights and moments, compute precision, clipping and
AdamW.

Shape legend: B batch, T time, N heads, D head_dim, P = D / 2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lab.peers.implementations import Cast, Draw, HuggingFace, Loop, fill_parameters
from lab.peers.llama import Llama, Rope, summed_loss
from ndtrain.config import Config, ConfigError, ModelConfig
from ndtrain.data import Batch
from ndtrain.measure.rounds import Repeats
from ndtrain.measure.training import Build, Implementation, Outcome, draw_on, ours, timed
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import DTYPES
from ndtrain.parallel.compile_choice import compiles


def check(peer: str, cfg: Config) -> None:
    """Check that the peer supports the recompute mode of `cfg`.

    Raises:
        ConfigError: it does not.
    """
    known = {"native": ("none", "full", "selective"), "transformers": ("none", "full")}[peer]
    if cfg.recompute.name not in known:
        raise ConfigError(f"recompute={cfg.recompute.name}: {peer} has no such mode; known: {', '.join(known)}")


# ------------------------------------------------------------------------------------------------ native PyTorch


def rotate(q_BTND: Tensor, k_BTND: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding in fp32, as torchtitan does."""
    sin_T1P = rope[1]
    cos_T1P = rope[0][..., : sin_T1P.shape[-1]]
    return _rotated(q_BTND, cos_T1P, sin_T1P), _rotated(k_BTND, cos_T1P, sin_T1P)


def _rotated(x_BTND: Tensor, cos_T1P: Tensor, sin_T1P: Tensor) -> Tensor:
    """Rotate the pairs (i, i + P)."""
    a, b = x_BTND.float().chunk(2, dim=-1)
    return torch.cat((a * cos_T1P - b * sin_T1P, b * cos_T1P + a * sin_T1P), dim=-1).type_as(x_BTND)


def _norm(m: ModelConfig) -> nn.Module:
    return nn.RMSNorm(m.hidden_size, eps=m.rms_norm_eps)


# torchtitan's selective checkpointing saves attention's results and every other matmul
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _selective() -> tuple[object, object]:
    """Return the contexts of one checkpointed block's forward and recompute."""
    matmuls = {False: 0, True: 0}

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        if op == torch.ops.aten.mm.default:
            matmuls[ctx.is_recompute] += 1
            saves = matmuls[ctx.is_recompute] % 2 == 1
        else:
            saves = op in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_CHECKPOINTS = {
    "none": lambda block: block,
    "full": partial(checkpoint_wrapper, preserve_rng_state=False),
    "selective": partial(checkpoint_wrapper, preserve_rng_state=False, context_fn=_selective),
}


def native(cfg: Config, device: torch.device, draw: Draw) -> Loop:
    """Return the training loop of the plain Llama with FSDP2 on one rank. Blocks and loss are compiled if
    `compiles` decides so, and `recompute` uses torch.utils.checkpoint. Call it within `world_of_one`."""
    with torch.device(device):
        module = Llama(cfg.model, _norm, rotate)
    fill_parameters(cfg, module, draw)
    layers, compiled = module.model.layers, compiles(cfg.train, cfg.model, MeshSpec.of(cfg.mesh), device)
    for i, block in enumerate(layers):
        layers[i] = _CHECKPOINTS[cfg.recompute.name](block)
        if compiled:
            layers[i].compile()
    if compiled:
        module.loss = torch.compile(summed_loss)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[cfg.precision.compute], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=cfg.mesh.zero == 3)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=cfg.mesh.zero == 3)
    return Loop(cfg, module, clip=_clip)


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """Create the process group of one rank that FSDP2 requires, and destroy it on exit."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _clip(parameters: object, most: float) -> Tensor:
    norm = nn.utils.clip_grad_norm_(parameters, most)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# ------------------------------------------------------------------------------------------------- transformers


class Autocast(nn.Module):
    """Computes in `dtype` from fp32 parameters, as autocast does."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype):
        super().__init__()
        self.module, self.device_type, self.dtype = module, device_type, dtype

    def forward(self, *args: Tensor) -> Tensor:
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32):
            return self.module(*args)


def transformers(cfg: Config, device: torch.device, draw: Draw) -> Loop:
    """Return the training loop of `transformers`' model under autocast. The whole model is compiled if `compiles`
    decides so.

    Autocast leaves the experts' grouped matmuls in fp32, so a mixture computes with copies of its weights in the
    compute precision.
    """
    with torch.device(device):
        module = HuggingFace(cfg.model)
    fill_parameters(cfg, module.causal_lm, draw)
    if cfg.recompute.name == "full":
        module.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    module.causal_lm.train()
    if compiles(cfg.train, cfg.model, MeshSpec.of(cfg.mesh), device):
        module.causal_lm.compile()
    dtype = DTYPES[cfg.precision.compute]
    return Loop(cfg, Cast(module, dtype) if cfg.model.num_experts else Autocast(module, device.type, dtype))


PEERS: dict[str, Callable[[Config, torch.device, Draw], Loop]] = {"native": native, "transformers": transformers}


def peer(name: str) -> Build:
    """Return what builds one of `PEERS` as an implementation to measure."""

    def build(cfg: Config, mesh: Mesh) -> Implementation:
        loop = PEERS[name](cfg, mesh.device, draw_on(mesh.device))

        def launch(batches: Sequence[Batch]) -> Callable[[], Outcome]:
            loss, norm = loop.launch(batches)
            return lambda: Outcome(loss.item(), norm.item())

        return Implementation(launch)

    return build


def timed_peers(cfg: Config, mesh: Mesh, names: Sequence[str], repeats: Repeats) -> dict[str, Any]:
    """Time "ours" and some of `PEERS`, as `timed` does."""
    builders = {name: ours if name == "ours" else peer(name) for name in names}
    with world_of_one(mesh.device) if "native" in names else nullcontext():
        return timed(cfg, mesh, builders, repeats)
