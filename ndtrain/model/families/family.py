"""What one model family declares: which biases and norms its block has, and how Hugging Face's config.json names it."""

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

# what the configuration classes of transformers assume where config.json says nothing
COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class Family:
    """A Llama-like decoder. A family with other modules gives `block`, a subclass of `ndtrain.model.block.Block`.

    Attributes:
        model_type: as in config.json.
        class_prefix: of its class names in transformers: Llama in LlamaForCausalLM.
        qkv_bias, o_bias, mlp_bias: whether these projections have biases.
        qk_norm: whether each head's query and key are normalised before the rotation.
        qk_norm_of_all_heads: whether all heads' queries, and all heads' keys, are normalised together instead.
        sliding_window: "never" | "given": wherever config.json has one | "used": only with `use_sliding_window`.
        rope_theta: what its configuration class assumes where config.json has none.
        partial_rotary_factor: the same of the part of a head that RoPE turns; here it turns whole heads.
        defaults: what it assumes where config.json says nothing of other fields.
        absent: fields of ours that its configuration class does not have; they must be false or null.
        fields: the names of its own fields in config.json, which its config dataclass declares or which stand in
            `OPTIONAL_FIELDS`.
        block: the class of its blocks without experts; None: `Block`. Without `latent_attention`, whose blocks are its
            own.
        latent_attention: whether its attention makes keys and values out of a latent (`model/latent_block.py`).
        moe: its mixtures of experts; None: it has none.
        init_std: (model, parameter name, the usual standard deviation) -> that of its initial weights.
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
            raise ValueError(f"family {self.model_type}: latent_attention has blocks of its own: leave block out")

    @property
    def causal_lm(self) -> str:
        """The class of transformers that opens its checkpoints."""
        return f"{self.class_prefix}ForCausalLM"

    @property
    def own_fields(self) -> tuple[str, ...]:
        """The fields of a model's configuration that not every family has."""
        return (*self.fields, *(("num_experts",) if self.moe else ()))

    def fill_in(self, m: ModelConfig) -> None:
        """Sets the sizes that are null and follow from others. `head_dim` stays null where the heads do not divide
        `hidden_size`."""
        if m.head_dim is None and self.latent_attention:
            m.head_dim = latent.head_dim(m)
        if m.head_dim is None and m.hidden_size % m.num_attention_heads == 0:
            m.head_dim = m.hidden_size // m.num_attention_heads
        if m.moe_intermediate_size is None and "moe_intermediate_size" in self.fields:
            m.moe_intermediate_size = m.intermediate_size

    def refusal(self, m: ModelConfig) -> str | None:
        """Why a model of this family cannot be as `m` says, in one line; None: it can. transformers has no place for
        what is refused, so that a checkpoint would lose it."""
        for key in self.absent:
            if getattr(m, key):
                return f"model.{key}=true: model.model_type={self.model_type} has none: set it to false"
        if m.sliding_window is not None and self.sliding_window == "never":
            return (
                f"model.sliding_window={m.sliding_window}: model.model_type={self.model_type} has no window: set it to "
                "null, or choose model.model_type=mistral, qwen2 or qwen3"
            )
        for f in fields(ModelConfig):
            value = getattr(m, f.name)
            default = f.default_factory() if callable(f.default_factory) else f.default
            if f.name in OPTIONAL_FIELDS and f.name not in self.own_fields and value != default:
                said = f"model.{f.name}={written(value)}: model.model_type={self.model_type} has none: leave it out"
                return f"{said}, or take a recipe's back with model.{f.name}={written(default)}"
        reason = latent.refusal(m) if self.latent_attention else None
        return reason or (self.moe.refusal(m) if self.moe else None)
