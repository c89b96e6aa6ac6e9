"""Every mesh over dp, fsdp, cp and tp trains as one process does.
The cases replicate K/V heads, have an indivisible vocabulary, and attention by ring, all-to-all or both,
with and without sequence parallelism and packed documents."""

from functools import cache
from itertools import product

import pytest

from tests.lib.parity import FP64, SHAPE, Run, compare, train

# tp=4 is 2 and tp=8 is 4 times the K/V heads; 1003 = 17 x 59
MODEL = [
    *SHAPE, "model.num_attention_heads=8", "model.num_key_value_heads=2", "model.head_dim=4",
    "model.intermediate_size=56", "model.vocab_size=1003", "train.seq_len=16", "train.global_batch=16",
]  # fmt: skip
TIED = "model.tie_word_embeddings=true"
PACKED = "data.pack=true"
TP = ([], ["tp.overlap=true"], ["tp.sequence_parallel=false"], ["tp.sequence_parallel=false", "tp.overlap=true"])


# each mode of tp, K/V heads that ranks share, a ring with packing, and all zero stages but 2
SAMPLE = (
    "tp4-sequence_parallel=false-tie_word_embeddings=true-zero=3-accumulate=1",
    "cp2-tp2-overlap=true-balance=striped-pack=true-zero=1-accumulate=2",
)


def factorisations(n: int) -> list[dict[str, int]]:
    sizes = [s for s in (1, 2, 4, 8) if n % s == 0]
    meshes = [dict(zip(("dp", "fsdp", "cp", "tp"), four, strict=True)) for four in product(sizes, repeat=4)]
    return [mesh for mesh in meshes if mesh["dp"] * mesh["fsdp"] * mesh["cp"] * mesh["tp"] == n]


def cp_kinds(cp: int) -> list[list[str]]:
    if cp == 1:
        return [[]]
    both = [["cp.ulysses=2"]] if cp > 2 else []
    return [[], ["cp.kind=ulysses"], *both, ["cp.balance=striped"]]


def sweep():
    """Every mesh with each mode of tp and each of cp (8 ranks: each once). Tied weights, packing, zero and accumulation
    alternate."""
    number = 0
    for n in (2, 4, 8):
        for mesh in factorisations(n):
            tps, cps = TP if mesh["tp"] > 1 else ([],), cp_kinds(mesh["cp"])
            ways = list(product(tps, cps))
            if n == 8:
                ways = [(tps[i % len(tps)], cps[i % len(cps)]) for i in range(max(len(tps), len(cps)))]
            for tp, cp in ways if len(ways) > 1 else ways * 2:
                number += 1
                tied, packed = number % 2 == 0, number % 4 < 2
                extra = [*tp, *cp, *[TIED] * tied, *[PACKED] * packed, f"mesh.zero={1 + number % 3}"]
                accumulation = 1 + number // 3 % 2
                sizes = "-".join(f"{a}{s}" for a, s in mesh.items() if s > 1)
                name = "-".join([sizes, *(e.split(".")[-1] for e in extra), f"accumulate={accumulation}"])
                marks = [] if name in SAMPLE else [pytest.mark.full]
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
def test_tp_and_cp_in_fp64_equal_one_process(mesh, extra, accumulation):
    check(mesh, extra, accumulation, FP64, loss=1e-10, state=1e-9)


def mesh(**sizes: int) -> dict[str, int]:
    return {"dp": 1, "fsdp": 1, "cp": 1, "tp": 1} | sizes


WHOLE_HEADS = ["layout.rules.heads=null", "layout.rules.kv_heads=null", "tp.sequence_parallel=false"]
VARIANTS = {
    "whole vocabulary": (mesh(tp=2, cp=2), ["layout.rules.vocab=null", TIED]),
    "whole vocabulary, whole residual stream": (mesh(tp=2), ["layout.rules.vocab=null", "tp.sequence_parallel=false"]),
    "whole mlp": (mesh(tp=2, fsdp=2), ["layout.rules.mlp=null"]),
    "whole heads": (mesh(tp=4), WHOLE_HEADS),
    "biases": (mesh(tp=4), ["model.attention_bias=true", "model.mlp_bias=true"]),
    "biases, whole residual stream": (
        mesh(tp=2),
        ["model.attention_bias=true", "model.mlp_bias=true", *WHOLE_HEADS[2:]],
    ),
    "qwen2": (mesh(tp=4), ["model.model_type=qwen2", "tp.overlap=true"]),
    "qwen3": (mesh(tp=4, cp=2), ["model.model_type=qwen3"]),
    "qwen3, whole residual stream": (mesh(tp=2), ["model.model_type=qwen3", "tp.sequence_parallel=false"]),
    "window": (mesh(cp=2, tp=2), ["model.model_type=mistral", "model.sliding_window=5", PACKED]),
    "window, ulysses": (mesh(cp=4), ["model.model_type=mistral", "model.sliding_window=5", "cp.kind=ulysses"]),
    "softcap": (mesh(cp=4), ["model.attn_logit_softcapping=0.5", "cp.ulysses=2"]),
    "alibi": (mesh(cp=2, tp=2), ["model.alibi=true", PACKED]),
    "alibi, ulysses": (mesh(cp=2, tp=2), ["model.alibi=true", "cp.kind=ulysses"]),
    "recompute": (mesh(cp=2, tp=2), ["recompute=full", "schedule=gpipe", PACKED]),
    "tp outside": (mesh(fsdp=2, tp=2), ["mesh.order=[pp,tp,cp,dp,fsdp]"]),
}


DEFAULT = ("qwen3, whole residual stream", "alibi, ulysses")


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in VARIANTS])
def test_variants_of_tp_and_cp_equal_one_process(name):
    sizes, extra = VARIANTS[name]
    check(sizes, extra, 2, FP64, loss=1e-10, state=1e-9)


LOWER = {
    "tp2": (mesh(tp=2), []), "cp2": (mesh(cp=2), []), "cp2-tp2": (mesh(cp=2, tp=2), []),
    "tp4-overlap": (mesh(tp=4), ["tp.overlap=true"]),
}  # fmt: skip


SAMPLED = ("cp2-tp2",)
lower = pytest.mark.parametrize("name", [n if n in SAMPLED else pytest.param(n, marks=pytest.mark.full) for n in LOWER])


@lower
@pytest.mark.full
def test_tp_and_cp_in_fp32_are_near_one_process(name):
    sizes, extra = LOWER[name]
    check(sizes, extra, 2, [], loss=1e-6, state=1e-5)


def error(run: Run, exact: Run) -> float:
    """The norm of the whole first gradient."""
    pairs = [(run.tensors["gradient"][n].double(), g.double()) for n, g in exact.tensors["gradient"].items()]
    square = sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
    return square.sqrt().item()


@lower
def test_bf16_rounds_no_more_than_one_process(name):
    """Sums over tp and cp are taken in fp32, so a mesh is no further from the exact gradient than one process is."""
    sizes, extra = LOWER[name]
    bf16 = [*MODEL, "train.micro_batch=8", "train.steps=1", "precision.compute=bf16"]
    axes = [f"mesh.{a}={s}" for a, s in sizes.items()]
    run, one = train(sizes["cp"] * sizes["tp"], [*bf16, *axes, *extra], "uneven"), train(1, bf16, "uneven")
    exact = reference(*FP64)
    print(f"{name}: {error(run, exact):.2e}, one process {error(one, exact):.2e}")
    assert error(run, exact) < 1.25 * error(one, exact)
    assert abs(run.losses[0] - exact.losses[0]) < 3e-3 * exact.losses[0]
