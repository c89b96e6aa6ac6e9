"""FLOPs of a model, counted from the shapes that its modules declare. MFU, stage balance and the planner use them.

Every function takes a resolved `ModelConfig` (`head_dim` set). Legend of the formulas: E hidden_size,
F intermediate_size, L num_hidden_layers, H query heads, K key/value heads, Q head_dim, V vocab_size, T seq_len.

A multiply-add is two FLOPs. Norms, RoPE, softmax and the optimizer are not counted. Layers of one model may differ
(some have experts), so functions about a block take the `index` of its layer. FLOPs count only the experts that a token
goes to. Parameter counts include all experts.
"""

import math
from collections.abc import Callable, Sequence

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.model.block import dim_elements
from ndtrain.model.families import family_of
from ndtrain.model.spec import Role
from ndtrain.model.transformer import block_ops, block_params, kinds

# ----------------------------------------------------------------------------------------------------- parameters


def block_shapes(m: ModelConfig, index: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a block. Names are relative to the block."""
    sizes = dim_elements(m)
    return {p.name: tuple(sizes[d] for d in p.dims) for p in block_params(m, index)}


def block_matmul_parameters(m: ModelConfig, index: int = 0) -> int:
    """Return the number of weights of one block that a token is multiplied by: only the token's own experts count."""
    return sum(op.multiply_adds for op in block_ops(m, index))


def block_parameters(m: ModelConfig, index: int = 0) -> int:
    """Return the number of parameters of one block: matrices, norms and biases."""
    return sum(math.prod(shape) for shape in block_shapes(m, index).values())


def expert_parameters(m: ModelConfig) -> int:
    """Return the number of parameters of all routed experts in the model."""
    sizes = dim_elements(m)
    of_experts = lambda i: (p.dims for p in block_params(m, i) if p.expert is not None)
    return over_layers(m, lambda i: sum(math.prod(sizes[d] for d in dims) for dims in of_experts(i)))


def hidden_parameters(m: ModelConfig) -> int:
    """Return the number of parameters of all hidden matrices, including the experts' matrices."""

    def of_block(i: int) -> int:
        table, sizes = block_params(m, i), dim_elements(m)
        return sum(math.prod(sizes[d] for d in p.dims) for p in table if p.role is Role.HIDDEN)

    return over_layers(m, of_block)


def over_layers(m: ModelConfig, of_block: Callable[[int], int]) -> int:
    """Sum a quantity over all layers, evaluating it for one layer of each kind."""
    return sum(len(layers) * of_block(layers[0]) for layers in kinds(m).values())


def embedding_parameters(m: ModelConfig) -> int:
    """Return V E, the parameters of the embedding table. An untied head has the same number."""
    return m.vocab_size * m.hidden_size


def parameter_count(m: ModelConfig) -> int:
    """Return the model's number of parameters. A tied head counts once. Padding of the vocabulary does not count."""
    tables = 1 if m.tie_word_embeddings else 2
    return over_layers(m, lambda i: block_parameters(m, i)) + tables * embedding_parameters(m) + m.hidden_size


def matmul_parameters(m: ModelConfig) -> int:
    """Return N_matmul, the number of weights a token is multiplied by. The head counts, tied or not. The embedding is a
    lookup and does not count."""
    return over_layers(m, lambda i: block_matmul_parameters(m, i)) + embedding_parameters(m)


# ----------------------------------------------------------------------------------------------------------- FLOPs


def op_flops(m: ModelConfig, seq_len: int, index: int = 0) -> dict[str, int]:
    """Return the forward FLOPs per token of each op of a block with FLOPs, in the order they run.

    A weight costs 2 FLOPs. The attention core costs 4 H Q T (scores and values over all T keys, not halved), or
    2 H (Q + V) T if a value has V elements.
    """
    return {op.name: flops for op in block_ops(m, index) if (flops := op.flops(seq_len))}


def block_flops(m: ModelConfig, seq_len: int, index: int = 0) -> int:
    """Return the forward FLOPs per token of one block: 2 N_block + 4 H Q T."""
    return sum(op_flops(m, seq_len, index).values())


def recompute_flops(m: ModelConfig, seq_len: int, skipped_ops: frozenset[str], index: int = 0) -> int:
    """Return the forward FLOPs per token of a block's recompute, which skips the ops `skipped_ops`."""
    return sum(flops for op, flops in op_flops(m, seq_len, index).items() if op not in skipped_ops)


def elementwise_values(m: ModelConfig, index: int = 0) -> int:
    """Return the number of values per token that a block's forward reads or writes outside its ops.

    These are two norms (2 E each), two additions to the stream (3 E each), RoPE of queries and keys (2 each), and
    SwiGLU (2 F and 3 F). If a token goes to k experts, its k copies (2 k E) and the k SwiGLUs count. Sorting and
    summing the k outputs adds 4 k E."""
    rotated = (m.num_attention_heads + m.num_key_value_heads) * m.head_dim
    common = 10 * m.hidden_size + 2 * rotated
    moe = family_of(m).moe
    if moe is None or not moe.is_sparse(m, index):
        return common + 5 * m.intermediate_size
    widths = moe.dim_sizes(m)
    of_experts = resolved(m.num_experts_per_tok) * (6 * m.hidden_size + 5 * widths["expert_mlp"][0])
    return common + of_experts + 5 * widths["shared_mlp"][0]


def head_flops(m: ModelConfig) -> int:
    """Return the forward FLOPs per token of the output projection: 2 V E."""
    return 2 * embedding_parameters(m)


def flops_per_token(m: ModelConfig, seq_len: int) -> int:
    """Return the model FLOPs per token of one training step, which MFU counts: 6 N_matmul + 12 L H Q T.

    The backward costs twice the forward.
    """
    return 3 * (over_layers(m, lambda i: block_flops(m, seq_len, i)) + head_flops(m))


def hardware_flops_per_token(
    m: ModelConfig, seq_len: int, skipped_ops: Sequence[frozenset[str] | None], look_ahead: bool = False
) -> float:
    """Return the FLOPs per token that a training step executes, which HFU counts.

    They are the model's FLOPs plus the repeated forwards: recompute, and the forward that looks ahead. These repeat
    only blocks and never the head, because its gradients are computed in the forward.

    Args:
        skipped_ops: for some of the blocks, the ops that each block's recompute skips (see `parallel/recompute.py`).
            None: the block is not recomputed. The average over these blocks is taken for the whole model.
        look_ahead: whether a forward of all blocks comes first (`moe.balance=hf`).
    """
    run_again = [ops for ops in skipped_ops if ops is not None]
    again = sum(over_layers(m, lambda i, ops=ops: recompute_flops(m, seq_len, ops, i)) for ops in run_again)
    ahead = over_layers(m, lambda i: block_flops(m, seq_len, i)) if look_ahead else 0
    return flops_per_token(m, seq_len) + ahead + (again / len(skipped_ops) if skipped_ops else 0)
