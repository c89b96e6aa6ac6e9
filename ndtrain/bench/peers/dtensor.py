"""The peers for tp: a plain PyTorch Llama cut by `parallelize_module`, as torchtitan cuts its own.

The model computes between its matmuls with the same functions as ours does (RMSNorm, RoPE, attention), and its plan
wraps and redistributes no more than it must: what is compared is the parallelism.

Shape legend: B batch, T time (T / ranks in the residual stream with sequence parallelism), E hidden_size, N query heads
here, K key/value heads here, D head_dim, V vocabulary here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from ndtrain.config import ModelConfig
from ndtrain.model.loss import IGNORE
from ndtrain.model.norm import rms_norm
from ndtrain.model.rope import inverse_frequencies, rope_table, rotate


class Norm(nn.Module):
    """RMSNorm of local tensors; a weight held by all ranks for their own tokens gets a gradient that is yet to be
    summed. (`nn.RMSNorm` under `SequenceParallel` gives the same and takes three times as long.)"""

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(m.hidden_size)), m.rms_norm_eps

    def forward(self, x_BTE: Tensor) -> Tensor:
        w = self.weight
        return rms_norm(x_BTE, w.to_local(grad_placements=[Partial()]) if isinstance(w, DTensor) else w, self.eps)


class Attention(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.head_dim = m.head_dim
        for name, heads in (("q", m.num_attention_heads), ("k", m.num_key_value_heads), ("v", m.num_key_value_heads)):
            self.add_module(f"{name}_proj", nn.Linear(m.hidden_size, heads * m.head_dim, bias=False))
        self.o_proj = nn.Linear(m.num_attention_heads * m.head_dim, m.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (p(x_BTE).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in (*rotate(q, k, rope), v))
        out_BNTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out_BNTD.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(m.hidden_size, m.intermediate_size, bias=False)
        self.up_proj = nn.Linear(m.hidden_size, m.intermediate_size, bias=False)
        self.down_proj = nn.Linear(m.intermediate_size, m.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))


class Block(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(m), Attention(m)
        self.post_attention_layernorm, self.mlp = Norm(m), MLP(m)

    def forward(self, x_BTE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), rope)
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class Llama(nn.Module):
    """A Llama of `nn.Linear`s under Hugging Face's parameter names; no biases, untied.

    (tokens [B, T], labels [B, T]) -> the sum of the losses over valid tokens.
    """

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.m, self.model = m, nn.Module()
        self.model.embed_tokens = nn.Embedding(m.vocab_size, m.hidden_size)
        self.model.layers = nn.ModuleList(Block(m) for _ in range(m.num_hidden_layers))
        self.model.norm = Norm(m)
        self.lm_head = nn.Linear(m.hidden_size, m.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        rope = rope_table(torch.arange(tokens_BT.shape[1]), inverse_frequencies(self.m), torch.float32)
        x_BTE = self.model.embed_tokens(tokens_BT)
        for block in self.model.layers:
            x_BTE = block(x_BTE, rope)
        logits_BTV = self.lm_head(self.model.norm(x_BTE)).float()
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")
        return loss.to_local() if isinstance(loss, DTensor) else loss


def parallelize(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cuts `model` over the one dim of `mesh`. Its loss is to be taken, forward and backward, under `loss_parallel()`.

    Args:
        sequence_parallel: the residual stream is cut along its tokens.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    # one wrapper in front of several matmuls: their input gradients are summed before they travel, not after
    enter = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    enter_with_rope = PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(Replicate(), None))
    leave = RowwiseParallel(output_layouts=stream)
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "model.layers.*.self_attn": enter_with_rope,
        "model.layers.*.mlp": enter,
        **{f"model.layers.*.self_attn.{p}_proj": ColwiseParallel() for p in "qkv"},
        **{f"model.layers.*.mlp.{p}_proj": ColwiseParallel() for p in ("gate", "up")},
        "model.layers.*.self_attn.o_proj": leave,
        "model.layers.*.mlp.down_proj": leave,
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    if sequence_parallel:
        for module in model.modules():
            if isinstance(module, Norm):
                module.weight = nn.Parameter(DTensor.from_local(module.weight.data, mesh, [Replicate()]))


def clip(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Clips the gradients by their norm over the whole model. Gradients that are yet to be summed are, once."""
    parameters = list(parameters)
    for p in parameters:
        if isinstance(p, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements, async_op=True)
    cut = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]  # DTensors and others do not mix in one operator
    norms = [nn.utils.get_total_norm([p.grad for p in kind]) for kind in (cut, whole) if kind]
    norms = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for kind in (cut, whole):
        nn.utils.clip_grads_with_norm_(kind, most, norm)
