"""The kinds of RoPE that `model.rope_scaling` may name, with their parameters."""

from typing import NamedTuple


class RopeKind(NamedTuple):
    """The parameters of one kind of RoPE.

    Attributes:
        needed, optional: names of the required and optional numbers, as in Hugging Face's config.json.
    """

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


ORIGINAL = "original_max_position_embeddings"
ROPE_KINDS = {
    "default": RopeKind(),
    "linear": RopeKind(("factor",)),
    "llama3": RopeKind(("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
    "yarn": RopeKind(
        ("factor", ORIGINAL), ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    ),
}  # fmt: skip
