"""Between `ModelConfig` and Hugging Face's config.json."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from ndtrain.config import ConfigError, ModelConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_OWN = "ndtrain_"  # before the model_type of what transformers has no class for, lest it load it as something else
_EXTRAS = ("attn_logit_softcapping", "alibi")  # what makes a model such a one
# what both sides name alike; `name` is ours alone, RoPE is written in both of transformers' spellings
_DIFFERENT = ("name", "model_type", "rope_theta", "rope_scaling", "sliding_window", *_EXTRAS)
_SAME = [f.name for f in fields(ModelConfig) if f.name not in _DIFFERENT]


def to_hf(m: ModelConfig) -> dict[str, Any]:
    """config.json of a resolved model: RoPE both as `rope_parameters` (transformers 5) and in the older keys."""
    scaling = dict(m.rope_scaling) if m.rope_scaling else None
    extras = {key: getattr(m, key) for key in _EXTRAS if getattr(m, key)}
    return {
        "architectures": ["NdtrainForCausalLM" if extras else _ARCHITECTURES[m.model_type]],
        "model_type": _OWN * bool(extras) + m.model_type,
        **{key: getattr(m, key) for key in _SAME},
        "hidden_act": "silu",
        "rope_theta": m.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": m.rope_theta},
        **_window(m),
        **extras,
        "use_cache": True,
    }


def _window(m: ModelConfig) -> dict[str, Any]:
    """The window of every layer; Qwen's models have it only where they are told so."""
    if m.sliding_window is None or m.model_type == "mistral":
        return {"sliding_window": m.sliding_window}
    types = ["sliding_attention"] * m.num_hidden_layers
    return {
        "sliding_window": m.sliding_window, "use_sliding_window": True, "max_window_layers": 0, "layer_types": types
    }  # fmt: skip


def from_hf(config: dict[str, Any], name: str = "hf") -> ModelConfig:
    """The model of a config.json.

    Raises:
        ConfigError: an architecture or a setting that ndtrain does not have.
    """
    kind = str(config.get("model_type")).removeprefix(_OWN)
    if kind not in _ARCHITECTURES:
        raise ConfigError(f"model_type={kind} in config.json is not supported; known: {', '.join(_ARCHITECTURES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act={config['hidden_act']} in config.json is not supported: only silu")
    if config.get("attention_dropout"):
        raise ConfigError(f"attention_dropout={config['attention_dropout']} in config.json is not supported: only 0")
    rope = config.get("rope_parameters") or {}
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"} or config.get("rope_scaling")
    if scaling and scaling.get("rope_type", scaling.get("type")) == "default":
        scaling = None
    windowed = config.get("use_sliding_window", kind == "mistral")
    if len(set(config.get("layer_types") or ())) > 1:
        raise ConfigError("layer_types in config.json are mixed: not supported, only the same attention in every layer")
    known = {key: config[key] for key in (*_SAME, *_EXTRAS) if key in config}
    known.setdefault("num_key_value_heads", config["num_attention_heads"])
    return ModelConfig(
        name=name,
        model_type=kind,
        **known,
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        rope_scaling=scaling,
        sliding_window=config.get("sliding_window") if windowed else None,
    )


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        ConfigError: there is none, or it does not parse.
    """
    try:
        return json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise ConfigError(
            f"init_from={folder}: config.json cannot be read ({error.strerror}): give a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"init_from={folder}: config.json does not parse: {error}") from error
