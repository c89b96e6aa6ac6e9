"""Which factor of learning rate and weight decay a parameter has."""

import pytest

from ndtrain.config import ConfigError, OptimConfig
from ndtrain.parallel.param_groups import ParamGroup, check_patterns, param_group
from tests.lib.helpers import config_refusal
from tests.lib.parity import SHAPE, compare, train
from tests.parallel.test_parity_moe import MODEL as EXPERTS
from tests.parallel.test_parity_moe import MODELS

NAMES = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
DOWN = "*.experts.*.down_proj.weight"


def test_the_last_pattern_that_matches_holds():
    cfg = OptimConfig(
        weight_decay=0.5, lr_mult={"*": 2, "*.down_proj.*": 4}, wd_mult={"*.down_proj.*": 3, "*.mlp.*": 0}
    )
    assert [param_group(cfg, name, 1 + (i < 2)) for i, name in enumerate(NAMES)] == [
        ParamGroup(2, 0.5), ParamGroup(4, 0), ParamGroup(2, 0)
    ]  # fmt: skip
    assert param_group(OptimConfig(weight_decay=0.5, wd_mult={"*": 3}), "model.norm.weight", 1) == ParamGroup(1, 0)


@pytest.mark.parametrize("key", ["lr_mult", "wd_mult"])
def test_a_pattern_without_parameters_is_refused(key):
    check_patterns(OptimConfig(**{key: {"*.down_proj.*": 2}}), NAMES)
    with pytest.raises(ConfigError, match=rf"^optim\.{key}: no parameter's name matches \*\.down_prj\.\*; "):
        check_patterns(OptimConfig(**{key: {"*.down_proj.*": 2, "*.down_prj.*": 2}}), NAMES)


@pytest.mark.parametrize("factor", ["-1", "inf", "nan"])
def test_a_factor_is_at_least_zero(factor):
    line = f"optim.lr_mult: the factor of * is {float(factor)}: must be at least 0"
    assert config_refusal([f"optim.lr_mult={{*:{factor}}}"]) == line


@pytest.mark.parametrize("precision", [[], pytest.param(["optim.state_dtype=bf16"], marks=pytest.mark.full)])
def test_a_factor_of_every_parameter_is_one_of_the_learning_rate(precision):
    """To the bit."""
    common = [*SHAPE, *precision, "train.global_batch=8", "train.micro_batch=8", "optim.min_lr=0"]
    factor, rate = train(1, [*common, "optim.lr_mult={*:4}"]), train(1, [*common, "optim.lr=4e-2"])
    assert factor.losses == rate.losses
    assert train(1, common).losses != rate.losses


@pytest.mark.parametrize("mesh", ["mesh.ep=2", pytest.param("mesh.zero=1", marks=pytest.mark.full)])
def test_factors_of_experts_on_a_mesh(mesh):
    """Weights and moments after three steps, against one process."""
    model = [*EXPERTS, *MODELS["qwen2-moe"], "model.num_experts=8", f"optim.lr_mult={{{DOWN}:4}}"]
    one, plain = train(1, [*model, "train.micro_batch=8"]), train(1, [*model[:-1], "train.micro_batch=8"])
    compare(train(2, [*model, "mesh.fsdp=2", mesh, "train.micro_batch=2"]), one, loss=1e-10, state=1e-9)
    assert one.losses[1:] != plain.losses[1:], "the factor changes nothing"
