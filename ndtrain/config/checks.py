"""The checks of a configuration that need no tensor and no process group."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ndtrain import schedule as schedules
from ndtrain.arguments import near
from ndtrain.config import registry
from ndtrain.config.lengths import check_positions, fit_warmup
from ndtrain.config.local_shapes import LocalShapes
from ndtrain.config.schema import AXES, TOKEN_SOURCES, Config, ConfigError, DataConfig, ModelConfig


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def resolve(cfg: Config, world_size: int) -> Config:
    """Fills in what depends on the world size (`-1` mesh sizes, the default zero stage, head_dim), checks every rule,
    and freezes the configuration. Changes and returns `cfg`; a frozen one is returned as it is.

    Raises:
        ConfigError: with the first rule that does not hold.
    """
    if cfg.frozen:
        return cfg
    _check_fields(cfg)
    _require(cfg.run.dir != "", "run.dir is empty: name a folder, e.g. run.dir=runs/first")
    _check_model(cfg.model)
    _resolve_mesh(cfg, world_size)
    _resolve_micro_batch(cfg)
    check_positions(cfg)
    fit_warmup(cfg)
    _check_train(cfg)
    check_data(cfg.data)
    _resolve_schedule(cfg)
    _check_rules(cfg.layout.rules)
    _check_tp(cfg)
    _resolve_cp(cfg)
    _check_precision(cfg)
    _resolve_recompute(cfg)
    _check_kernel(cfg)
    _check_loggers(cfg)
    cfg.freeze()
    return cfg


def _check_fields(cfg: Config) -> None:
    """The choices and bounds that the schema declares beside its fields, section by section."""
    for section in fields(cfg):
        value = getattr(cfg, section.name)
        for f in fields(value) if is_dataclass(value) else ():
            _check_field(f"{section.name}.{f.name}", getattr(value, f.name), f.metadata)


def _check_field(key: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if "choices" in metadata:
        part = metadata["part"]
        known = list(dict.fromkeys((*metadata["choices"], *(registry.names(part) if part else ()))))
        for one in value if metadata["several"] and isinstance(value, list) else [value]:
            _require(one in known, f"{key}={one}: no such choice; {near(str(one), known)}known: {', '.join(known)}")
    if "least" in metadata:
        least = metadata["least"]
        _require(value is None or value >= least, f"{key}={value}: must be at least {least}")


def _check_loggers(cfg: Config) -> None:
    """What each logger's own `check` refuses."""
    for name in cfg.logger.names:
        if name in registry.names("logger"):  # jsonl is no part: it is always written
            getattr(registry.get("logger", name), "check", lambda cfg: None)(cfg)


def _resolve_schedule(cfg: Config) -> None:
    s, layers = cfg.schedule, cfg.model.num_hidden_layers
    _require(s.chunks is None or s.chunks >= 1, f"schedule.chunks={s.chunks}: must be at least 1, or null")
    if s.chunks is None:
        s.chunks = schedules.default_chunks(s.name)
    _require(s.name != "csv" or bool(s.path), "schedule.path is missing: schedule=csv needs it")
    try:
        table = schedules.build(s.name, cfg.mesh.pp, cfg.microbatches, s.chunks, s.path)
    except schedules.ScheduleError as error:
        raise ConfigError(f"schedule={s.name}: {error}") from error
    chunked = " or schedule.chunks" if s.name in ("gpipe", "interleaved") and s.chunks > 1 else ""
    _require(
        table.stages <= layers,
        f"schedule={s.name} cuts the model into {table.stages} stages, more than its "
        f"model.num_hidden_layers={layers}: lower mesh.pp{chunked}",
    )
    if s.split is not None:
        _require(
            len(s.split) == table.stages and sum(s.split) == layers and min(s.split) >= 1,
            f"schedule.split={s.split}: must name a number of layers, at least 1, for each of {table.stages} stages, "
            f"{layers} together",
        )


