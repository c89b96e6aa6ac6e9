"""Compiled code without a device: what exists of its results, and a run that compiles against one that does not."""

import pytest
import torch

from ndtrain.config import load_config, resolve
from ndtrain.parallel.allocations import Allocations
from ndtrain.plan.compiled import pretended_compiler
from ndtrain.plan.dry import dry_run

MATRIX = 16 * 16 * 4  # bytes
SHAPE = [
    "recipe=llama_debug", "model.vocab_size=128", "model.hidden_size=64", "model.intermediate_size=96",
    "model.num_hidden_layers=4", "train.seq_len=64", "train.global_batch=4", "train.micro_batch=2",
    "precision.compute=bf16",
]  # fmt: skip


def between_matmuls(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.mm(x, w)
    return torch.mm(y * 2 + y.exp() * y.sin(), w)


def peak_of(function) -> tuple[int, int]:
    """(peak, what is left) in bytes."""
    x, w = (torch.empty(16, 16, device="meta") for _ in range(2))
    with Allocations() as made:
        result = function(x, w)
    assert result.shape == (16, 16)
    return made.peak_bytes, made.now


def test_peak_of_compiled_code_excludes_fused_intermediates():
    assert peak_of(between_matmuls) == (5 * MATRIX, MATRIX)
    with pretended_compiler():
        assert peak_of(torch.compile(between_matmuls)) == (2 * MATRIX, MATRIX)


def test_compiled_code_saves_what_partitioner_chooses():
    """For a chain of elementwise operators it saves the input of the first one, and recomputes the rest."""
    with pretended_compiler(), Allocations() as made:
        x = torch.empty(16, 16, device="meta", requires_grad=True)
        y = torch.compile(lambda x: x.sin().exp().sin())(x)
        assert made.now == 2 * MATRIX
        y.sum().backward()
    assert made.now == 3 * MATRIX, "x, its gradient and y"


@pytest.mark.full
def test_compiled_dry_run_has_same_flops_and_less_memory():
    cfg = lambda compiled: resolve(load_config([*SHAPE, "mesh.fsdp=2", f"train.compile={compiled}"]), 2)
    auto, off = (dry_run(cfg(way), 0, "cuda") for way in ("auto", "false"))
    assert auto.compiled and not off.compiled
    assert (auto.flops, auto.traffic, auto.state) == (off.flops, off.traffic, off.state)
    assert auto.peak_bytes < off.peak_bytes
