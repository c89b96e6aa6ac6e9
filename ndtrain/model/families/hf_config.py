"""Converts between `ModelConfig` and Hugging Face's config.json. `hf_fields.py` describes the fields of config.json."""

from pathlib import Path
from typing import Any

from ndtrain.config import ConfigError, ModelConfig
from ndtrain.config.json_file import JsonError, read_object
from ndtrain.config.registry import config_of, joined, names
from ndtrain.config.rope_kinds import ORIGINAL, ROPE_KINDS
from ndtrain.model.families import family_of
from ndtrain.model.families.family import Family
from ndtrain.model.families.hf_fields import (
    EXTRAS,
    OWN,
    SAME,
    check_fields,
    is_number,
    mod_fields,
    read_family,
    refusal,
    with_expert_count,
)

_SLIDES, _FULL = "sliding_attention", "full_attention"


def to_hf(m: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a resolved model. RoPE is in `rope_parameters` (transformers 5) and in older keys."""
    scaling = dict(m.rope_scaling) if m.rope_scaling else None
    extras = {key: getattr(m, key) for key in EXTRAS if getattr(m, key)}
    family = family_of(m)
    whole_heads = {} if family.partial_rotary_factor == 1 else {"partial_rotary_factor": 1.0}
    return {
        "architectures": ["NdtrainForCausalLM" if extras else family.causal_lm],
        "model_type": OWN * bool(extras) + m.model_type,
        **{key: getattr(m, key) for key in (*SAME, *mod_fields(m.attention))},
        **{key: value for key in family.fields if (value := getattr(m, key)) is not None or key in family.defaults},
        **({"head_dim": m.qk_rope_head_dim} if family.latent_attention else {}),
        **({family.moe.count: m.num_experts} if family.moe else {}),
        "hidden_act": "silu",
        "rope_theta": m.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": m.rope_theta, **whole_heads},
        **whole_heads,
        **_window_fields(m, family),
        **extras,
        "use_cache": True,
    }


def _window_fields(m: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the fields that set the window of every layer."""
    if m.sliding_window is None or family.sliding_window == "given":
        return {"sliding_window": m.sliding_window}
    return {
        "sliding_window": m.sliding_window,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "layer_types": [_SLIDES] * m.num_hidden_layers,
    }


def from_hf(config: dict[str, Any], name: str = "hf") -> ModelConfig:
    """Return the model of a config.json, with `head_dim` set. Fields that it leaves out have `transformers`' defaults.

    Raises:
        ConfigError: an architecture or a setting is not supported, or a field is missing or unusable. The message names
            it.
    """
    family, own = read_family(config)
    given = {**family.defaults, **with_expert_count(config, family)}
    if not any("partial_rotary_factor" in (said or {}) for said in (given, given.get("rope_parameters"))):
        given["partial_rotary_factor"] = family.partial_rotary_factor
    check_fields(given, family, own)
    mod = given.get("attention")
    if mod is not None and mod not in names("attention_mod"):
        raise refusal(given, "attention", "no plugin registers it: name its module, plugins=[my_package.my_module]")
    fields = (*SAME, *EXTRAS, *family.own_fields, *mod_fields(mod))
    known = {key: given[key] for key in fields if given.get(key) is not None}
    heads = known["num_attention_heads"]
    known.setdefault("num_key_value_heads", heads)
    if family.latent_attention:  # transformers stores the number of rotated elements under this name
        known.pop("head_dim", None)
    theta, scaling = _rope(given, family)
    window = _window(given, family)
    parts = [config_of("family", family.model_type), mod and config_of("attention_mod", mod)]
    made = joined([config for config in parts if config] or [ModelConfig])
    m = made(
        name=name,
        model_type=family.model_type,
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=window,
        **known,
    )
    family.fill_in(m)
    if m.head_dim is None:
        raise refusal(given, "hidden_size", f"must be a multiple of num_attention_heads={heads}, or give head_dim")
    return m


def _rope(config: dict[str, Any], family: Family) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling) from either spelling. If a config.json has both, they must agree."""
    spelled = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    scalings = [_scaling(config, key, rope) for key, rope in spelled.items()]
    thetas = [r["rope_theta"] for r in (*spelled.values(), config) if r.get("rope_theta") is not None]
    if any(s != scalings[0] for s in scalings) or any(t != thetas[0] for t in thetas):
        raise ConfigError(
            "init_from: rope_parameters in config.json contradicts the older rope_scaling and rope_theta: "
            "remove one of them"
        )
    theta = thetas[0] if thetas else family.rope_theta
    if not is_number(theta) or theta <= 0:
        raise ConfigError(f"init_from: rope_theta={theta} in config.json: must be a number above 0")
    return float(theta), scalings[0] if scalings else None


def _scaling(config: dict[str, Any], key: str, rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise refusal(config, key, f"RoPE of type {kind} is not supported; known: {', '.join(ROPE_KINDS)}")
    said = {k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    if said.get("partial_rotary_factor") == 1:
        del said["partial_rotary_factor"]
    needed, optional = ROPE_KINDS[kind]
    if ORIGINAL in needed:  # it may be in either of two places
        beside = config.get(ORIGINAL)
        if beside is not None and said.setdefault(ORIGINAL, beside) != beside:
            raise refusal(config, ORIGINAL, f"{key} has {said[ORIGINAL]}: remove one of them")
        said.setdefault(ORIGINAL, config["max_position_embeddings"])
    else:
        said.pop(ORIGINAL, None)
    for k, v in said.items():
        if k not in (*needed, *optional):
            raise refusal(config, key, f"{k}={v} is not supported with RoPE of type {kind}")
        if not is_number(v) or v <= 0:
            raise refusal(config, key, f"{k}={v} must be a number above 0")
    if lacking := [k for k in needed if k not in said]:
        raise refusal(config, key, f"RoPE of type {kind} needs {', '.join(lacking)} too")
    return {"rope_type": kind, **said} if said else None


def _window(config: dict[str, Any], family: Family) -> int | None:
    """Return the window of all layers. Mistral has one whenever it is given, Llama never.

    Qwen's models need `use_sliding_window`. The window applies from layer `max_window_layers` on, or to the layers that
    `layer_types` selects."""
    used = family.sliding_window == "used"
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if not config.get("use_sliding_window", True):
        if family.sliding_window == "given" and window is not None:
            raise refusal(config, "use_sliding_window", f"contradicts sliding_window={window}: set that to null")
        window = None
    if window is not None and window <= 0:
        raise refusal(config, "sliding_window", "must be above 0")
    if family.sliding_window == "never" and window is not None:
        raise refusal(config, "sliding_window", f"a {family.class_prefix} has no window: set it to null")
    first = config["max_window_layers"] if used else 0
    if types := config.get("layer_types"):
        key, alike = "layer_types", len(types) == layers and all(t == types[0] for t in types)
    else:  # do not build a list of all layers: config.json may name any number of them
        key, alike = "max_window_layers", window is None or first <= 0 or first >= layers
        types = [_SLIDES if window is not None and first <= 0 else _FULL]
    if types[0] not in (_SLIDES, _FULL) or not alike:
        raise refusal(config, key, f"each of {layers} layers must have the same attention, {_FULL} or {_SLIDES}")
    slides = types[0] == _SLIDES
    if slides != (window is not None) and (slides or not used):
        raise refusal(config, "layer_types", f"contradicts sliding_window={window}")
    return window if slides else None


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face folder.

    Raises:
        ConfigError: there is none, or it cannot be read or does not parse.
    """
    path = folder / "config.json"
    if not path.is_file():
        adapter = (folder / "adapter_config.json").exists()
        fix = "an adapter: merge it into its base model first" if adapter else "give a Hugging Face model folder"
        raise ConfigError(f"init_from={folder}: there is no config.json: {fix}")
    try:
        return read_object(path)
    except JsonError as error:
        raise ConfigError(f"init_from={folder}: {error}".replace(f" {folder}/", " ")) from error
