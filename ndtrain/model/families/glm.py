"""GLM-4.5 (arXiv:2508.06471): grouped-query attention, and the experts of DeepSeek-V3.

The experts have a sigmoid router with selection biases and groups. There are shared experts, and some dense layers
first. RoPE rotates whole heads. GLM-4.5's published models rotate half of each head, and are therefore refused."""

from ndtrain.model.families.deepseek import EXPERT_FIELDS, EXPERTS
from ndtrain.model.families.family import COMMON_DEFAULTS, Family, attention_bias, never
from ndtrain.plugins import register_family

GLM4_MOE = register_family(
    Family(
        "glm4_moe",
        "Glm4Moe",
        qkv_bias=attention_bias,
        o_bias=never,
        mlp_bias=never,
        partial_rotary_factor=0.5,
        defaults=COMMON_DEFAULTS
        | {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True, "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        absent=("mlp_bias", "alibi"),
        fields=EXPERT_FIELDS,
        moe=EXPERTS,
    )
)  # fmt: skip
