"""The fields of Hugging Face's config.json: which are read, which change nothing, and which are refused.

If `transformers` would compute a model differently from ndtrain, the model is refused by name. Every field that affects
the computation is therefore read, or must have a value under which it changes nothing (`_NEUTRAL`). Fields about files,
tokens and generation are skipped (`_PASSED`). `unknown_fields` finds fields that are in no table.
"""

from dataclasses import fields
from typing import Any

from ndtrain.config import ConfigError, ModelConfig
from ndtrain.config.registry import get, names, own_keys
from ndtrain.model.families.family import Family
from ndtrain.model.families.moe import COUNT_SPELLINGS, OPTIONAL_FIELDS

OWN = "ndtrain_"  # prefix of model_type for models that transformers must not load, because it has no class for them
EXTRAS = ("attn_logit_softcapping", "alibi", "attention")  # fields of models that transformers has no class for
OURS = ("name", "init_mult", "mup_base")  # fields that no config.json has
# fields with the same name on both sides. RoPE is written in both of transformers' spellings
_DIFFERENT = (*OURS, "model_type", "rope_theta", "rope_scaling", "sliding_window", *EXTRAS, *OPTIONAL_FIELDS)
SAME = tuple(f.name for f in fields(ModelConfig) if f.name not in _DIFFERENT)


_SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Fields for computations that no model here has -> the values that change nothing, besides null, false, zero and empty.
# Fields that add weights need no entry, because the files' tensors reveal them.
_NEUTRAL: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "attention_dropout": (), "hidden_dropout": (), "residual_dropout": (), "embedding_dropout": (), "attn_pdrop": (),
    "resid_pdrop": (), "embd_pdrop": (), "hidden_dropout_prob": (), "attention_probs_dropout_prob": (),
    "partial_rotary_factor": (1,), "rotary_pct": (1,), "rope_interleaved": (), "use_mrope": (), "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "final_logit_softcapping": (), "query_pre_attn_scalar": (), "attention_multiplier": (), "clip_qkv": (),
    "residual_multiplier": (1,), "embedding_multiplier": (1,), "logits_scaling": (1,), "logit_scale": (1,),
    "attention_chunk_size": (), "attn_temperature_tuning": (), "use_parallel_residual": (), "parallel_attn": (),
    **dict.fromkeys(COUNT_SPELLINGS, ()), "per_layer_config": (), "router_jitter_noise": (), "qkv_bias": (True,),
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
    "is_encoder_decoder": (), "add_cross_attention": (),
    "quantization_config": (), "quantization": (), "compression_config": (),
}  # fmt: skip
_FALSE_SAYS_SOMETHING = ("qkv_bias",)  # fields for which false changes the computation too
# fields that do not affect training
_PASSED = {
    "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "pretraining_tp", "auto_map", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "id2label", "label2id", "num_labels", "problem_type", "tokenizer_class", "attn_implementation", "is_decoder",
    "max_sequence_length", "model_max_length", "transformers.js_config", "unsloth_version", "unsloth_fixed",
    "is_llama_config", "ep_size", "aux_loss_alpha", "seq_aux", "qk_head_dim", "num_nextn_predict_layers",
    "num_mtp_layers", "temperature", "top_k", "top_p", "do_sample", "max_length", "repetition_penalty",
}  # fmt: skip
_NOT_CARRIED = ("dtype", "torch_dtype", "auto_map", "custom_pipelines")  # specific to a checkpoint, or names of code
_READ = {
    "model_type", "architectures", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", *SAME, *EXTRAS,
}  # fmt: skip
_TYPES = {f.name: f.type for f in fields(ModelConfig) if f.name in (*SAME, *EXTRAS, "sliding_window")} | {
    "num_key_value_heads": int | None, "use_sliding_window": bool, "max_window_layers": int, "layer_types": list | None,
    "rope_theta": float | None, "rope_scaling": dict | None, "rope_parameters": dict | None,
    "original_max_position_embeddings": int | None,
}  # fmt: skip
_OPTIONAL_TYPES = {f.name: f.type for f in fields(ModelConfig) if f.name in OPTIONAL_FIELDS} | {
    "mlp_only_layers": list | None
}
_LARGEST = 10**15
_MAY_BE_ZERO = (
    "max_window_layers",
    "initializer_range",
    "router_aux_loss_coef",
    "sliding_window",
    "first_k_dense_replace",
)


def refusal(config: dict[str, Any], key: str, why: str) -> ConfigError:
    """Return an error that names a field, its value and what is wrong with it."""
    value = str(config[key])
    return ConfigError(f"init_from: {key}={value if len(value) <= 60 else value[:57] + '...'} in config.json: {why}")


