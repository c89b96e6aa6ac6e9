"""The kernels of a GPU over a sharded sequence, against a brute-force masked softmax: outputs and all gradients."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ndtrain.config import world_from_env
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.parallel.cp import cp_core
from tests.lib.gpu_kernels import on_a_gpu
from tests.lib.ranks import run_ranks
from tests.model.test_attention import VARIANTS, assert_close, brute_force, out_and_gradients, random_qkv, variant
from tests.model.test_gpu_kernels import FLASH, flash_scores

LENGTH, HEADS = 64, (4, 2)


def scores_of(kernel: str, name: str):
    return flash_scores(name, 2, LENGTH) if kernel == "flash" else variant(name, 2, LENGTH, HEADS[0])


def on_ranks(kernel: str, cases: list[tuple[SequenceSharding, str]], dtype: torch.dtype) -> list:
    """This rank's out, dq, dk, dv of each case, and how often flash was called."""
    part, results = world_from_env()[0], []
    for sharding, name in cases:
        tokens = torch.from_numpy(sharding.index(part))
        shards = [x[:, tokens] for x in random_qkv(2, LENGTH, *HEADS, 16, dtype)]
        core, ctx = cp_core(sharding, dist.group.WORLD, part), SimpleNamespace(scores=scores_of(kernel, name))
        with on_a_gpu(kernel) as calls:
            results.append((out_and_gradients(lambda *x, core=core, ctx=ctx: core(*x, ctx), *shards), len(calls)))
    return results


def check(kernel: str, cases: list[tuple[SequenceSharding, str]], bound: float, dtype=torch.float64) -> None:
    by_rank = run_ranks(on_ranks, cases[0][0].parts, kernel, cases, dtype, timeout=300)
    wide = [x.double() for x in random_qkv(2, LENGTH, *HEADS, 16, dtype)]
    for i, (sharding, name) in enumerate(cases):
        scores = scores_of(kernel, name)
        expected = out_and_gradients(lambda *x, scores=scores: brute_force(*x, scores), *wide)
        got = [torch.empty_like(x, dtype=dtype) for x in expected]
        for part, results in enumerate(by_rank):
            mine, calls = results[i]
            assert (calls > 0) == (kernel == "flash")
            for whole, x in zip(got, mine, strict=True):
                whole[:, torch.from_numpy(sharding.index(part))] = x
        assert_close(got, expected, bound, 10 * bound)


def sharding_of(ring: int, ulysses: int = 1, balance: str = "zigzag") -> SequenceSharding:
    return SequenceSharding(LENGTH, ring, ulysses, balance)


SHARDINGS = {
    "zigzag": sharding_of(2),
    "striped": sharding_of(2, balance="striped"),
    "none": sharding_of(2, balance="none"),
    "ulysses": sharding_of(1, 2),
}


def test_flash_on_shards_equals_masked_softmax():
    check("flash", [(s, name) for s in SHARDINGS.values() for name in FLASH], 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("kernel, names", [("flash", list(FLASH)), ("flex", VARIANTS)])
def test_gpu_kernels_in_fp32_are_near_masked_softmax(kernel, names):
    check(kernel, [(s, name) for s in SHARDINGS.values() for name in names], 2e-6, torch.float32)


@pytest.mark.parametrize(
    "sharding", ["zigzag", *(pytest.param(s, marks=pytest.mark.full) for s in list(SHARDINGS)[1:])]
)
@pytest.mark.full
def test_flex_on_shards_equals_masked_softmax(sharding):
    names = ["everything"] if sharding == "zigzag" else VARIANTS
    check("flex", [(SHARDINGS[sharding], name) for name in names], 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("kernel, names", [("flash", list(FLASH)), ("flex", ["mod", "everything"])])
def test_ring_of_ulysses_groups_equals_masked_softmax(kernel, names):
    check(kernel, [(sharding_of(2, 2, b), name) for b in ("zigzag", "striped") for name in names], 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("balance", ["zigzag", "striped", "none"])
def test_ring_of_four_equals_masked_softmax(balance):
    check("flash", [(sharding_of(4, 1, balance), name) for name in FLASH], 1e-10)
    check("flex", [(sharding_of(4, 1, balance), name) for name in ("packed", "everything")], 1e-10)
