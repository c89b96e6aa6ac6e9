"""Models with latent attention (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1): the sizes of their latents and
heads, and the checks of their configuration."""

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved

# fields of ModelConfig that only models with latent attention have
LATENT_FIELDS = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave",
)  # fmt: skip
_NEEDED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def head_dim(m: ModelConfig) -> int:
    """Return the number of elements of a head's query and key, rotated or not."""
    return resolved(m.qk_nope_head_dim) + resolved(m.qk_rope_head_dim)


def dim_sizes(m: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the sizes of the named dims that only latent attention has."""
    heads, latent = m.num_attention_heads, resolved(m.kv_lora_rank)
    return {
        "key_value_heads": (heads, resolved(m.qk_nope_head_dim) + resolved(m.v_head_dim)),
        "value_heads": (heads, resolved(m.v_head_dim)),
        "q_latent": (m.q_lora_rank or 0, 1),
        "kv_latent": (latent, 1),
        "kv_latent_and_key": (latent + resolved(m.qk_rope_head_dim), 1),
    }


def refusal(m: ModelConfig) -> str | None:
    """Return in one line why ndtrain refuses the model, or None if it does not."""
    for key in _NEEDED:
        if getattr(m, key) is None:
            return f"model.{key} is missing: model.model_type={m.model_type} needs it"
    if m.head_dim not in (None, head_dim(m)):
        return (
            f"model.head_dim={m.head_dim}: latent attention sets it to model.qk_nope_head_dim + model.qk_rope_head_dim "
            f"= {head_dim(m)}: remove it"
        )
    if resolved(m.qk_rope_head_dim) % 2:
        return f"model.qk_rope_head_dim={m.qk_rope_head_dim} must be even (RoPE rotates pairs)"
    if resolved(m.v_head_dim) > head_dim(m):
        return (
            f"model.v_head_dim={m.v_head_dim} exceeds model.qk_nope_head_dim + model.qk_rope_head_dim = {head_dim(m)}: "
            "lower it"
        )
    if m.num_key_value_heads != m.num_attention_heads:
        return (
            f"model.num_key_value_heads={m.num_key_value_heads} must equal model.num_attention_heads="
            f"{m.num_attention_heads}: with latent attention every head has its own key and value"
        )
    return None
