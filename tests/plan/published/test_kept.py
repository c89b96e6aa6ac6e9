"""Memory that other trainers keep, and how notes of a source change it."""

import pytest

from lab.published.run import run_of
from lab.published.table import held_gib
from ndtrain.plan.events import Kernel
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.memory import rank_memory
from ndtrain.plan.price import FLASH2_ON_HOPPER
from tests.plan.published.test_run import ROW

TOKENS, HIDDEN, WIDTH = 2 * 256, 512, 2048  # of a microbatch; tp is 2


def plan(**cells: str):
    return run_of(ROW | {"pp": "1", "dp": "8", "model": "llama"} | cells).plan()


def kept(made, kind, recompute=False):
    """Bytes that a pass of a block keeps."""
    return next(
        p.kept_bytes for v, p in made.pieces.items() if (v.kind, v.layer, v.recompute) == (kind, "block", recompute)
    )


def test_dtensor_trainer_keeps_gathered_inputs():
    ours, other = plan(), plan(notes="DTensor")
    gathered = 2 * TOKENS // 2 * HIDDEN * 2  # two inputs, the other rank's half, bf16
    assert kept(other, "F") - kept(ours, "F") == gathered == kept(ours, "B") - kept(other, "B")
    without = {"tp": "1", "dp": "16"}
    assert kept(plan(**without, notes="DTensor"), "F") == kept(plan(**without), "F")


def test_every_second_matmul_sac_keeps_expected_bytes():
    cells = {"recompute": "selective", "tp": "1", "dp": "16"}
    second = plan(**cells, notes="every-2nd-matmul; op-level SAC")
    assert sum(kept(second, k, r) for k, r in (("F", False), ("F", True), ("B", False))) == 0
    kept_ops = TOKENS * 2 * (HIDDEN + HIDDEN + HIDDEN + HIDDEN + WIDTH)  # input, q, v, core and gate, bf16
    assert kept(second, "F") == pytest.approx(kept_ops, rel=0.2)


def test_fp32_grad_accum_note_adds_fp32_sum():
    ours, other = plan(), plan(notes="fp32 grad accum")
    parameters = sum(u.numel for u in ours.program.units.values())
    assert other.memory[0].state - ours.memory[0].state == 2 * parameters
    assert other.memory[0].step == ours.memory[0].step


def test_compiled_blocks_leave_loss_eager():
    made = plan()
    head = next(p for v, p in made.pieces.items() if v.layer == "head" and v.kind == "F")
    assert made.cfg.train.compile and head.peak_bytes > 8 * TOKENS * 1024 / 2, "its logits are in fp32, twice"


def test_attention_kernel_follows_gpu_and_year():
    def flops(gpu, **cells):
        made = plan(gpu=gpu, peak_tflops="", **cells)
        piece = next(p for v, p in made.pieces.items() if v.layer == "block" and v.kind == "F")
        return next(e.flops for e in piece.events if isinstance(e, Kernel) and e.kind == "attention")

    second = flops("A100", source="a page")
    assert flops("A100", source="llm-foundry") == flops("H100", source="arXiv:2212.01234") == 2 * second
    assert flops("H100", source="a page") == second == flops("A100", source="NeMo")
    assert flops("H100", source="NeMo") == pytest.approx(second / FLASH2_ON_HOPPER)


def test_memory_is_taken_from_rank_that_trainer_reports():
    cells = {"pp": "2", "dp": "4", "vocab": "65536"}
    most, first = plan(**cells), plan(**cells, source="nanotron")
    of_ranks = [rank_memory(first.program, rank, first.pieces, first.sizes) for rank in first.program.ranks]
    assert first.memory == of_ranks[:1] and sum(of_ranks[0]) != sum(of_ranks[1]), "the head is on the last rank"
    assert len(most.memory) == 2 and most.tensor_bytes == max(map(sum, most.memory))


def test_held_gib_is_capped_by_gpu_memory():
    h100 = load_hardware("h100")
    assert held_gib(h100, 40 * 2**30) == 40 and held_gib(h100, 90 * 2**30) == 84.9e9 / 2**30
