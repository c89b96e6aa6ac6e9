"""Seconds of kernels and collectives, by hand."""

from dataclasses import fields, replace

import pytest

from ndtrain.config import ConfigError
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.plan.events import Kernel
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.price import ADDED, Prices, Rates, peak_flops, rates_of

# 1 TFLOP/s, 1 GB/s of memory, links of 10 GB/s, a network of 1 GB/s a device, everything reached
MACHINE = Hardware("mine", "cuda", 80, 8, {"bf16": 1}, 1, 10, 1)
RATES = Rates(
    matmul=0.5, attention=0.25, sustained=0.8, memory=0.5, kernel_s=0.125, launch_s=0.5, link=1, network=1,
    link_hop_s=0.001, network_hop_s=0.01, interference=0, step_s=0,
)  # fmt: skip
GB = 10**9


def prices(**sizes: int) -> Prices:
    axes = ("pp", "dp", "fsdp", "cp", "tp")
    return Prices(MACHINE, RATES, MeshSpec(axes, tuple(sizes.get(a, 1) for a in axes)))


def test_kernel_time_is_bound_by_flops_or_bytes():
    p = prices()
    assert p.kernel(Kernel("matmul", 10**12, 0, "bf16")) == pytest.approx(2 + 0.125)
    assert p.kernel(Kernel("attention", 10**12, 0, "bf16")) == pytest.approx(4 + 0.125)
    assert p.kernel(Kernel("matmul", 10**12, 5 * GB, "bf16")) == pytest.approx(10 + 0.125)  # memory bounds it
    assert p.kernel(Kernel("memory", 0, GB, "fp32")) == pytest.approx(2 + 0.125)


def test_gpu_with_fp8_sustains_share_of_peak():
    hopper = Prices(replace(MACHINE, peak_tflops={"bf16": 1, "fp8": 2}), RATES, MeshSpec(("tp",), (1,)))
    assert hopper.kernel(Kernel("matmul", 10**12, 0, "bf16")) == pytest.approx(2 / 0.8 + 0.125)
    assert hopper.kernel(Kernel("matmul", 10**12, 0, "fp8")) == pytest.approx(1 / 0.8 + 0.125)


def test_cpu_kernel_time_includes_launch():
    cpu = Prices(replace(MACHINE, device="cpu"), RATES, MeshSpec(("tp",), (1,)))
    assert cpu.launch_s == 0 and cpu.kernel(Kernel("memory", 0, 0, "fp32")) == pytest.approx(0.125 + 0.5)
    assert prices().launch_s == 0.5


COLLECTIVES = {  # mesh, axis, op, seconds of 8 GB
    "gather on a host": ({"tp": 8}, "tp", "all_gather", 7 / 8 * 0.8 + 7 * 0.001),
    "reduction on a host": ({"tp": 4}, "tp", "reduce_scatter", 3 / 4 * 0.8 + 3 * 0.001),
    "all-reduce on a host": ({"tp": 8}, "tp", "all_reduce", 2 * 7 / 8 * 0.8 + 2 * 3 * 0.001),  # the tree has 3 levels
    "one member a host": ({"fsdp": 4, "tp": 8}, "fsdp", "all_gather", 3 / 4 * 8 + 3 * 0.01),
    "two members a host": ({"fsdp": 4, "tp": 4}, "fsdp", "all_gather", 3 / 4 * 8 / 2 + 2 * 0.001 + 0.01),
    "whole hosts": ({"fsdp": 16}, "fsdp", "all_gather", 15 / 16 * 8 / 8 + 14 * 0.001 + 0.01),
    "two axes": ({"fsdp": 2, "cp": 2, "tp": 8}, "fsdp+cp", "all_gather", 3 / 4 * 8 + 3 * 0.01),
    "heads for tokens on a host": ({"cp": 4}, "cp", "all_to_all", 3 / 4 * 0.8 + 3 * 0.001),
    "heads for tokens across": ({"cp": 2, "tp": 8}, "cp", "all_to_all", 1 / 2 * 8 + 0.01),
    "neighbours on a host": ({"cp": 8}, "cp", "send_recv", 0.8 + 0.001),
    "neighbours across": ({"cp": 2, "tp": 8}, "cp", "send_recv", 8 + 0.01),
    "alone": ({"tp": 8}, "cp", "all_gather", 0.0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_time_follows_link_tier(name):
    sizes, axis, op, seconds = COLLECTIVES[name]
    assert prices(**sizes).collective(axis, op, 8 * GB) == pytest.approx(seconds)


def test_small_all_reduce_uses_tree_latency():
    many, host = prices(dp=512, tp=8), prices(tp=8)
    assert many.collective("dp", "all_reduce", 0) == pytest.approx(2 * 9 * 0.01)
    assert host.collective("tp", "all_gather", 0) == pytest.approx(7 * 0.001)


def test_message_time_depends_on_host_of_next_stage():
    assert prices(pp=2, tp=8).message("pp", GB) == pytest.approx(1.01)
    assert prices(pp=2, tp=4).message("pp", GB) == pytest.approx(0.101)


def test_fp8_peak_falls_back_to_bf16():
    assert peak_flops(MACHINE, "fp8") == 10**12
    assert peak_flops(load_hardware("h100"), "fp8") == 1979e12


def test_missing_rate_is_one_line_error():
    with pytest.raises(ConfigError, match=r"^hardware=cpu: peak_tflops\.bf16 is missing: .*calibrate`$"):
        peak_flops(load_hardware("cpu"), "bf16")
    with pytest.raises(ConfigError, match="hardware=cpu: memory_gb_s is missing"):
        Prices(load_hardware("cpu"), RATES, MeshSpec(("tp",), (1,))).kernel(Kernel("memory", 0, GB, "fp32"))


def test_rates_of_description_override_planner():
    assert rates_of(replace(MACHINE, rates={"matmul": 0.9}), RATES) == replace(RATES, matmul=0.9)
    with pytest.raises(ConfigError, match=r"rates\.matmull: no such rate; did you mean 'matmul'\?"):
        rates_of(replace(MACHINE, rates={"matmull": 0.9}))


def test_rates_of_allows_zero_cost_but_no_zero_efficiency():
    none = dict.fromkeys(ADDED, 0.0)
    assert rates_of(replace(MACHINE, rates=none), RATES) == replace(RATES, **none)
    for f in fields(Rates):
        if f.name not in ADDED:
            with pytest.raises(ConfigError, match=rf"rates\.{f.name}=0: must be a positive number"):
                rates_of(replace(MACHINE, rates={f.name: 0.0}))
