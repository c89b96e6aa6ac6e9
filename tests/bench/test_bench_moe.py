"""`python -m ndtrain.bench moe`: all sides compute the same, what differs is found, and mistakes are one line."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ndtrain.bench import moe
from ndtrain.bench.__main__ import main
from ndtrain.bench.moe import LOOP, OURS, PRODUCTS, TRANSFORMERS, Options, balanced_products, loop_over, our_block
from ndtrain.parallel.linear import grouped

QUICK = ["tokens=32", "hidden=16", "intermediate=8", "rounds=2", "steps=1", "warmup=1", "device=cpu"]


def test_every_implementation_is_measured(tmp_path, capsys):
    assert main(["moe", "experts=2,5", *QUICK, f"out={tmp_path}/moe.json"]) == 0
    cases = json.loads((tmp_path / "moe.json").read_text())["cases"]
    assert list(cases) == ["2", "5"]
    for case in cases.values():
        assert list(case) == [OURS, LOOP, *TRANSFORMERS, PRODUCTS]
        assert all(of["ms"]["median"] > 0 for of in case.values()) and case[OURS]["over_ours"]["median"] == 1
    assert "5 experts, 32 tokens to 2 each, 16 x 8, fp32" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["output", "input's gradient"])
def test_implementation_with_different_result_is_refused(wrong, monkeypatch, capsys):
    right = moe.loop_over

    def other(block):
        layer = right(block)
        shift = lambda x: 1.01 * layer(x) if wrong == "output" else layer(x) + 0.01 * (x - x.detach())
        return shift

    monkeypatch.setattr(moe, "loop_over", other)
    assert main(["moe", "experts=4", *QUICK]) == 1
    assert f"error: loop: its {wrong} is " in capsys.readouterr().err


def test_loop_computes_weight_gradients():
    """A training step computes them too. Each side has its own weights."""
    options = Options(tokens=32, hidden=16, intermediate=8)
    block = our_block(options, 4, torch.device("cpu"))
    x = torch.randn(32, 16, requires_grad=True)  # our matrices are no inputs of autograd
    loop = loop_over(block)
    loop(x).square().sum().backward()
    block.feed_forward(x).square().sum().backward()
    theirs = next(c.cell_contents for c in loop.__closure__ if isinstance(c.cell_contents, list))
    first, stacks = block.mixture.experts["0"], block.ops.grouped_linear.__self__.fused_weights
    of_first = first.gate_proj.weight, first.down_proj.weight
    gates_and_ups, downs = (stacks[w].weight.grad.unflatten(0, (4, -1)) for w in of_first)
    for gate_and_up, of_down, (gate, up, down) in zip(gates_and_ups, downs, theirs, strict=True):
        assert torch.allclose(gate_and_up, torch.cat([gate.grad, up.grad]), atol=1e-5) and gate.grad.abs().max() > 0
        assert torch.allclose(of_down, down.grad, atol=1e-5)


def test_products_have_shapes_and_flops_of_layer(monkeypatch):
    """Products of rows have the layer's shapes, forward and backward. All products together have the FLOPs of nine
    matmuls. Every row is in a group, and group sizes differ by at most one."""
    made, sizes, options, device = [], [], Options(tokens=33, hidden=16, intermediate=8), torch.device("cpu")
    real = grouped.sum_of_products

    def record(xs, ws, rows):
        made.extend((tuple(x.shape), tuple(w.shape)) for x, w in zip(xs, ws, strict=True))
        sizes.append(rows.sizes)
        return real(xs, ws, rows)

    monkeypatch.setattr(grouped, "sum_of_products", record)
    with FlopCounterMode(display=False) as counter:
        balanced_products(options, 4, device)()
    assert counter.get_total_flops() == 9 * 2 * 66 * 16 * 8
    assert sum(sizes[0]) == 66 and max(sizes[0]) - min(sizes[0]) == 1
    alone, made = made, []
    x = torch.randn(33, 16)
    moe.passes(our_block(options, 4, device).feed_forward, x, x)
    assert sorted(made) == sorted(alone) and len(made) == 4


@pytest.mark.parametrize("experts", ["", "1", "8,many"])
def test_bad_number_of_experts_is_one_line_error(experts, capsys):
    assert main(["moe", f"experts={experts}", *QUICK]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: experts={experts}: must be numbers of at least top_k=2") and err.count("\n") == 1
