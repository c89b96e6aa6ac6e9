"""The keys of an optimizer: wrong values, and keys that it does not read."""

import pytest

from ndtrain.config import load_config, resolve
from tests.lib.helpers import config_refusal

REFUSED = {
    "optim.ns=gram": "optim.ns=gram: optim=adamw does not read it: leave it at classic, or choose optim=muon",
    "optim.adamw_lr=1e-3": "optim=adamw does not read it: leave it at null, or choose optim=muon",
    "optim.momentum=0.8": "optim.momentum=0.8: optim=adamw does not read it: leave it at 0.95, or choose optim=muon or "
    "optim=sgd",
    "optim=sgd optim.state_dtype=bf16": "optim.state_dtype=bf16: optim=sgd does not read it: leave it at null",
    "optim=lion optim.torch_name=Adam": "optim=lion does not read it",
    "optim=muon optim.momentum=1": "optim.momentum=1.0: must be in [0, 1)",
    "optim=muon optim.ns=newton": "optim.ns=newton: no such choice; ",
    "optim=muon optim.ns_steps=0": "optim.ns_steps=0",
    "optim=muon optim.ns_dtype=fp16": "optim.ns_dtype=fp16: no such choice",
    "optim=mun": "did you mean 'muon'",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_wrong_key_of_an_optimizer_is_refused_in_one_line(overrides):
    refusal = config_refusal(overrides.split())
    assert REFUSED[overrides] in refusal and "\n" not in refusal


@pytest.mark.parametrize("optim", ["adamw", "muon", "sgd", "lion", "torch"])
def test_every_shipped_optimizer_is_an_option(optim):
    more = ["optim.torch_name=Adam"] if optim == "torch" else []
    assert resolve(load_config([f"optim={optim}", *more]), 1).optim.name == optim


def test_shipped_names_are_those_that_the_package_registers():
    from ndtrain.config.optim_checks import SHIPPED
    from ndtrain.config.registry import _parts, names

    of_ndtrain = [n for n in names("optimizer") if _parts["optimizer", n].module.startswith("ndtrain.")]
    assert sorted(of_ndtrain) == sorted(SHIPPED)