def read_family(config: dict[str, Any]) -> tuple[Family, bool]:
    """Return (the family of a config.json, True if its model_type has ndtrain's prefix).

    Raises:
        ConfigError: ndtrain does not support the model_type, or its class in `architectures`.
    """
    said = str(config.get("model_type"))
    kind = said.removeprefix(OWN)
    if kind not in names("family"):
        raise ConfigError(
            f"init_from: model_type={said} in config.json is not supported; known: {', '.join(names('family'))}"
        )
    family, own = get("family", kind), said != kind
    known = ["NdtrainForCausalLM"] if own else [family.causal_lm, f"{family.class_prefix}Model"]
    classes = config.get("architectures") or known
    if not isinstance(classes, list) or not any(c in known for c in classes):
        raise refusal(config, "architectures", f"with model_type={said} only {' and '.join(known)} are supported")
    return family, own


def check_fields(config: dict[str, Any], family: Family, own: bool) -> None:
    """Check that fields that are read have usable values, and that other fields do not change the computation.

    Args:
        config: with the family's defaults filled in.

    Raises:
        ConfigError: a field fails the check. The message names it.
    """
    absent = (*family.absent, *(() if own else EXTRAS))
    neutral = {key: fine for key, fine in _NEUTRAL.items() if key not in family.own_fields}
    for key, fine in (neutral | dict.fromkeys(absent, ())).items():
        value = config.get(key)
        silent = _says_nothing(value) and not (value is False and key in _FALSE_SAYS_SOMETHING)
        if not silent and value not in fine:
            allowed = " or ".join(str(v) for v in fine) or "null"
            raise refusal(config, key, f"not supported for model_type={family.model_type}; supported: {allowed}")
    for key in _SHAPE:
        if config.get(key) is None:
            raise ConfigError(f"init_from: {key} is missing from config.json")
    for key, wanted in (_TYPES | {k: t for k, t in _OPTIONAL_TYPES.items() if k in family.own_fields}).items():
        if key in config:
            _check_value(config, key, wanted)


def with_expert_count(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return a config.json whose number of experts, if it has one, is spelled `num_experts`.

    Raises:
        ConfigError: two spellings have different numbers.
    """
    said = {key: config[key] for key in COUNT_SPELLINGS if config.get(key) is not None}
    if family.moe is None or not said:
        return config
    first, *others = said
    for other in others:
        if said[other] != said[first]:
            raise refusal(config, other, f"contradicts {first}={said[first]}: remove one of them")
    return {key: value for key, value in config.items() if key not in COUNT_SPELLINGS} | {"num_experts": said[first]}


def _check_value(config: dict[str, Any], key: str, wanted: Any) -> None:
    value = config[key]
    if wanted in (float, float | None):
        right = is_number(value) or (value is None and wanted is not float)
    else:
        right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not right:
        raise refusal(config, key, f"must be of type {getattr(wanted, '__name__', wanted)}")
    if is_number(value) and not abs(value) < _LARGEST:
        raise refusal(config, key, f"must be a number below {_LARGEST:.0e}")
    if is_number(value) and value <= 0 and key not in _MAY_BE_ZERO:
        raise refusal(config, key, "must be above 0")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def unknown_fields(config: dict[str, Any]) -> list[str]:
    """Return the fields of a config.json that have a value but that ndtrain neither reads nor knows to be harmless."""
    kind = str(config.get("model_type")).removeprefix(OWN)
    own = get("family", kind).fields if kind in names("family") else ()
    known = _READ | _PASSED | _NEUTRAL.keys() | {*own, *mod_fields(config.get("attention"))}
    return [k for k, v in config.items() if k not in known and not k.startswith("_") and not _says_nothing(v)]


def uninterpreted_fields(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return the fields of a config.json that do not define the model, without names of code.

    These are fields about tokens, generation and files, fields that change nothing, and fields that ndtrain does not
    know.

    Args:
        model_type: the type of the model that is written. If config.json has another type, only fields about tokens,
            generation and files are returned. The others might change the computation of the written model.
    """
    kind = str(config.get("model_type")).removeprefix(OWN)
    own = get("family", kind).own_fields if kind in names("family") else ()
    left = _READ | {*own, *mod_fields(config.get("attention")), *COUNT_SPELLINGS, *_NOT_CARRIED}
    kept = {key: value for key, value in config.items() if key not in left}
    return kept if kind == model_type else {key: value for key, value in kept.items() if key in _PASSED}


def mod_fields(attention: str | None) -> list[str]:
    """Return the fields that a loaded plugin's attention mod adds to config.json."""
    return own_keys("attention_mod", attention) if attention in names("attention_mod") else []


def _says_nothing(value: Any) -> bool:
    return value is None or value in (False, 0, "", [], {})
