"""The simulated step against times that are calculated by hand, with pieces made by hand."""

from dataclasses import replace
from unittest import mock

import pytest

from ndtrain.config import Config, load_config, resolve
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.plan.events import Collective, Event, Kernel, Piece, Wait
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.price import Prices, Rates
from ndtrain.plan.simulate import CAUSES, Simulation, Sizes
from ndtrain.program.build import UnitFacts
from ndtrain.program.passes import Variant
from ndtrain.program.step import StepProgram
from ndtrain.schedule import COST
from ndtrain.schedule import simulate as simulated

BASE = ["recipe=llama_debug", "model.num_hidden_layers=4", "train.global_batch=8", "train.micro_batch=1"]
SECOND = 10**12  # FLOPs
INFINITE = 1e30
# everything but what a test names is free
FAST = Hardware("mine", "cuda", 80, 8, {"fp32": 1, "bf16": 1}, INFINITE, INFINITE, INFINITE)
RATES = Rates(
    matmul=1, attention=1, memory=1, kernel_s=0, launch_s=0, link=1, network=1, link_hop_s=0, network_hop_s=0,
    interference=0, step_s=0,
)  # fmt: skip
GB = 10**9


def configured(overrides: str, ranks: int) -> Config:
    return resolve(load_config([*BASE, *overrides.split()]), ranks)


def compute(seconds: float) -> tuple[Event, ...]:
    return (Kernel("matmul", int(seconds * SECOND), 0, "fp32"),)


def simulation(
    cfg: Config,
    cost: dict[tuple[str, str], float] | None = None,
    events: dict[tuple[str, str], tuple[Event, ...]] | None = None,
    hardware: Hardware = FAST,
    rates: Rates = RATES,
    message: int = 0,
    free: frozenset[str] = frozenset(),
) -> Simulation:
    """A step whose passes take `cost` seconds by (kind, layer), or make `events`; what neither names takes none."""
    program, cost, events = StepProgram.of(cfg), cost or {}, events or {}

    def piece(v: Variant) -> Piece:
        key = v.kind, v.layer
        return Piece(events.get(key) or compute(cost.get(key, 0.0)), 0, 0)

    pieces = {v: piece(v) for rank in program.ranks for v in rank.passes}
    prices = Prices(hardware, rates, MeshSpec.of(cfg.mesh))
    return Simulation(program, pieces, Sizes(4, 4, message, 0, 0, 4), prices, free)


def seconds(*args, **options) -> float:
    return simulation(*args, **options).times.gradients


BLOCKS = {(kind, "block"): float(cost) for kind, cost in COST.items()}

# ------------------------------------------------------------------------------------------------------------ pipelines


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_bubble_equals_schedule_simulator(schedule):
    split = "[2,2]" if schedule in ("gpipe", "1f1b", "zb_h1") else "[1,1,1,1]"
    cfg = configured(f"mesh.pp=2 schedule={schedule} schedule.split={split}", 2)
    step = simulation(cfg, BLOCKS)
    stages = step.program.schedule.stages
    cost = {kind: c * 4 / stages for kind, c in COST.items()}
    assert step.times.gradients == pytest.approx(simulated(step.program.schedule, cost).makespan)


def test_message_delays_waiting_stage():
    cfg = configured("mesh.pp=2 train.global_batch=1 schedule=gpipe schedule.split=[2,2]", 2)
    linked = replace(FAST, link_gb_s=1.0)
    assert seconds(cfg, BLOCKS, hardware=linked, message=GB) == pytest.approx(4 * 1 + 4 * 2 + 2 * 1)
    assert seconds(cfg, BLOCKS, hardware=linked, message=GB, free=frozenset({"pp"})) == pytest.approx(12)


def test_messages_of_one_pair_run_in_turn():
    """Eight microbatches, each with a message of 5 s behind a forward of 1 s: the messages set the pace."""
    cfg = configured("mesh.pp=2 schedule=gpipe schedule.split=[2,2]", 2)
    linked, cost = replace(FAST, link_gb_s=1.0), {("F", "block"): 0.5}
    assert seconds(cfg, cost, hardware=linked, message=5 * GB) == pytest.approx(1 + 8 * 5 + 1 + 5 * 8)


