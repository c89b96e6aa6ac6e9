"""A Llama-family decoder under Hugging Face's parameter names: plain PyTorch on one device.

Every weight matmul goes through `Ops.linear`. The embedding, the attention core, and the head with its loss are one
call each. Parallelism replaces these calls and leaves this file unchanged.

The residual stream is [N, E]: the tokens of a microbatch, its rows concatenated. Under sequence parallelism it is a
shard of these tokens.

Shape legend: B batch, T time, N tokens of the residual stream, E hidden_size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ndtrain.config import ModelConfig
from ndtrain.config.registry import get, names
from ndtrain.config.schema import resolved
from ndtrain.model.attention.custom_op import handle
from ndtrain.model.attention.mods import attention_mod
from ndtrain.model.attention.scores import Scores, alibi_slopes
from ndtrain.model.block import Block, Context, HeadRows, Ops, Weights, declared, dim_elements
from ndtrain.model.families import family_of
from ndtrain.model.latent_block import LatentBlock, LatentMoEBlock
from ndtrain.model.moe.block import MoEBlock
from ndtrain.model.norm import rms_norm
from ndtrain.model.rope import inverse_frequencies, rope_table, table_factor
from ndtrain.model.spec import Dims, Init, OpSpec, Param, Role
from ndtrain.model.vocabulary import Targets

EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
BLOCKS = ("block", "sparse")  # the kinds of segments that are blocks: without experts, with experts
_BIAS = "selection_bias."  # prefix of a selection bias's name, before the name of its layer

# ------------------------------------------------------------------------------------------------- kinds of blocks


def is_sparse(m: ModelConfig, index: int) -> bool:
    """Return True if layer `index` has experts."""
    moe = family_of(m).moe
    return moe is not None and moe.is_sparse(m, index)


def sparse_layers(m: ModelConfig) -> list[int]:
    """Return the indices of the layers that have experts."""
    return [i for i in range(m.num_hidden_layers) if is_sparse(m, i)]


def block_class(m: ModelConfig, index: int) -> type[Block]:
    """Return the class of the block of layer `index`."""
    if family_of(m).latent_attention:
        return LatentMoEBlock if is_sparse(m, index) else LatentBlock
    return MoEBlock if is_sparse(m, index) else family_of(m).block or Block


def kinds(m: ModelConfig) -> dict[type[Block], list[int]]:
    """Return the layers of each kind of block. The kinds are in the order of their first layers."""
    of_kind: dict[type[Block], list[int]] = {}
    for i in range(m.num_hidden_layers):
        of_kind.setdefault(block_class(m, i), []).append(i)
    return of_kind


def make_block(m: ModelConfig, ops: Ops, index: int, experts: range | None = None) -> Block:
    """Return the block of layer `index`, holding only `experts`. None: all experts."""
    return block_class(m, index)(m, family_of(m), ops, experts)


# -------------------------------------------------------------------------------------------- parameters and ops


def op_table(m: ModelConfig, index: int = 0) -> tuple[OpSpec, ...]:
    """Return the ops of layer `index` in the order they run, as its block class declares them."""
    return block_class(m, index).op_table(m, family_of(m))


def all_ops(m: ModelConfig) -> list[OpSpec]:
    """Return the ops of every kind of block, as its class declares them."""
    return [op for layers in kinds(m).values() for op in op_table(m, layers[0])]


def block_ops(m: ModelConfig, index: int = 0) -> list[OpSpec]:
    """Return the ops of layer `index` in the order they run. `outputs` and `multiply_adds` follow from their weights.

    Raises:
        ValueError: an op names a projection that the block does not have.
    """
    dims, sizes = {p.name: p.dims for p in block_params(m, index)}, dim_elements(m)
    return [_with_sizes(op, m, dims, sizes) if op.projections else op for op in op_table(m, index)]


def _with_sizes(op: OpSpec, m: ModelConfig, dims: dict[str, Dims], sizes: dict[str, int]) -> OpSpec:
    if absent := next((name for name in op.weights if name not in dims), None):
        raise ValueError(f"op {op.name}: the block has no {absent}: correct its projections")
    matrices = [dims[name] for name in op.weights]
    weights = sum(math.prod(sizes[d] for d in matrix) for matrix in matrices)
    if op.routed:  # all experts have the same shapes. A token goes to some of the experts, a row to one of them
        experts = resolved(m.num_experts)
        weights, matrices = weights * resolved(m.num_experts_per_tok) // experts, matrices[: len(matrices) // experts]
    return replace(op, multiply_adds=weights, outputs=tuple(matrix[0] for matrix in matrices))


def block_params(m: ModelConfig, index: int = 0) -> list[Param]:
    """Return the parameters of layer `index`, collected from its block. Names and units are relative to the block.

    They are in the order of the modules, but the experts' matrices come last, grouped by the matmul that reads them."""
    ops, experts = op_table(m, index), moe.experts if (moe := family_of(m).moe) else ""
    op_of, sizes = {name: op for op in ops for name in op.weights}, dim_elements(m)
    params = {}
    with torch.device("meta"):
        block = make_block(m, Ops(), index)
    for name, dims, init, expert in declared(block):
        op, unit = op_of.get(name), "" if expert is None else experts
        init = Init.TO_STREAM if op and op.to_stream else init
        role = _role(op, [sizes[d] for d in dims])
        params[name] = Param(name, dims, unit, index, expert, op.name if op else None, init, role)
    stacked = [params.pop(name) for op in ops if op.routed for name in op.weights]
    return [*params.values(), *stacked]


