"""DeepSeek-V3 (arXiv:2412.19437), and Moonlight (arXiv:2502.16982), which has the same model_type.

They have latent attention, experts in groups with a sigmoid router, shared experts, and some dense layers first."""

from ndtrain.model.families.family import COMMON_DEFAULTS, Family, never
from ndtrain.model.families.latent import LATENT_FIELDS
from ndtrain.model.families.moe import MoE, SharedExpert, shares_of_sigmoids, sigmoid_scored
from ndtrain.plugins import register_family

EXPERT_FIELDS = (
    "num_experts_per_tok", "output_router_logits", "moe_intermediate_size", "norm_topk_prob", "n_shared_experts",
    "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor",
)  # fmt: skip
EXPERTS = MoE(
    "n_routed_experts",
    sigmoid_scored,
    shared=SharedExpert(
        "shared_experts", "n_shared_experts", lambda m, n: n * (m.moe_intermediate_size or m.intermediate_size)
    ),
    affinities=shares_of_sigmoids,
    bias="mlp.gate.e_score_correction_bias",
)

DEEPSEEK_V3 = register_family(
    Family(
        "deepseek_v3",
        "DeepseekV3",
        qkv_bias=never,
        mlp_bias=never,
        defaults=COMMON_DEFAULTS
        | {
            "max_position_embeddings": 4096, "num_key_value_heads": 128, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 3,
            "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True,
        },
        absent=("mlp_bias", "alibi"),
        fields=(*EXPERT_FIELDS, *LATENT_FIELDS),
        latent_attention=True,
        moe=EXPERTS,
    )
)  # fmt: skip
