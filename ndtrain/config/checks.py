"""Checks of a configuration that need no tensors and no process group."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ndtrain import schedule as schedules
from ndtrain.arguments import near
from ndtrain.config import registry
from ndtrain.config.data_checks import check_data
from ndtrain.config.foreign_names import meaning_of_value
from ndtrain.config.island_checks import check_islands
from ndtrain.config.lengths import (
    check_batch_ramp,
    check_positions,
    choose_length,
    fit_warmup,
    note_long_ramp,
)
from ndtrain.config.local_shapes import LocalShapes
from ndtrain.config.mesh_checks import check_ep, check_rules, check_tp, resolve_cp, resolve_mesh, resolve_micro_batch
from ndtrain.config.moe_checks import resolve_balance
from ndtrain.config.name_patterns import check_factors
from ndtrain.config.optim_checks import check_optim, check_qk_clip, resolve_mup
from ndtrain.config.rope_kinds import ROPE_KINDS
from ndtrain.config.schema import EXPERT_OPS, SAVABLE_OPS, Config, ConfigError, ModelConfig, require, written


def resolve(cfg: Config, world_size: int) -> Config:
    """Fill in the values that depend on other keys or on the world size, check every rule, and freeze `cfg`.

    Examples of such values are mesh sizes of -1, the default ZeRO stage and head_dim. The function changes and returns
    `cfg`. It returns a frozen configuration unchanged.

    Raises:
        ConfigError: a rule does not hold; the message describes the first such rule.
    """
    if cfg.frozen:
        return cfg
    check_model(cfg)
    require(cfg.run.name != "", "run.name is empty: give the run a name, e.g. run.name=first")
    require(cfg.run.dir != "", "run.dir is empty: name a folder, e.g. run.dir=runs/first")
    check_batch_ramp(cfg)
    check_qk_clip(cfg)
    resolve_mup(cfg)
    resolve_balance(cfg)
    resolve_mesh(cfg, world_size)
    check_ep(cfg)
    resolve_micro_batch(cfg)
    check_positions(cfg)
    choose_length(cfg)
    if cfg.train.epochs is None:
        _resolve_steps(cfg)
    _check_train(cfg)
    check_islands(cfg)
    check_data(cfg.data)
    _resolve_schedule(cfg)
    check_rules(cfg.layout.rules)
    check_tp(cfg)
    resolve_cp(cfg)
    _check_precision(cfg)
    _resolve_recompute(cfg)
    _check_kernel(cfg)
    _check_loggers(cfg)
    _check_checkpoint_folder(cfg)
    cfg.freeze()
    return cfg


def _check_checkpoint_folder(cfg: Config) -> None:
    folder = cfg.checkpoint.folder
    require(folder != "", "checkpoint.folder is empty: name a folder, or set null for run.dir/checkpoints")
    require(
        "://" not in (folder or "") or cfg.checkpoint.layout == "host",
        f"checkpoint.folder={folder} is in an object store, whose objects are written by one rank each: set "
        "checkpoint.layout=host",
    )


def resolve_epochs(cfg: Config, sequences: int | None) -> Config:
    """Return a copy of a resolved configuration with `train.steps` computed from `train.epochs`, checked and frozen.

    Return `cfg` itself if `train.epochs` is not set.

    Args:
        sequences: number of sequences in one pass over the training split. None: the split has no end.

    Raises:
        ConfigError: the number of steps is unknown, or another key does not fit it.
    """
    t = cfg.train
    if t.epochs is None:
        return cfg
    require(
        sequences is not None, f"train.epochs={t.epochs:g}: the length of the data is unknown: set train.steps instead"
    )
    made = cfg.unfrozen()
    made.train.steps = t.batch_sizes.steps_for(t.epochs * (sequences or 0))  # the last may reach into a next epoch
    _resolve_steps(made)
    made.freeze()
    return made


def check_model(cfg: Config) -> None:
    """Check every field by itself, then the model as a whole. Fill in the model's sizes that follow from other sizes.

    Raises:
        ConfigError: a rule does not hold; the message describes the first such rule.
    """
    _check_fields(cfg)
    _check_model(cfg.model)


def _check_fields(cfg: Config) -> None:
    """Check the choices and bounds that the schema declares for its fields, section by section."""
    for section in fields(cfg):
        value = getattr(cfg, section.name)
        for f in fields(value) if is_dataclass(value) else ():
            _check_field(f"{section.name}.{f.name}", getattr(value, f.name), f.metadata)


def _check_field(key: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if "choices" in metadata and value is not None:
        part = metadata["part"]
        known = list(dict.fromkeys((*metadata["choices"], *(registry.names(part) if part else ()))))
        for one in value if metadata["several"] and isinstance(value, list) else [value]:
            text = written(one)
            if text not in known:
                hint = meaning_of_value(key, str(text), known) or near(str(text), known)
                raise ConfigError(f"{key}={text}: no such choice; {hint}known: {', '.join(known)}")
    if "least" in metadata:
        least = metadata["least"]
        require(value is None or value >= least, f"{key}={value}: must be at least {least}")
        finite = value is None or math.isfinite(value)
        require(finite or metadata["infinite"], f"{key}={value}: must be a finite number")
    if "positive" in metadata and value is not None:
        require(math.isfinite(value), f"{key}={value}: must be a finite number")
        or_null = ", or null" if metadata["optional"] else ""
        require(value > 0, f"{key}={value}: must be positive{or_null}")


def _check_loggers(cfg: Config) -> None:
    """Call the `check` function of each logger that has one."""
    for name in cfg.logger.names:
        if name in registry.names("logger"):  # jsonl is always written and is not registered
            getattr(registry.get("logger", name), "check", lambda cfg: None)(cfg)


def _resolve_schedule(cfg: Config) -> None:
    s, layers = cfg.schedule, cfg.model.num_hidden_layers
    require(s.chunks is None or s.chunks >= 1, f"schedule.chunks={s.chunks}: must be at least 1, or null")
    if s.chunks is None:
        s.chunks = schedules.default_chunks(s.name)
    require(s.name != "csv" or bool(s.path), "schedule.path is missing: schedule=csv needs it")
    try:
        for size in cfg.train.batch_sizes.all:
            table = schedules.build(s.name, cfg.mesh.pp, cfg.microbatches_of(size), s.chunks, s.path)
    except schedules.ScheduleError as error:
        raise ConfigError(f"schedule={s.name}: {error}") from error
    if s.split is not None:
        least = min(s.split, default=0) >= 0 and min(s.split[1:-1], default=1) >= 1
        require(
            len(s.split) == table.stages and sum(s.split) == layers and least,
            f"schedule.split={s.split}: must have the number of layers of each of {table.stages} stages, {layers} in "
            "all; only the first and the last stage may have 0 layers",
        )
        return
    chunked = " or schedule.chunks" if s.name in ("gpipe", "interleaved") and s.chunks > 1 else ""
    require(
        table.stages <= layers,
        f"schedule={s.name} cuts the model into {table.stages} stages, more than its "
        f"model.num_hidden_layers={layers}: lower mesh.pp{chunked}",
    )


def _check_model(m: ModelConfig) -> None:
    check_factors("model.init_mult", m.init_mult)
    require(
        m.num_attention_heads % m.num_key_value_heads == 0,
        f"model.num_attention_heads={m.num_attention_heads} must be a multiple of "
        f"model.num_key_value_heads={m.num_key_value_heads}",
    )
    family = registry.get("family", m.model_type)
    require(m.sliding_window is None or m.sliding_window >= 1, "model.sliding_window: must be at least 1, or null")
    if reason := family.refusal(m):
        raise ConfigError(reason)
    family.fill_in(m)
    require(
        m.head_dim is not None,
        f"model.hidden_size={m.hidden_size} must be a multiple of model.num_attention_heads={m.num_attention_heads}, "
        "or set model.head_dim",
    )
    in_part = m.qk_rope_head_dim is not None  # only this part of a head is rotated; the family has checked its size
    require(in_part or m.head_dim % 2 == 0, f"model.head_dim={m.head_dim} must be even (RoPE rotates pairs)")
    if m.rope_scaling:
        kind = m.rope_scaling.get("rope_type", m.rope_scaling.get("type"))
        require(kind in ROPE_KINDS, f"model.rope_scaling.rope_type={kind}: known: {', '.join(ROPE_KINDS)}")
        for key in ROPE_KINDS[kind].needed:
            require(key in m.rope_scaling, f"model.rope_scaling.{key} is missing: rope_type={kind} needs it")
            _check_rope_number(key, m.rope_scaling[key], positive=True)
        for key in ROPE_KINDS[kind].optional:
            if m.rope_scaling.get(key) is not None:
                _check_rope_number(key, m.rope_scaling[key], positive=False)


def _check_rope_number(key: str, value: Any, positive: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    require(is_number, f"model.rope_scaling.{key}={written(value)}: must be a number")
    require(not positive or value > 0, f"model.rope_scaling.{key}={value}: must be positive")


def _check_kernel(cfg: Config) -> None:
    kernel, compute, m = cfg.hardware.attention, cfg.precision.compute, cfg.model
    require(
        kernel in ("auto", "flex", "math") or not (m.alibi or m.attn_logit_softcapping or m.attention),
        f"hardware.attention={kernel} does not support model.alibi, model.attn_logit_softcapping and model.attention: "
        "choose flex, math or auto",
    )
    require(
        not (kernel == "cudnn" and cfg.data.pack),
        "hardware.attention=cudnn builds a graph for each document length: choose flash or auto with data.pack",
    )
    too_wide = {"flash": ("fp32", "fp64"), "cudnn": ("fp32", "fp64"), "efficient": ("fp64",), "flex": ("fp64",)}
    require(
        compute not in too_wide.get(kernel, ()),
        f"hardware.attention={kernel} does not support precision.compute={compute}: choose precision.compute=bf16, "
        "or hardware.attention=auto",
    )


_UNITS = {"b": 1} | {f"{p}{b}": base**n for n, p in enumerate("kmgt", 1) for b, base in (("b", 1000), ("ib", 1024))}


def _resolve_recompute(cfg: Config) -> None:
    """Check the keys of `recompute`, and convert `recompute.budget` to a number of bytes."""
    r = cfg.recompute
    every = r.every if isinstance(r.every, int) else None
    require(r.every == "auto" or (every or 0) >= 1, f"recompute.every={r.every}: must be at least 1, or auto")
    for op in r.keep:
        require(
            op in (*SAVABLE_OPS, *EXPERT_OPS),
            f"recompute.keep: no op {op} whose result a block can keep; {near(op, [*SAVABLE_OPS, *EXPERT_OPS])}"
            f"known: {', '.join((*SAVABLE_OPS, *EXPERT_OPS))}",
        )
    if r.name == "budget":
        require(r.budget is not None, "recompute.budget is missing: recompute=budget needs it, e.g. 2GiB")
        r.budget = parse_bytes("recompute.budget", r.budget)


def parse_bytes(key: str, value: int | str) -> int:
    """Return the number of bytes that a text such as 2GiB, 500MB, 1.5 GiB or a plain number describes.

    Raises:
        ConfigError: the value is none of these, or less than one byte; the message names `key`.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(value).strip())
    unit = _UNITS.get(match[2].lower() or "b") if match and match[1].count(".") <= 1 and match[1] != "." else None
    size = 0 if unit is None else int(float(match[1]) * unit)
    require(size >= 1, f"{key}={value}: must be a number of bytes, or one with a unit: 2GiB, 500MB")
    return size


