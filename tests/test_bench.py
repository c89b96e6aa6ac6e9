"""`python -m ndtrain.bench peers`: both sides do the same work, figures are there, mistakes are one line."""

import json

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.bench.__main__ import main
from ndtrain.bench.peers import Options, Turns, _require_equal_losses, config_of, make_batches
from ndtrain.bench.sides import SIDES
from ndtrain.config import world_from_env
from ndtrain.mesh import Mesh, MeshSpec
from tests.ranks import run_ranks

QUICK = ["shape=tiny", "rounds=2", "steps=1", "warmup=1"]
RATIO = {"median", "q1", "q3", "min", "max", "best"}
# zero -> all-gathers and reduce-scatters of a step of 2 microbatches; units: 2 blocks, and the root, which stays
COLLECTIVES = {1: (3, 3), 2: (3, 6), 3: (10, 6)}


@pytest.mark.parametrize(
    ("args", "peers"),
    [
        (["axis=one"], {"bare", "transformers"}),
        (["axis=one", "precision=bf16", "accumulate=2"], {"bare", "transformers"}),
        (["axis=dp", "accumulate=2"], {"ddp"}),
        (["axis=fsdp", "profile=true"], {"fsdp2"}),
    ],
    ids=" ".join,
)
def test_peers(args, peers, tmp_path, capsys):
    assert main(["peers", *args, *QUICK, f"out={tmp_path}/found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["commit"] and found["hardware"]["cores"] and found["versions"]["torch"]
    shape = found["shapes"]["tiny"]
    losses = {name: side["losses"] for name, side in shape["sides"].items() if name != "local"}
    assert losses.keys() == {"ours", *peers}
    for name in peers:
        assert losses[name] == pytest.approx(losses["ours"], rel=1e-3 if "precision=bf16" in args else 1e-5)
        assert shape["ratios"][name].keys() == RATIO and min(shape["ratios"][name].values()) > 0
        assert len(shape["sides"][name]["block_ms"]) == 2
    said = capsys.readouterr().out
    assert all(f"{name} / ours" in said for name in peers)
    assert ("aten::mm" in said) == ("profile=true" in args)


def test_different_work_is_refused():
    with pytest.raises(RuntimeError, match="at step 2 the loss of ddp is 4"):
        _require_equal_losses({"ours": [5.0, 4.1], "ddp": [5.0, 4.0]}, 1e-4)


class Collectives(TorchDispatchMode):
    """Counts c10d operators by name."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def fsdp2_collectives(zero: int) -> tuple[int, int, float]:
    """On one rank: all-gathers and reduce-scatters of a step with FSDP2, and the share of parameters held after it."""
    rank, _, world = world_from_env()
    cfg = config_of(Options(axis="fsdp", ranks=world, zero=zero, accumulate=2), "tiny")
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    loop = SIDES["fsdp2"](cfg, mesh)
    side = Turns(loop, [make_batches(cfg, mesh, 0)])
    side.steps(1)  # the first step sets up
    with Collectives() as seen:
        side.steps(1)
    parameters = list(loop.module.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)
    held = sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)
    count = lambda word: sum(word in name for name in seen.names)
    return count("allgather"), count("reduce_scatter"), held


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_fsdp2_side_shards_and_gathers_by_block(zero):
    assert run_ranks(fsdp2_collectives, 2, zero) == [(*COLLECTIVES[zero], 0.5)] * 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "bench: no such bench; known: peers"),
        (["peer"], "did you mean 'peers'?"),
        (["peers"], "axis is missing; known: one, dp, fsdp"),
        (["peers", "axis=fdsp"], "fdsp: no such axis; did you mean 'fsdp'? known: one, dp, fsdp"),
        (["peers", "axis=dp", "rank=2"], "rank: no such key; did you mean 'ranks'?"),
        (["peers", "axis=dp", "ranks=1"], "axis=dp and axis=fsdp need at least 2 ranks"),
        (["peers", "axis=one", "ranks=2"], "ranks=2: axis=one compares one process"),
        (["peers", "axis=dp", "zero=2"], "zero=2: only axis=fsdp shards"),
        (["peers", "axis=dp", "rounds=0"], "rounds=0: must be a whole number, at least 1"),
        (["peers", "axis=dp", "profile=yes"], "yes: no such profile; known: true, false"),
        (["peers", "axis=dp", "out=/nowhere/x.json"], "there is no folder /nowhere"),
        (["peers", "axis"], "arguments are key=value"),
    ],
)
def test_bad_arguments_are_one_line(args, said, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err
