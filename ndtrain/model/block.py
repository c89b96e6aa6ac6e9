"""One transformer block, and how it declares its parameters and ops.

Each parameter is declared once, where its module is made, with named dims: `Weights(m, "heads", "embed")`. Each op is
declared once, in the order the ops run (`Block.op_table`). The rest of the code reads the records collected from these
declarations (`spec.py`): sharding, parameter counts, initial values, recompute, the planner.

Shape legend: B batch, T time, N tokens of the residual stream, E hidden_size, H query heads, K key/value heads,
D head_dim, F intermediate_size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.model.attention.core import local_core
from ndtrain.model.attention.scores import Scores
from ndtrain.model.families import Family, family_of, latent
from ndtrain.model.loss import head_loss
from ndtrain.model.moe.exchange import Exchange, ExpertRows
from ndtrain.model.moe.permutation import Permutation
from ndtrain.model.moe.router import Routing
from ndtrain.model.norm import rms_norm
from ndtrain.model.rope import rotate
from ndtrain.model.spec import CORE, OUTPUT, Dims, Init, Joins, OpSpec
from ndtrain.model.swiglu import swiglu
from ndtrain.model.vocabulary import Targets

# ----------------------------------------------------------------------------------------------- the replaceable ops


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return x @ w.T + b for each weight [out, in]. Weights that share x (q/k/v, gate/up) are passed in one call."""
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def wide_linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x @ w.T in fp32 or wider. A router's choice must not depend on the compute precision."""
    wide = torch.promote_types(x_NI.dtype, torch.float32)
    return F.linear(x_NI.to(wide), weight_OI.to(wide))


def grouped_linear(x_MI: Tensor, expert_rows: ExpertRows, weights: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Multiply each row by the matrices of its expert: one output per entry of `weights`.

    Args:
        x_MI: rows sorted by expert.
        expert_rows: the number of rows of each expert.
        weights: for each output, one matrix [out, in] per expert.
    """
    of_expert = x_MI.split(expert_rows.sizes)
    return tuple(torch.cat([F.linear(x, w) for x, w in zip(of_expert, ws, strict=True)]) for ws in weights)


def embedding(tokens_BT: Tensor, weight_VE: Tensor) -> Tensor:
    """Return the residual stream [N, E] of the tokens [B, T]."""
    return F.embedding(tokens_BT.flatten(), weight_VE)


def balance(logits_NX: Tensor, routing: Routing, counts_X: Tensor, bias_X: Tensor) -> Tensor:
    """Return the weights of a routing, unchanged. In training, a replacement also counts the load of each expert.

    The replacement may return weights whose backward also adds the gradients of balance losses to the logits' gradient.

    Args:
        counts_X: number of these tokens that go to each expert.
        bias_X: the selection bias, which identifies the layer.
    """
    return routing.weights


def gather_routed(x_NE: Tensor, routing: Routing, permutation: Permutation) -> tuple[Tensor, Tensor, Permutation]:
    """Return the tokens that the experts of this device compute, with their weights and their permutation."""
    return x_NE, routing.weights, permutation


@dataclass(frozen=True)
class Ops:
    """The calls that parallelism replaces. Each default is the computation on one device.

    The replacements are in `parallel/`:

    - `linear/`: the ops with weights. Their weight gradients go straight into the flat buffers.
    - `tp.py`: `norm_of_heads`, `for_all_heads`, `embedding`, `core` and `head_loss`; the communication in `linear`.
    - `cp.py`: `core`. `ep.py`: `exchange`. `balance.py`: `balance`.
    - `expert_slices.py`: `gather_routed` and `reduce_routed`.
    """

    linear: Callable = linear
    wide_linear: Callable = wide_linear  # (x [N, I], weight [O, I]) -> [N, O] in fp32 or wider
    grouped_linear: Callable = grouped_linear  # (x [M, I] by expert, ExpertRows, weights) -> a tuple of [M, O]
    exchange: Callable = Exchange  # (counts [X], rows M) -> an Exchange
    embedding: Callable = embedding  # (tokens [B, T], weight [V, E]) -> [N, E]
    norm_of_heads: Callable = rms_norm  # (x [N, H D], weight [H D], eps): over all heads of a token
    for_all_heads: Callable = lambda x: x  # (x [N, I] of this rank's tokens) -> the tokens that its heads read [N, I]
    core: Callable = local_core  # (q [B, T, H, D], k and v [B, T, K, D], ctx, largest [H] | None) -> [B, T, H, D]
    head_loss: Callable = head_loss  # (x [N, E], weight [V, E], targets, scale, chunk) -> sums [S]
    balance: Callable = balance  # (logits [N, X], routing, counts [X], bias [X]) -> weights [N, K]
    gather_routed: Callable = gather_routed  # (x [N, E], routing, permutation) -> x, weights [N, K], permutation
    reduce_routed: Callable = lambda y: y  # (outputs [N, E] of the gathered tokens) -> outputs of this rank's tokens


class Context(NamedTuple):
    """The inputs of a microbatch besides its activations.

    Attributes:
        tokens: [B, T] ids.
        targets: the labels [B, T] that the head predicts (-100: no prediction), and the objective's other columns.
        rope: cos and sin for the tokens' positions. None if the model does not use RoPE.
        loss_scale: returns the factor of the sum of token losses. Called only when the head computes the loss.
        scores: the operations on attention scores, in addition to the causal mask.
        handle: the key under which a compiled graph finds the scores (`attention/custom_op.py`).
    """

    tokens: Tensor
    targets: Targets
    rope: tuple[Tensor, Tensor] | None
    loss_scale: Callable[[], Tensor]
    scores: Scores
    handle: Tensor


# ------------------------------------------------------------------------------------------------ declared parameters


def dim_sizes(m: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return, for each named dim, (units that may be sharded, elements per unit)."""
    return {
        "vocab": (m.vocab_size, 1),
        "embed": (m.hidden_size, 1),
        "mlp": (m.intermediate_size, 1),
        "heads": (m.num_attention_heads, m.head_dim),
        "kv_heads": (m.num_key_value_heads, m.head_dim),
        "head_dim": (m.head_dim, 1),
        **(latent.dim_sizes(m) if family_of(m).latent_attention else {}),
        **(moe.dim_sizes(m) if (moe := family_of(m).moe) else {}),
    }


def dim_elements(m: ModelConfig) -> dict[str, int]:
    """Return the number of elements of each named dim."""
    return {dim: units * width for dim, (units, width) in dim_sizes(m).items()}


class Weights(nn.Module):
    """Parameters `weight` and optionally `bias`, declared by their dims. The ops read them, so it has no forward.

    Args:
        dims: the named dims of the weight. A weight with a single dim is the scale of a norm.
        bias: whether there is a bias, over the weight's first dim.
        expert: the index of the expert that the parameters belong to. None: they belong to no expert.

    Attributes:
        dims: parameter name -> its named dims.
    """

    def __init__(self, m: ModelConfig, *dims: str, bias: bool = False, expert: int | None = None):
        super().__init__()
        self.expert = expert
        self.dims: dict[str, Dims] = {"weight": dims} | ({"bias": dims[:1]} if bias else {})
        sizes = dim_elements(m)
        shape = lambda named: tuple(sizes[d] for d in named)
        self.weight = nn.Parameter(torch.empty(shape(dims)))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(shape(dims[:1]))) if bias else None)


