"""A Llama-family decoder under Hugging Face's parameter names: plain PyTorch on one device.

Every weight matmul goes through `Ops.linear`, the embedding, the attention core and head + loss through one call
each; parallelism replaces those calls and never this file. The dim table at the top is the only other thing it needs.

The residual stream is [N, E]: a microbatch's tokens, row behind row, or a share of them.

Shape legend: B batch, T time, N tokens of the stream, E hidden_size, H query heads, K key/value heads, D head_dim,
F intermediate_size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.config import ModelConfig
from ndtrain.model.attention.core import local_core
from ndtrain.model.attention.custom_op import handle
from ndtrain.model.attention.scores import Scores, alibi_slopes
from ndtrain.model.loss import head_loss
from ndtrain.model.norm import rms_norm
from ndtrain.model.rope import inverse_frequencies, rope_table, rotate
from ndtrain.model.swiglu import swiglu

# ------------------------------------------------------------------------------------------- the table of named dims

_BLOCK = {
    "input_layernorm.weight": ("embed",),
    "self_attn.q_proj.weight": ("heads", "embed"),
    "self_attn.k_proj.weight": ("kv_heads", "embed"),
    "self_attn.v_proj.weight": ("kv_heads", "embed"),
    "self_attn.o_proj.weight": ("embed", "heads"),
    "post_attention_layernorm.weight": ("embed",),
    "mlp.gate_proj.weight": ("mlp", "embed"),
    "mlp.up_proj.weight": ("mlp", "embed"),
    "mlp.down_proj.weight": ("embed", "mlp"),
}
# weights of one input whose outputs are also read together: as one matrix they need one product
_FUSED = (("self_attn.q_proj", "self_attn.k_proj"), ("mlp.gate_proj", "mlp.up_proj"))
_QKV_BIAS = {f"self_attn.{p}_proj.bias": (dim,) for p, dim in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))}
_O_BIAS = {"self_attn.o_proj.bias": ("embed",)}
_MLP_BIAS = {f"mlp.{p}_proj.bias": (dim,) for p, dim in (("gate", "mlp"), ("up", "mlp"), ("down", "embed"))}
_QK_NORM = {f"self_attn.{p}_norm.weight": ("head_dim",) for p in ("q", "k")}

EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def _block_dims(m: ModelConfig) -> dict[str, tuple[str, ...]]:
    qwen2 = m.model_type == "qwen2"  # biases q, k and v but not the output
    return (
        _BLOCK
        | (_QKV_BIAS if qwen2 or m.attention_bias else {})
        | (_O_BIAS if m.attention_bias and not qwen2 else {})
        | (_MLP_BIAS if m.mlp_bias else {})
        | (_QK_NORM if m.model_type == "qwen3" else {})
    )


def tensor_dims(m: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Every parameter of the model, in order: Hugging Face name -> named dims."""
    table: dict[str, tuple[str, ...]] = {f"{EMBED}.weight": ("vocab", "embed")}
    for i in range(m.num_hidden_layers):
        table |= {f"{layer(i)}.{name}": dims for name, dims in _block_dims(m).items()}
    table[f"{NORM}.weight"] = ("embed",)
    if not m.tie_word_embeddings:
        table[f"{HEAD}.weight"] = ("vocab", "embed")
    return table


def fused_names(m: ModelConfig) -> list[tuple[str, ...]]:
    """The names of weights that one product may serve, where their rows lie one behind the other."""
    return [
        tuple(f"{layer(i)}.{leaf}.weight" for leaf in leaves) for i in range(m.num_hidden_layers) for leaves in _FUSED
    ]


def dim_sizes(m: ModelConfig) -> dict[str, tuple[int, int]]:
    """Named dim -> (units that may be cut apart, elements per unit)."""
    return {
        "vocab": (m.vocab_size, 1),
        "embed": (m.hidden_size, 1),
        "mlp": (m.intermediate_size, 1),
        "heads": (m.num_attention_heads, m.head_dim),
        "kv_heads": (m.num_key_value_heads, m.head_dim),
        "head_dim": (m.head_dim, 1),
    }


