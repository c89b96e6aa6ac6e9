"""The program of every pipeline rank launches what the real one launches."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from ndtrain.config import Config, load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.plan.__main__ import main
from ndtrain.plan.dry import dry_run
from ndtrain.plan.step import Traffic
from ndtrain.program import step as step_module
from ndtrain.program.launch_order import LaunchOrderError, Op, Step, Wait
from ndtrain.program.ops import Await, Collect, Gather, Receive, Reduce, Send, Sum
from ndtrain.program.step import RankPlan, StepProgram, prove_if_short
from tests.lib.launches import on_fake_ranks
from tests.lib.parity import make_batches

SHAPE = ["recipe=llama_debug", "train.global_batch=16", "train.micro_batch=2", "precision.compute=bf16"]
COUNTS = 8  # bytes of a rank's number of valid tokens, which is summed over all ranks with other tokens
WIDTH = {"compute": 2, "master": 4}

MESHES = {
    "mesh.pp=2 mesh.dp=2 mesh.fsdp=2 mesh.zero=2 schedule=zb_h1": 8,
}
MORE_MESHES = {
    "mesh.fsdp=2 mesh.tp=2 mesh.zero=1": 4,
    "mesh.pp=2 mesh.fsdp=2 mesh.zero=3 recompute=full": 4,
    "mesh.fsdp=2 mesh.tp=2 mesh.zero=2": 4,
    "mesh.fsdp=2 mesh.tp=2 mesh.zero=3 recompute=every model.num_hidden_layers=8": 4,
    "mesh.dp=2 mesh.tp=2 mesh.zero=1": 4,
    "mesh.pp=2 mesh.fsdp=2 mesh.cp=2 schedule=interleaved model.num_hidden_layers=8": 8,
    "mesh.pp=2 mesh.fsdp=2 schedule=zb_v mesh.zero=3 model.num_hidden_layers=8": 4,
    "mesh.pp=4 mesh.fsdp=2 schedule=dualpipe_v model.num_hidden_layers=8 model.tie_word_embeddings=true": 8,
}


@pytest.mark.parametrize(
    ("mesh", "ranks"), [*MESHES.items(), *(pytest.param(*c, marks=pytest.mark.full) for c in MORE_MESHES.items())]
)
def test_program_has_collectives_of_dry_run(mesh, ranks):
    cfg = resolve(load_config([*SHAPE, "train.compile=false", *mesh.split()]), ranks)
    program, spec = StepProgram.of(cfg), MeshSpec.of(cfg.mesh)
    for pp, own in enumerate(program.ranks):
        dry = dry_run(cfg, spec.rank(dict.fromkeys(spec.order, 0) | {"pp": pp}), "cuda")
        ops = [op for _, op in own.program]
        sharded = _wide(spec, next(iter(program.units.values())).axes.split("+"))
        gathers = [program.units[op.unit].numel for op in ops if isinstance(op, Gather)] if sharded else []
        reductions = [program.units[op.unit].numel for op in ops if isinstance(op, Reduce)] if sharded else []
        real = {(t.axis, t.op): t for t in dry.traffic}
        assert _of(real, sharded, "reduce_scatter") == (len(reductions), sum(reductions) * WIDTH["master"])
        assert _of(real, sharded, "all_gather") == (len(gathers), sum(gathers) * WIDTH["compute"])
        tokens = _wide(spec, ("dp", "fsdp", "cp"))
        sums = [op.units for op in ops if isinstance(op, Sum) and op.axes == tokens]
        summed = sum(program.units[u].numel // program.units[u].groups.shards for units in sums for u in units)
        assert _of(real, tokens, "all_reduce") == (1 + len(sums), COUNTS + summed * WIDTH["master"])
        assert _of(real, "pp", "send")[0] == sum(isinstance(op, Send) for op in ops)
        assert _of(real, "pp", "receive")[0] == sum(len(turn.posts) for turn in own.program.turns)


HOW = [
    "mesh.zero=1 schedule=interleaved",
    "mesh.fsdp=1 mesh.dp=2 model.vocab_size=30000 schedule=zb_v",
    "model=moe_debug moe.balance=hf mesh.zero=3 recompute=full",
]
MORE_HOW = [
    "mesh.zero=2 schedule=zb_h1",
    "mesh.fsdp=1 mesh.dp=2 model.tie_word_embeddings=true",
    "mesh.zero=3 schedule=1f1b recompute=full",
    "mesh.zero=3 schedule=zb_v",
    "model=moe_debug moe.balance=hf mesh.zero=2 schedule=interleaved",
]


@pytest.mark.parametrize("how", [*HOW, *(pytest.param(how, marks=pytest.mark.full) for how in MORE_HOW)])
def test_program_launches_and_waits_in_executor_order(how):
    """Gathers, reductions, sums over replicas, messages and the waits for them, on real stages whose collectives carry
    nothing. A balance loss over the whole batch has a forward before the step."""
    overrides = [*SHAPE, "model.num_hidden_layers=8", "mesh.pp=2", "mesh.fsdp=2", "precision.compute=fp32"]
    cfg = resolve(load_config([*overrides, "train.compile=false", *how.split()]), 4)
    ran, program = (
        on_fake_ranks(lambda rank, entries: _run_step(cfg, rank, entries), 4),
        StepProgram.of(cfg, device="cpu"),
    )
    for pp, own in enumerate(program.ranks):
        rank = 2 * pp  # its first one
        assert list(_as_ran(ran[rank][0])) == list(_as_planned(own))
        assert "wait for a message" in _as_planned(own), "a pipeline"


def _run_step(cfg: Config, rank: int, entries: list) -> None:
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    entries.clear()
    TrainingStep(cfg, mesh, stages).run(1, make_batches(cfg, mesh, 1, "none")).wait()


def _as_planned(own: RankPlan) -> Iterator[str]:
    names = {
        Gather: "gather", Await: "wait for a gather", Receive: "wait for a message", Send: "send", Reduce: "reduce",
        Collect: "wait for a reduction", Sum: "sum",
    }  # fmt: skip
    for turn in (*(own.look_ahead.turns if own.look_ahead else ()), *own.program.turns):
        yield from ("receive" for _ in turn.posts)
        yield from (names[type(op)] for op in turn.ops if type(op) in names)
    yield from (names[type(op)] for op in own.program.end if type(op) in names)


def _as_ran(steps: Iterable[Step]) -> Iterator[str]:
    """Without what is as small as a few counts, and without waits for messages that this rank sent."""
    launches = {"all_gather": "gather", "receive": "receive", "send": "send", "reduce_scatter": "reduce"}
    launches["all_reduce"] = "sum"
    waits = {"all_gather": "wait for a gather", "receive": "wait for a message"}
    waits["reduce_scatter"] = "wait for a reduction"
    for step in steps:
        op, names = (step.op, waits) if isinstance(step, Wait) else (step, launches)
        loads = isinstance(op, Op) and op.name == "all_reduce" and len(op.members) == 4  # of experts, over all ranks
        if isinstance(op, Op) and op.nbytes > 64 and op.name in names and not loads:
            yield names[op.name]


def _wide(spec: MeshSpec, axes: Iterable[str]) -> str:
    """The axes of more than one rank, as the dry run names their group."""
    return "+".join(a for a in spec.order if a in axes and spec.size(a) > 1)


def _of(real: dict[tuple[str, str], Traffic], axis: str, op: str) -> tuple[int, int]:
    """(number, bytes) of the real collectives."""
    traffic = real.get((axis, op))
    return (traffic.count, traffic.bytes) if traffic else (0, 0)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe_v"])
def test_a_stage_of_one_unit_has_one_reduction_at_a_time(schedule):
    """Stages have one layer each, whose only unit is reduced after one backward and then after the next."""
    how = [f"schedule={schedule}", "mesh.pp=4", "mesh.fsdp=2", "mesh.zero=2", "train.compile=false"]
    layers = 4 if schedule == "1f1b" else 8
    step = StepProgram.of(resolve(load_config([*SHAPE, f"model.num_hidden_layers={layers}", *how]), 8))
    step.prove()
    for own in step.ranks:
        ends = [type(op) for _, op in own.program if isinstance(op, Reduce | Collect) and op.unit == own.units[-1]]
        assert ends and ends == [Reduce, Collect] * (len(ends) // 2)


def test_prove_finds_deadlock_of_missing_send():
    cfg = resolve(load_config([*SHAPE, "mesh.pp=2", "schedule=1f1b", "train.compile=false"]), 2)
    step = StepProgram.of(cfg)
    step.prove()
    first, second = step.ranks
    turn = next(turn for turn in first.program.turns if any(isinstance(op, Send) for op in turn.ops))
    mute = turn._replace(ops=tuple(op for op in turn.ops if not isinstance(op, Send)))
    turns = tuple(mute if t is turn else t for t in first.program.turns)
    faulty = replace(step, ranks=[replace(first, program=replace(first.program, turns=turns)), second])
    with pytest.raises(LaunchOrderError, match=r"deadlock:\n  rank \d waits for receives"):
        faulty.prove()


@pytest.mark.parametrize("fault", [Gather, Reduce, Sum])
def test_order_comparison_finds_missing_launch(fault):
    """The comparison above would find it."""
    cfg = resolve(load_config([*SHAPE, "mesh.fsdp=2", "mesh.dp=2", "mesh.zero=3", "train.compile=false"]), 4)
    plan = StepProgram.of(cfg).ranks[0]
    whole = list(_as_planned(plan))
    op = next(op for _, op in plan.program if isinstance(op, fault))
    without = lambda ops: tuple(o for o in ops if o is not op)
    turns = tuple(turn._replace(ops=without(turn.ops)) for turn in plan.program.turns)
    program = replace(plan.program, turns=turns, end=without(plan.program.end))
    assert list(_as_planned(replace(plan, program=program))) != whole


def test_program_command_prints_every_op_once(tmp_path, capsys):
    run = ["recipe=llama_debug", "hardware=cpu", "mesh.pp=2", "mesh.fsdp=2", "mesh.zero=2", "rank=2"]
    assert main(["program", *run, f"json={tmp_path / 'program.json'}"]) == 0
    out, made = capsys.readouterr().out, json.loads((tmp_path / "program.json").read_text())
    assert out.startswith("rank 2 (pp=1 fsdp=0), 1f1b, 2 microbatches, zero=2")
    numbers = [int(line.split()[0]) for line in out.splitlines() if line.split() and line.split()[0].isdigit()]
    assert "checked under NCCL's rules for all 2 pipeline ranks: no deadlock" in out
    assert numbers == list(range(len(made))) and "gather   model.layers.1  (all-gather over fsdp" in out
    assert made[0] == {"action": None, "op": "CountTokens"} and made[-1] == {"action": None, "op": "Report"}
    assert made[1] == {"action": "F(microbatch 0, stage 1)", "op": "Gather", "unit": "model.layers.1"}
    assert main(["program", *run[:-1], "rank=4"]) == 2
    assert "rank=4: there are 4 ranks, 0 to 3" in capsys.readouterr().err


def test_program_command_prints_equal_actions_once(capsys):
    assert main(["program", "recipe=llama_debug", "hardware=cpu", "train.global_batch=64", "mesh.fsdp=2"]) == 0
    out = capsys.readouterr().out
    assert out.count("run      forward of model.layers.0") <= 3 and re.search(r", as F\(microbatch \d, stage 0\)", out)


def test_prove_if_short_finds_missing_send_before_training(monkeypatch):
    cfg = resolve(load_config([*SHAPE, "mesh.pp=2", "schedule=1f1b", "train.compile=false"]), 2)
    assert prove_if_short(cfg, "cpu")
    build = step_module.build_program

    def without_sends(*args):
        program = build(*args)
        mute = lambda turn: turn._replace(ops=tuple(op for op in turn.ops if not isinstance(op, Send)))
        return replace(program, turns=tuple(map(mute, program.turns)))

    monkeypatch.setattr(step_module, "build_program", without_sends)
    step_module._shared.cache_clear()
    with pytest.raises(LaunchOrderError, match="deadlock"):
        prove_if_short(cfg, "cpu")
    step_module._shared.cache_clear()


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.fsdp=2"],
        ["mesh.pp=2", "train.global_batch=4096"],
        ["mesh.pp=2", "recompute=budget", "recompute.budget=1GiB"],
    ],
)
def test_prove_if_short_leaves_out_long_steps_and_unknown_programs(overrides):
    cfg = resolve(load_config([*SHAPE, "train.micro_batch=1", "train.compile=false", *overrides]), 2)
    assert not prove_if_short(cfg, "cpu")
