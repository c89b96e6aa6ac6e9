"""The declaration of a model family: the biases and norms of its block, and its names in Hugging Face's config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ndtrain.config import ModelConfig
from ndtrain.config.schema import written
from ndtrain.model.families import latent
from ndtrain.model.families.moe import OPTIONAL_FIELDS, MoE

Flag = Callable[[ModelConfig], bool]
never: Flag = lambda m: False
always: Flag = lambda m: True
attention_bias: Flag = lambda m: m.attention_bias

# values that the configuration classes of transformers assume for fields that config.json leaves out
COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class Family:
    """A Llama-like decoder. A family with other modules sets `block` to a subclass of `ndtrain.model.block.Block`.

    Attributes:
        model_type: its name in config.json.
        class_prefix: prefix of its class names in transformers: Llama in LlamaForCausalLM.
        qkv_bias, o_bias, mlp_bias: whether these projections have biases.
        qk_norm: whether each head's query and key are normalised before RoPE.
        qk_norm_of_all_heads: whether, instead, the queries of all heads are normalised together, and the keys likewise.
        sliding_window: "never" | "given": if config.json has a window | "used": only with `use_sliding_window`.
        rope_theta: the value that transformers assumes if config.json has none.
        partial_rotary_factor: the part of a head that RoPE rotates if config.json has no such field. ndtrain supports
            only whole heads.
        defaults: the values that transformers assumes for other fields that config.json leaves out.
        absent: fields of `ModelConfig` that its class in transformers does not have. They must be false or null.
        fields: its own fields in config.json. Its config dataclass declares them, or `OPTIONAL_FIELDS` lists them.
        block: the class of its blocks without experts. None: `Block`. With `latent_attention` it must be None.
        latent_attention: whether its attention computes keys and values from a latent (`model/latent_block.py`).
        moe: its mixtures of experts. None: it has none.
        init_std: (model, parameter name, default standard deviation) -> standard deviation of the initial weights.
    """

    model_type: str
    class_prefix: str
    qkv_bias: Flag = attention_bias
    o_bias: Flag = attention_bias
    mlp_bias: Flag = lambda m: m.mlp_bias
    qk_norm: bool = False
    qk_norm_of_all_heads: bool = False
    sliding_window: str = "never"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    defaults: Mapping[str, Any] = field(default_factory=lambda: COMMON_DEFAULTS)
    absent: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    block: type | None = None
    latent_attention: bool = False
    moe: MoE | None = None
    init_std: Callable[[ModelConfig, str, float], float] = lambda m, name, std: std

    def __post_init__(self) -> None:
        if self.block and self.latent_attention:
            raise ValueError(f"family {self.model_type}: latent_attention has its own blocks: remove block")

    @property
    def causal_lm(self) -> str:
        """The class of transformers that loads its checkpoints."""
        return f"{self.class_prefix}ForCausalLM"

    @property
    def own_fields(self) -> tuple[str, ...]:
        """The fields of a model's configuration that not every family has."""
        return (*self.fields, *(("num_experts",) if self.moe else ()))

    def fill_in(self, m: ModelConfig) -> None:
        """Set the sizes that are null and follow from other sizes. If the heads do not divide `hidden_size`, `head_dim`
        stays null."""
        if m.head_dim is None and self.latent_attention:
            m.head_dim = latent.head_dim(m)
        if m.head_dim is None and m.hidden_size % m.num_attention_heads == 0:
            m.head_dim = m.hidden_size // m.num_attention_heads
        if m.moe_intermediate_size is None and "moe_intermediate_size" in self.fields:
            m.moe_intermediate_size = m.intermediate_size

    def refusal(self, m: ModelConfig) -> str | None:
        """Return in one line why ndtrain refuses model `m` of this family, or None if it does not.

        The refused settings have no field in transformers, so a checkpoint would lose them."""
        for key in self.absent:
            if getattr(m, key):
                return f"model.{key}=true: model.model_type={self.model_type} does not support it: set it to false"
        if m.sliding_window is not None and self.sliding_window == "never":
            return (
                f"model.sliding_window={m.sliding_window}: model.model_type={self.model_type} has no window: set it to "
                "null, or choose model.model_type=mistral, qwen2 or qwen3"
            )
        for f in fields(ModelConfig):
            value = getattr(m, f.name)
            default = f.default_factory() if callable(f.default_factory) else f.default
            if f.name in OPTIONAL_FIELDS and f.name not in self.own_fields and value != default:
                said = f"model.{f.name}={written(value)}: model.model_type={self.model_type} does not use it: remove it"
                return f"{said}, or reset the recipe's value with model.{f.name}={written(default)}"
        reason = latent.refusal(m) if self.latent_attention else None
        return reason or (self.moe.refusal(m) if self.moe else None)
