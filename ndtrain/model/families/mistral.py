"""Mistral (Jiang et al., 2023, arXiv:2310.06825): a sliding window if config.json has one, and no biases."""

from ndtrain.model.families.family import COMMON_DEFAULTS, Family, never
from ndtrain.plugins import register_family

MISTRAL = register_family(
    Family(
        "mistral",
        "Mistral",
        qkv_bias=never,
        o_bias=never,
        mlp_bias=never,
        sliding_window="given",
        defaults=COMMON_DEFAULTS
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        absent=("attention_bias", "mlp_bias"),
    )
)
