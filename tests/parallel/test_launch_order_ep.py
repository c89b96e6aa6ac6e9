"""No exchange with the experts of other ranks deadlocks on NCCL, as in `test_launch_order.py`."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from ndtrain.config import load_config, resolve
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.moe.block import MoEBlock
from ndtrain.parallel.build import build_stages
from ndtrain.program.launch_order import Compute, Op, Wait, check
from tests.lib.launches import on_fake_ranks
from tests.parallel.test_launch_order import FULL, MODEL, program, run

EXPERTS = [
    "model.model_type=qwen2_moe", "model.num_experts=8", "model.num_experts_per_tok=2", "model.mlp_only_layers=[1]",
    "model.moe_intermediate_size=20", "model.shared_expert_intermediate_size=24",
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (4, ["mesh.dp=2", "mesh.fsdp=2", "mesh.ep=2", "recompute=full", "train.global_batch=8"]),
        pytest.param(4, ["mesh.fsdp=4", "mesh.ep=4", "recompute=selective", "train.global_batch=8"], marks=FULL),
        pytest.param(
            8, ["mesh.pp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.ep=4", "schedule=zb_v", "train.global_batch=4"],
            marks=FULL,
        ),
        pytest.param(
            8, ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.ep=2", "layout.rules.expert_mlp=tp", "mesh.zero=3",
                "schedule=zb_h1", "train.global_batch=8"],
            marks=FULL,
        ),
        pytest.param(
            16, ["mesh.pp=2", "mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.ep=2", "mesh.zero=3",
                 "schedule=interleaved", "train.global_batch=8"],
            marks=FULL,
        ),
    ],
)  # fmt: skip
def test_programs_with_ep_do_not_deadlock(world, overrides):
    """Rows of experts go over a communicator of their own. (On these ranks, which run one after
    another, none arrive.)"""
    programs = program([*EXPERTS, *overrides], world)
    check(programs)
    steps = [s for threads in programs.values() for steps in threads.values() for s in steps if isinstance(s, Op)]
    assert {s.comm.partition(" [")[0] for s in steps if s.name == "all_to_all"} == {"ep exchange"}


SAME_GROUPS = {
    "a stage without experts": (
        4, [*EXPERTS, "mesh.pp=2", "mesh.fsdp=2", "mesh.ep=2", "model.mlp_only_layers=[0,1,2,3]"], "ep exchange"
    ),
    "a stage without layers": (
        8, [*EXPERTS, "mesh.pp=2", "mesh.tp=2", "mesh.fsdp=2", "mesh.ep=2", "schedule.split=[0,8]"], "tp"
    ),
    "tied embeddings": (4, ["mesh.pp=2", "mesh.tp=2", "model.tie_word_embeddings=true", "schedule.split=[0,8]"], "tp"),
    "fewer K/V heads than tp": (8, ["mesh.pp=2", "mesh.tp=4", "schedule.split=[0,8]"], "tp"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_GROUPS)
def test_every_rank_makes_the_same_groups(name):
    """The order is the same too, also on a stage without experts or without layers."""
    asked: dict[int, list] = {}
    world, overrides, among = SAME_GROUPS[name]
    cfg = resolve(load_config([*MODEL, *overrides, "train.global_batch=4"]), world)

    def noted(mesh: Mesh, name: str, blocks: list, make: Callable = Mesh._new_groups) -> Any:
        asked.setdefault(mesh.rank, []).append((name, blocks))
        return make(mesh, name, blocks)

    def build_rank(rank: int, entries: list) -> None:
        build_stages(cfg, Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"), in_order=True))

    with mock.patch.object(Mesh, "_new_groups", noted):
        on_fake_ranks(build_rank, world)
    assert all(asked[rank] == asked[0] for rank in range(world))
    assert among in [name for name, _ in asked[0]]


def test_the_shared_expert_is_computed_while_rows_travel():
    """In each microbatch, forward and backward, it runs between the launch of an exchange and its wait."""
    cfg = resolve(load_config([*MODEL, *EXPERTS, "mesh.dp=2", "mesh.ep=2", "train.global_batch=4"]), 2)

    def rank_program(rank: int, entries: list) -> None:
        def marked(block: MoEBlock, x: torch.Tensor, shared_expert: Callable = MoEBlock.shared_expert) -> torch.Tensor:
            entries.append(Compute(1))
            y = shared_expert(block, x)
            y.register_hook(lambda grad: entries.append(Compute(2)))
            return y

        with mock.patch.object(MoEBlock, "shared_expert", marked):
            run(cfg, rank, entries, 1, ["step"], costs=False)

    steps = on_fake_ranks(rank_program, 2)[0][0]
    exchanges = [s for s in steps if isinstance(s, Op) and s.name == "all_to_all"]
    places = {id(s.op): i for i, s in enumerate(steps) if isinstance(s, Wait)}
    during = [[s.seconds for s in steps[steps.index(x) : places[id(x)]] if isinstance(s, Compute)] for x in exchanges]
    sparse_layers, microbatches = 7, 2
    assert [computed for computed in during if computed].count([1]) == sparse_layers * microbatches
    assert [computed for computed in during if computed].count([2]) == sparse_layers * microbatches