def declared(module: nn.Module) -> Iterator[tuple[str, Dims, Init, int | None]]:
    """Yield (name, named dims, initial values, expert) for every parameter of a module, in order.

    The table of ops (`Block.op_table`) decides which matrices start smaller (`Init.TO_STREAM`)."""
    for path, part in module.named_modules():
        if isinstance(part, Weights):
            of_weight = Init.NORMAL if len(part.dims["weight"]) > 1 else Init.ONES
            for name, dims in part.dims.items():
                yield f"{path}.{name}", dims, of_weight if name == "weight" else Init.ZEROS, part.expert


# --------------------------------------------------------------------------------------------------------- the block


class HeadRows(NamedTuple):
    """A projection of queries or keys, and how the attention logits of a head depend on its rows.

    Attributes:
        projection: its path relative to the block.
        powers: consecutive rows of each head as (number, power): to multiply the head's logits by g, each row is
            multiplied by g to this power. The powers of a query and of the key that it meets add up to 1.
    """

    projection: str
    powers: tuple[tuple[int, float], ...]


class Block(nn.Module):
    """Pre-norm attention and SwiGLU MLP (Shazeer, 2020, arXiv:2002.05202), each added to the residual stream.

    Attributes:
        held_experts: indices of the experts that this block holds. None: all of them.
        largest_H: for each query head of this device, the largest log-sum-exp of its attention scores so far. None: it
            is not wanted.
    """

    largest_H: Tensor | None = None

    def __init__(self, m: ModelConfig, family: Family, ops: Ops, held_experts: range | None = None):
        super().__init__()
        self.m, self.ops, self.norms_all_heads = m, ops, family.qk_norm_of_all_heads
        self.held_experts = held_experts
        self.input_layernorm = Weights(m, "embed")
        self.self_attn = self.make_attention(m, family)
        self.post_attention_layernorm = Weights(m, "embed")
        self.add_mlp(m, family)

    def add_mlp(self, m: ModelConfig, family: Family) -> None:
        self.mlp = self.make_mlp(m, family)

    def use(self, ops: Ops) -> None:
        """Replace the ops. If the parameters are replaced too, call this afterwards."""
        self.ops = ops

    @classmethod
    def op_table(cls, m: ModelConfig, family: Family) -> tuple[OpSpec, ...]:
        """Return the ops in the order they run."""
        return *cls.attention_ops(m, family), *cls.mlp_ops(m, family)

    @classmethod
    def attention_ops(cls, m: ModelConfig, family: Family) -> tuple[OpSpec, ...]:
        products = 2 * m.num_attention_heads * resolved(m.head_dim)  # scores, and the sum of the values
        return (
            OpSpec("qkv_proj", (("self_attn.q_proj", "self_attn.k_proj"), ("self_attn.v_proj",))),
            OpSpec(CORE, outputs=("heads",), multiply_adds_a_key=products, joins=Joins.POSITIONS),
            OpSpec("o_proj", (("self_attn.o_proj",),), joins=Joins.SLICES, to_stream=True),
        )

    @classmethod
    def head_rows(cls, m: ModelConfig) -> tuple[HeadRows, HeadRows]:
        """Return how logits depend on the rows of the query projection, and of the key projection."""
        half = ((resolved(m.head_dim), 0.5),)
        return HeadRows("self_attn.q_proj", half), HeadRows("self_attn.k_proj", half)

    @classmethod
    def mlp_ops(cls, m: ModelConfig, family: Family) -> tuple[OpSpec, ...]:
        return (
            OpSpec("gate_up_proj", (("mlp.gate_proj", "mlp.up_proj"),)),
            OpSpec(OUTPUT, (("mlp.down_proj",),), joins=Joins.SLICES, to_stream=True, last=True),
        )

    def make_attention(self, m: ModelConfig, family: Family) -> nn.Module:
        a, bias = nn.Module(), family.qkv_bias(m)
        a.q_proj = Weights(m, "heads", "embed", bias=bias)
        a.k_proj = Weights(m, "kv_heads", "embed", bias=bias)
        a.v_proj = Weights(m, "kv_heads", "embed", bias=bias)
        a.o_proj = Weights(m, "embed", "heads", bias=family.o_bias(m))
        of_head, of_all = family.qk_norm, family.qk_norm_of_all_heads
        a.q_norm = Weights(m, "heads" if of_all else "head_dim") if of_head or of_all else None
        a.k_norm = Weights(m, "kv_heads" if of_all else "head_dim") if of_head or of_all else None
        return a

    def make_mlp(self, m: ModelConfig, family: Family) -> nn.Module:
        mlp, bias = nn.Module(), family.mlp_bias(m)
        mlp.gate_proj = Weights(m, "mlp", "embed", bias=bias)
        mlp.up_proj = Weights(m, "mlp", "embed", bias=bias)
        mlp.down_proj = Weights(m, "embed", "mlp", bias=bias)
        return mlp

    def forward(self, x_NE: Tensor, ctx: Context) -> Tensor:
        x_NE = x_NE + self.attention(self.norm(x_NE, self.input_layernorm), ctx)
        return x_NE + self.feed_forward(self.norm(x_NE, self.post_attention_layernorm))

    def norm(self, x: Tensor, norm: Weights) -> Tensor:
        return rms_norm(x, norm.weight, self.m.rms_norm_eps)

    def linear(self, x: Tensor, *projections: Weights) -> tuple[Tensor, ...]:
        return self.ops.linear(x, [p.weight for p in projections], [p.bias for p in projections])

    def attention(self, x_NE: Tensor, ctx: Context) -> Tensor:
        a, (B, T) = self.self_attn, ctx.tokens.shape
        q, k, v = self.linear(x_NE, a.q_proj, a.k_proj, a.v_proj)
        if self.norms_all_heads:
            q, k = (self.ops.norm_of_heads(y, n.weight, self.m.rms_norm_eps) for y, n in ((q, a.q_norm), (k, a.k_norm)))
        if (most := self.m.clip_qkv) is not None:
            q, k, v = (y.clamp(-most, most) for y in (q, k, v))
        # -1: with tp a rank holds only some of the heads, and the weights' shapes determine how many
        q, k, v = (y.view(B, T, -1, self.m.head_dim) for y in (q, k, v))
        if a.q_norm is not None and not self.norms_all_heads:
            q, k = self.norm(q, a.q_norm), self.norm(k, a.k_norm)
        if ctx.rope is not None:
            q, k = rotate(q, k, ctx.rope)
        out_BTHD = self.ops.core(q, k, v, ctx, self.largest_H)
        return self.linear(out_BTHD.reshape(B * T, -1), a.o_proj)[0]

    def feed_forward(self, x_NE: Tensor) -> Tensor:
        gate_NF, up_NF = self.linear(x_NE, self.mlp.gate_proj, self.mlp.up_proj)
        return self.linear(swiglu(gate_NF, up_NF), self.mlp.down_proj)[0]
