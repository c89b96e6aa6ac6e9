"""The mesh of a run: its sizes for the number of ranks, and the sizes that each axis must divide."""

import math

from ndtrain.arguments import near
from ndtrain.config import registry
from ndtrain.config.local_shapes import LocalShapes
from ndtrain.config.schema import AXES, DATA_AXES, Config, ConfigError, MoEConfig, require, resolved


def resolve_mesh(cfg: Config, world_size: int) -> None:
    mesh = cfg.mesh
    sizes = {a: getattr(mesh, a) for a in AXES}
    require(sorted(mesh.order) == sorted(AXES), f"mesh.order={mesh.order}: must name each of {', '.join(AXES)} once")
    for axis, size in sizes.items():
        require(size == -1 or size >= 1, f"mesh.{axis}={size}: must be at least 1, or -1 for all remaining ranks")
    free = [a for a, s in sizes.items() if s == -1]
    require(len(free) <= 1, f"mesh.{' and mesh.'.join(free)} are -1: only one axis can be -1")
    fixed = math.prod(s for s in sizes.values() if s != -1)
    product = " x ".join(f"{a}={s}" for a, s in sizes.items() if s != 1) or "1"
    if free:
        require(
            world_size % fixed == 0,
            f"mesh {product}: the fixed sizes multiply to {fixed}, which does not divide the {world_size} ranks",
        )
        setattr(mesh, free[0], world_size // fixed)
    else:
        require(
            fixed == world_size,
            f"mesh {product} needs {fixed} rank{'s' * (fixed != 1)} but {world_size} started: "
            f"change the mesh (mesh.fsdp=-1: all remaining ranks), or use torchrun --nproc-per-node {fixed}",
        )
    if mesh.zero is None:
        mesh.zero = 1 if mesh.pp > 1 else 3
    require(mesh.zero in (1, 2, 3), f"mesh.zero={mesh.zero}: must be 1, 2 or 3")


def check_ep(cfg: Config) -> None:
    """Check `mesh.ep` and its keys in `moe`. The ep ranks are a subset of the ranks on the data axes."""
    mesh, moe, experts = cfg.mesh, cfg.moe, cfg.model.num_experts
    require(
        moe.overlap or moe.parts == MoEConfig().parts,
        f"moe.parts={moe.parts} has no effect without moe.overlap=true: set that too, or remove moe.parts",
    )
    if mesh.ep == 1:
        for key, given in (("overlap=true", moe.overlap), (f"capacity={moe.capacity}", moe.capacity is not None)):
            require(not given, f"moe.{key}: it has no effect with mesh.ep=1: remove it, or raise mesh.ep")
        return
    require(
        experts is not None,
        f"mesh.ep={mesh.ep}: model.model_type={cfg.model.model_type} has no experts: set it to 1",
    )
    ranks = math.prod(getattr(mesh, axis) for axis in DATA_AXES)
    require(
        ranks % mesh.ep == 0,
        f"mesh.ep={mesh.ep} must divide mesh.dp x mesh.fsdp x mesh.cp = {mesh.dp} x {mesh.fsdp} x {mesh.cp} = {ranks}",
    )
    require(resolved(experts) % mesh.ep == 0, f"mesh.ep={mesh.ep} must divide model.num_experts={experts}: lower it")
    each = resolved(experts) // mesh.ep
    require(
        not moe.overlap or moe.parts <= each,
        f"moe.parts={moe.parts} exceeds the experts per rank, {experts} / {mesh.ep} = {each}: lower moe.parts "
        "or mesh.ep, or set moe.overlap=false",
    )


_MICROBATCHES = 2  # of an island, if all islands compute equal shares


def resolve_micro_batch(cfg: Config) -> None:
    """Set `train.micro_batch` if it is null.

    Without pipeline it becomes a rank's whole share of the global batch, because fewer passes take less time. A
    pipeline needs several microbatches to be full: at least two per pipeline rank, in a number that divides the share.
    With `train.batch_ramp` it divides the shares of all batches.
    """
    t, mesh = cfg.train, cfg.mesh
    if t.micro_batch is None:
        share = max(1, math.gcd(*t.batch_sizes.all) // (mesh.dp * mesh.fsdp))
        least = 1 if mesh.pp == 1 else 2 * mesh.pp
        if cfg.islands.count:  # shares of several sizes have to be possible
            least = max(least, _MICROBATCHES * cfg.islands.count)
        least = min(share, least)
        t.micro_batch = share // next(n for n in range(least, share + 1) if share % n == 0)


_TP_DIMS = ("heads", "kv_heads", "mlp", "vocab", "shared_mlp", "expert_mlp")  # the dims that tp can shard


def check_rules(rules: dict[str, str | None]) -> None:
    for dim, axis in rules.items():
        key = f"layout.rules.{dim}"
        if dim not in _TP_DIMS:  # not `require`, which would search for similar names even if the dim is valid
            raise ConfigError(f"{key}: no such dim; {near(dim, list(_TP_DIMS))}known: {', '.join(_TP_DIMS)}")
        require(axis is None or axis in AXES, f"{key}={axis}: no such axis; known: {', '.join(AXES)}, null")
        require(axis in (None, "tp"), f"{key}={axis}: only tp shards dims: set it to tp or null")
    require(
        rules.get("heads") == rules.get("kv_heads"),
        f"layout.rules.kv_heads={rules.get('kv_heads')} must equal layout.rules.heads={rules.get('heads')}: "
        "a rank needs the K/V heads of its query heads",
    )


def check_tp(cfg: Config) -> None:
    m, tp, rules = cfg.model, cfg.mesh.tp, cfg.layout.rules
    moe = registry.get("family", m.model_type).moe
    require(
        not rules.get("expert_mlp") or moe is not None,
        f"layout.rules.expert_mlp=tp: model.model_type={m.model_type} has no experts: remove it",
    )
    if tp == 1:
        return
    heads, kv_heads = m.num_attention_heads, m.num_key_value_heads
    if rules.get("heads"):
        require(heads % tp == 0, f"mesh.tp={tp} must divide model.num_attention_heads={heads}")
        require(
            kv_heads % tp == 0 or tp % kv_heads == 0,
            f"mesh.tp={tp} and model.num_key_value_heads={kv_heads}: one must divide the other",
        )
    else:
        require(
            not cfg.tp.sequence_parallel,
            "layout.rules.heads=null: unsharded attention needs all tokens: set tp.sequence_parallel=false",
        )
    # With experts, building the layouts checks the dense layers; this rule does not shard the experts.
    if rules.get("mlp") and m.num_experts is None:
        require(
            m.intermediate_size % tp == 0, f"mesh.tp={tp} must divide model.intermediate_size={m.intermediate_size}"
        )
    if moe and rules.get("expert_mlp"):
        size, key = moe.dim_sizes(m)["expert_mlp"][0], "moe_intermediate_size"
        key = "intermediate_size" if getattr(m, key) is None else key
        require(
            size % tp == 0,
            f"mesh.tp={tp} must divide model.{key}={size}, which layout.rules.expert_mlp=tp shards: change one of "
            "them, or set the rule to null",
        )
    if rules.get("vocab"):
        require(
            m.vocab_size >= tp, f"mesh.tp={tp} exceeds model.vocab_size={m.vocab_size}: set layout.rules.vocab=null"
        )
    if cfg.tp.sequence_parallel:
        tokens = LocalShapes.of(cfg).tokens
        require(
            tokens % tp == 0,
            f"mesh.tp={tp} must divide the {tokens} tokens of a microbatch (train.micro_batch x train.seq_len / "
            "mesh.cp) with tp.sequence_parallel=true: change one of them, or set it to false",
        )


def resolve_cp(cfg: Config) -> None:
    m, n, cp = cfg.model, cfg.mesh.cp, cfg.cp
    if cp.balance == "auto":
        cp.balance = "striped" if cfg.data.pack else "zigzag"
    if n == 1:
        cp.ulysses = 1
        return
    if cp.ulysses is None:
        cp.ulysses = n if cp.kind == "ulysses" else 1
    u = cp.ulysses
    require(u >= 1 and n % u == 0, f"cp.ulysses={u} must divide mesh.cp={n}")
    shapes = LocalShapes.of(cfg)
    heads, kv_heads = shapes.heads, shapes.kv_heads
    of = f" / mesh.tp = {heads}" if heads < m.num_attention_heads else ""
    require(
        heads % u == 0,
        f"cp.ulysses={u} must divide model.num_attention_heads={m.num_attention_heads}{of}: "
        "lower it, or set cp.kind=ring and cp.ulysses=null",
    )
    require(
        kv_heads % u == 0 or u % kv_heads == 0,
        f"cp.ulysses={u} and the {kv_heads} K/V heads of a rank: one must divide the other",
    )
    ring = n // u
    least = math.lcm(2 * ring, n) if cp.balance == "zigzag" and ring > 1 else n
    why = "2 x mesh.cp" if least == 2 * n else "mesh.cp" if least == n else f"{least}"
    require(
        cfg.train.seq_len % least == 0,
        f"train.seq_len={cfg.train.seq_len} must be a multiple of {why} = {least} (cp.balance={cp.balance}): "
        f"try train.seq_len={least * max(1, round(cfg.train.seq_len / least))}",
    )
