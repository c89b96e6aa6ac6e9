"""Qwen2-MoE (arXiv:2407.10671) and Qwen3-MoE (arXiv:2505.09388). Some layers of either may be dense.

Qwen2-MoE has biases on q, k and v, and a shared expert. Qwen3-MoE has a norm of each head's query and key, and no
shared expert."""

from ndtrain.model.families.family import COMMON_DEFAULTS, Family, always, never
from ndtrain.model.families.moe import FIELDS, PLACEMENT_FIELDS, MoE, SharedExpert, renormalised_if_asked
from ndtrain.plugins import register_family

_FIELDS = (*FIELDS, *PLACEMENT_FIELDS, "moe_intermediate_size", "norm_topk_prob")
_DEFAULTS = COMMON_DEFAULTS | {"max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28}

QWEN2_MOE = register_family(
    Family(
        "qwen2_moe",
        "Qwen2Moe",
        qkv_bias=always,
        o_bias=never,
        mlp_bias=never,
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        absent=("mlp_bias",),
        fields=(*_FIELDS, "shared_expert_intermediate_size"),
        moe=MoE(
            "num_experts",
            renormalised_if_asked,
            shared=SharedExpert(
                "shared_expert", "shared_expert_intermediate_size", lambda m, size: size, gated=True
            ),
        ),
    )
)  # fmt: skip
QWEN3_MOE = register_family(
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        mlp_bias=never,
        qk_norm=True,
        defaults=_DEFAULTS
        | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        absent=("mlp_bias",),
        fields=_FIELDS,
        moe=MoE("num_experts", renormalised_if_asked),
    )
)
