"""`bench optim`: all ways make the same update, and the figures are those of the plan."""

import json

import pytest
import torch

from ndtrain.bench.__main__ import main
from ndtrain.bench.optim import Options, Updates, config_of
from ndtrain.model.flops import hidden_parameters
from tests.lib.ranks import run_ranks

SMALL = "model.hidden_size=32 model.intermediate_size=64 model.num_hidden_layers=2 model.vocab_size=300"
MUON = f"optim=muon optim.ns_dtype=fp32 {SMALL}"


def weights_after(way: str) -> list[torch.Tensor]:
    """On one rank: its shards of the weights after an update of the same gradients."""
    from ndtrain.config import world_from_env

    rank, _, _ = world_from_env()
    made = Updates(config_of(Options(ranks=2, overrides=MUON), 2), rank)
    for unit in made.stages.units.units.values():
        unit.grad.copy_(torch.linspace(-1, 1, unit.grad.numel()).sin())
    {"owners": made.run, "gathered": made.gather_and_run}[way]()
    return [unit.master.clone() for unit in made.stages.units.units.values()]


def test_gathered_and_owners_make_the_same_update():
    for ours, gathered in zip(
        run_ranks(weights_after, 2, "owners"), run_ranks(weights_after, 2, "gathered"), strict=True
    ):
        assert all(map(torch.equal, ours, gathered))


@pytest.mark.full
@pytest.mark.parametrize("axis", ["fsdp", "dp", "tp"])
def test_figures_count_exchanges_and_bytes(axis, tmp_path, capsys):
    out = tmp_path / "optim.json"
    assert main(["optim", "rounds=2", f"axis={axis}", f"overrides={MUON}", f"out={out}"]) == 0
    result = json.loads(out.read_text())
    model = config_of(Options(overrides=MUON), 2).model
    assert result["bytes"] == 2 * 4 * hidden_parameters(model), "each matrix in fp32, to its owner and back"
    assert 1 <= result["busiest"] < 2 and result["ratios"].keys() >= {"duplicated", "alone", "adamw"}
    assert "duplicated / owners" in capsys.readouterr().out


@pytest.mark.full
def test_an_elementwise_optimizer_is_measured_alone(capsys):
    assert main(["optim", "rounds=2", f"overrides=optim=lion {SMALL}"]) == 0
    assert "exchanges" not in capsys.readouterr().out
