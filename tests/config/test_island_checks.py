"""Runs that cannot be islands are refused with one line."""

import pytest

from tests.lib.helpers import config_refusal

ISLANDS = ["recipe=llama_debug", "islands.count=2"]
REFUSED = {
    "an address without a port": (["islands.address=somewhere"], "islands.address=somewhere: must be host:port"),
    "one of two addresses": (["islands.address=[127.0.0.1:1,x]"], "islands.address=x: must be host:port"),
    "a negative count": (["islands.count=-1"], "islands.count=-1: must be at least 0"),
    "a fixed number of microbatches": (["mesh.pp=2", "schedule=zb_v"], "choose one of gpipe, 1f1b, interleaved"),
    "a balance loss of the whole batch": (["model=moe_debug", "moe.balance=hf"], "moe.balance=hf needs the loads"),
    "a stream": (["data=hf", "data.path=x", "data.streaming=true"], "set data.streaming=false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_resolve_run_that_cannot_be_an_island_is_refused(case):
    overrides, why = REFUSED[case]
    assert why in config_refusal([*ISLANDS, *overrides], world=2 if "mesh.pp=2" in overrides else 1)
