"""What `bench gpu` measures our step against, on one device: a Llama in plain PyTorch as torchtitan trains its own, and
`transformers`' Llama. Same weights, tokens, fp32 master weights and moments, compute precision, clipping and AdamW.

Shape legend: B batch, T time, E hidden_size, N query heads, K key/value heads, D head_dim, P = D / 2, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ndtrain.bench.peers.dtensor import MLP
from ndtrain.bench.peers.implementations import HuggingFace, Loop
from ndtrain.config import Config, ConfigError, ModelConfig
from ndtrain.model.init import fill
from ndtrain.model.loss import IGNORE
from ndtrain.model.rope import inverse_frequencies, rope_table
from ndtrain.parallel.build import DTYPES

Draw = Callable[[int, str, int, int], Tensor]


def check(peer: str, cfg: Config) -> None:
    """
    Raises:
        ConfigError: the peer cannot train as `cfg` says.
    """
    known = {"native": ("none", "full", "selective"), "transformers": ("none", "full")}[peer]
    if cfg.recompute.name not in known:
        raise ConfigError(f"recompute={cfg.recompute.name}: {peer} has no such mode; known: {', '.join(known)}")


# ------------------------------------------------------------------------------------------------ native PyTorch


class Attention(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.head_dim = m.head_dim
        query, key_value = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
        self.q_proj = nn.Linear(m.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(m.hidden_size, key_value, bias=False)
        self.v_proj = nn.Linear(m.hidden_size, key_value, bias=False)
        self.o_proj = nn.Linear(query, m.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        q, k, v = (p(x_BTE).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, cos_TP, sin_TP), rotated(k, cos_TP, sin_TP)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out_BNTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out_BNTD.transpose(1, 2).flatten(-2))


def rotated(x_BTND: Tensor, cos_T1P: Tensor, sin_T1P: Tensor) -> Tensor:
    """Rotary embedding of the pairs (i, i + P), in fp32 as torchtitan's."""
    a, b = x_BTND.float().chunk(2, dim=-1)
    return torch.cat((a * cos_T1P - b * sin_T1P, b * cos_T1P + a * sin_T1P), dim=-1).type_as(x_BTND)


class Block(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(m.hidden_size, eps=m.rms_norm_eps)
        self.self_attn = Attention(m)
        self.post_attention_layernorm = nn.RMSNorm(m.hidden_size, eps=m.rms_norm_eps)
        self.mlp = MLP(m)

    def forward(self, x_BTE: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), cos_TP, sin_TP)
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class Llama(nn.Module):
    """A Llama of PyTorch's own modules under Hugging Face's parameter names, without biases.

    (tokens [B, T], labels [B, T]) -> the sum of the losses over valid tokens. `loss` may be replaced by its compiled
    form.
    """

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.m, self.model, self.loss = m, nn.Module(), summed_loss
        self.model.embed_tokens = nn.Embedding(m.vocab_size, m.hidden_size)
        self.model.layers = nn.ModuleList(Block(m) for _ in range(m.num_hidden_layers))
        self.model.norm = nn.RMSNorm(m.hidden_size, eps=m.rms_norm_eps)
        self.lm_head = nn.Linear(m.hidden_size, m.vocab_size, bias=False)
        if m.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        cos, sin = self._rope(tokens_BT)
        x_BTE = self.model.embed_tokens(tokens_BT)
        for block in self.model.layers:
            x_BTE = block(x_BTE, cos, sin)
        return self.loss(self.lm_head(self.model.norm(x_BTE)), labels_BT)

    def _rope(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self._table is None:
            places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            cos, sin = rope_table(places, inverse_frequencies(self.m, places.device), torch.float32)
            self._table = cos[..., : sin.shape[-1]], sin
        return self._table


def summed_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    flat = logits_BTV.flatten(0, 1).float()
    return F.cross_entropy(flat, labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")


# what torchtitan's selective checkpointing saves: attention's results, and of the matmuls every other one
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _saves_some() -> tuple[object, object]:
    """The contexts of one checkpointed block's first and second run."""
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
    "selective": partial(checkpoint_wrapper, preserve_rng_state=False, context_fn=_saves_some),
}


def native(cfg: Config, device: torch.device, draw: Draw) -> Loop:
    """The plain Llama with FSDP2 on one rank, blocks and loss compiled where `train.compile` says so, and `recompute`
    as torch.utils.checkpoint does it."""
    with torch.device(device):
        module = Llama(cfg.model)
    _fill(cfg, module, draw)
    layers = module.model.layers
    for i, block in enumerate(layers):
        layers[i] = _CHECKPOINTS[cfg.recompute.name](block)
        if cfg.train.compile:
            layers[i].compile()
    if cfg.train.compile:
        module.loss = torch.compile(summed_loss)
    _one_rank(device)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[cfg.precision.compute], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=cfg.mesh.zero == 3)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=cfg.mesh.zero == 3)
    return Loop(cfg, module, clip=_clip)


def _one_rank(device: torch.device) -> None:
    """The world of one that FSDP2 asks for."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


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
    """`transformers`' model, compiled whole where `train.compile` says so, under autocast."""
    with torch.device(device):
        module = HuggingFace(cfg.model)
    _fill(cfg, module.causal_lm, draw)
    if cfg.recompute.name == "full":
        module.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    module.causal_lm.train()
    if cfg.train.compile:
        module.causal_lm.compile()
    return Loop(cfg, Autocast(module, device.type, DTYPES[cfg.precision.compute]))


def _fill(cfg: Config, module: nn.Module, draw: Draw) -> None:
    for name, p in module.named_parameters():
        fill(p.data.view(-1), cfg.model, cfg.run.seed, name, 0, draw)


PEERS: dict[str, Callable[[Config, torch.device, Draw], Loop]] = {"native": native, "transformers": transformers}
