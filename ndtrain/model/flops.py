"""FLOPs of a model, counted from the shapes that its modules declare: what MFU, stage balance and prediction share.

Every function takes a resolved `ModelConfig` (`head_dim` set). Legend of the formulas: E hidden_size,
F intermediate_size, L num_hidden_layers, H query heads, K key/value heads, Q head_dim, V vocab_size, T seq_len.
A multiply-add is two FLOPs; norms, RoPE, softmax and the optimizer are not counted. Layers of one model may differ
(some have experts), so what is said of a block is said of that of layer `index`. Of experts those count as FLOPs that a
token goes to, and all of them as parameters.
"""

import math
from collections.abc import Callable, Sequence

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.model.block import dim_elements
from ndtrain.model.families import family_of
from ndtrain.model.transformer import block_ops, block_params, kinds

# ----------------------------------------------------------------------------------------------------- parameters


def block_shapes(m: ModelConfig, index: int = 0) -> dict[str, tuple[int, ...]]:
    """Every parameter of a block: name below the block -> shape."""
    sizes = dim_elements(m)
    return {p.name: tuple(sizes[d] for d in p.dims) for p in block_params(m, index)}


def block_matmul_parameters(m: ModelConfig, index: int = 0) -> int:
    """Weights of one block that a token is multiplied by: its matrices, of the experts those that it goes to."""
    return sum(op.multiply_adds for op in block_ops(m, index))


def block_parameters(m: ModelConfig, index: int = 0) -> int:
    """All parameters of one block: its matrices, norms and biases."""
    return sum(math.prod(shape) for shape in block_shapes(m, index).values())


def expert_parameters(m: ModelConfig) -> int:
    """All parameters of the experts that tokens are routed to."""
    sizes = dim_elements(m)
    of_experts = lambda i: (p.dims for p in block_params(m, i) if p.expert is not None)
    return over_layers(m, lambda i: sum(math.prod(sizes[d] for d in dims) for dims in of_experts(i)))


def over_layers(m: ModelConfig, of_block: Callable[[int], int]) -> int:
    """The sum of something over all layers, from its value for one layer of each kind."""
    return sum(len(layers) * of_block(layers[0]) for layers in kinds(m).values())


def embedding_parameters(m: ModelConfig) -> int:
    """V E: the embedding table, and as many in the head where that is untied."""
    return m.vocab_size * m.hidden_size


def parameter_count(m: ModelConfig) -> int:
    """Parameters of the whole model; a tied head counts once, padding of the vocabulary not at all."""
    tables = 1 if m.tie_word_embeddings else 2
    return over_layers(m, lambda i: block_parameters(m, i)) + tables * embedding_parameters(m) + m.hidden_size


def matmul_parameters(m: ModelConfig) -> int:
    """N_matmul: weights a token is multiplied by. The head counts, tied or not; the embedding is a look-up."""
    return over_layers(m, lambda i: block_matmul_parameters(m, i)) + embedding_parameters(m)


# ----------------------------------------------------------------------------------------------------------- FLOPs


def op_flops(m: ModelConfig, seq_len: int, index: int = 0) -> dict[str, int]:
    """Forward FLOPs a token of each op of a block that computes, in the order they run: 2 a weight, and for the
    attention core 4 H Q T (scores and values over all T keys, not halved), or 2 H (Q + V) T if a value has V elements.
    """
    return {op.name: flops for op in block_ops(m, index) if (flops := op.flops(seq_len))}


def block_flops(m: ModelConfig, seq_len: int, index: int = 0) -> int:
    """Forward FLOPs a token of one block: 2 N_block + 4 H Q T."""
    return sum(op_flops(m, seq_len, index).values())


def recompute_flops(m: ModelConfig, seq_len: int, skipped_ops: frozenset[str], index: int = 0) -> int:
    """Forward FLOPs a token of a block's recompute, which skips the ops `skipped_ops`."""
    return sum(flops for op, flops in op_flops(m, seq_len, index).items() if op not in skipped_ops)


def elementwise_values(m: ModelConfig, index: int = 0) -> int:
    """Values a token that a block's forward reads or writes outside its ops: two norms (2 E each), two additions to
    the stream (3 E each), RoPE of queries and keys (2 each), SwiGLU (2 F and 3 F). A token that goes to k experts is
    copied to each (2 k E), has SwiGLU in each, and its k outputs are sorted and summed (4 k E)."""
    rotated = (m.num_attention_heads + m.num_key_value_heads) * m.head_dim
    common = 10 * m.hidden_size + 2 * rotated
    moe = family_of(m).moe
    if moe is None or not moe.is_sparse(m, index):
        return common + 5 * m.intermediate_size
    widths = moe.dim_sizes(m)
    of_experts = resolved(m.num_experts_per_tok) * (6 * m.hidden_size + 5 * widths["expert_mlp"][0])
    return common + of_experts + 5 * widths["shared_mlp"][0]


def head_flops(m: ModelConfig) -> int:
    """Forward FLOPs a token of the output projection: 2 V E."""
    return 2 * embedding_parameters(m)


def flops_per_token(m: ModelConfig, seq_len: int) -> int:
    """Model FLOPs a token of one training step, which MFU counts: 6 N_matmul + 12 L H Q T.

    A backward costs two forwards.
    """
    return 3 * (over_layers(m, lambda i: block_flops(m, seq_len, i)) + head_flops(m))


def hardware_flops_per_token(
    m: ModelConfig, seq_len: int, skipped_ops: Sequence[frozenset[str] | None], look_ahead: bool = False
) -> float:
    """FLOPs a token that are really executed, which HFU counts: the model's, those of the recompute, and those of a
    look ahead. The head is in neither (its gradients are made while the logits are at hand).

    Args:
        skipped_ops: for each of some blocks the ops that its recompute skips, None where it is not recomputed
            (`parallel/recompute.py` knows); the model's other blocks are taken to be like these on average.
        look_ahead: whether a forward of all blocks comes first (`moe.balance=hf`).
    """
    run_again = [ops for ops in skipped_ops if ops is not None]
    again = sum(over_layers(m, lambda i, ops=ops: recompute_flops(m, seq_len, ops, i)) for ops in run_again)
    ahead = over_layers(m, lambda i: block_flops(m, seq_len, i)) if look_ahead else 0
    return flops_per_token(m, seq_len) + ahead + (again / len(skipped_ops) if skipped_ops else 0)
