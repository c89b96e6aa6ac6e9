"""Bytes of a rank's state against the closed form of each ZeRO stage."""

from dataclasses import replace

import pytest
import torch

from ndtrain.mesh.sharding import Tensors
from ndtrain.optim import StateSpec
from ndtrain.parallel.unit import StatePlan, state_bytes

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ADAM = (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))


def closed_form(plan: StatePlan, shards: int, numel: int) -> int:
    """Bytes on the device. With N elements in n shards, c bytes of compute, m of master precision and s of master,
    moments and average: ZeRO 1 holds N (c + m) + s N/n, ZeRO 2 N c + (m + s) N/n, ZeRO 3 (m + s) N/n."""
    c, m, shard = plan.compute.itemsize, plan.master.itemsize, -(-numel // shards)
    moments = sum((spec.dtype or plan.master).itemsize for spec in plan.spec)
    state = m + moments + (m if plan.ema else 0)
    zero = 1 if shards == 1 and (c == m or plan.offload) else plan.zero  # one rank that holds one copy gathers nothing
    if plan.offload:
        state = c if zero == 3 else 0
    elif zero < 3 and c == m:
        state -= m
    weights = 0 if zero == 3 else c * shard * shards
    return weights + m * (shard * shards if zero == 1 or shards == 1 else shard) + state * shard


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("compute", "master"), [(BF16, FP32), (FP32, FP32), (FP64, FP64)])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_bytes_equal_closed_form(zero, shards, compute, master, offload):
    for spec in (ADAM, tuple(replace(s, dtype=BF16) for s in ADAM)):
        for ema in (False, True):
            plan = StatePlan(zero, compute, master, spec, ema=ema, offload=offload)
            held = state_bytes(plan, shards, 1000)
            assert held.on_device == closed_form(plan, shards, 1000)


def test_state_bytes_with_offload_on_one_rank_are_on_host():
    held = state_bytes(StatePlan(3, BF16, FP32, ADAM, offload=True), 1, 1000)
    assert (held.on_device, held.on_host) == (1000 * (2 + 4), 1000 * (4 + 8))


def test_state_bytes_of_indivisible_length_are_padded():
    plan = StatePlan(3, BF16, FP32, ADAM)
    assert state_bytes(plan, 4, 10) == state_bytes(plan, 4, 12) and state_bytes(plan, 4, 10).on_device == 16 * 3


def test_state_bytes_count_each_state_for_its_tensors():
    of = lambda *tensors: StatePlan(1, BF16, FP32, tuple(StateSpec(t.name, tensors=t) for t in tensors))
    sharded = lambda *tensors: state_bytes(of(*tensors), 4, 1000, hidden=190).sharded // 4 - 250
    assert [sharded(Tensors.HIDDEN), sharded(Tensors.OTHER), sharded(*Tensors)] == [190, 60, 500]


def test_state_of_whole_tensors_is_not_sharded():
    spec = StateSpec("row", shape=lambda shape: shape[:1])
    assert state_bytes(StatePlan(1, BF16, FP32, (spec,)), 4, 1000).sharded == 4 * 250
