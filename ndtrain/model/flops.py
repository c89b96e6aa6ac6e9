"""FLOPs and bytes of a model, counted from the shapes that its modules declare: what MFU, stage balance and memory
prediction share.

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


# ---------------------------------------------------------------------------------------------------------- memory


def state_bytes(
    n_params: int,
    shard: int,
    zero: int,
    compute_bytes: int,
    master_bytes: int = 4,
    shared: bool = False,
    optim_bytes: int | None = None,
    offload: bool = False,
) -> int:
    """Bytes a rank holds between steps in parameters, gradients, master weights and optimizer state.

    With N parameters sharded over n ranks, c bytes of compute and m of master precision (gradients are kept in the
    latter) and s = m + `optim_bytes`: zero 1 holds N (c + m) + s N/n, zero 2
    N c + (m + s) N/n, zero 3 (m + s) N/n. The blocks that zero 3 gathers during a step, at most two, come on top. The
    flat buffer is padded to n equal shards, hence N/n is rounded up. Offloaded, s N/n lies in host memory
    (`offloaded_bytes`), and zero 3 holds c N/n in its place.

    Args:
        n_params: this rank's parameters after the tp and pp cuts.
        shard: ranks the state is cut over, fsdp x cp.
        zero: 1, 2 or 3.
        compute_bytes: bytes an element of the compute precision.
        master_bytes: bytes an element of the master precision.
        shared: compute and master are one dtype, and the rank's slice of the compute copy is its master: zero 1 and 2
            then hold m N/n less.
        optim_bytes: bytes of the optimizer's state tensors per element, all together; None: two of master precision.
        offload: master and optimizer state are in host memory.

    Raises:
        ValueError: no such zero stage, or `shared` between dtypes of unequal size or with an offloaded master.
    """
    if zero not in (1, 2, 3):
        raise ValueError(f"zero={zero}: must be 1, 2 or 3")
    if shared and (compute_bytes != master_bytes or offload):
        where = " in host memory" if offload else ""
        raise ValueError(f"a slice of {compute_bytes}-byte elements cannot be the {master_bytes}-byte master{where}")
    piece = -(-n_params // shard)
    whole = piece * shard
    state = 0 if offload else offloaded_bytes(n_params, shard, master_bytes, optim_bytes)
    if zero == 3:
        return master_bytes * piece + (compute_bytes * piece if offload else state)
    if shared:
        state -= master_bytes * piece
    gradients = whole if zero == 1 else piece
    return compute_bytes * whole + master_bytes * gradients + state


def offloaded_bytes(n_params: int, shard: int, master_bytes: int = 4, optim_bytes: int | None = None) -> int:
    """Bytes of master weights and optimizer state of a rank's shard, as `state_bytes` names its sizes. Where they are
    in host memory, the buffers that copies pass through come on top: twice the largest unit's gradient and weights."""
    state = 2 * master_bytes if optim_bytes is None else optim_bytes
    return (master_bytes + state) * -(-n_params // shard)
