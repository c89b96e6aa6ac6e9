"""moe.overlap: the rows of experts travel in parts. No bit of a run changes, and parts are under way while others are
multiplied."""

from collections.abc import Callable
from functools import cache
from unittest import mock

import pytest
import torch

from ndtrain.config import load_config, resolve
from ndtrain.model.moe.block import MoEBlock
from ndtrain.plan.dry import dry_run
from ndtrain.program.launch_order import Compute, Op, Wait, check
from tests.lib.helpers import config_refusal
from tests.lib.launches import on_fake_ranks
from tests.lib.parity import Run, train
from tests.parallel import test_launch_order
from tests.parallel.test_launch_order import program, run
from tests.parallel.test_launch_order_ep import EXPERTS
from tests.parallel.test_parity_ep import EIGHT
from tests.parallel.test_parity_moe import FULL, MODEL, MODELS, SCHEDULES

OVERLAP = "moe.overlap=true"
# Experts' rows of whole vectors: PyTorch's sigmoid on a CPU computes the last elements of a tensor, those that fill no
# vector, with another function.
WHOLE_VECTORS = ("model.intermediate_size=64",)
WHOLE_VECTORS_OF_EXPERTS = ("model.moe_intermediate_size=32",)  # of families whose experts have a size of their own
FEW_ROWS = "model.vocab_size=2"  # then many tokens choose the same experts, and others get no rows


@cache
def trained(name: str, ranks: int, *overrides: str) -> Run:
    own_size = any(key.startswith("model.moe_intermediate_size=") for key in MODELS[name])
    whole = (*WHOLE_VECTORS, *(WHOLE_VECTORS_OF_EXPERTS if own_size else ()))
    return train(ranks, [*MODEL, *MODELS[name], EIGHT, *whole, *overrides], "uneven")


def check_bits(name: str, ranks: int, *overrides: str, parts: int = 2) -> None:
    """Of losses, norms, balance, gradients, weights and moments."""
    run, whole = trained(name, ranks, *overrides, OVERLAP, f"moe.parts={parts}"), trained(name, ranks, *overrides)
    assert (run.losses, run.norms, run.balance) == (whole.losses, whole.norms, whole.balance)
    for kind, tensors in whole.tensors.items():
        assert run.tensors[kind].keys() == tensors.keys()
        differ = [name for name, x in tensors.items() if not torch.equal(run.tensors[kind][name], x)]
        assert not differ, f"{kind} of {differ}"


TWO = ("mesh.dp=2", "mesh.ep=2", "train.micro_batch=2")


@pytest.mark.parametrize(
    ("name", "parts", "more"),
    [
        ("qwen2-moe", 3, ("recompute=full",)),
        *(pytest.param(name, 2, (), marks=FULL) for name in MODELS),
        *(pytest.param("mixtral", parts, (), marks=FULL) for parts in (3, 4)),
        pytest.param("qwen2-moe", 4, ("recompute=none", FEW_ROWS), marks=FULL),
        pytest.param("qwen2-moe", 2, ("recompute=selective", "recompute.keep=[router,experts]"), marks=FULL),
        pytest.param("qwen2-moe", 2, ("recompute=every", "recompute.every=2"), marks=FULL),
        pytest.param("qwen2-moe", 2, ("recompute=budget", "recompute.budget=1MB"), marks=FULL),
        pytest.param("qwen2-moe", 2, ("train.compile=true",), marks=FULL),
        pytest.param("qwen2-moe", 2, ("precision.params=fp32", "precision.compute=fp32"), marks=FULL),
        pytest.param("qwen2-moe", 2, ("precision.params=fp32", "precision.compute=bf16"), marks=FULL),
    ],
)
def test_overlap_is_bitwise_equal(name, parts, more):
    check_bits(name, 2, *TWO, *more, parts=parts)


@FULL
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_overlap_with_all_axes_is_bitwise_equal(recompute, zero):
    mesh = ("mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.ep=4", f"mesh.zero={zero}")
    check_bits("qwen2-moe", 8, *mesh, "train.micro_batch=1", f"recompute={recompute}")


@pytest.mark.parametrize("schedule", [pytest.param(s, marks=[FULL] * (s != "zb_h1")) for s in SCHEDULES])
@pytest.mark.full
def test_overlap_with_schedules_is_bitwise_equal(schedule):
    """The backward of weights may be an action of its own."""
    layers = f"model.num_hidden_layers={SCHEDULES[schedule]}"
    mesh = ("mesh.pp=2", "mesh.fsdp=2", "mesh.ep=2", "train.micro_batch=1")
    check_bits("qwen2-moe", 4, layers, f"schedule={schedule}", *mesh)


