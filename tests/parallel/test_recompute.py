"""Every recompute mode trains as without it, sends nothing twice whose result can be saved, and stays under its
peak."""

import random
from collections.abc import Callable
from functools import cache
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ndtrain.config import EXPERT_OPS, SAVABLE_OPS, Config, ConfigError, RecomputeConfig, load_config, resolve
from ndtrain.model import params
from ndtrain.model.transformer import all_ops
from ndtrain.parallel import recompute_budget
from ndtrain.parallel.build import DTYPES
from ndtrain.parallel.recompute import RecomputeGroup, RecomputeOps, SavedOps, plan_recompute, skipped_ops
from ndtrain.parallel.recompute_budget import BlockSizes, Choice, Load, choices, load, peak_bytes, plan, recompute_cost
from ndtrain.schedule import Action
from tests.lib.parity import FP64, SHAPE, Run, compare, rank_run, train
from tests.lib.ranks import run_ranks
from tests.parallel.test_memory import measure

# ----------------------------------------------------------------------------------------------------------- parity

MODEL = [
    *SHAPE, *FP64, "train.global_batch=8", "model.num_hidden_layers=4", "model.num_attention_heads=8",
    "model.num_key_value_heads=2", "model.head_dim=4", "model.vocab_size=103",
]  # fmt: skip
CASES = {
    "selective": (1, ["recompute=selective"]),
    "selective, qkv": (1, ["recompute=selective", "recompute.keep=[qkv_proj,gate_up_proj]"]),
    "selective, nothing": (1, ["recompute=selective", "recompute.keep=[]"]),
    "selective, all": (1, ["recompute=selective", f"recompute.keep=[{','.join(SAVABLE_OPS)}]", "data.pack=true"]),
    "every auto": (1, ["recompute=every", "recompute.every=auto"]),
    "every 3, gpipe": (1, ["recompute=every", "recompute.every=3", "schedule=gpipe"]),
    "budget": (1, ["recompute=budget", "recompute.budget=360kB"]),
    "full, tp": (2, ["recompute=full", "mesh.tp=2", "model.attention_bias=true", "model.mlp_bias=true"]),
    "full, whole residual stream": (2, ["recompute=full", "mesh.tp=2", "tp.sequence_parallel=false",
    "tp.overlap=true"]), "every 2, tp": (2, ["recompute=every", "recompute.every=2", "mesh.tp=2"]),
    "selective, tp": (2, ["recompute=selective", "mesh.tp=2", "tp.overlap=true"]),
    "full, ring": (2, ["recompute=full", "mesh.cp=2", "data.pack=true"]),
    "full, ulysses": (2, ["recompute=full", "mesh.cp=2", "cp.kind=ulysses"]),
    "selective, ulysses": (2, ["recompute=selective", "mesh.cp=2", "cp.kind=ulysses", "data.pack=true"]),
    "budget, ring": (2, ["recompute=budget", "recompute.budget=600kB", "mesh.cp=2"]),
    "full, tp and cp": (4, ["recompute=full", "mesh.tp=2", "mesh.cp=2"]),
    "selective, tp and cp": (4, ["recompute=selective", "mesh.tp=2", "mesh.cp=2", "schedule=gpipe"]),
    "budget, tp": (2, ["recompute=budget", "recompute.budget=200kB", "mesh.tp=2"]),
    "selective, 1f1b": (2, ["recompute=selective", "mesh.pp=2"]),
    "every 2, interleaved": (2, ["recompute=every", "recompute.every=2", "mesh.pp=2", "schedule=interleaved"]),
    "selective, zb_v": (2, ["recompute=selective", "mesh.pp=2", "schedule=zb_v"]),
    "full, zb_h1 and tp": (4, ["recompute=full", "mesh.pp=2", "schedule=zb_h1", "mesh.tp=2"]),
    "budget, zb_v": (2, ["recompute=budget", "recompute.budget=700kB", "mesh.pp=2", "schedule=zb_v"]),
    "budget, dualpipe_v": (2, ["recompute=budget", "recompute.budget=1MB", "mesh.pp=2", "schedule=dualpipe_v"]),
    **{f"selective, zero {z}": (2, ["recompute=selective", "mesh.fsdp=2", f"mesh.zero={z}"]) for z in (1, 2, 3)},
    **{f"budget, zero {z}": (2, ["recompute=budget", "recompute.budget=600kB", "mesh.fsdp=2", f"mesh.zero={z}"])
       for z in (1, 2, 3)},
}  # fmt: skip
DEFAULT = ("selective", "every auto", "budget", "full, ulysses", "budget, zb_v")