def _check_train(cfg: Config) -> None:
    t, mesh = cfg.train, cfg.mesh
    per_forward = mesh.dp * mesh.fsdp * t.micro_batch
    for size in reversed(t.batch_sizes.all):
        named = "train.global_batch={}" if size == t.global_batch else "a batch of {} in train.batch_ramp"
        require(
            size % per_forward == 0,
            f"{named.format(size)} must be a multiple of mesh.dp x mesh.fsdp x train.micro_batch = "
            f"{mesh.dp} x {mesh.fsdp} x {t.micro_batch} = {per_forward}: "
            f"try {named.format(per_forward * max(1, round(size / per_forward)))}",
        )
    require(t.stop_at is None or t.stop_at >= 1, f"train.stop_at={t.stop_at}: must be at least 1, or null")
    require(
        not (t.profile and t.trace),
        f"train.profile={t.profile} would slow down the step that train.trace=true measures: set only one of them",
    )
    check_optim(cfg.optim)


def _resolve_steps(cfg: Config) -> None:
    """Adjust and check the keys that depend on `train.steps`."""
    fit_warmup(cfg)
    note_long_ramp(cfg)
    t, optim = cfg.train, cfg.optim
    origin = "" if t.epochs is None else f" (train.epochs={t.epochs:g})"
    if t.stop_at is not None:
        require(t.stop_at <= t.steps, f"train.stop_at={t.stop_at} exceeds train.steps={t.steps}{origin}")
    end = f"train.steps={t.steps}{origin}" if t.stop_at is None else f"train.stop_at={t.stop_at}"
    require(
        not t.profiled or t.profiled[-1] <= (t.stop_at or t.steps),
        f"train.profile={t.profile} exceeds {end}: choose earlier steps",
    )
    length = t.steps if optim.decay_steps is None else optim.decay_steps
    require(
        optim.schedule == "constant" or optim.warmup < length,
        f"optim.warmup={optim.warmup} must be less than the {length} steps of the schedule "
        f"(optim.decay_steps, or train.steps{origin})",
    )