def test_look_ahead_forward_has_its_own_bubble():
    """All ranks wait for the loads that it has counted."""
    mesh = "model=moe_debug moe.balance={} mesh.pp=2 schedule=gpipe schedule.split=[2,2]"
    cost = BLOCKS | {(kind, "sparse"): seconds for (kind, _), seconds in BLOCKS.items()}
    with_it, without = (seconds(configured(mesh.format(balance), 2), cost) for balance in ("hf", "none"))
    assert with_it - without == pytest.approx((8 + 2 - 1) * 2)


# -------------------------------------------------------------------------------------------- collectives inside passes

ROUND = (Collective("tp", "all_gather", 2 * GB, 0), *compute(3), Wait(0))  # half of the bytes cross


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 3), (0.5, 3), (0.25, 4), (0.125, 8)])
def test_collective_longer_than_compute_is_exposed(rate, expected):
    cfg = configured("mesh.tp=2 train.global_batch=1", 2)
    step = {"events": {("F", "block"): ROUND}, "hardware": replace(FAST, link_gb_s=rate)}
    assert seconds(cfg, **step) == pytest.approx(4 * expected)
    assert seconds(cfg, **step, free=frozenset({"tp"})) == pytest.approx(4 * 3)


def test_compute_during_collective_is_slower():
    cfg = configured("mesh.tp=2 train.global_batch=1", 2)
    slowed = replace(RATES, interference=0.5)
    linked = replace(FAST, link_gb_s=1.0)
    assert seconds(cfg, events={("F", "block"): ROUND}, hardware=linked, rates=slowed) == pytest.approx(4 * 3.5)


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 3), (0.25, 4.5)])
def test_exposed_collective_adds_lateness(rate, expected):
    """The sum of the norms' gradients over tp at the end of the step is exposed too, and adds its own lateness."""
    cfg = configured("mesh.tp=2 train.global_batch=1", 2)
    step = {"events": {("F", "block"): ROUND}, "hardware": replace(FAST, link_gb_s=rate)}
    late = replace(RATES, late_s=0.5)
    assert seconds(cfg, **step, rates=late) == pytest.approx(4 * expected + 0.5)
    assert seconds(cfg, **step, rates=late, free=frozenset({"tp"})) == pytest.approx(4 * 3)


def test_collectives_of_one_axis_run_in_turn():
    cfg = configured("mesh.tp=2 train.global_batch=1", 2)
    both = (*(Collective("tp", "all_gather", 2 * GB, i) for i in range(2)), Wait(1), Wait(0))
    assert seconds(cfg, events={("F", "block"): both}, hardware=replace(FAST, link_gb_s=1.0)) == pytest.approx(4 * 2)


def test_slow_launches_bound_step_time():
    cfg = configured("train.global_batch=1", 1)
    small = {("F", "block"): compute(0.001) * 10}
    slow = replace(RATES, launch_s=0.002)
    # 46 launches up to that of the first block's backward: embedding, 4 x 10, norm, head, and back; then the host leads
    assert seconds(cfg, {("B", "block"): 1.0}, small, rates=slow) == pytest.approx(46 * 0.002 + 4)
    assert seconds(cfg, {("B", "block"): 1.0}, small) == pytest.approx(40 * 0.001 + 4)


# ----------------------------------------------------------------------------------------------------- units of weights

EVERY = {(kind, layer): 1.0 for kind in "FB" for layer in ("embed", "block", "norm", "head")}
PASSES = 2 * 7  # forward and backward of the embedding, four blocks, norm and head


def units_of(step: Simulation) -> dict[str, UnitFacts]:
    return step.program.units


def test_gathers_and_reductions_hide_behind_passes():
    """Zero 3: the first gather and the last reduction are exposed. The head's gather begins one pass before it, so one
    of its two seconds is exposed. So is one second of its reduction, which the next unit's reduction waits for."""
    cfg = configured("mesh.fsdp=2 mesh.zero=3 train.global_batch=2 model.vocab_size=2048", 2)
    embed = units_of(simulation(cfg))["model.embed_tokens"].numel
    linked = replace(FAST, link_gb_s=embed / GB)  # 2 s for the embedding's 4 bytes an element, as half of them cross
    blocks = max(u.numel for name, u in units_of(simulation(cfg)).items() if "layers" in name)
    assert blocks < embed / 2, "those of a block are hidden behind one pass"
    slow = simulation(cfg, EVERY, hardware=linked)
    head = slow.program.units["lm_head"].numel
    assert head == embed
    assert slow.times.gradients == pytest.approx(PASSES + 2 + 1 + 1 + 2, abs=0.01)


