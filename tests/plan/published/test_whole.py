"""Full recompute of trainers that repeat a block's whole forward."""

import pytest

from lab.published.run import run_of
from ndtrain.plan.events import Collective, Kernel
from tests.plan.published.test_run import ROW

STREAM = 2 * 256 // 2 * 512 * 2  # bytes of a microbatch's activations on a rank of tp=2, in bf16


def passes(**cells: str):
    """The first forward of a block, and the recompute."""
    made = run_of(ROW | {"pp": "1", "dp": "8", "model": "llama", "recompute": "full"} | cells).plan()
    both = {v.recompute: p for v, p in made.pieces.items() if v.layer == "block" and v.kind == "F"}
    return both[False], both[True]


def matmuls(piece):
    return [e.shape for e in piece.events if isinstance(e, Kernel) and e.kind == "matmul"]


def sums(piece):
    return [e.op for e in piece.events if isinstance(e, Collective)]


def test_whole_recompute_repeats_all_matmuls_and_messages():
    forward, again = passes()
    assert matmuls(again) == matmuls(forward) and sums(again) == sums(forward)
    assert sums(forward).count("reduce_scatter") == 2


def test_whole_recompute_keeps_only_block_input():
    forward, _ = passes()
    assert forward.kept_bytes == pytest.approx(STREAM, rel=1e-4)
    alone, _ = passes(tp="1", dp="16")
    assert alone.kept_bytes == pytest.approx(2 * STREAM, rel=1e-4), "without tp too"


def test_eager_torchtitan_recompute_skips_last_matmul():
    forward, again = passes(notes="torchtitan, eager")
    assert matmuls(again) == matmuls(forward)[:-1] and sums(again).count("reduce_scatter") == 1
    forward, again = passes(notes="torchtitan")
    assert matmuls(again) == matmuls(forward), "a compiled one runs as a whole"


def test_attention_aware_checkpointing_keeps_cp_attention():
    cells = {"tp": "1", "cp": "2"}
    forward, again = passes(**cells)
    assert sums(forward) and sums(again) == sums(forward)
    forward, again = passes(**cells, notes="attention-aware checkpointing")
    assert sums(forward) and not sums(again)