def tensor_shapes(m: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, in order: Hugging Face name -> shape."""
    return _shapes(m, tensor_dims(m))


def layer(i: int) -> str:
    return f"model.layers.{i}"


def unit_of(name: str) -> str:
    """The unit (embedding, one block, final norm, head) that a parameter belongs to."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[1] == "layers" else name.rpartition(".")[0]


# ----------------------------------------------------------------------------------------------- the replaceable ops


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """x @ w.T + b for each weight [out, in]: q/k/v and gate/up come together because they share x."""
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def embedding(tokens_BT: Tensor, weight_VE: Tensor) -> Tensor:
    """The stream [N, E] of some tokens."""
    return F.embedding(tokens_BT.flatten(), weight_VE)


@dataclass(frozen=True)
class Ops:
    """The calls that parallelism may replace; the defaults are what they say on one device."""

    linear: Callable = linear
    embedding: Callable = embedding  # (tokens [B, T], weight [V, E]) -> [N, E]
    core: Callable = local_core  # (q [B, T, H, D], k and v [B, T, K, D], ctx) -> [B, T, H, D]
    head_loss: Callable = head_loss  # (x [N, E], weight [V, E], labels [B, T], scale, chunk) -> scalar


class Context(NamedTuple):
    """What a microbatch carries beside its activations.

    Attributes:
        tokens: [B, T] ids. labels: [B, T] ids, -100 where nothing is predicted.
        rope: cos and sin for the tokens' positions; None where the model does not rotate.
        loss_scale: gives what the sum of token losses is multiplied with, when the loss is reached.
        scores: what attention scores go through beside the causal mask.
        ticket: what a compiled graph finds the scores by.
    """

    tokens: Tensor
    labels: Tensor
    rope: tuple[Tensor, Tensor] | None
    loss_scale: Callable[[], Tensor]
    scores: Scores
    handle: Tensor


# ------------------------------------------------------------------------------------------------------- the modules


class Weights(nn.Module):
    """Parameters `weight` and perhaps `bias`, without a forward: the matmul is `Ops.linear`'s."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class Block(nn.Module):
    """Pre-norm attention and SwiGLU MLP (Shazeer, 2020, arXiv:2002.05202), each added to the residual stream."""

    def __init__(self, m: ModelConfig, ops: Ops):
        super().__init__()
        self.m, self.ops = m, ops
        shapes = _shapes(m, _block_dims(m))
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for path in dict.fromkeys(name.rpartition(".")[0] for name in shapes):
            parent, _, leaf = path.rpartition(".")
            own = {n.rpartition(".")[2]: s for n, s in shapes.items() if n.rpartition(".")[0] == path}
            (getattr(self, parent) if parent else self).add_module(leaf, Weights(own))

    def forward(self, x_NE: Tensor, ctx: Context) -> Tensor:
        x_NE = x_NE + self._attention(self._norm(x_NE, self.input_layernorm), ctx)
        return x_NE + self._mlp(self._norm(x_NE, self.post_attention_layernorm))

    def _norm(self, x: Tensor, norm: Weights) -> Tensor:
        return rms_norm(x, norm.weight, self.m.rms_norm_eps)

    def _linear(self, x: Tensor, *projections: Weights) -> tuple[Tensor, ...]:
        return self.ops.linear(x, [p.weight for p in projections], [p.bias for p in projections])

    def _attention(self, x_NE: Tensor, ctx: Context) -> Tensor:
        a, (B, T) = self.self_attn, ctx.tokens.shape
        # -1: how many heads are here follows from the weights
        q, k, v = [y.view(B, T, -1, self.m.head_dim) for y in self._linear(x_NE, a.q_proj, a.k_proj, a.v_proj)]
        if self.m.model_type == "qwen3":
            q, k = self._norm(q, a.q_norm), self._norm(k, a.k_norm)
        if ctx.rope is not None:
            q, k = rotate(q, k, ctx.rope)
        out_BTHD = self.ops.core(q, k, v, ctx)
        return self._linear(out_BTHD.reshape(B * T, -1), a.o_proj)[0]

    def _mlp(self, x_NE: Tensor) -> Tensor:
        gate_NF, up_NF = self._linear(x_NE, self.mlp.gate_proj, self.mlp.up_proj)
        return self._linear(swiglu(gate_NF, up_NF), self.mlp.down_proj)[0]


def _shapes(m: ModelConfig, dims: dict[str, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    sizes = {d: units * width for d, (units, width) in dim_sizes(m).items()}
    return {name: tuple(sizes[d] for d in named) for name, named in dims.items()}


@dataclass(frozen=True)
class Segment:
    """One step of a stage's forward: `run(x, ctx) -> x` (x is None into the embedding, a loss out of the head).

    Attributes:
        unit: the unit whose parameters it reads.
        weight_in_backward: whether its backward reads them again.
    """

    unit: str
    run: Callable[[Tensor | None, Context], Tensor]
    weight_in_backward: bool = True


class Transformer(nn.Module):
    """One stage: the blocks `layers`, with the embedding if `first`, with final norm and head if `last`.

    Parameter names are those of the whole model, whatever the stage holds. A last stage with tied embeddings holds a
    copy under the embedding's name.
    """

    def __init__(
        self,
        m: ModelConfig,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
        loss_chunk: int = 1024,
    ):
        super().__init__()
        self.m, self.ops, self.loss_chunk = m, Ops(), loss_chunk
        self.first, self.last = first, last
        self.kernel: str | None = None  # of attention on a GPU, as `Scores.kernel`
        self._ropes: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        shapes = tensor_shapes(m)
        tied = m.tie_word_embeddings
        self.model = nn.Module()
        if first or (last and tied):
            self.model.embed_tokens = Weights({"weight": shapes[f"{EMBED}.weight"]})
        indices = range(m.num_hidden_layers) if layers is None else layers
        self.model.layers = nn.ModuleDict({str(i): Block(m, self.ops) for i in indices})
        if last:
            self.model.norm = Weights({"weight": shapes[f"{NORM}.weight"]})
            if not tied:
                self.lm_head = Weights({"weight": shapes[f"{HEAD}.weight"]})

    def use(self, ops: Ops) -> None:
        """Replaces the calls."""
        self.ops = ops
        for block in self.model.layers.values():
            block.ops = ops

    @property
    def head(self) -> Weights:
        return self.model.embed_tokens if self.m.tie_word_embeddings else self.lm_head

    def segments(self) -> list[Segment]:
        """The stage's forward as a list, in order."""
        found = []
        if self.first:
            found.append(Segment(EMBED, self._embed, weight_in_backward=False))
        for i, block in self.model.layers.items():
            found.append(Segment(layer(int(i)), block))
        if self.last:
            found.append(Segment(NORM, self._final_norm))
            found.append(Segment(EMBED if self.m.tie_word_embeddings else HEAD, self._head_loss))
        return found

    def _embed(self, x: None, ctx: Context) -> Tensor:
        return self.ops.embedding(ctx.tokens, self.model.embed_tokens.weight)

    def _final_norm(self, x_NE: Tensor, ctx: Context) -> Tensor:
        return rms_norm(x_NE, self.model.norm.weight, self.m.rms_norm_eps)

    def _head_loss(self, x_NE: Tensor, ctx: Context) -> Tensor:
        return self.ops.head_loss(x_NE, self.head.weight, ctx.labels, ctx.loss_scale(), self.loss_chunk)

    def context(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        dtype: torch.dtype,
        loss_scale: Callable[[], Tensor] | None = None,
        positions: Tensor | None = None,
        documents: tuple[tuple[int, ...], ...] | None = None,
    ) -> Context:
        """A microbatch's context.

        Args:
            dtype: the compute precision (rotary tables are fp32 or wider).
            loss_scale: gives the factor of the loss; None: it is the plain sum.
            positions: [T] or [B, T], each token's place in its document; None: 0 to T - 1.
            documents: per row, where documents start in the whole sequence; None: each row is one.
        """
        m, device = self.m, tokens_BT.device
        wide = torch.promote_types(dtype, torch.float32)
        rope = None if m.alibi else self._rope(positions, tokens_BT.shape[1], device, wide)
        slopes = alibi_slopes(m.num_attention_heads) if m.alibi else None
        scores = Scores(m.sliding_window, m.attn_logit_softcapping, slopes, documents, self.kernel)
        one = lambda: torch.ones((), dtype=wide, device=device)
        return Context(tokens_BT, labels_BT, rope, loss_scale or one, scores, handle(scores))

    def _rope(self, positions: Tensor | None, length: int, device: torch.device, dtype: torch.dtype):
        """The rotary table of some positions; that of all in order is made once."""
        if positions is not None:
            return rope_table(positions, inverse_frequencies(self.m, device), dtype)
        key = length, device, dtype
        if key not in self._ropes:
            self._ropes[key] = self._rope(torch.arange(length, device=device), *key)
        return self._ropes[key]

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """The sum of the losses over valid tokens, for one process that holds the whole model."""
        x, ctx = None, self.context(tokens_BT, labels_BT, self.head.weight.dtype)
        for segment in self.segments():
            x = segment.run(x, ctx)
        return x

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """[B, T, V], for looking at a model; training never makes them."""
        x, ctx = None, self.context(tokens_BT, tokens_BT, self.head.weight.dtype)
        for segment in self.segments()[:-1]:
            x = segment.run(x, ctx)
        return self.ops.linear(x, [self.head.weight], [None])[0].view(*tokens_BT.shape, -1)
