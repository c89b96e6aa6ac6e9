"""Islands of different meshes equal one process: loss, gradients, weights, also if some are killed and come back."""

import pytest

from tests.islands.runs import (
    Islands,
    island_arguments,
    largest_difference,
    largest_difference_of_tensors,
    run_one,
    run_with_kills,
)
from tests.lib.helpers import write_corpus

STEPS = 5
MOE = ["model=moe_debug", "moe.balance=bias"]
MUON = ["optim=muon", "optim.ns_dtype=fp64"]
CASES = {  # the meshes of the islands, further overrides
    "two of one process": (["one", "one"], []),
    "tp and one process": (["tp", "one"], []),
    "fsdp and pp": (["fsdp", "pp"], []),
    "cp, dp and tp": (["cp", "dp", "tp"], ["data.pack=true"]),
    "four meshes": (["tp", "fsdp", "cp", "pp"], []),
    "zero 1, tied embeddings, ema": (
        ["fsdp", "one"],
        ["mesh.zero=1", "model.tie_word_embeddings=true", "optim.ema=0.9"],
    ),
    "z-loss": (["tp", "fsdp"], ["objective.z_loss=0.01"]),
    "recompute": (["fsdp", "pp"], ["recompute=full"]),
    "muon": (["tp", "fsdp"], MUON),
    "experts": (["ep", "one"], MOE),
    "experts, balanced by sequence": (["ep", "fsdp", "tp"], ["model=moe_debug", "moe.balance=sequence"]),
}
BY_DEFAULT = "tp and one process"


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.txt")


def check_equal(tmp_path, meshes, args, steps) -> None:
    """Run islands and one process, and compare all steps."""
    run_one(tmp_path / "reference", args)
    names = dict(zip("abcd", meshes, strict=False))
    with Islands(tmp_path, args, names) as islands:
        for name in names:
            islands.start(name)
        islands.wait()
    for name in names:
        assert largest_difference(tmp_path / "reference", tmp_path / name) < 1e-12
        for step in range(1, steps + 1):
            assert largest_difference_of_tensors(tmp_path / "reference", tmp_path / name, step) < 1e-10


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == BY_DEFAULT else pytest.mark.full) for case in CASES]
)
def test_islands_of_different_meshes_equal_one_process(case, tmp_path, corpus):
    meshes, more = CASES[case]
    args = island_arguments(tmp_path, corpus, STEPS, "checkpoint.every=1", f"checkpoint.keep={STEPS}", *more)
    check_equal(tmp_path, meshes, args, STEPS)


def test_island_that_is_killed_and_returns_leaves_the_curve_unchanged(tmp_path, corpus):
    """The other island goes on alone, and the returning one joins it. No step is lost."""
    check_kills(tmp_path, corpus, ["one", "one"], kills=1, steps=60, seed=0)


@pytest.mark.full
def test_island_that_returns_reads_the_state_of_muon(tmp_path, corpus):
    """The momentum of hidden matrices, and the moments of all other tensors."""
    check_kills(tmp_path, corpus, ["tp", "one"], 1, 60, 0, *MUON)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_islands_that_are_killed_at_random_moments_leave_the_curve_unchanged(seed, tmp_path, corpus):
    meshes = [["tp", "fsdp"], ["one", "cp", "fsdp"], ["pp", "one", "one"], ["one", "one", "tp"]][seed % 4]
    assert check_kills(tmp_path, corpus, meshes, kills=5, steps=250, seed=seed) == 5


def check_kills(tmp_path, corpus, meshes, kills, steps, seed, *more) -> int:
    killed = run_with_kills(tmp_path, corpus, meshes, kills, steps, seed, *more)
    assert killed.of_curves < 1e-10 and killed.of_tensors < 1e-10, killed
    return killed.kills
