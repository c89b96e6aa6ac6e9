"""A Llama that the peers train, made of `nn.Linear`s without biases, with Hugging Face's parameter names.

Shape legend: B batch, T time (T / ranks in the residual stream with sequence parallelism), E hidden_size, N query heads
here, K key/value heads here, D head_dim, V vocabulary here.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ndtrain.config import ModelConfig
from ndtrain.model.rope import inverse_frequencies, rope_table
from ndtrain.model.vocabulary import IGNORE

Rope = tuple[Tensor, Tensor]  # cos and sin
Rotate = Callable[[Tensor, Tensor, Rope], tuple[Tensor, Tensor]]  # q [B, T, N, D], k [B, T, K, D] -> the same, rotated
MakeNorm = Callable[[ModelConfig], nn.Module]


class Attention(nn.Module):
    def __init__(self, m: ModelConfig, rotate: Rotate):
        super().__init__()
        self.head_dim, self.rotate = m.head_dim, rotate
        query, key_value = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
        self.q_proj = nn.Linear(m.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(m.hidden_size, key_value, bias=False)
        self.v_proj = nn.Linear(m.hidden_size, key_value, bias=False)
        self.o_proj = nn.Linear(query, m.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, rope: Rope) -> Tensor:
        q, k, v = (p(x_BTE).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in (*self.rotate(q, k, rope), v))
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
    def __init__(self, m: ModelConfig, norm: MakeNorm, rotate: Rotate):
        super().__init__()
        self.input_layernorm, self.self_attn = norm(m), Attention(m, rotate)
        self.post_attention_layernorm, self.mlp = norm(m), MLP(m)

    def forward(self, x_BTE: Tensor, rope: Rope) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), rope)
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class Llama(nn.Module):
    """(tokens [B, T], labels [B, T]) -> the sum of the losses over valid tokens. All sequences have the same length.

    Args:
        norm: makes an RMSNorm.
        rotate: applies the rotary embedding.

    Attributes:
        loss: (logits, labels) -> the summed loss; may be replaced by its compiled form.
    """

    def __init__(self, m: ModelConfig, norm: MakeNorm, rotate: Rotate):
        super().__init__()
        self.m, self.model, self.loss = m, nn.Module(), summed_loss
        self.model.embed_tokens = nn.Embedding(m.vocab_size, m.hidden_size)
        self.model.layers = nn.ModuleList(Block(m, norm, rotate) for _ in range(m.num_hidden_layers))
        self.model.norm = norm(m)
        self.lm_head = nn.Linear(m.hidden_size, m.vocab_size, bias=False)
        if m.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rope: Rope | None = None

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        if self._rope is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            self._rope = rope_table(positions, inverse_frequencies(self.m, positions.device), torch.float32)
        x_BTE = self.model.embed_tokens(tokens_BT)
        for block in self.model.layers:
            x_BTE = block(x_BTE, self._rope)
        loss = self.loss(self.lm_head(self.model.norm(x_BTE)), labels_BT)
        return loss.to_local() if isinstance(loss, DTensor) else loss


def summed_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    flat = logits_BTV.flatten(0, 1).float()
    return F.cross_entropy(flat, labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")