def _role(op: OpSpec | None, shape: Sequence[int]) -> Role:
    if op is None:
        return Role.OTHER
    return Role.READOUT if op.wide or min(shape) == 1 else Role.HIDDEN


def params(m: ModelConfig) -> dict[str, Param]:
    """Return every parameter of the model by name, in order."""
    of_kind = {kind: block_params(m, layers[0]) for kind, layers in kinds(m).items()}
    table = [Param(f"{EMBED}.weight", ("vocab", "embed"), EMBED)]
    for i in range(m.num_hidden_layers):
        at, units = layer(i), layer_units(m, i)
        for p in of_kind[block_class(m, i)]:
            table.append(p._replace(name=f"{at}.{p.name}", unit=units[p.expert is not None], layer=i))
    table.append(Param(f"{NORM}.weight", ("embed",), NORM, init=Init.ONES))
    if not m.tie_word_embeddings:
        table.append(Param(f"{HEAD}.weight", ("vocab", "embed"), HEAD, role=Role.READOUT))
    return {p.name: p for p in table}


def head_rows(m: ModelConfig) -> dict[str, tuple[int, HeadRows]]:
    """Return, for each parameter of a projection of queries or keys, (index of its layer, the rows of its heads)."""
    table = {}
    for kind, layers in kinds(m).items():
        rows = {rows.projection: rows for rows in kind.head_rows(m)}
        for p in block_params(m, layers[0]):
            if (projection := p.name.rpartition(".")[0]) in rows:
                table |= {f"{layer(i)}.{p.name}": (i, rows[projection]) for i in layers}
    return table


def names_of(table: Mapping[str, Param], role: Role) -> frozenset[str]:
    """Return the names of the parameters that have a role."""
    return frozenset(name for name, p in table.items() if p.role is role)


def tensor_dims(m: ModelConfig) -> dict[str, Dims]:
    """Return the named dims of every parameter, in order. Keys are Hugging Face names."""
    return {name: p.dims for name, p in params(m).items()}


