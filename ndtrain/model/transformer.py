"""A Llama-family decoder under Hugging Face's parameter names: plain PyTorch on one device.

Every weight matmul goes through `Ops.linear`, the embedding, the attention core and head + loss through one call each.
Parallelism replaces those calls and never this file.

The residual stream is [N, E]: a microbatch's tokens, row behind row; under sequence parallelism a shard of them.

Shape legend: B batch, T time, N tokens of the residual stream, E hidden_size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from ndtrain.config import ModelConfig
from ndtrain.config.registry import get, names
from ndtrain.config.schema import resolved
from ndtrain.model.attention.custom_op import handle
from ndtrain.model.attention.mods import attention_mod
from ndtrain.model.attention.scores import Scores, alibi_slopes
from ndtrain.model.block import Block, Context, Dims, Ops, Weights, declared_dims, dim_sizes
from ndtrain.model.families import family_of
from ndtrain.model.latent_block import LatentBlock, LatentMoEBlock
from ndtrain.model.moe.block import MoEBlock
from ndtrain.model.norm import rms_norm
from ndtrain.model.rope import inverse_frequencies, rope_table, table_factor

EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
_BIAS = "selection_bias."  # before the name of a layer

# -------------------------------------------------------------------------------------------- the table of named dims


def is_sparse(m: ModelConfig, index: int) -> bool:
    """Whether layer `index` has experts."""
    moe = family_of(m).moe
    return moe is not None and moe.is_sparse(m, index)


def sparse_layers(m: ModelConfig) -> list[int]:
    """The layers that have experts."""
    return [i for i in range(m.num_hidden_layers) if is_sparse(m, i)]


def block_class(m: ModelConfig, index: int) -> type[Block]:
    """The kind of layer `index`."""
    if family_of(m).latent_attention:
        return LatentMoEBlock if is_sparse(m, index) else LatentBlock
    return MoEBlock if is_sparse(m, index) else family_of(m).block or Block


def kinds(m: ModelConfig) -> dict[type[Block], list[int]]:
    """Each kind of block -> the layers that are of it, in the order of the first ones."""
    of_kind: dict[type[Block], list[int]] = {}
    for i in range(m.num_hidden_layers):
        of_kind.setdefault(block_class(m, i), []).append(i)
    return of_kind


def make_block(m: ModelConfig, ops: Ops, index: int, experts: range | None = None) -> Block:
    """The block of layer `index`, with some of its experts; None: all."""
    return block_class(m, index)(m, family_of(m), ops, experts)


def block_dims(m: ModelConfig, index: int = 0) -> dict[str, Dims]:
    """Every parameter of the block of layer `index`: name below the block -> named dims, collected from its modules in
    their order. What a grouped product serves comes one behind the other, after all else."""
    with torch.device("meta"):
        dims = dict(declared_dims(make_block(m, Ops(), index)))
    stacks = block_class(m, index).stacks(m, family_of(m))
    stacked = {f"{p}.weight": dims[f"{p}.weight"] for stack in stacks for p in chain.from_iterable(stack)}
    return {name: named for name, named in dims.items() if name not in stacked} | stacked


def tensor_dims(m: ModelConfig) -> dict[str, Dims]:
    """Every parameter of the model, in order: Hugging Face name -> named dims."""
    of_kind = {kind: block_dims(m, layers[0]) for kind, layers in kinds(m).items()}
    table: dict[str, Dims] = {f"{EMBED}.weight": ("vocab", "embed")}
    for i in range(m.num_hidden_layers):
        table |= {f"{layer(i)}.{name}": dims for name, dims in of_kind[block_class(m, i)].items()}
    table[f"{NORM}.weight"] = ("embed",)
    if not m.tie_word_embeddings:
        table[f"{HEAD}.weight"] = ("vocab", "embed")
    return table


def tensor_shapes(m: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, in order: Hugging Face name -> shape."""
    sizes = {d: units * width for d, (units, width) in dim_sizes(m).items()}
    return {name: tuple(sizes[d] for d in named) for name, named in tensor_dims(m).items()}


def bias_names(m: ModelConfig) -> dict[str, str]:
    """The selection bias of each layer with experts: its name in a checkpoint -> the stem of the files that hold it.
    Where a family's model files have no place for it, it stands beside the optimizer's state."""
    moe, layers = family_of(m).moe, sparse_layers(m)
    if moe is None or moe.bias is None:
        return {_BIAS + layer(i): "optimizer" for i in layers}
    return {f"{layer(i)}.{moe.bias}": "model" for i in layers}


def is_selection_bias(name: str) -> bool:
    """Whether a tensor of a checkpoint is one, by the names of all families."""
    mixtures = [moe for moe in (get("family", f).moe for f in names("family")) if moe is not None and moe.bias]
    return name.startswith(_BIAS) or any(name.endswith(f".{moe.bias}") for moe in mixtures)