def _check_precision(cfg: Config) -> None:
    p, moments = cfg.precision, cfg.optim.state_dtype
    require(p.params == "fp64" or p.compute != "fp64", "precision.compute=fp64 needs precision.params=fp64")
    require(
        p.params == "fp32" or p.compute in ("fp64", "fp32"),
        "precision.params=fp64 needs precision.compute=fp64 or fp32",
    )
    require(moments in (None, "fp32", "bf16"), f"optim.state_dtype={moments}: no such choice; known: null, fp32, bf16")
    require(
        moments is None or p.params == "fp32",
        f"optim.state_dtype={moments} needs precision.params=fp32: set it to null with precision.params=fp64",
    )
    if p.compute == "fp8":
        _check_fp8(cfg)


FP8_MULTIPLE = 16  # every dimension of an fp8 matmul must be a multiple of this number


def _check_fp8(cfg: Config) -> None:
    """Check the matmul sizes that the configuration alone determines.

    `fp8.check_shapes` later checks the actual matrices of a rank: a model with experts may have no dense MLP, and
    latent attention has heads of other sizes.
    """
    m, shapes = cfg.model, LocalShapes.of(cfg)
    sizes = {
        "model.hidden_size": m.hidden_size,
        "train.micro_batch x train.seq_len / mesh.cp": shapes.tokens,
    }
    if m.num_experts is None:
        sizes["model.intermediate_size / mesh.tp"] = shapes.intermediate_size
    if m.kv_lora_rank is None:
        sizes["model.num_attention_heads x head_dim / mesh.tp"] = shapes.heads * m.head_dim
        sizes["model.num_key_value_heads x head_dim / mesh.tp"] = shapes.kv_heads * m.head_dim
    for key, size in sizes.items():
        require(
            size % FP8_MULTIPLE == 0,
            f"{key} = {size} must be a multiple of {FP8_MULTIPLE} with precision.compute=fp8: change it, or set "
            "precision.compute=bf16",
        )
