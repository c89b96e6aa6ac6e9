"""Attention before FlashAttention: the traffic, the FLOPs and the memory of its scores."""

import pytest

from lab.published.run import run_of
from lab.published.unfused import is_unfused
from ndtrain.plan.events import Kernel
from tests.plan.published.test_run import ROW

OLD = ROW | {
    "notes": "no sequence parallel",
    "source": "Narayanan et al. arXiv:2104.04473",
    "pp": "1",
    "dp": "8",
    "model": "GPT",
}
SCORES = 2 * 4 * 256 * 256  # of a layer: micro_batch, heads of a rank, tokens squared


def passes(row, layer="block"):
    return {v: p for v, p in run_of(row).plan().pieces.items() if v.layer == layer}


def matmul_flops(piece):
    return sum(e.flops for e in piece.events if isinstance(e, Kernel) and e.kind == "matmul")


@pytest.mark.parametrize(
    "source, unfused",
    [
        ("Narayanan et al. arXiv:2104.04473", True),
        ("Korthikanti et al. 2022 arXiv:2205.05198 Table 5", True),
        ("arXiv:2206.01234", False),
        ("MegaScale arXiv:2402.15627", False),
        ("a report of 2021", True),
        ("torchtitan 2024", False),
    ],
)
def test_sources_before_june_2022_are_unfused(source, unfused):
    assert is_unfused({"source": source}) == unfused


def test_unfused_scores_cost_traffic_and_full_matmuls():
    old, new = passes(OLD), passes(OLD | {"source": "a page"})
    for variant, piece in old.items():
        fused = new[variant]
        attention = [e for e in fused.events if isinstance(e, Kernel) and e.kind == "attention"]
        products = 2 if variant.kind == "F" else 4
        assert len(attention) == 1 and not any(e.kind == "attention" for e in piece.events if isinstance(e, Kernel))
        assert matmul_flops(piece) - matmul_flops(fused) == products * 2 * SCORES * 64
        read = sum(e.bytes for e in piece.events if isinstance(e, Kernel) and e.kind == "memory")
        assert read > (9 if variant.kind == "F" else 11) * SCORES


def test_unfused_scores_are_kept_unless_recomputed():
    for recompute in ("none", "full", "selective"):
        old, new = (passes(OLD | {"recompute": recompute, "source": s}) for s in (OLD["source"], "a page"))
        kept = {v: old[v].kept_bytes - new[v].kept_bytes for v in old}
        for variant, more in kept.items():
            stored = variant.kind != "F" or variant.save is None or variant.recompute
            assert more == stored * (1 if variant.kind == "F" else -1) * 5 * SCORES, (recompute, variant)


def test_old_source_has_sequence_parallelism_only_if_noted():
    """Sequence parallelism came with arXiv:2205.05198."""
    assert not run_of(OLD | {"notes": ""}).config().tp.sequence_parallel
    assert run_of(OLD | {"notes": "sequence parallel"}).config().tp.sequence_parallel
    assert run_of(OLD | {"source": "a page", "notes": ""}).config().tp.sequence_parallel
