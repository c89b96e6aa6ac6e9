"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Mistral with experts of `intermediate_size` in every layer."""

from ndtrain.model.families.family import COMMON_DEFAULTS, Family, never
from ndtrain.model.families.moe import FIELDS, MoE, renormalised
from ndtrain.plugins import register_family

MIXTRAL = register_family(
    Family(
        "mixtral",
        "Mixtral",
        qkv_bias=never,
        o_bias=never,
        mlp_bias=never,
        sliding_window="given",
        rope_theta=1e6,
        defaults=COMMON_DEFAULTS
        | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072, "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        absent=("attention_bias", "mlp_bias"),
        fields=FIELDS,
        moe=MoE("num_local_experts", renormalised, "block_sparse_moe", ("w1", "w3", "w2")),
    )
)  # fmt: skip