@cache
def reference(*overrides: str) -> Run:
    return train(1, [*MODEL, "train.micro_batch=8", *overrides], "uneven")


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_recompute_in_fp64_equals_run_without(name):
    n, extra = CASES[name]
    same = [e for e in extra if e.startswith(("model.", "data."))]
    run = train(n, [*MODEL, "train.micro_batch=2", *extra], "uneven")
    compare(run, reference(*same), loss=1e-10, state=1e-9)


# ------------------------------------------------------------------------------------------------------------- keep


def test_saved_ops_replays_results_in_order():
    saved, made = SavedOps(), iter(range(10))
    make = lambda: (torch.full((2,), float(next(made))),)
    with saved.saving("a", frozenset({"x"})):
        first = [saved("x", make), saved("y", make), saved("x", make)]
    with saved.replaying("a"):
        assert saved.of("y") is None
        second = [saved("x", make), saved("y", make), saved.of("x")(make)]
    assert second[0] is first[0] and second[2] is first[2] and second[1] is not first[1]
    assert saved.of("x") is None and saved("x", make)[0][0] == 4


def test_saved_ops_refuses_differing_recompute():
    saved = SavedOps()
    with saved.saving("a", frozenset({"x"})):
        saved("x", lambda: torch.ones(1))
    with (
        pytest.raises(RuntimeError, match="recompute of a did not use the saved results of x"),
        saved.replaying("a"),
    ):
        pass


def test_saved_ops_keeps_shape_only_ops_as_shape():
    saved = SavedOps()
    with saved.saving("a", frozenset({"x", "y"}), shape_only=frozenset({"y"})):
        saved("x", lambda: (torch.ones(5, 3), torch.ones(4)))
        saved("y", lambda: (torch.ones(5, 3),))
    with saved.replaying("a"):
        saved("x", lambda: 1 / 0)
        assert saved("y", lambda: 1 / 0)[0].shape == (5, 3)
    with saved.saving("a", frozenset({"x", "y"}), shape_only=frozenset({"y"})):
        saved("x", lambda: (torch.ones(5, 3), torch.ones(4)))
        saved("y", lambda: (torch.ones(5, 3),))
    assert saved.drop("a") == {"x": 4 * (15 + 4), "y": 4}


@pytest.mark.parametrize("model", ["llama_debug", "moe_debug", "mixtral_8x7b", "deepseek_v3"])
def test_every_matrix_of_a_block_has_an_op(model):
    m = resolve(load_config([f"model={model}", "model.num_hidden_layers=5"]), 1).model
    assert not [p.name for p in params(m).values() if len(p.dims) > 1 and p.layer is not None and p.op is None]


# ----------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("cfg", "sizes"),
    [
        (RecomputeConfig(name="none"), []),
        (RecomputeConfig(name="full", every=3), [1] * 9),
        (RecomputeConfig(name="selective"), [1] * 9),
        (RecomputeConfig(name="every", every=4), [4, 4, 1]),
        (RecomputeConfig(name="every", every="auto"), [3, 3, 3]),
    ],
)
def test_plan_recompute_groups_cover_blocks_in_order(cfg, sizes):
    groups = plan_recompute(range(2, 11), cfg, RecomputeOps())
    assert [len(g.layers) for g in groups] == sizes
    assert [i for g in groups for i in g.layers] == (list(range(2, 11)) if sizes else [])


