"""FLOPs and bytes of a model, from its description alone: what MFU, stage balance and memory prediction share.

Every function takes a resolved `ModelConfig` (`head_dim` set). Legend of the formulas: E hidden_size,
F intermediate_size, L num_hidden_layers, H query heads, K key/value heads, Q head_dim, V vocab_size, T seq_len.
A multiply-add is two FLOPs; norms, RoPE, softmax and the optimizer are not counted.
"""

from ndtrain.config import ModelConfig, RecomputeConfig

# ----------------------------------------------------------------------------------------------------- parameters


def block_matmul_parameters(m: ModelConfig) -> int:
    """Weights of one block that every token is multiplied by: q and o, k and v, gate, up and down."""
    query, key_value = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    return 2 * m.hidden_size * (query + key_value) + 3 * m.hidden_size * m.intermediate_size


def block_parameters(m: ModelConfig) -> int:
    """All parameters of one block: its matrices, two norms, and the biases and q/k norms its model_type has."""
    query, key_value = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    vectors = 2 * m.hidden_size
    if m.model_type == "qwen2" or m.attention_bias:
        vectors += query + 2 * key_value
    if m.model_type != "qwen2" and m.attention_bias:
        vectors += m.hidden_size
    if m.mlp_bias:
        vectors += 2 * m.intermediate_size + m.hidden_size
    if m.model_type == "qwen3":
        vectors += 2 * m.head_dim
    return block_matmul_parameters(m) + vectors


def embedding_parameters(m: ModelConfig) -> int:
    """V E: the embedding table, and as many in the head where that is untied."""
    return m.vocab_size * m.hidden_size


def parameter_count(m: ModelConfig) -> int:
    """Parameters of the whole model; a tied head counts once, padding of the vocabulary not at all."""
    tables = 1 if m.tie_word_embeddings else 2
    return m.num_hidden_layers * block_parameters(m) + tables * embedding_parameters(m) + m.hidden_size


def matmul_parameters(m: ModelConfig) -> int:
    """N_matmul: weights every token is multiplied by. The head counts, tied or not; the embedding is a look-up."""
    return m.num_hidden_layers * block_matmul_parameters(m) + embedding_parameters(m)


# ----------------------------------------------------------------------------------------------------------- FLOPs


def block_flops(m: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs a token of one block: 2 N_block + 4 H Q T (scores and values over all T keys, not halved)."""
    return 2 * block_matmul_parameters(m) + 4 * m.num_attention_heads * m.head_dim * seq_len


def head_flops(m: ModelConfig) -> int:
    """Forward FLOPs a token of the output projection: 2 V E."""
    return 2 * embedding_parameters(m)


def flops_per_token(m: ModelConfig, seq_len: int) -> int:
    """Model FLOPs a token of one training step, which MFU counts: 6 N_matmul + 12 L H Q T.

    A backward costs two forwards.
    """
    return 3 * (m.num_hidden_layers * block_flops(m, seq_len) + head_flops(m))


def hardware_flops_per_token(m: ModelConfig, seq_len: int, recompute: RecomputeConfig) -> int:
    """FLOPs a token that are really executed, which HFU counts: the model's, and what the backward recomputes.

    `full` and `every` both run all blocks forward once more: `every` keeps fewer boundaries, but each block's inside
    is lost all the same. The head is never recomputed (its gradients are taken while the logits are at hand).

    Raises:
        ValueError: a recompute mode whose cost is not known here.
    """
    again = {"none": 0, "full": 1, "every": 1}
    if recompute.name not in again:
        raise ValueError(f"recompute={recompute.name}: its FLOPs are unknown; known: {', '.join(again)}")
    blocks = m.num_hidden_layers * block_flops(m, seq_len)
    return flops_per_token(m, seq_len) + again[recompute.name] * blocks


# ---------------------------------------------------------------------------------------------------------- memory


def state_bytes(
    n_params: int, shard: int, zero: int, compute_bytes: int, master_bytes: int = 4, shared: bool = False
) -> int:
    """Bytes a rank holds between steps in parameters, gradients, master weights and two moments.

    With N parameters cut over n ranks, c bytes of compute and m of master precision (gradients are kept in the
    latter): zero 1 holds N (c + m) + 3 m N/n, zero 2 N c + 4 m N/n, zero 3 4 m N/n. The blocks that zero 3 gathers
    during a step, at most two, come on top. The flat buffer is padded to n equal shards, hence N/n is rounded up.

    Args:
        n_params: this rank's parameters after the tp and pp cuts.
        shard: ranks the state is cut over, fsdp x cp.
        zero: 1, 2 or 3.
        compute_bytes: bytes an element of the compute precision.
        master_bytes: bytes an element of the master precision.
        shared: compute and master are one dtype, and the rank's slice of the compute copy is its master: zero 1 and 2
            then hold m N/n less.

    Raises:
        ValueError: no such zero stage, or `shared` between dtypes of unequal size.
    """
    if zero not in (1, 2, 3):
        raise ValueError(f"zero={zero}: must be 1, 2 or 3")
    if shared and compute_bytes != master_bytes:
        raise ValueError(f"a slice of {compute_bytes}-byte elements cannot be the {master_bytes}-byte master")
    piece = -(-n_params // shard)
    whole = piece * shard
    if zero == 3:
        return 4 * master_bytes * piece
    slices = 2 if shared else 3  # the moments, and the master where it is a copy of its own
    gradients = whole if zero == 1 else piece
    return compute_bytes * whole + master_bytes * (gradients + slices * piece)
