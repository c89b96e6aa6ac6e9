"""How experts are balanced where the configuration does not say, and what is refused."""

import pytest

from ndtrain.config import load_config, resolve
from tests.lib.helpers import config_refusal

DEFAULTS = {
    "a new model": ([], "bias", 0.0),
    "a new model that asks for its balance loss": (["model.output_router_logits=true"], "hf", 0.0),
    "a folder": (["init_from=folder"], "none", 0.0),
    "a folder that asks for its balance loss": (["init_from=folder", "model.output_router_logits=true"], "hf", 0.0),
    "a folder and a choice": (["init_from=folder", "moe.balance=bias"], "bias", 0.0),
    "a folder that is upcycled": (["init_from=folder", "moe.upcycle=true"], "bias", 0.0),
    "the loss of sequences": (["moe.balance=sequence"], "sequence", 0.001),
    "both, as DeepSeek-V3": (["moe.aux_coef=0.0001"], "bias", 0.0001),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_balance_follows_from_model_and_init(name):
    overrides, balance, coefficient = DEFAULTS[name]
    cfg = load_config(["recipe=moe_debug", *(o for o in overrides if not o.startswith("init_from"))])
    cfg.init_from = "folder" if "init_from=folder" in overrides else None  # whose model is read before
    moe = resolve(cfg, 1).moe
    assert (moe.balance, moe.aux_coef) == (balance, coefficient)


def test_dense_model_has_no_balance():
    assert resolve(load_config(["recipe=llama_debug"]), 1).moe.balance is None


REFUSED = {
    "no such balance": ("moe_debug", "moe.balance=biased", ["moe.balance=biased", "did you mean 'bias'", "sequence"]),
    "a dense model": ("llama_debug", "moe.balance=bias", ["moe.balance=bias", "llama has no experts", "remove it"]),
    "a coefficient of nothing": (
        "moe_debug", "moe.aux_coef=0.1 moe.balance=hf", ["moe.aux_coef=0.1", "moe.balance=hf", "router_aux_loss_coef"],
    ),
    "a loss that transformers does not have": (
        "deepseek_v3", "mesh.pp=1 mesh.ep=1 mesh.fsdp=1 mesh.tp=1 moe.balance=hf",
        ["moe.balance=hf", "deepseek_v3", "use sequence or bias"],
    ),
    "upcycling nothing": ("moe_debug", "moe.upcycle=true", ["moe.upcycle=true", "init_from=FOLDER"]),
    "upcycling to a dense model": ("llama_debug", "moe.upcycle=true", ["moe.upcycle=true", "llama has no experts"]),
    "an endless rate": ("moe_debug", "moe.bias_rate=inf", ["moe.bias_rate=inf", "finite"]),
    "a recipe's coefficient": ("moe_small", "moe.balance=none", ["moe.aux_coef=0.003", "moe.aux_coef=null"]),
    "a recipe's rate": ("moe_small", "model=llama_small", ["moe.bias_rate=0.0005", "moe.bias_rate=0.001"]),
    "more parts than experts": (
        "moe_debug", "mesh.dp=4 mesh.ep=4 moe.overlap=true moe.parts=3", ["parts=3", "8 / 4 = 2", "lower moe.parts"],
    ),
    "a negative rate": ("moe_debug", "moe.bias_rate=-1", ["moe.bias_rate=-1", "at least 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_moe_settings_that_contradict_are_refused(name):
    recipe, overrides, said = REFUSED[name]
    line = config_refusal([f"recipe={recipe}", *overrides.split()], 4 if "mesh.dp=4" in overrides else 1)
    assert all(word in line for word in said), line