def test_plan_recompute_groups_save_and_skip_expected_ops():
    always = frozenset({"o_proj", "down_proj"})
    last = frozenset({"down_proj"})
    group = lambda layers, save: RecomputeGroup(layers, save, last, last)
    ops, every = RecomputeOps(always, last), RecomputeConfig(name="every", every=2)
    assert plan_recompute([1, 2, 3], every, ops) == [group([1, 2], always), group([3], always)]
    choice = [frozenset({"core"}), None, frozenset()]
    chosen = plan_recompute([1, 2, 3], RecomputeConfig(name="budget"), ops, choice)
    assert chosen == [group([1], always | {"core"}), group([3], always)]
    plain = plan_recompute([1, 2, 3], every, RecomputeOps(last=last))
    assert skipped_ops([1, 2, 3], plain) == [frozenset(), {"down_proj"}, {"down_proj"}]
    assert skipped_ops([1, 2, 3], plain, compiled=True) == [frozenset()] * 3
    assert skipped_ops([1, 2, 3], chosen) == [always | {"core"}, None, always]


SHARED = ["model=moe_debug", "model.model_type=qwen2_moe", "model.shared_expert_intermediate_size=64"]
TRAVELS = {
    "tp": (2, ["mesh.tp=2"], {"o_proj", "down_proj"}),
    "cp": (2, ["mesh.cp=2"], {"core"}),
    "fsdp and pp": (4, ["mesh.fsdp=2", "mesh.pp=2"], set()),
    "tp, shared experts": (2, [*SHARED, "mesh.tp=2"], {"o_proj", "shared_expert_down", "down_proj"}),
    "ep": (2, ["model=moe_debug", "mesh.fsdp=2", "mesh.ep=2"], {"dispatch", "combine"}),
    "ep and cp": (2, ["model=moe_debug", "mesh.cp=2", "mesh.ep=2"], {"core", "dispatch", "combine"}),
}


@pytest.mark.parametrize("case", TRAVELS)
def test_results_of_messages_are_saved_in_every_mode(case):
    ranks, overrides, sent = TRAVELS[case]
    cfg = resolve(load_config([*overrides, "recompute=full"]), ranks)
    ops = RecomputeOps.of(cfg.model, cfg.mesh)
    assert ops.always == sent
    assert ops.last == {"down_proj"}
    of_experts = {"experts_down"} if "model=moe_debug" in overrides else set()
    assert ops.unread(frozenset({"combine"})) == {"down_proj"} | of_experts
    assert ops.unread(frozenset({"core"})) == {"down_proj"}


# ----------------------------------------------------------------------------------------------------- communication


def bytes_sent(ways: list[list[str]]) -> list[int]:
    """Bytes that this rank sends in a run of each."""
    return [_sent(overrides) for overrides in ways]


def _sent(overrides: list[str]) -> int:
    total = 0

    def counting(send: Callable) -> Callable:
        def call(x: torch.Tensor, *args, **kwargs):
            nonlocal total
            total += x.nbytes
            return send(x, *args, **kwargs)

        return call

    with patch.object(dist, "isend", counting(dist.isend)), patch.object(dist, "all_reduce", counting(dist.all_reduce)):
        rank_run(
            [*MODEL, "model.num_hidden_layers=2", "train.micro_batch=4", "train.steps=1", "mesh.zero=1", *overrides]
        )
    return total


SHORT = ["model.num_hidden_layers=2", "train.micro_batch=4", "train.steps=1", "mesh.zero=1"]
RUNS = 2 * 2  # microbatches x blocks
STREAM = 4 * 12 * 36 * 8 // 2  # bytes of a rank's half of the residual stream of a microbatch
HEADS = 4 * 6 * (4 + 1 + 1) * 4 * 8  # bytes of q, k and v for a rank's half of the tokens and the other rank's heads
SENT = {  # mesh -> bytes that a block's recompute sends with full, every=2, selective, selective without gate_up_proj
    "tp": (["mesh.tp=2"], (2 * STREAM, 2 * STREAM, STREAM, 2 * STREAM)),
    "tp, in parts": (["mesh.tp=2", "tp.overlap=true"], (2 * STREAM, 2 * STREAM, STREAM, 2 * STREAM)),
    "tp, whole residual stream": (["mesh.tp=2", "tp.sequence_parallel=false"], (0, 0, 0, 0)),
    "ring": (["mesh.cp=2"], (0, 0, 0, 0)),
    "ulysses": (["mesh.cp=2", "cp.kind=ulysses"], (HEADS,) * 4),
}
WAYS = [
    ["recompute=full"], ["recompute=every", "recompute.every=2"], ["recompute=selective"],
    ["recompute=selective", "recompute.keep=[core]"],
]  # fmt: skip