def fused_names(m: ModelConfig) -> list[tuple[str, ...]]:
    """The names of weights that one matmul may serve, where their rows lie one behind the other."""
    family, fused = family_of(m), []
    for kind, layers in kinds(m).items():
        of_kind = [*kind.fused, *(tuple(chain.from_iterable(stack)) for stack in kind.stacks(m, family))]
        fused += [(i, projections) for i in layers for projections in of_kind]
    return [tuple(f"{layer(i)}.{p}.weight" for p in projections) for i, projections in fused]


def ops_of_weights(m: ModelConfig) -> dict[str, str]:
    """The weights of all blocks that a token is multiplied by: name -> the op (as in `flops.op_flops`) that does it."""
    family = family_of(m)
    of_kind = [(layers, kind.ops_projections(m, family)) for kind, layers in kinds(m).items()]
    return {
        f"{layer(i)}.{projection}.weight": op
        for layers, ops in of_kind
        for op, projections in ops.items()
        for projection in projections
        for i in layers
    }


def layer(i: int) -> str:
    return f"model.layers.{i}"


def unit_of(name: str) -> str:
    """The unit (embedding, one block, a block's experts, final norm, head) that a parameter belongs to."""
    parts = name.split(".")
    if parts[1] != "layers":
        return name.rpartition(".")[0]
    return ".".join(parts[: parts.index("experts") + 1] if "experts" in parts else parts[:3])


def expert_of(name: str) -> int | None:
    """Which expert of its layer a parameter belongs to; None: it is none's."""
    _, among, rest = name.partition(".experts.")
    return int(rest.partition(".")[0]) if among else None


def layer_units(m: ModelConfig, i: int) -> tuple[str, ...]:
    """The units of a layer. Experts are one of their own, since other ranks may shard them."""
    if not is_sparse(m, i):
        return (layer(i),)
    return layer(i), f"{layer(i)}.{resolved(family_of(m).moe).module}.experts"


# ------------------------------------------------------------------------------------------------------------ stages


@dataclass(frozen=True)
class Segment:
    """One step of a stage's forward: `run(x, ctx) -> x` (x is None into the embedding, a loss out of the head).

    Attributes:
        units: the units whose parameters it reads.
        weight_in_backward: whether its backward reads them again.
    """

    units: tuple[str, ...]
    run: Callable[[Tensor | None, Context], Tensor]
    weight_in_backward: bool = True

    @property
    def is_block(self) -> bool:
        return ".layers." in self.units[0]


class Transformer(nn.Module):
    """One stage: the blocks `layers` with the `experts` of each (None: all), with the embedding if `first`, with final
    norm and head if `last`.

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
        experts: range | None = None,
    ):
        super().__init__()
        self.m, self.ops, self.loss_chunk = m, Ops(), loss_chunk
        self.first, self.last = first, last
        self.kernel: str | None = None  # of attention on a GPU, as `Scores.kernel`
        self.mod = attention_mod(m)
        self._ropes: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        tied = m.tie_word_embeddings
        self.model = nn.Module()
        if first or (last and tied):
            self.model.embed_tokens = Weights(m, "vocab", "embed")
        indices = range(m.num_hidden_layers) if layers is None else layers
        self.model.layers = nn.ModuleDict({str(i): make_block(m, self.ops, i, experts) for i in indices})
        if last:
            self.model.norm = Weights(m, "embed")
            if not tied:
                self.lm_head = Weights(m, "vocab", "embed")

    def use(self, ops: Ops) -> None:
        """Replaces the calls."""
        self.ops = ops
        for block in self.model.layers.values():
            block.use(ops)

    def use_biases(self, bias_LX: Tensor) -> None:
        """Gives the stage's blocks with experts their selection biases, as views of those of the whole model."""
        for bias_X, i in zip(bias_LX, sparse_layers(self.m), strict=True):
            if str(i) in self.model.layers:
                self.model.layers[str(i)].selection_bias = bias_X

    @property
    def head(self) -> Weights:
        return self.model.embed_tokens if self.m.tie_word_embeddings else self.lm_head

    def segments(self) -> list[Segment]:
        """The stage's forward as a list, in order."""
        segments = []
        if self.first:
            segments.append(Segment((EMBED,), self._embed, weight_in_backward=False))
        for i, block in self.model.layers.items():
            segments.append(Segment(layer_units(self.m, int(i)), block))
        if self.last:
            segments.append(Segment((NORM,), self._final_norm))
            segments.append(Segment((EMBED if self.m.tie_word_embeddings else HEAD,), self._head_loss))
        return segments

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
        scores = Scores(
            window=m.sliding_window, softcap=m.attn_logit_softcapping, slopes=slopes, mod=self.mod, documents=documents,
            kernel=self.kernel,
        )  # fmt: skip
        one = lambda: torch.ones((), dtype=wide, device=device)
        return Context(tokens_BT, labels_BT, rope, loss_scale or one, scores, handle(scores))

    def _rope(self, positions: Tensor | None, length: int, device: torch.device, dtype: torch.dtype):
        """The rotary table of some positions; that of all in order is made once."""
        if positions is not None:
            return rope_table(positions, inverse_frequencies(self.m, device), dtype, table_factor(self.m))
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
