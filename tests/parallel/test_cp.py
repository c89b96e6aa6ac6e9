"""Attention over ranks against a brute-force masked softmax on one process: outputs and all gradients, in fp64."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ndtrain.config import world_from_env
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.parallel.cp import cp_core
from tests.lib.ranks import run_ranks
from tests.model.test_attention import VARIANTS, assert_close, brute_force, out_and_gradients, random_qkv, variant

LENGTH = 64


def on_ranks(cases: list[tuple], B: int, D: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """This rank's out, dq, dk, dv of each case (sharding, heads, name of the variant)."""
    part, results = world_from_env()[0], []
    for sharding, heads, name in cases:
        tokens = torch.from_numpy(sharding.index(part))
        shards = [x[:, tokens] for x in random_qkv(B, sharding.length, *heads, D, dtype)]
        ctx = SimpleNamespace(scores=variant(name, B, sharding.length, heads[0]))
        core = cp_core(sharding, dist.group.WORLD, part)
        results.append(out_and_gradients(lambda *x, core=core, ctx=ctx: core(*x, ctx), *shards))
    return results


def check(cases: list[tuple], bound_out: float, bound_grad: float, dtype=torch.float64, B: int = 2, D: int = 16):
    """All cases have the same number of ranks."""
    by_rank = run_ranks(on_ranks, cases[0][0].parts, cases, B, D, dtype)
    for i, (sharding, heads, name) in enumerate(cases):
        wide = [x.double() for x in random_qkv(B, sharding.length, *heads, D, dtype)]
        scores = variant(name, B, sharding.length, heads[0])
        expected = out_and_gradients(lambda *x, scores=scores: brute_force(*x, scores), *wide)
        got = [torch.empty_like(x, dtype=dtype) for x in expected]
        for part, mine in enumerate(by_rank):
            for whole, x in zip(got, mine[i], strict=True):
                assert x.dtype == dtype
                whole[:, torch.from_numpy(sharding.index(part))] = x
        try:
            assert_close(got, expected, bound_out, bound_grad)
        except AssertionError as e:
            raise AssertionError(f"{sharding}, heads {heads}, {name}: {e}") from e


def sharding_of(ring: int, ulysses: int = 1, balance: str = "zigzag", length: int = LENGTH) -> SequenceSharding:
    return SequenceSharding(length, ring, ulysses, balance)


FULL = pytest.mark.full
RINGS = [
    pytest.param(ring, balance, marks=[] if (ring, balance) in ((4, "zigzag"), (2, "striped"), (2, "none")) else [FULL])
    for ring in (2, 4)
    for balance in ("zigzag", "striped", "none")
]


@pytest.mark.parametrize(("ring", "balance"), RINGS)
def test_ring_attention_equals_masked_softmax(ring, balance):
    names = VARIANTS if balance != "none" else ["plain", "everything"]
    check([(sharding_of(ring, 1, balance), (4, 2), name) for name in names], 1e-10, 1e-9)


@pytest.mark.parametrize("ulysses", [2, pytest.param(4, marks=FULL)])
def test_ulysses_attention_equals_masked_softmax(ulysses):
    # 1: fewer key/value heads than ranks, so their gradients are summed over the ranks that hold a replica
    check([(sharding_of(1, ulysses), heads, n) for heads in ((4, 4), (4, 1), (8, 2)) for n in VARIANTS], 1e-10, 1e-9)


@pytest.mark.parametrize("balance", ["zigzag", pytest.param("striped", marks=FULL)])
def test_ring_of_ulysses_groups_equals_masked_softmax(balance):
    check([(sharding_of(2, 2, balance), heads, n) for heads in ((4, 2), (4, 1)) for n in VARIANTS], 1e-10, 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("balance", ["zigzag", "striped", "none"])
@pytest.mark.parametrize(
    "ring, ulysses", [(2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4), (3, 2)]
)
def test_every_sharding_equals_masked_softmax(ring, ulysses, balance):
    c = sharding_of(ring, ulysses, balance, 96)
    check([(c, heads, n) for heads in ((8, 8), (8, 4), (8, 1)) for n in VARIANTS], 1e-10, 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2), (2, 2)])
def test_attention_over_several_blocks_equals_masked_softmax(ring, ulysses):
    check([(sharding_of(ring, ulysses, length=2400), (4, 2), n) for n in VARIANTS], 1e-10, 1e-9, B=1)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attention_in_low_precision_is_near_fp64(dtype, bound):
    check([(sharding_of(2), (4, 2), n) for n in VARIANTS], bound, 2 * bound, dtype)


@pytest.mark.parametrize("N, K, U", [(6, 2, 4), (12, 6, 4)])
def test_indivisible_head_counts_are_refused(N, K, U):
    q, k, v, _ = random_qkv(1, 8, N, K, 16)
    core = cp_core(sharding_of(1, U), None, 0, links=SimpleNamespace())
    with pytest.raises(ValueError, match=f"{K} key/value heads"):
        core(q, k, v, SimpleNamespace(scores=variant("plain", 1, 8, N)))


def compiled_and_not() -> tuple[torch.Tensor, torch.Tensor]:
    part = world_from_env()[0]
    c = sharding_of(2)
    core, ctx = cp_core(c, dist.group.WORLD, part), SimpleNamespace(scores=variant("packed", 1, LENGTH, 4))
    q, k, v, _ = (x[:, c.index(part)] for x in random_qkv(1, LENGTH, 4, 2, 16))
    f = lambda q, k, v: core(q * 2, k, v, ctx) + 1
    return torch.compile(f, backend="eager")(q, k, v), f(q, k, v)


@pytest.mark.full
def test_compiled_block_with_cp_equals_eager():
    for compiled, eager in run_ranks(compiled_and_not, 2):
        assert torch.equal(compiled, eager)