@pytest.mark.parametrize("name", [n if n == "tp" else pytest.param(n, marks=pytest.mark.full) for n in SENT])
def test_the_recompute_sends_only_the_inputs_of_ops(name):
    """The column-parallel linears of tp need all tokens, and the core of Ulysses all tokens of a head. These inputs are
    gathered again, as in a backward. No output is summed or exchanged again, and no ring is sent around."""
    mesh, expected = SENT[name]
    for none, *recomputed in run_ranks(bytes_sent, 2, [[*mesh, *way] for way in (["recompute=none"], *WAYS)]):
        assert none > 0
        assert [(sent - none) / RUNS for sent in recomputed] == list(expected)


# ----------------------------------------------------------------------------------------------------------- memory

DEEP = [
    "model.num_hidden_layers=16", "model.num_key_value_heads=2", "train.seq_len=128", "train.loss_chunk=64",
    "mesh.zero=1",
]  # fmt: skip
MB = 1_000_000


def peaks(ways: list[list[str]]) -> list[dict]:
    """For each: the measured peak bytes of a step above the state, and with recompute=budget what was planned."""
    return [_peak(way) for way in ways]


def _peak(overrides: list[str]) -> dict:
    planned = {}

    def spy(loads, sizes, limit, cost, always):
        chosen = plan(loads, sizes, limit, cost, always)
        full = [c for c in choices(always) if c is not None][:1] * len(chosen)
        planned.update(
            budget=limit, chosen=chosen, cost=sum(map(cost, chosen)), full=sum(map(cost, full)),
            least=peak_bytes(loads, full, sizes), most=peak_bytes(loads, [None] * len(chosen), sizes),
        )  # fmt: skip
        return chosen

    with patch.object(recompute_budget, "plan", spy):
        return {"peak": measure([*DEEP, *overrides])["peak"], **planned}


def test_peak_activations_order_by_recompute_mode():
    ways = [["recompute=none"], ["recompute=selective"], ["recompute=every", "recompute.every=2"], ["recompute=full"]]
    none, selective, every, full = (r["peak"] for r in run_ranks(peaks, 1, ways)[0])
    print(f"none {none}, selective {selective}, every=2 {every}, full {full}")
    assert full <= 0.25 * none
    assert none - selective >= 0.5 * (none - full)
    assert full < every < selective


def budget_ways(extra: list[str], share: list[float]) -> list[list[str]]:
    """Budgets between the least that works on all ranks and the peak without recompute."""
    asked = run_ranks(peaks, *_ranks(extra), [[*extra, "recompute=budget", "recompute.budget=1TB"]])
    least, most = (max(rank[0][bound] for rank in asked) for bound in ("least", "most"))
    limits = [int(least + s * (most - least)) for s in share]
    return [[*extra, "recompute=budget", f"recompute.budget={b}"] for b in limits]


def _ranks(extra: list[str]) -> tuple[int]:
    return (2 if any(e.startswith("mesh.") and e.endswith("=2") for e in extra) else 1,)


SETTINGS = {
    "fp32": [], "gpipe": ["schedule=gpipe"], "bf16": ["precision.compute=bf16"],
    "packed": ["data.pack=true", "train.seq_len=64"], "tp": ["mesh.tp=2"], "ring": ["mesh.cp=2"],
    "ulysses": ["mesh.cp=2", "cp.kind=ulysses"], "zero 3": ["mesh.fsdp=2", "mesh.zero=3"],
    "1f1b": ["mesh.pp=2"], "zb_h1": ["mesh.pp=2", "schedule=zb_h1"], "zb_v": ["mesh.pp=2", "schedule=zb_v"],
    "zero 2 in bf16": ["mesh.fsdp=2", "mesh.zero=2", "precision.compute=bf16"],
}  # fmt: skip