def tensor_shapes(m: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, in order. Keys are Hugging Face names."""
    sizes = dim_elements(m)
    return {name: tuple(sizes[d] for d in dims) for name, dims in tensor_dims(m).items()}


def bias_names(m: ModelConfig) -> dict[str, str]:
    """Return the selection biases of the model: name in a checkpoint -> stem of the files that hold it.

    Each layer with experts has one. If the family's model files have no place for it, the optimizer's files hold it."""
    moe, layers = family_of(m).moe, sparse_layers(m)
    if moe is None or moe.bias is None:
        return {_BIAS + layer(i): "optimizer" for i in layers}
    return {f"{layer(i)}.{moe.bias}": "model" for i in layers}


def is_selection_bias(name: str) -> bool:
    """Return True if `name` is the name of a selection bias in the checkpoints of any family."""
    mixtures = [moe for moe in (get("family", f).moe for f in names("family")) if moe is not None and moe.bias]
    return name.startswith(_BIAS) or any(name.endswith(f".{moe.bias}") for moe in mixtures)


def fused_names(m: ModelConfig) -> list[tuple[str, ...]]:
    """Return groups of names: the weights of a group can share one matmul if their rows are contiguous in memory."""
    of_kind = [(layers, op.projections) for layers in kinds(m).values() for op in op_table(m, layers[0])]
    return [
        tuple(f"{layer(i)}.{projection}.weight" for projection in neighbours)
        for layers, projections in of_kind
        for neighbours in projections
        if len(neighbours) > 1
        for i in layers
    ]


def layer(i: int) -> str:
    return f"model.layers.{i}"


def layer_units(m: ModelConfig, i: int) -> tuple[str, ...]:
    """Return the units of a layer. Its experts are a separate unit, because different ranks may shard them."""
    if not is_sparse(m, i):
        return (layer(i),)
    return layer(i), f"{layer(i)}.{resolved(family_of(m).moe).experts}"


# ------------------------------------------------------------------------------------------------------------ stages


@dataclass(frozen=True)
class Segment:
    """One step of a stage's forward: `run(x, ctx) -> x`. The embedding gets x = None. The head returns the loss,
    followed by the objective's other sums.

    Attributes:
        units: the units whose parameters it reads.
        kind: "embed", "block", "sparse" (a block with experts), "norm" or "head".
        weight_in_backward: whether its backward reads the parameters again.
    """

    units: tuple[str, ...]
    run: Callable[[Tensor | None, Context], Tensor]
    kind: str = BLOCKS[0]
    weight_in_backward: bool = True

    @property
    def is_block(self) -> bool:
        return self.kind in BLOCKS


class Transformer(nn.Module):
    """One stage of the model: the blocks of `layers`, the embedding if `first`, the final norm and the head if `last`.
    The default is the whole model.

    Parameters have the names of the whole model, whichever layers the stage holds. A last stage with tied embeddings
    holds a copy of the embedding, under the embedding's name.

    Args:
        layers: indices of the blocks. None: all layers.
        loss_chunk: number of tokens whose logits exist at a time.
        experts: indices of the experts that each block holds. None: all experts.
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
        self.kernel: str | None = None  # the attention kernel on a GPU, as in `Scores.kernel`
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
        """Replace the ops in the stage and in all its blocks."""
        self.ops = ops
        for block in self.model.layers.values():
            block.use(ops)

    def use_biases(self, bias_LX: Tensor) -> None:
        """Set the selection bias of each block with experts to a view of its row of `bias_LX`, the whole model's."""
        for bias_X, i in zip(bias_LX, sparse_layers(self.m), strict=True):
            if str(i) in self.model.layers:
                self.model.layers[str(i)].selection_bias = bias_X

    @property
    def head(self) -> Weights:
        return self.model.embed_tokens if self.m.tie_word_embeddings else self.lm_head

    def segments(self) -> list[Segment]:
        """Return the stage's forward as a list of segments, in order."""
        segments = []
        if self.first:
            segments.append(Segment((EMBED,), self._embed, "embed", weight_in_backward=False))
        for i, block in self.model.layers.items():
            segments.append(Segment(layer_units(self.m, int(i)), block, BLOCKS[is_sparse(self.m, int(i))]))
        if self.last:
            segments.append(Segment((NORM,), self._final_norm, "norm"))
            segments.append(Segment((EMBED if self.m.tie_word_embeddings else HEAD,), self._head_loss, "head"))
        return segments

    def _embed(self, x: None, ctx: Context) -> Tensor:
        return self.ops.embedding(ctx.tokens, self.model.embed_tokens.weight)

    def _final_norm(self, x_NE: Tensor, ctx: Context) -> Tensor:
        return rms_norm(x_NE, self.model.norm.weight, self.m.rms_norm_eps)

    def _head_loss(self, x_NE: Tensor, ctx: Context) -> Tensor:
        return self.ops.head_loss(x_NE, self.head.weight, ctx.targets, ctx.loss_scale(), self.loss_chunk)

    def context(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        dtype: torch.dtype,
        loss_scale: Callable[[], Tensor] | None = None,
        positions: Tensor | None = None,
        documents: tuple[tuple[int, ...], ...] | None = None,
        columns: Mapping[str, Tensor] | None = None,
    ) -> Context:
        """Return the context of a microbatch.

        Args:
            dtype: the compute precision (rotary tables are fp32 or wider).
            loss_scale: returns the factor of the loss. None: the factor is 1.
            positions: [T] or [B, T], each token's position in its document. None: 0 to T - 1.
            documents: for each row, where documents start in the whole sequence. None: each row is one document.
            columns: further data that the objective reads, each [B, T, ...].
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
        return Context(tokens_BT, Targets(labels_BT, columns or {}), rope, loss_scale or one, scores, handle(scores))

    def _rope(self, positions: Tensor | None, length: int, device: torch.device, dtype: torch.dtype):
        """Return the rotary table for the given positions. The table for 0 to `length` - 1 is cached."""
        if positions is not None:
            return rope_table(positions, inverse_frequencies(self.m, device), dtype, table_factor(self.m))
        key = length, device, dtype
        if key not in self._ropes:
            self._ropes[key] = self._rope(torch.arange(length, device=device), *key)
        return self._ropes[key]

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return the summed loss over the tokens with a label. For a single process that holds the whole model."""
        x, ctx = None, self.context(tokens_BT, labels_BT, self.head.weight.dtype)
        for segment in self.segments():
            x = segment.run(x, ctx)
        return x[0]

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits [B, T, V], to inspect a model. Training never materialises all of them."""
        x, ctx = None, self.context(tokens_BT, tokens_BT, self.head.weight.dtype)
        for segment in self.segments()[:-1]:
            x = segment.run(x, ctx)
        return self.ops.linear(x, [self.head.weight], [None])[0].view(*tokens_BT.shape, -1)