def _check_model(m: ModelConfig) -> None:
    _require(
        m.num_attention_heads % m.num_key_value_heads == 0,
        f"model.num_attention_heads={m.num_attention_heads} must be a multiple of "
        f"model.num_key_value_heads={m.num_key_value_heads}",
    )
    if m.head_dim is None:
        _require(
            m.hidden_size % m.num_attention_heads == 0,
            f"model.hidden_size={m.hidden_size} must be a multiple of "
            f"model.num_attention_heads={m.num_attention_heads}, or set model.head_dim",
        )
        m.head_dim = m.hidden_size // m.num_attention_heads
    _require(m.head_dim % 2 == 0, f"model.head_dim={m.head_dim} must be even (RoPE rotates pairs)")
    _require(m.sliding_window is None or m.sliding_window >= 1, "model.sliding_window: must be at least 1, or null")
    if reason := registry.get("family", m.model_type).refusal(m):
        raise ConfigError(reason)
    cap = m.attn_logit_softcapping
    _require(cap is None or cap > 0, f"model.attn_logit_softcapping={cap}: must be positive, or null")
    if m.rope_scaling:
        kind = m.rope_scaling.get("rope_type", m.rope_scaling.get("type"))
        _require(
            kind in ("default", "linear", "llama3"),
            f"model.rope_scaling.rope_type={kind}: known: default, linear, llama3",
        )
        need = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        for key in need.get(kind, ()):
            _require(key in m.rope_scaling, f"model.rope_scaling.{key} is missing: rope_type={kind} needs it")