@pytest.mark.parametrize("name", ["fp32", *(pytest.param(n, marks=pytest.mark.full) for n in list(SETTINGS)[1:])])
def test_budget_plan_stays_under_budget(name):
    """The least budget that the error names works. A larger budget costs less recompute, never more than
    recompute=full, and most of it is used."""
    extra = SETTINGS[name]
    for by_rank in run_ranks(peaks, *_ranks(extra), budget_ways(extra, [0, 0.1, 0.4, 0.8])):
        for r in by_rank:
            print(f"{name}: peak {r['peak']} of {r['budget']}, cost {r['cost'] / r['full']:.2f} of full's")
            assert r["peak"] <= r["budget"]
            assert r["cost"] <= r["full"]
        tight = [r for r in by_rank if r["budget"] < r["most"]]
        costs = [r["cost"] for r in tight]
        assert costs == sorted(costs, reverse=True) and len(set(costs)) == len(costs)
        if not any("mesh.pp" in e for e in extra):  # bounds of several stages together lie higher
            assert all(r["peak"] > 0.75 * r["budget"] for r in tight[1:]), "much of the budget lies idle"


def test_too_small_budget_error_names_least_budget():
    with pytest.raises(AssertionError, match=r"recompute.budget=1000000: .* need at least \d+ bytes"):
        run_ranks(peaks, 1, [["recompute=budget", "recompute.budget=1MB"]])


# ------------------------------------------------------------------------------------------------------------- plans


def random_sizes(draw: random.Random) -> BlockSizes:
    size = lambda most: draw.randint(1, most)
    saved = {op: size(40) for op in SAVABLE_OPS}
    return BlockSizes(size(20), size(100), saved, size(150), size(50), size(20), size(300), size(30))


def brute_force(loads: list[Load], sizes: BlockSizes, limit: int, cost: Callable, always: frozenset[str]):
    """(cost, peak) of the best plan with at most two kinds of blocks, None where there is none; and the least
    peak of all plans."""
    blocks = sum(one.blocks for one in loads)
    every = [p for p in product(choices(always), repeat=blocks) if len(set(p)) <= 2]
    rated = [(sum(map(cost, p)), peak_bytes(loads, p, sizes)) for p in every]
    return min((r for r in rated if r[1] <= limit), default=None), min(h for _, h in rated)


@pytest.mark.parametrize(
    "loads",
    [
        [Load(1, 1)], [Load(3, 1)], [Load(3, 2)], [Load(2, 3, 1)], [Load(2, 2), Load(1, 1)], [Load(2, 1), Load(2, 3)],
    ],
)  # fmt: skip
def test_budget_plan_is_cheapest_of_all_plans(loads):
    draw, always = random.Random(5), frozenset({"core", "o_proj"})
    planned = refused = 0
    for _ in range(60):
        sizes, price = random_sizes(draw), {op: draw.randint(1, 9) for op in SAVABLE_OPS}
        cost = lambda c, price=price: 0 if c is None else 2 + sum(price[op] for op in SAVABLE_OPS if op not in c)
        blocks = sum(one.blocks for one in loads)
        bounds = [peak_bytes(loads, [c] * blocks, sizes) for c in choices(always)]
        limit = draw.randint(min(bounds) - 20, max(bounds) + 20)
        best, least = brute_force(loads, sizes, limit, cost, always)
        if best is None:
            refused += 1
            with pytest.raises(ConfigError, match=f"need at least {least} bytes"):
                plan(loads, sizes, limit, cost, always)
        else:
            planned += 1
            chosen = plan(loads, sizes, limit, cost, always)
            assert (sum(map(cost, chosen)), peak_bytes(loads, chosen, sizes)) == best
            assert len(set(chosen)) <= 2
    assert planned and refused


def simulated_peak(blocks: int, microbatches: int, chosen: list, sizes: BlockSizes) -> int:
    """All forwards, then all backwards, with the bytes counted as they are allocated and freed."""
    now = sizes.besides + microbatches * (sum(sizes.held(c) for c in chosen) + sizes.tail)
    peak = now + sizes.head
    for _ in range(microbatches):
        now -= sizes.tail
        for choice in reversed(chosen):
            now -= sizes.held(choice)
            peak = max(peak, now + sizes.boundary + sizes.backward)
    return peak * 51 // 50


