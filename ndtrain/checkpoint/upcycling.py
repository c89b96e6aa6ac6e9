"""Starts a mixture of experts from a dense model by upcycling (Komatsuzaki et al., 2022, arXiv:2212.05055).

Every expert is a copy of its layer's dense MLP. The routers are drawn at random. All other weights are copied."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ndtrain.checkpoint.elements import CheckpointError
from ndtrain.checkpoint.pretrained import load_weights
from ndtrain.config import Config, ModelConfig, check_model
from ndtrain.config.schema import resolved, written
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import tensor_shapes
from ndtrain.model.families import family_of
from ndtrain.model.families.hf_fields import OURS, mod_fields
from ndtrain.model.families.moe import OPTIONAL_FIELDS
from ndtrain.model.transformer import layer, sparse_layers
from ndtrain.parallel.build import Stages, initialise

_MLP = ("gate_proj", "up_proj", "down_proj")  # of a dense layer, and of a shared expert
# fields that may differ between a mixture and the dense model it starts from. `_mlp_sizes` are checked separately
_OWN = {*OURS, "model_type", "intermediate_size", "initializer_range", "max_position_embeddings", *OPTIONAL_FIELDS}
_OWN -= {"clip_qkv"}


def dense_origins(m: ModelConfig) -> dict[str, str | None]:
    """Return the dense tensor that each tensor of a mixture starts as a copy of. None: it is drawn at random.

    Tensors that have the same name in the dense model are not listed."""
    moe = resolved(family_of(m).moe)
    mlps = [(f"experts.{x}", moe.projections) for x in range(resolved(m.num_experts))]
    drawn = ["gate"]
    if moe.shared:
        mlps.append((moe.shared.module, _MLP))
        drawn += [f"{moe.shared.module}_gate"] if moe.shared.gated else []
    origins: dict[str, str | None] = {}
    for name in map(layer, sparse_layers(m)):
        mixture = f"{name}.{moe.module}"
        for mlp, projections in mlps:
            pairs = zip(projections, _MLP, strict=True)
            origins |= {f"{mixture}.{mlp}.{ours}.weight": f"{name}.mlp.{theirs}.weight" for ours, theirs in pairs}
        origins |= {f"{mixture}.{router}.weight": None for router in drawn}
    return origins


def load_start(folder: Path, stages: Stages, mesh: Mesh, seed: int | None = None) -> None:
    """Fill this rank's elements from the folder `init_from`.

    Args:
        seed: with `moe.upcycle`, the seed of the weights that the folder's dense model does not have, else None.

    Raises:
        CheckpointError: as `load_weights`.
    """
    origins: dict[str, str | None] = {}
    if seed is not None:
        origins = dense_origins(stages.model)
        initialise(stages, seed, only={name for name, origin in origins.items() if origin is None})
    load_weights(folder, stages, mesh, origins)


# ------------------------------------------------------------------------------------------------------------ checks


def starting_model(cfg: Config, held: ModelConfig) -> ModelConfig:
    """Return the model of a run that starts from a folder: the folder's, or with `moe.upcycle` the run's own.

    Args:
        cfg: not resolved yet.
        held: the model of the folder `cfg.init_from`.

    Raises:
        ConfigError: the run's own model cannot start from the folder's model.
    """
    if not cfg.moe.upcycle:
        return held
    check_model(cfg)
    folder, m = f"init_from={cfg.init_from}", cfg.model
    if family_of(m).moe is None:
        raise _refusal(
            f"model.model_type={m.model_type} has no experts: choose a model with experts, e.g. model=moe_debug"
        )
    if family_of(held).moe is not None:
        raise _refusal(f"{folder} already is a mixture of experts ({held.model_type}): remove moe.upcycle")
    common = [key for key in (*(f.name for f in fields(ModelConfig)), *mod_fields(held.attention)) if key not in _OWN]
    _check_family(folder, held, m, common)
    if differing := [key for key in common if not _same(getattr(m, key, None), getattr(held, key))]:
        fix = " ".join(f"model.{key}={_value(getattr(held, key))}" for key in differing)
        raise _refusal(f"model.{differing[0]} and the config.json of {folder} differ: set {fix}")
    for key, size in _mlp_sizes(m):
        if size != held.intermediate_size:
            raise _refusal(
                f"model.{key}={getattr(m, key)} gives an MLP of size {size}, but it starts as a copy of one of {folder}"
                f", whose intermediate_size is {held.intermediate_size}: make them equal"
            )
    return m


def _check_family(folder: str, held: ModelConfig, m: ModelConfig, common: list[str]) -> None:
    """Check that both families have the same tensors besides the experts. Fields that must be equal are already."""
    alike = {f.name for f in fields(m)} & {*common, "intermediate_size"}
    like = replace(m, **{key: getattr(held, key) for key in alike})
    there, origins = tensor_shapes(held), dense_origins(like)
    wanted: dict[str, Any] = {}
    for name, shape in tensor_shapes(like).items():
        if (origin := origins.get(name, name)) is not None:
            wanted[origin] = shape if origin == name else there.get(origin)
    for name in {**there, **wanted}:
        if wanted.get(name) != there.get(name):
            sides = f"{wanted.get(name, 'none')}, and {folder} ({held.model_type}) has {there.get(name, 'none')}"
            raise _refusal(
                f"model.model_type={m.model_type} cannot start from a {held.model_type}: its tensor {name} would be "
                f"{sides}: choose a family with the same attention"
            )


def _mlp_sizes(m: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield (key, inner size) of each kind of MLP that starts as a copy of a dense one."""
    family = family_of(m)
    moe = resolved(family.moe)
    expert = "moe_intermediate_size" if "moe_intermediate_size" in family.fields else "intermediate_size"
    yield expert, moe.dim_sizes(m)["expert_mlp"][0]
    if moe.shared:
        yield moe.shared.field, moe.shared.inner(m)
    if len(sparse_layers(m)) < m.num_hidden_layers:
        yield "intermediate_size", m.intermediate_size


def _refusal(why: str) -> CheckpointError:
    return CheckpointError(f"moe.upcycle=true: {why}")


def _same(ours: Any, theirs: Any) -> bool:
    """Return True if two values are equal. No dict and an empty dict mean the same RoPE."""
    return (ours or None) == (theirs or None)


def _value(value: Any) -> str:
    """Format a value as an override."""
    if isinstance(value, Mapping):
        return "'{" + ",".join(f"{k}: {_value(v)}" for k, v in value.items()) + "}'"
    return "null" if value is None else str(written(value))
