"""OLMoE (Muennighoff et al., 2024, arXiv:2409.02060). One norm covers the queries of all heads, a second
one the keys of all heads. q, k and v may be clipped."""

from ndtrain.model.families.family import COMMON_DEFAULTS, Family, never
from ndtrain.model.families.moe import FIELDS, MoE, renormalised_if_asked
from ndtrain.plugins import register_family

OLMOE = register_family(
    Family(
        "olmoe",
        "Olmoe",
        mlp_bias=never,
        qk_norm_of_all_heads=True,
        defaults=COMMON_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.01,
        },
        absent=("mlp_bias",),
        fields=(*FIELDS, "norm_topk_prob", "clip_qkv"),
        moe=MoE("num_experts", renormalised_if_asked),
    )
)