def test_peak_bytes_equals_simulated_peak():
    draw = random.Random(6)
    for _ in range(200):
        sizes, blocks, m = random_sizes(draw), draw.randint(1, 5), draw.randint(1, 4)
        chosen = [draw.choice(choices(frozenset())) for _ in range(blocks)]
        assert peak_bytes([Load(blocks, m)], chosen, sizes) == simulated_peak(blocks, m, chosen, sizes)


def test_load_counts_live_microbatches_of_stage():
    row = [Action(kind, m, s) for kind, m, s in
           [("F", 0, 1), ("F", 1, 1), ("F", 0, 2), ("I", 0, 2), ("B", 0, 1), ("F", 1, 2), ("I", 1, 2), ("W", 0, 2),
            ("W", 1, 2), ("B", 1, 1)]]  # fmt: skip
    assert [load(row, 1, 3), load(row, 2, 5)] == [Load(3, 2, 0), Load(5, 1, 2)]


def cost_of(cfg: Config, device: str) -> Callable[[Choice], float]:
    ops, compute = RecomputeOps.of(cfg.model, cfg.mesh), DTYPES[cfg.precision.compute]
    return recompute_cost(cfg.model, cfg.train.seq_len, compute, ops, device)


def test_budget_plan_saves_most_in_last_blocks():
    sizes = BlockSizes(10, 100, dict.fromkeys(SAVABLE_OPS, 10), 120)
    cfg = resolve(load_config([]), 1)
    cost = cost_of(cfg, "cpu")
    chosen = plan([Load(8, 1)], sizes, 600, cost, frozenset())
    first_none = chosen.index(None)
    assert 0 < first_none < 8 and chosen[first_none:] == [None] * (8 - first_none)
    assert plan([Load(8, 1)], sizes, 10**6, cost, frozenset()) == [None] * 8


def test_recompute_cost_counts_dense_and_moe_layers():
    """In DeepSeek-V3 58 of 61 layers have experts: keeping their results saves more than keeping the dense MLPs'."""
    cost = cost_of(resolve(load_config(["recipe=deepseek_v3"]), 2048), "cuda")
    everything, experts, dense = (cost(frozenset(ops)) for ops in ((), ("experts",), ("gate_up_proj",)))
    assert experts < dense < everything


# ----------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recompute=selective", "recompute.keep=[core,gate_proj]"], "no op gate_proj .*gate_up_proj"),
        (["recompute=selective", "recompute.keep=[down_proj]"], "no op down_proj"),
        (["recompute=every", "recompute.every=0"], "recompute.every=0"),
        (["recompute=every", "recompute.every=root"], "recompute.every=root: .*auto"),
        (["recompute=budget"], "recompute.budget is missing"),
        (["recompute=budget", "recompute.budget=2gallons"], "recompute.budget=2gallons"),
        (["recompute=budget", "recompute.budget=0"], "recompute.budget=0"),
    ],
)
def test_unsupported_recompute_settings_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message) as error:
        resolve(load_config(overrides), 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 * 2**30), ("500MB", 500 * MB), ("1.5 gib", 3 * 2**29), ("4096", 4096)]
)
def test_budget_is_parsed_to_bytes(text, size):
    assert resolve(load_config(["recompute=budget", f"recompute.budget={text}"]), 1).recompute.budget == size


def test_keep_accepts_exactly_savable_ops_of_blocks():
    savable = lambda m: {op.name for op in all_ops(m) if op.savable}
    dense, experts = (resolve(load_config([f"model={name}"]), 1).model for name in ("llama_debug", "deepseek_v3"))
    assert {*SAVABLE_OPS} == savable(dense)
    assert {*SAVABLE_OPS, *EXPERT_OPS} == savable(experts)
    assert list(SAVABLE_OPS) == [op.name for op in all_ops(dense) if op.savable], "in the order they run"