# ------------------------------------------------------------------------------------------------ launches, in order


@FULL
@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("parts", [2, 4])
def test_overlap_sends_same_bytes_in_more_messages(parts, recompute):
    """The same rows are sent in more messages, and none again for a recompute."""
    overrides = [*MODEL, *MODELS["mixtral"], EIGHT, "mesh.dp=2", "mesh.ep=2", "train.micro_batch=1"]
    more = [f"recompute={recompute}", OVERLAP, f"moe.parts={parts}"]
    record = dry_run(resolve(load_config([*overrides, *more]), 2), 1, "cpu")
    (sent,) = [t for t in record.traffic if t.op == "all_to_all"]
    layers, microbatches, rows, row = 3, 4, 16 * 2, 32 * 8
    assert sent.count == layers * microbatches * (1 + 4 * parts)
    assert sent.bytes == layers * microbatches * (8 * 8 + 4 * rows * row)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (4, ["mesh.dp=2", "mesh.fsdp=2", "mesh.ep=2", "recompute=full", "train.global_batch=8"]),
        pytest.param(
            8, ["mesh.pp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.ep=4", "schedule=zb_v", "train.global_batch=4"],
            marks=FULL,
        ),
    ],
)  # fmt: skip
@pytest.mark.full
def test_overlap_programs_do_not_deadlock(world, overrides):
    check(program([*EXPERTS, *overrides, OVERLAP], world))


def test_experts_of_one_part_run_while_others_travel():
    """In the forward and in the backward of each layer: when a part's experts begin, everything that was launched
    before and is not waited for yet is under way."""
    overrides = [*EXPERTS, "mesh.dp=2", "mesh.ep=2", "train.global_batch=4", OVERLAP, "moe.parts=2"]
    cfg = resolve(load_config([*test_launch_order.MODEL, *overrides]), 2)

    def rank_program(rank: int, entries: list) -> None:
        def marked(block: MoEBlock, x: torch.Tensor, part, experts: Callable = MoEBlock.experts) -> torch.Tensor:
            number = 1 + part.experts.start // 2  # of the part
            entries.append(Compute(number))
            y = experts(block, x, part)
            y.register_hook(lambda grad: entries.append(Compute(-number)))
            return y

        with mock.patch.object(MoEBlock, "experts", marked):
            run(cfg, rank, entries, 1, ["step"], costs=False)

    steps = on_fake_ranks(rank_program, 2)[0][0]
    exchanges = [s for s in steps if isinstance(s, Op) and s.name == "all_to_all"]
    sparse_layers, microbatches = 7, 2
    travelling: list[Op] = []
    seen = {number: [] for number in (1, 2, -1, -2)}  # of a part, negative in the backward
    for s in steps:
        if isinstance(s, Op) and s.name == "all_to_all":
            travelling.append(s)
        elif isinstance(s, Wait) and s.op in travelling:
            travelling.remove(s.op)
        elif isinstance(s, Compute):
            seen[int(s.seconds)].append(len(travelling))
    each = sparse_layers * microbatches
    # the rows of the second part, the outputs of the first; of the backward the same, with the parts changed over
    assert seen == {1: [1] * each, 2: [1] * each, -1: [1] * each, -2: [1] * each}
    assert len(exchanges) == each * (1 + 4 * 2) and not travelling


# ------------------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "without ep": (["moe.overlap=true"], 1, ["moe.overlap=true", "mesh.ep=1", "remove it"]),
    "a dense model": (["recipe=llama_debug", "moe.overlap=true"], 1, ["moe.overlap=true", "llama has no experts"]),
    "more parts than experts": (
        ["mesh.dp=2", "mesh.ep=2", "moe.overlap=true", "moe.parts=5"], 2, ["parts=5", "8 / 2 = 4", "lower moe.parts"],
    ),
    "one part": (["mesh.dp=2", "mesh.ep=2", "moe.overlap=true", "moe.parts=1"], 2, ["moe.parts=1", "at least 2"]),
    "parts of nothing": (["mesh.dp=2", "mesh.ep=2", "moe.parts=3"], 2, ["moe.parts=3", "moe.overlap=true"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_overlap_is_refused(name):
    overrides, world, said = REFUSED[name]
    line = config_refusal(["recipe=moe_debug", *overrides], world)
    assert all(words in line for words in said), line
