"""Factors of learning rate, weight decay and initial weights per parameter."""

import pytest
import torch

from ndtrain.config import ConfigError, OptimConfig, load_config, resolve
from ndtrain.config.name_patterns import check_patterns, factor_of
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import Dim, TensorLayout
from ndtrain.parallel.build import build_stages
from ndtrain.parallel.param_groups import ParamGroup, param_group
from tests.lib.helpers import config_refusal
from tests.lib.parity import SHAPE, compare, train
from tests.parallel.test_parity_moe import MODEL as EXPERTS
from tests.parallel.test_parity_moe import MODELS

NAMES = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
DOWN = "*.experts.*.down_proj.weight"


def tensor(name: str, ndim: int) -> TensorLayout:
    return TensorLayout(name, (Dim("embed", 8),) * ndim, ((0, 8),) * ndim, frozenset())


def test_param_group_uses_last_matching_pattern():
    cfg = OptimConfig(
        weight_decay=0.5, lr_mult={"*": 2, "*.down_proj.*": 4}, wd_mult={"*.down_proj.*": 3, "*.mlp.*": 0}
    )
    assert [param_group(cfg, tensor(name, 1 + (i < 2))) for i, name in enumerate(NAMES)] == [
        ParamGroup(2, 0.5), ParamGroup(4, 0), ParamGroup(2, 0)
    ]  # fmt: skip
    assert param_group(OptimConfig(weight_decay=0.5, wd_mult={"*": 3}), tensor("model.norm.weight", 1)) == ParamGroup(
        1, 0
    )


def test_null_discards_patterns_of_recipe():
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    cfg = load_config(["recipe=moe_small"])
    assert (param_group(cfg.optim, tensor(name, 2)), factor_of(cfg.model.init_mult, name)) == (
        ParamGroup(4, 0.1 / 4),
        4,
    )
    cfg = load_config(["recipe=moe_small", "optim.lr_mult=null", "optim.wd_mult=null", "model.init_mult=null"])
    assert (param_group(cfg.optim, tensor(name, 2)), factor_of(cfg.model.init_mult, name)) == (ParamGroup(1, 0.1), 1)
    build_stages(resolve(cfg, 1), Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu")))


def test_check_patterns_refuses_pattern_without_match():
    check_patterns("optim.lr_mult", {"*.down_proj.*": 2, "*.down_prj.*": 1}, NAMES)
    with pytest.raises(ConfigError, match=r"^optim\.lr_mult: no parameter matches \*\.down_prj\.\*; names are"):
        check_patterns("optim.lr_mult", {"*.down_proj.*": 2, "*.down_prj.*": 2}, NAMES)
    with pytest.raises(ConfigError, match=rf"matches {NAMES[1][:-5]}; did you mean '{NAMES[1]}'\? "):
        check_patterns("optim.lr_mult", {NAMES[1][:-5]: 2}, NAMES)


@pytest.mark.parametrize("key", ["optim.lr_mult", "optim.wd_mult", "model.init_mult"])
def test_factors_are_checked_before_a_run(key):
    for factor in ("-1", "inf", "nan"):
        line = f"{key}: the factor of * is {float(factor)}: must be finite and at least 0"
        assert config_refusal([f"{key}={{*:{factor}}}"]) == line
    cfg = resolve(load_config([*SHAPE, f"{key}={{*.down_prj.*:2}}"]), 1)
    with pytest.raises(ConfigError, match=rf"^{key}: no parameter matches \*\.down_prj\.\*; "):
        build_stages(cfg, Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu")))


@pytest.mark.parametrize("precision", [[], pytest.param(["optim.state_dtype=bf16"], marks=pytest.mark.full)])
def test_lr_mult_of_all_equals_scaled_learning_rate(precision):
    """The losses are bitwise equal."""
    common = [*SHAPE, *precision, "train.global_batch=8", "train.micro_batch=8", "optim.min_lr=0"]
    factor, rate = train(1, [*common, "optim.lr_mult={*:4}"]), train(1, [*common, "optim.lr=4e-2"])
    assert factor.losses == rate.losses
    assert train(1, common).losses != rate.losses


@pytest.mark.parametrize("mesh", ["mesh.ep=2", pytest.param("mesh.zero=1", marks=pytest.mark.full)])
@pytest.mark.full
def test_expert_factors_on_mesh_equal_one_process(mesh):
    """Weights and moments after three steps, against one process."""
    model, factors = [*EXPERTS, *MODELS["qwen2-moe"], "model.num_experts=8"], f"{{{DOWN}:4}}"
    given = [f"optim.lr_mult={factors}", f"model.init_mult={factors}"]
    one, *others = (train(1, [*model, *some, "train.micro_batch=8"]) for some in (given, given[:1], given[1:]))
    compare(train(2, [*model, *given, "mesh.fsdp=2", mesh, "train.micro_batch=2"]), one, loss=1e-10, state=1e-9)
    assert all(one.losses[1:] != other.losses[1:] for other in others), "a factor changes nothing"