@pytest.mark.parametrize(("zero", "expected"), [(1, 44), (2, 44), (3, 52)])
def test_gathers_run_while_stage_waits_for_message(zero, expected):
    """Each gather takes 2 s and each block's forward 10 s. The gathers of embedding and first block are exposed.
    Under zero 3 so are four gathers in the last stage's backward, which takes no time: head, norm and two blocks."""
    cfg = configured(
        f"mesh.pp=2 mesh.fsdp=2 mesh.zero={zero} train.global_batch=2 schedule=gpipe schedule.split=[2,2]", 4
    )
    with mock.patch.object(Prices, "collective", lambda self, axis, op, nbytes: 2.0 * (op == "all_gather")):
        assert seconds(cfg, {("F", "block"): 10.0}) == pytest.approx(expected)


def test_slow_reduction_delays_next_reduction():
    cfg = configured("mesh.fsdp=2 mesh.zero=2 train.global_batch=2", 2)
    units = units_of(simulation(cfg))
    reduced = sum(u.numel for u in units.values())
    last = units["lm_head"].numel
    linked = replace(FAST, link_gb_s=last / GB / 50)  # 100 s for the head: backwards hardly count
    gathers = reductions = 2.0 * 50 * reduced / last
    assert seconds(cfg, EVERY, hardware=linked) == pytest.approx(gathers + reductions + PASSES, rel=0.1)
    assert seconds(cfg, EVERY, hardware=linked, free=frozenset({"fsdp"})) == pytest.approx(PASSES)


@pytest.mark.parametrize(("zero", "expected"), [(1, 4 * 20), (2, 41 + 1 + 3 * 20)])
def test_only_reductions_with_buffers_delay_backward(zero, expected):
    """Each takes 20 s. Zero 1: they run one after another, and the last stage has four units. Zero 2: the
    last stage's second block waits for the reductions of head and norm, and so does what the first stage waits for."""
    cfg = configured(
        f"mesh.pp=2 mesh.fsdp=2 mesh.zero={zero} train.global_batch=2 schedule=gpipe schedule.split=[2,2]", 4
    )
    with mock.patch.object(Prices, "collective", lambda self, axis, op, nbytes: 20.0 * (op == "reduce_scatter")):
        assert seconds(cfg, {("B", "block"): 1.0}) == pytest.approx(expected)


def test_sums_over_replicas_are_waited_for_at_the_end():
    cfg = configured("mesh.dp=2 mesh.zero=1 train.global_batch=2", 2)
    total = 4 * sum(u.numel for u in units_of(simulation(cfg)).values())
    linked = replace(FAST, link_gb_s=total / GB)  # one second: all of them are smaller than a bucket
    assert total < 4 << 20
    assert seconds(cfg, EVERY, hardware=linked) == pytest.approx(PASSES + 1)
    assert seconds(cfg, EVERY, hardware=linked, free=frozenset({"dp"})) == pytest.approx(PASSES)


MESHES = {
    "mesh.fsdp=2 mesh.zero=3": 2,
    "mesh.pp=2 mesh.fsdp=2 mesh.zero=2 schedule=zb_h1": 4,
    "mesh.pp=2 mesh.dp=2 mesh.tp=2 mesh.zero=1": 8,
}


@pytest.mark.parametrize("mesh", MESHES)
def test_step_time_is_monotonic_in_bandwidth_and_free_costs(mesh):
    cfg = configured(mesh, MESHES[mesh])
    rates = [2.0**-n for n in range(8)]
    slow = [replace(FAST, link_gb_s=r / 100, network_gb_s=r / 100, gpus_per_node=2) for r in rates]
    times = [seconds(cfg, EVERY | BLOCKS, hardware=h, message=10**6) for h in slow]
    assert times == sorted(times) and times[0] < times[-1]
    causes = [frozenset(CAUSES[i:]) for i in range(len(CAUSES) + 1)]
    freed = [seconds(cfg, EVERY | BLOCKS, hardware=slow[-1], message=10**6, free=free) for free in causes]
    assert freed == sorted(freed) and freed[-1] == times[-1]
