"""Every mesh over dp, fsdp, cp and tp trains as one process does: heads in replicated K/V groups, a vocabulary nothing
divides, streams cut or not, attention by ring, all-to-all or both, documents packed or not."""

from functools import cache
from itertools import product

import pytest

from tests.parity import FP64, SHAPE, Run, compare, train

# tp=4 is 2 and tp=8 is 4 times the K/V heads; 1003 = 17 x 59
MODEL = [
    *SHAPE, "model.num_attention_heads=8", "model.num_key_value_heads=2", "model.head_dim=4",
    "model.intermediate_size=56", "model.vocab_size=1003", "train.seq_len=16", "train.global_batch=16",
]  # fmt: skip
TIED = "model.tie_word_embeddings=true"
PACKED = "data.pack=true"
TP = ([], ["tp.overlap=true"], ["tp.sequence_parallel=false"], ["tp.sequence_parallel=false", "tp.overlap=true"])


def factorisations(n: int) -> list[dict[str, int]]:
    sizes = [s for s in (1, 2, 4, 8) if n % s == 0]
    found = [dict(zip(("dp", "fsdp", "cp", "tp"), four, strict=True)) for four in product(sizes, repeat=4)]
    return [mesh for mesh in found if mesh["dp"] * mesh["fsdp"] * mesh["cp"] * mesh["tp"] == n]


def cp_kinds(cp: int) -> list[list[str]]:
    if cp == 1:
        return [[]]
    both = [["cp.ulysses=2"]] if cp > 2 else []
    return [[], ["cp.kind=ulysses"], *both, ["cp.balance=striped"]]


def sweep():
    """For every mesh each way of tp and each of cp, in turn with tied weights, packing, zero and accumulation."""
    number = 0
    for n in (2, 4, 8):
        for mesh in factorisations(n):
            ways = list(product(TP if mesh["tp"] > 1 else ([],), cp_kinds(mesh["cp"])))
            for tp, cp in ways if len(ways) > 1 else ways * 2:
                number += 1
                tied, packed = number % 2 == 0, number % 4 < 2
                extra = [*tp, *cp, *[TIED] * tied, *[PACKED] * packed, f"mesh.zero={1 + number % 3}"]
                accumulation = 1 + number // 3 % 2
                sampled = (n <= 4 and number % 3 == 0) or (n == 8 and min(mesh["cp"], mesh["tp"]) > 1 and number % 7 == 0)
                marks = [] if sampled else [pytest.mark.full]
                sizes = "-".join(f"{a}{s}" for a, s in mesh.items() if s > 1)
                name = "-".join([sizes, *(e.split(".")[-1] for e in extra), f"accumulate={accumulation}"])
                yield pytest.param(mesh, extra, accumulation, marks=marks, id=name)


@cache
def reference(*overrides: str) -> Run:
    """The one-process, one-microbatch run."""
    return train(1, [*MODEL, "train.micro_batch=16", *overrides], "uneven")


def check(mesh: dict[str, int], extra: list[str], accumulation: int, precision: list[str], **bounds: float):
    ranks = mesh["dp"] * mesh["fsdp"] * mesh["cp"] * mesh["tp"]
    micro = max(1, 16 // (mesh["dp"] * mesh["fsdp"] * accumulation))
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    same = [*precision, *(e for e in extra if e.startswith(("model.", "data.", "layout.")))]
    run = train(ranks, [*MODEL, f"train.micro_batch={micro}", *precision, *sizes, *extra], "uneven")
    compare(run, reference(*same), **bounds)


@pytest.mark.parametrize(("mesh", "extra", "accumulation"), list(sweep()))
def test_fp64(mesh, extra, accumulation):
    check(mesh, extra, accumulation, FP64, loss=1e-10, state=1e-9)