def _resolve_mesh(cfg: Config, world_size: int) -> None:
    mesh = cfg.mesh
    sizes = {a: getattr(mesh, a) for a in AXES}
    _require(sorted(mesh.order) == sorted(AXES), f"mesh.order={mesh.order}: must name each of {', '.join(AXES)} once")
    for axis, size in sizes.items():
        _require(size == -1 or size >= 1, f"mesh.{axis}={size}: must be at least 1, or -1 for the rest")
    free = [a for a, s in sizes.items() if s == -1]
    _require(len(free) <= 1, f"mesh.{' and mesh.'.join(free)} are -1: only one axis can take the rest")
    fixed = math.prod(s for s in sizes.values() if s != -1)
    product = " x ".join(f"{a}={s}" for a, s in sizes.items() if s != 1) or "1"
    if free:
        _require(
            world_size % fixed == 0,
            f"mesh {product}: the fixed sizes make {fixed}, which does not divide the {world_size} ranks started",
        )
        setattr(mesh, free[0], world_size // fixed)
    else:
        _require(
            fixed == world_size,
            f"mesh {product} needs {fixed} rank{'s' * (fixed != 1)} but {world_size} started: "
            f"change the mesh (mesh.fsdp=-1 takes the rest) or torchrun --nproc-per-node {fixed}",
        )
    if mesh.zero is None:
        mesh.zero = 1 if mesh.pp > 1 else 3
    _require(mesh.zero in (1, 2, 3), f"mesh.zero={mesh.zero}: must be 1, 2 or 3")


def _resolve_micro_batch(cfg: Config) -> None:
    """null becomes a rank's whole share of the global batch, because fewer passes take less time. A pipeline needs
    several microbatches to be full: two for each of its ranks, or more where that does not divide the share."""
    t, mesh = cfg.train, cfg.mesh
    if t.micro_batch is None:
        share = max(1, t.global_batch // (mesh.dp * mesh.fsdp))
        least = min(share, 1 if mesh.pp == 1 else 2 * mesh.pp)
        t.micro_batch = share // next(n for n in range(least, share + 1) if share % n == 0)


_TP_DIMS = ("heads", "kv_heads", "mlp", "vocab")  # the dims that tp's ops can shard


def _check_rules(rules: dict[str, str | None]) -> None:
    for dim, axis in rules.items():
        key = f"layout.rules.{dim}"
        _require(
            dim in _TP_DIMS,
            f"{key}: no such dim to cut; {near(dim, list(_TP_DIMS))}known: {', '.join(_TP_DIMS)}",
        )
        _require(axis is None or axis in AXES, f"{key}={axis}: no such axis; known: {', '.join(AXES)}, null")
        _require(axis in (None, "tp"), f"{key}={axis}: only tp shards dims: set it to tp or null")
    _require(
        rules.get("heads") == rules.get("kv_heads"),
        f"layout.rules.kv_heads={rules.get('kv_heads')} must be as layout.rules.heads={rules.get('heads')}: "
        "a rank needs the K/V heads of its query heads",
    )


def _check_tp(cfg: Config) -> None:
    m, tp, rules = cfg.model, cfg.mesh.tp, cfg.layout.rules
    if tp == 1:
        return
    heads, kv_heads = m.num_attention_heads, m.num_key_value_heads
    if rules.get("heads"):
        _require(heads % tp == 0, f"mesh.tp={tp} must divide model.num_attention_heads={heads}")
        _require(
            kv_heads % tp == 0 or tp % kv_heads == 0,
            f"mesh.tp={tp} and model.num_key_value_heads={kv_heads}: one must divide the other",
        )
    else:
        _require(
            not cfg.tp.sequence_parallel,
            "layout.rules.heads=null: attention on every rank needs the whole stream: set tp.sequence_parallel=false",
        )
    if rules.get("mlp"):
        _require(
            m.intermediate_size % tp == 0, f"mesh.tp={tp} must divide model.intermediate_size={m.intermediate_size}"
        )
    if rules.get("vocab"):
        _require(
            m.vocab_size >= tp, f"mesh.tp={tp} exceeds model.vocab_size={m.vocab_size}: set layout.rules.vocab=null"
        )
    if cfg.tp.sequence_parallel:
        tokens = LocalShapes.of(cfg).tokens
        _require(
            tokens % tp == 0,
            f"mesh.tp={tp} must divide the {tokens} tokens of a microbatch (train.micro_batch x train.seq_len / "
            "mesh.cp) with tp.sequence_parallel=true: change one of them, or set it to false",
        )


def _resolve_cp(cfg: Config) -> None:
    m, n, cp = cfg.model, cfg.mesh.cp, cfg.cp
    if cp.balance == "auto":
        cp.balance = "striped" if cfg.data.pack else "zigzag"
    if n == 1:
        cp.ulysses = 1
        return
    if cp.ulysses is None:
        cp.ulysses = n if cp.kind == "ulysses" else 1
    u = cp.ulysses
    _require(u >= 1 and n % u == 0, f"cp.ulysses={u} must divide mesh.cp={n}")
    shapes = LocalShapes.of(cfg)
    heads, kv_heads = shapes.heads, shapes.kv_heads
    of = f" / mesh.tp = {heads}" if heads < m.num_attention_heads else ""
    _require(
        heads % u == 0,
        f"cp.ulysses={u} must divide model.num_attention_heads={m.num_attention_heads}{of}: "
        "lower it, or set cp.kind=ring and cp.ulysses=null",
    )
    _require(
        kv_heads % u == 0 or u % kv_heads == 0,
        f"cp.ulysses={u} and the {kv_heads} K/V heads of a rank: one must divide the other",
    )
    ring = n // u
    least = math.lcm(2 * ring, n) if cp.balance == "zigzag" and ring > 1 else n
    why = "2 x mesh.cp" if least == 2 * n else "mesh.cp" if least == n else f"{least}"
    _require(
        cfg.train.seq_len % least == 0,
        f"train.seq_len={cfg.train.seq_len} must be a multiple of {why} = {least} (cp.balance={cp.balance}): "
        f"try train.seq_len={least * max(1, round(cfg.train.seq_len / least))}",
    )


def _check_kernel(cfg: Config) -> None:
    kernel, compute, m = cfg.hardware.attention, cfg.precision.compute, cfg.model
    _require(
        kernel in ("auto", "math") or not (m.alibi or m.attn_logit_softcapping),
        f"hardware.attention={kernel} knows neither model.alibi nor model.attn_logit_softcapping: choose math, or auto",
    )
    too_wide = {"flash": ("fp32", "fp64"), "cudnn": ("fp32", "fp64"), "efficient": ("fp64",)}
    _require(
        compute not in too_wide.get(kernel, ()),
        f"hardware.attention={kernel} does not compute in precision.compute={compute}: choose precision.compute=bf16, "
        "or hardware.attention=auto",
    )


SAVABLE_OPS = ("qkv_proj", "core", "o_proj", "gate_up_proj")  # their results can be saved for the recompute
_UNITS = {"b": 1} | {f"{p}{b}": base**n for n, p in enumerate("kmgt", 1) for b, base in (("b", 1000), ("ib", 1024))}


def _resolve_recompute(cfg: Config) -> None:
    """Checks its keys; the budget becomes a number of bytes."""
    r = cfg.recompute
    every = r.every if isinstance(r.every, int) else None
    _require(r.every == "auto" or (every or 0) >= 1, f"recompute.every={r.every}: must be at least 1, or auto")
    for op in r.keep:
        _require(
            op in SAVABLE_OPS,
            f"recompute.keep: no op {op} whose result a block can keep; {near(op, list(SAVABLE_OPS))}"
            f"known: {', '.join(SAVABLE_OPS)}",
        )
    if r.name == "budget":
        _require(r.budget is not None, "recompute.budget is missing: recompute=budget needs it, e.g. 2GiB")
        r.budget = parse_bytes("recompute.budget", r.budget)


def parse_bytes(key: str, value: int | str) -> int:
    """2GiB, 500MB, 1.5 GiB or a plain number as bytes.

    Raises:
        ConfigError: it is none of these, or less than one byte; the line names `key`.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(value).strip())
    unit = _UNITS.get(match[2].lower() or "b") if match and match[1].count(".") <= 1 and match[1] != "." else None
    size = 0 if unit is None else int(float(match[1]) * unit)
    _require(size >= 1, f"{key}={value}: must be a number of bytes, or one with a unit: 2GiB, 500MB")
    return size


def _check_train(cfg: Config) -> None:
    t, mesh, optim = cfg.train, cfg.mesh, cfg.optim
    replicas = mesh.dp * mesh.fsdp
    per_forward = replicas * t.micro_batch
    _require(
        t.global_batch % per_forward == 0,
        f"train.global_batch={t.global_batch} must be a multiple of mesh.dp x mesh.fsdp x train.micro_batch = "
        f"{mesh.dp} x {mesh.fsdp} x {t.micro_batch} = {per_forward}: "
        f"try train.global_batch={per_forward * max(1, round(t.global_batch / per_forward))}",
    )
    _require(t.stop_at is None or t.stop_at >= 1, f"train.stop_at={t.stop_at}: must be at least 1, or null")
    if t.stop_at is not None:
        _require(t.stop_at <= t.steps, f"train.stop_at={t.stop_at} lies beyond train.steps={t.steps}")
    end, key = (t.steps, "train.steps") if t.stop_at is None else (t.stop_at, "train.stop_at")
    _require(
        not t.profiled or t.profiled[-1] <= end,
        f"train.profile={t.profile} lies beyond {key}={end}: choose earlier steps",
    )
    _require(
        not (t.profile and t.trace),
        f"train.profile={t.profile} slows the step that train.trace=true times: set only one of them",
    )
    for key in ("lr", "min_lr", "eps", "weight_decay", "clip"):
        value = getattr(optim, key)
        _require(value is None or math.isfinite(value), f"optim.{key}={value}: must be a finite number")
    _require(optim.lr > 0, f"optim.lr={optim.lr}: must be positive")
    _require(
        len(optim.betas) == 2 and all(0 <= b < 1 for b in optim.betas),
        f"optim.betas={optim.betas}: must be two numbers in [0, 1)",
    )
    _require(optim.eps > 0, f"optim.eps={optim.eps}: must be positive")
    _require(
        optim.clip is None or optim.clip > 0, f"optim.clip={optim.clip}: must be positive, or null for no clipping"
    )
    _require(optim.ema is None or 0 < optim.ema < 1, f"optim.ema={optim.ema}: must lie in (0, 1), or null for none")
    _require(0 < optim.wsd_decay <= 1, f"optim.wsd_decay={optim.wsd_decay}: must lie in (0, 1]")
    length = t.steps if optim.decay_steps is None else optim.decay_steps
    _require(length >= 1, f"optim.decay_steps={length}: must be at least 1, or null for train.steps")
    _require(
        optim.schedule == "constant" or optim.warmup < length,
        f"optim.warmup={optim.warmup} must be less than the {length} steps of the schedule "
        "(optim.decay_steps, or train.steps)",
    )


def _check_precision(cfg: Config) -> None:
    p, moments = cfg.precision, cfg.optim.state_dtype
    _require(p.params == "fp64" or p.compute != "fp64", "precision.compute=fp64 needs precision.params=fp64")
    _require(
        p.params == "fp32" or p.compute in ("fp64", "fp32"),
        "precision.params=fp64 goes with precision.compute=fp64 or fp32",
    )
    _require(moments in (None, "fp32", "bf16"), f"optim.state_dtype={moments}: no such choice; known: null, fp32, bf16")
    _require(
        moments is None or p.params == "fp32",
        f"optim.state_dtype={moments} needs precision.params=fp32: set it to null with precision.params=fp64",
    )
    if p.compute == "fp8":
        _check_fp8(cfg)


_FP8_MULTIPLE = 16  # of every size of a matmul in fp8


def _check_fp8(cfg: Config) -> None:
    m, shapes = cfg.model, LocalShapes.of(cfg)
    sizes = {
        "model.hidden_size": m.hidden_size,
        "model.intermediate_size / mesh.tp": shapes.intermediate_size,
        "model.num_attention_heads x head_dim / mesh.tp": shapes.heads * m.head_dim,
        "model.num_key_value_heads x head_dim / mesh.tp": shapes.kv_heads * m.head_dim,
        "train.micro_batch x train.seq_len / mesh.cp": shapes.tokens,
    }
    for key, size in sizes.items():
        _require(
            size % _FP8_MULTIPLE == 0,
            f"{key} = {size} must be a multiple of {_FP8_MULTIPLE} with precision.compute=fp8: change it, or compute "
            "in bf16",
        )


def check_data(data: DataConfig) -> None:
    """Checks the keys of `data`, or of one corpus of a blend, without reading any file.

    Raises:
        ConfigError: naming the key.
    """
    name = data.name
    if name in TOKEN_SOURCES and name != "bin":
        _check_token_files(data)
    if name in ("text", "jsonl", "bin", "hf"):
        _require(bool(data.path), f"data.path is missing: data={name} needs it, e.g. data.path=corpus/")
    _require(
        name not in ("python", "text", "jsonl", "hf", "bin") or data.paths is None,
        f"data.paths={data.paths}: only {_listed(TOKEN_SOURCES[1:])} read it, data={name} reads data.path: set it to "
        "null",
    )
    _require(0 <= data.validation < 1, f"data.validation={data.validation}: must lie in [0, 1)")
    _require(name != "blend" or bool(data.blend), f"data.blend is empty: data=blend needs {_BLEND}")
    _require(name == "blend" or not data.blend, f"data.blend is for data=blend, but data={name}: set data=blend")
    _require(
        name == "hf" or not data.streaming,
        f"data.streaming=true: only data=hf streams, data={name} is tokenised into data.cache: set it to false",
    )
    _require(
        name in TOKEN_SOURCES or data.validation_path is None,
        f"data.validation_path={data.validation_path}: only {_listed(TOKEN_SOURCES)} read it, data={name} holds out "
        "data.validation of its documents: set it to null",
    )
    _require(
        name in ("hf", "blend") or data.eval_split is None,
        f"data.eval_split={data.eval_split}: only data=hf has splits, data={name} holds out data.validation of its "
        "documents: set it to null",
    )


def _listed(sources: Sequence[str]) -> str:
    return ", ".join(f"data={name}" for name in sources)


def _check_token_files(data: DataConfig) -> None:
    """Checks the keys of files in the format of another program."""
    name = data.name
    _require(
        bool(data.path or data.paths),
        f"data.path is missing: data={name} needs it, e.g. data.path={_EXAMPLES[name]}, or data.paths=[...]",
    )
    _require(
        not (data.path and data.paths),
        f"data.path={data.path} and data.paths={data.paths}: data={name} reads one of them: set the other to null",
    )
    _require(
        name == "datatrove" or data.dtype == DataConfig.dtype,
        f"data.dtype={data.dtype}: data={name} finds the type of the ids in its files: leave data.dtype out",
    )


_EXAMPLES = {"megatron": "corpus_text_document", "llmc": "'fineweb_train_*.bin'", "datatrove": "tokens/"}
_BLEND = "corpora with weights, e.g. data.blend=[{name: python, weight: 1}, {name: text, path: corpus/, weight: 2}]"
