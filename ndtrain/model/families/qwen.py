"""Qwen2 (arXiv:2407.10671): biases on q, k and v. Qwen3 (arXiv:2505.09388): a norm of each head's query and key."""

from ndtrain.model.families.family import COMMON_DEFAULTS, Family, always, never
from ndtrain.plugins import register_family

_DEFAULTS = COMMON_DEFAULTS | {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip

QWEN2 = register_family(
    Family(
        "qwen2",
        "Qwen2",
        qkv_bias=always,
        o_bias=never,
        mlp_bias=never,
        sliding_window="used",
        defaults=_DEFAULTS,
        absent=("mlp_bias",),
    )
)
QWEN3 = register_family(
    Family(
        "qwen3",
        "Qwen3",
        mlp_bias=never,
        qk_norm=True,
        sliding_window="used",
        defaults=_DEFAULTS | {"head_dim": 128},
        absent=("mlp_bias",),
    )
)
