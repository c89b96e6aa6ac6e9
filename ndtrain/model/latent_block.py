"""Blocks with latent attention (MLA: DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1).

The keys and values of all heads are computed from one latent vector per token. Queries may have a latent of their own.
RoPE rotates only part of each head, and all heads share the rotated part of the key.

Shape legend: B batch, T time, N tokens, E hidden_size, H heads; D elements of a head's query and key, of which R are
rotated; V elements of a head's value, L elements of the latent of keys and values.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.model.block import Block, Context, HeadRows, Weights
from ndtrain.model.families.family import Family
from ndtrain.model.moe.block import MoEBlock
from ndtrain.model.norm import rms_norm
from ndtrain.model.rope import neighbours_apart, rotate, score_factor
from ndtrain.model.spec import OpSpec

_LATENT_EPS = 1e-6  # eps of the latents' norms, as in transformers: it does not depend on `rms_norm_eps`


class LatentBlock(Block):
    """Pre-norm latent attention and SwiGLU MLP."""

    @classmethod
    def attention_ops(cls, m: ModelConfig, family: Family) -> tuple[OpSpec, ...]:
        qkv, core, out = super().attention_ops(m, family)
        if m.q_lora_rank is None:
            into = ("self_attn.q_proj",), ("self_attn.kv_a_proj_with_mqa",)
        else:
            into = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), ("self_attn.q_b_proj",)
        products = m.num_attention_heads * (resolved(m.head_dim) + resolved(m.v_head_dim))
        return (
            replace(qkv, projections=(*into, ("self_attn.kv_b_proj",))),
            replace(core, multiply_adds_a_key=products),
            out,
        )

    @classmethod
    def head_rows(cls, m: ModelConfig) -> tuple[HeadRows, HeadRows]:
        """Return how logits depend on the rows of the query projection, and of the key projection. All heads share the
        rotated part of the key, so the rotated rows of a query get the whole factor."""
        plain, rotated, of_value = (resolved(n) for n in (m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim))
        queries = "self_attn.q_proj" if m.q_lora_rank is None else "self_attn.q_b_proj"
        return (
            HeadRows(queries, ((plain, 0.5), (rotated, 1.0))),
            HeadRows("self_attn.kv_b_proj", ((plain, 0.5), (of_value, 0.0))),
        )

    def make_attention(self, m: ModelConfig, family: Family) -> nn.Module:
        a, bias = nn.Module(), family.o_bias(m)
        if m.q_lora_rank is None:
            a.q_proj = Weights(m, "heads", "embed")
            a.kv_a_proj_with_mqa = Weights(m, "kv_latent_and_key", "embed", bias=bias)
        else:
            a.q_a_proj = Weights(m, "q_latent", "embed", bias=bias)
            a.kv_a_proj_with_mqa = Weights(m, "kv_latent_and_key", "embed", bias=bias)
            a.q_a_layernorm = Weights(m, "q_latent")
            a.q_b_proj = Weights(m, "heads", "q_latent")
        a.kv_a_layernorm = Weights(m, "kv_latent")
        a.kv_b_proj = Weights(m, "key_value_heads", "kv_latent")
        a.o_proj = Weights(m, "embed", "value_heads", bias=bias)
        return a

    def attention(self, x_NE: Tensor, ctx: Context) -> Tensor:
        a, m = self.self_attn, self.m
        q, kv_and_key = self._queries_and_latent(x_NE)
        sizes = resolved(m.kv_lora_rank), resolved(m.qk_rope_head_dim)
        latent_NL, key_NR = kv_and_key.split_with_sizes(sizes, -1)
        kv = self.linear(self._latent_norm(latent_NL, a.kv_a_layernorm), a.kv_b_proj)[0]
        q_BTHD, k_BTHD, v_BTHV = self._heads(q, kv, self.ops.for_all_heads(key_NR), ctx)
        # kernels need one head size for queries, keys and values. Zeros appended to the values add zeros to the output
        narrower = q_BTHD.shape[-1] - v_BTHV.shape[-1]
        v_BTHD = F.pad(v_BTHV, (0, narrower))
        out_BTHV = self.ops.core(q_BTHD, k_BTHD, v_BTHD, ctx, self.largest_H)[..., : m.v_head_dim]
        return self.linear(out_BTHV.flatten(0, 1).flatten(1), a.o_proj)[0]

    def _queries_and_latent(self, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (queries of all heads, latent of keys and values followed by the rotated part of the key)."""
        a = self.self_attn
        if self.m.q_lora_rank is None:
            return self.linear(x_NE, a.q_proj)[0], self.linear(x_NE, a.kv_a_proj_with_mqa)[0]
        q_latent, kv_and_key = self.linear(x_NE, a.q_a_proj, a.kv_a_proj_with_mqa)
        return self.linear(self._latent_norm(q_latent, a.q_a_layernorm), a.q_b_proj)[0], kv_and_key

    @staticmethod
    def _latent_norm(x: Tensor, norm: Weights) -> Tensor:
        return rms_norm(x, norm.weight, _LATENT_EPS)

    def _heads(self, q: Tensor, kv: Tensor, key_NR: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return (queries and keys [B, T, H, D], values [B, T, H, V]) of this rank's heads, after RoPE."""
        m, (B, T) = self.m, ctx.tokens.shape
        plain, rotated, of_value = (resolved(n) for n in (m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim))
        q_plain, q_BTHR = q.view(B, T, -1, plain + rotated).split_with_sizes((plain, rotated), -1)
        k_plain, v_BTHV = kv.view(B, T, -1, plain + of_value).split_with_sizes((plain, of_value), -1)
        key_BT1R = key_NR.reshape(B, T, 1, rotated)
        if m.rope_interleave:
            q_BTHR, key_BT1R = neighbours_apart(q_BTHR), neighbours_apart(key_BT1R)
        q_BTHR, key_BT1R = rotate(q_BTHR, key_BT1R, resolved(ctx.rope))
        q_BTHD = torch.cat((q_plain, q_BTHR), -1)
        k_BTHD = torch.cat((k_plain, key_BT1R.expand(-1, -1, k_plain.shape[2], -1)), -1)
        factor = score_factor(m)
        return q_BTHD if factor == 1 else q_BTHD * factor, k_BTHD, v_BTHV


class LatentMoEBlock(LatentBlock, MoEBlock):
    """Pre-norm latent attention and a mixture of SwiGLU experts."""
