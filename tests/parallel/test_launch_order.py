"""No program of ours deadlocks on NCCL: the launches and waits of every rank, in order, run in the simulator of NCCL's
rules (ndtrain/program/launch_order.py). The simulator finds the deadlocks of the order that pipelines had before."""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ndtrain import schedule as schedules
from ndtrain.config import Config, LocalShapes, load_config, resolve, world_from_env
from ndtrain.engine.train_step import Evaluation, TrainingStep
from ndtrain.mesh.flight_recorder import Entry
from ndtrain.mesh.mesh import Link, Mesh, MeshSpec
from ndtrain.model.transformer import BLOCKS
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.kernel_choice import Shape, choose_kernel
from ndtrain.program.launch_order import Compute, Op, Outcome, Step, Wait, check, simulate
from ndtrain.program.ops import Run
from ndtrain.schedule import NAMES, Action, build, forwards
from tests.lib.helpers import arguments, checkpoint_of, rank_main, rows, write_corpus
from tests.lib.launches import a_direction_each, journal, of_journal, on_fake_ranks, pipeline
from tests.lib.parity import FP64, SHAPE, assemble, make_batches, rank_run
from tests.lib.ranks import run_ranks

FULL = pytest.mark.full
SCHEDULES = [name for name in NAMES if name != "csv"]
CHUNKS = {"gpipe": (1, 2, 3, 4), "interleaved": (1, 2, 3, 4)}  # the others have a number of their own
MODEL = [
    *SHAPE, "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.hidden_size=32", "train.seq_len=16",
    "model.num_hidden_layers=8", "train.micro_batch=1",
]  # fmt: skip

# --------------------------------------------------------------------------------------------------------- every table


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Millions of small objects are made and dropped."""
    gc.disable()
    yield
    gc.enable()


def deadlocks(name: str, pp: int, counts: range, chunks: int | None = None, rows: Callable = lambda s: s) -> list[int]:
    """The numbers of microbatches with which the old order deadlocks."""
    tables = {m: rows(build(name, pp, m, chunks)) for m in counts}
    return [m for m, table in tables.items() if simulate(pipeline(table, a_direction_each)).stuck]


@pytest.mark.parametrize(
    ("name", "pp", "most", "expected"),
    [
        ("interleaved", 8, 35, [1, 2, 3, 4, 5, 6, 21, 22, 23, 31]),
        ("interleaved", 6, 20, [1, 2, 3, 4, 17]),
        ("interleaved", 4, 20, [1, 2]),
        ("gpipe", 8, 20, [1, 2, 3, 4, 5, 6]),
        ("1f1b", 8, 20, []),
        ("zb_h1", 8, 20, []),
        ("zb_v", 8, 20, []),
        ("dualpipe_v", 8, 20, []),
    ],
)
def test_the_old_order_deadlocks(name, pp, most, expected):
    """One communicator of all pipeline ranks for messages up, one for messages down."""
    assert deadlocks(name, pp, range(1, most + 1), chunks=CHUNKS.get(name, (None, None))[1]) == expected


@FULL
def test_the_old_order_deadlocks_up_to_64_microbatches(without_gc):
    assert deadlocks("interleaved", 8, range(1, 65)) == [1, 2, 3, 4, 5, 6, 21, 22, 23, 31]
    assert deadlocks("interleaved", 6, range(1, 65)) == [1, 2, 3, 4, 17]


@pytest.mark.parametrize("pp", [4, 6, 8])
@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_the_old_order_deadlocks_in_evaluation(name, pp):
    assert deadlocks(name, pp, range(1, 2 * pp), chunks=2, rows=forwards) == list(range(1, pp - 1))


def check_tables(pp: int, counts: Iterator[int] | range) -> int:
    """Checks training and evaluation of every schedule. Returns the number of tables."""
    placements = set()
    for name, m in product(SCHEDULES, counts):
        for chunks in CHUNKS.get(name, (None,)):
            schedule = build(name, pp, m, chunks)
            check(pipeline(schedule))
            if (schedule.rank_of, m) not in placements:
                check(pipeline(forwards(schedule)))
            placements.add((schedule.rank_of, m))
    return len(placements)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_current_order_does_not_deadlock(pp):
    check_tables(pp, range(1, pp + 1))


@FULL
@pytest.mark.parametrize("pp", range(2, 17))
def test_current_order_does_not_deadlock_in_any_table(pp, without_gc):
    assert check_tables(pp, range(1, 65)) == 5 * 64  # placements: a loop of 1 to 4 chunks, or a V


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seconds", [0, 0.1])
def test_messages_do_not_delay_each_other(name, seconds):
    """The step takes as long as in the schedule's own simulator, where messages do not delay each other."""
    for pp, m in ((4, 8), (8, 16)):
        schedule = build(name, pp, m)
        ideal = schedules.simulate(schedule, latency=seconds).makespan
        assert check(pipeline(schedule, seconds=seconds)).makespan == pytest.approx(ideal, rel=1e-12)


def test_the_old_order_made_zb_v_slower():
    lost = []
    for pp, m in ((4, 7), (4, 8), (4, 16), (8, 15), (8, 16), (8, 32)):
        schedule = build("zb_v", pp, m)
        ideal = schedules.simulate(schedule).makespan
        lost.append(simulate(pipeline(schedule, a_direction_each)).makespan / ideal - 1)
    assert min(lost) > 0.03 and 0.10 < max(lost) < 0.11, lost


# -------------------------------------------------------------------------------------------- the program of every rank

Programs = dict[int, dict[int, list[Step]]]


def program(
    overrides: list[str], world: int, steps: int = 2, parts: Sequence[str] = ("step", "evaluation"), **reading: Any
) -> Programs:
    """The launches and waits of every rank: its stages are built, and `steps` times it runs the `parts`."""
    cfg = resolve(load_config([*MODEL, *overrides]), world)
    return on_fake_ranks(lambda rank, entries: run(cfg, rank, entries, steps, parts), world, **reading)


def run(cfg: Config, rank: int, entries: list, steps: int, parts: Sequence[str], costs: bool = True) -> None:
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"), in_order=True)
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, evaluation = TrainingStep(cfg, mesh, stages), Evaluation(cfg, mesh, stages)
    if costs:
        with_costs(step, entries)
    for number in range(1, steps + 1):
        batches = make_batches(cfg, mesh, number, "none")
        if "step" in parts:
            step.run(number, batches).wait()
        if "evaluation" in parts:
            evaluation.run([batches])


def with_costs(step: TrainingStep, entries: list) -> None:
    """Enters the compute of blocks: 1 for a forward, 2 for a backward."""
    executor = step.executor
    run_pass = executor.run_pass

    def timed(run: Run, a: Action) -> None:
        if executor.layers[run.layer].kind in BLOCKS:
            entries.append(Compute(schedules.COST[run.kind]))
        run_pass(run, a)

    executor.run_pass = timed


def messages(steps: list[Step]) -> list[tuple[str, tuple[int, ...]]]:
    """Launches and waits of messages between stages, without the waits for sends (which are left out where done)."""
    ways = {"send": "sends", "receive": "receives"}
    out = []
    for step in steps:
        op = step.op if isinstance(step, Wait) else step
        if isinstance(op, Op) and not op.members and not (isinstance(step, Wait) and op.sends):
            out.append((f"{type(step).__name__} {ways.get(op.name, op.name)}", (*op.sends, *op.receives)))
    return out


@pytest.mark.parametrize("name", SCHEDULES)
def test_executor_sends_messages_in_simulated_order(name):
    """The executor sends the messages of `pipeline`, in the same order, in a step and in an evaluation."""
    ran = program([f"schedule={name}", "mesh.pp=4", "mesh.zero=1", "train.global_batch=5"], 4, steps=1)
    schedule = build(name, 4, 5)
    step, evaluation = pipeline(schedule), pipeline(forwards(schedule))
    for rank, threads in ran.items():
        assert messages(threads[0]) == messages(step[rank]) + messages(evaluation[rank])


def factors(n: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (n,)
        return
    for first in (size for size in range(1, n + 1) if n % size == 0):
        yield from ((first, *rest) for rest in factors(n // first, axes - 1))


CP = ([], ["cp.kind=ulysses"], ["cp.balance=striped"])
TP = ([], ["tp.overlap=true"], ["tp.sequence_parallel=false"], ["tp.sequence_parallel=false", "tp.overlap=true"])
RECOMPUTE = ([], ["recompute=full"], ["recompute=selective"], ["recompute=every"])
SAMPLED = (3,)


def meshes() -> Iterator:
    """All meshes of 4 and 8 ranks and some of 16. The other settings alternate."""
    sizes = [s for n in (4, 8) for s in factors(n, 5)]
    sizes += [s for i, s in enumerate(factors(16, 5)) if i % 3 == 0 and s[0] <= 8]
    for i, (pp, dp, fsdp, cp, tp) in enumerate(s for s in sizes if s[3] <= 8 and s[4] <= 4):
        cps = [*CP, ["cp.ulysses=2"]] if 2 < cp < 8 else CP[:: 2 if cp > 4 else 1]
        extra = [
            f"schedule={SCHEDULES[i % len(SCHEDULES)] if pp < 8 else 'interleaved'}", f"mesh.zero={1 + (i + 2) % 3}",
            *RECOMPUTE[i // 3 % 4], *["model.tie_word_embeddings=true"] * (i % 2), *["data.pack=true"] * (i // 2 % 2),
            *(TP[i % 4] if tp > 1 else []), *(cps[i % len(cps)] if cp > 1 else []),
            f"train.global_batch={dp * fsdp * (1 + i % 5)}", *["model.num_hidden_layers=16"] * (pp == 8),
        ]  # fmt: skip
        mesh = {"pp": pp, "dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp}
        name = "-".join([*(f"{a}{n}" for a, n in mesh.items() if n > 1), *(e.rpartition(".")[2] for e in extra)])
        yield pytest.param(mesh, extra, marks=[] if i in SAMPLED else [FULL], id=name)


@pytest.mark.parametrize(("mesh", "extra"), list(meshes()))
def test_programs_of_meshes_do_not_deadlock(mesh, extra):
    """Pipelines, gathers ahead and reductions, rings and Ulysses, tp with overlap, tied embeddings, in training and
    evaluation."""
    world = 1
    for size in mesh.values():
        world *= size
    programs = program([*(f"mesh.{axis}={size}" for axis, size in mesh.items()), *extra], world)
    check(programs)
    assert sum(isinstance(s, Op) for mine in programs.values() for steps in mine.values() for s in steps) > world


def shared_directions(mesh: Mesh, axis: str, pairs) -> dict[tuple[int, int], Link]:
    """As `Mesh.links` was before: two groups for all pairs."""
    up, down, here = mesh.group(axis), mesh.group(axis, lane="down"), mesh.coords[axis]
    return {(a, b): Link(up if a < b else down, a + b - here) for a, b in sorted(set(pairs)) if here in (a, b)}


@pytest.mark.parametrize("part", ["step", "evaluation"])
def test_the_old_order_deadlocks_in_the_whole_program(part):
    overrides = ["schedule=interleaved", "mesh.pp=4", "mesh.fsdp=2", "train.global_batch=4"]
    check(program(overrides, 8, parts=[part]))
    with mock.patch.object(Mesh, "links", shared_directions):
        stuck = simulate(program(overrides, 8, parts=[part])).stuck
    assert len(stuck) == 8 and all(" waits for receive (" in line for line in stuck)
    assert "F(microbatch 1, stage 0)) on pp down [0, 2, 4, 6]" in stuck[0]


# ----------------------------------------------------------------------------------- gathers and reductions of zero 3


def zero_3(cost: float, lane: str) -> Outcome:
    """fsdp of two ranks: a block's gather takes `cost`, its reduce-scatter in twice the precision 2 `cost`."""
    times = {"all_gather": cost, "reduce_scatter": 2 * cost}

    def seconds(entry: Entry) -> float:
        of_block = entry.record.channel.startswith("fsdp") and entry.record.nbytes > 20_000
        return of_block * times.get(entry.record.op, 0.0)

    with mock.patch("ndtrain.parallel.unit.REDUCTIONS", lane):
        overrides = ["mesh.fsdp=2", "mesh.zero=3", "train.global_batch=8"]
        return check(program(overrides, 2, steps=1, parts=["step"], seconds=seconds))


def test_a_second_communicator_hides_gathers_behind_the_backward():
    """A backward takes 2. On one communicator the next gather waits for the reduce-scatter before it."""
    blocks, microbatches, step = 8, 4, 8 * 4 * 3
    one, two = zero_3(0.5, ""), zero_3(0.5, "reductions")
    assert step < two.makespan <= one.makespan
    one, two = zero_3(0.9, ""), zero_3(0.9, "reductions")
    waits = one.makespan - two.makespan
    assert waits == pytest.approx(0.7 * (blocks - 2) * microbatches, rel=0.3), (one, two)
    print(f"makespan {one.makespan:.1f} on one communicator, {two.makespan:.1f} on two")


@pytest.mark.parametrize(
    ("mesh", "most"),
    [
        ({"fsdp": 2, "zero": 1}, None),
        ({"fsdp": 2, "zero": 2}, 2),  # each holds its unit's whole gradient
        ({"fsdp": 2, "dp": 2, "zero": 1}, 2),  # replicas sum its result
    ],
)
def test_reductions_in_place_are_waited_for_at_end(mesh, most):
    """Zero 1 on NCCL: the gradient stays whole anyway. (gloo's reductions receive into buffers of their own.) The
    others are waited for when the next one is launched."""
    overrides = ["mesh.pp=2", *(f"mesh.{k}={v}" for k, v in mesh.items()), "train.global_batch=4", "schedule=1f1b"]
    with mock.patch("ndtrain.engine.executor.reduces_in_place", lambda full: True):
        programs = program(overrides, 4 * mesh.get("dp", 1), steps=1, parts=["step"])
    check(programs)
    for threads in programs.values():
        running, peak, launched = 0, 0, 0
        for step in threads[0]:
            if isinstance(step, Op) and step.name == "reduce_scatter":
                running, launched = running + 1, launched + 1
            elif isinstance(step, Wait) and step.op.name == "reduce_scatter":
                running -= 1
            peak = max(peak, running)
        assert running == 0 and launched > 4 and peak == (most or launched)


# ------------------------------------------------------------------------------------------------------ real gloo ranks


def recorded(args: list[str]) -> list[Entry]:
    """On one rank: the journal of a whole run of the program, whose groups are those that NCCL gets."""
    in_order = partial(Mesh, in_order=True)
    with journal() as entries, mock.patch("ndtrain.engine.trainer.Mesh", in_order):
        assert rank_main(args) == 0
    return entries


def of_run(folder: Path, corpus: Path, ranks: int, *overrides: str) -> list[list[Entry]]:
    args = arguments(folder, corpus, "model.num_hidden_layers=8", "train.steps=4", "optim.warmup=1", *overrides)
    return run_ranks(recorded, ranks, args, timeout=240)


def ops_of(journals: list[list[Entry]]) -> set[str]:
    return {f"{e.record.channel.partition(' [')[0]} {e.record.op}" for j in journals for e in j if e.group}


BUDGET = ["recompute=budget", "recompute.budget=1GiB"]
SAVING = ["data=bin", "checkpoint.every=2", "checkpoint.async_save=true"]
TEXTS = ["data=text", "train.sample_every=4", "train.sample_tokens=2"]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(4, ["mesh.pp=2", "mesh.fsdp=2", "mesh.zero=3", "schedule=interleaved", *BUDGET], marks=FULL),
        pytest.param(4, ["mesh.pp=4", "schedule=gpipe", "model.tie_word_embeddings=true"], marks=FULL),
        pytest.param(4, ["mesh.pp=2", "mesh.tp=2", *TEXTS], marks=FULL),
        pytest.param(4, ["mesh.cp=4", "cp.ulysses=2", "data.pack=true", "data.eos_id=32"], marks=FULL),
        pytest.param(4, ["mesh.tp=2", "mesh.dp=2", "tp.overlap=true"], marks=FULL),
        pytest.param(8, ["mesh.pp=2", "mesh.tp=2", "mesh.cp=2", "schedule=zb_v", "tp.overlap=true"], marks=FULL),
        pytest.param(8, ["mesh.pp=4", "mesh.fsdp=2", "mesh.zero=3", "schedule=dualpipe_v"], marks=FULL),
        pytest.param(8, ["mesh.pp=2", "mesh.fsdp=2", "mesh.dp=2", "mesh.zero=2", "schedule=1f1b"], marks=FULL),
    ],
)  # fmt: skip
def test_recorded_runs_do_not_deadlock(ranks, overrides, tmp_path):
    """Whole runs of real ranks, with evaluations, texts and checkpoints in the background, from the first collective to
    the last."""
    corpus = write_corpus(tmp_path / "corpus.txt")
    np.frombuffer(corpus.read_bytes(), np.uint8).astype("<u2").tofile(tmp_path / "held.bin")
    held = [] if TEXTS[0] in overrides else ["train.eval_every=2", f"data.validation_path={tmp_path / 'held.bin'}"]
    source = corpus if TEXTS[0] in overrides else tmp_path / "held.bin"
    journals = of_run(tmp_path / "run", source, ranks, *SAVING, *held, *overrides)
    programs = {rank: of_journal(entries) for rank, entries in enumerate(journals)}
    check(programs)
    assert all(len(threads) > 1 for threads in programs.values()), "no background thread communicated"
    assert rows(tmp_path / "run")[-1]["step"] == 4 and checkpoint_of(tmp_path / "run", 4).exists()
    ops = ops_of(journals)
    for axis, expected in {"mesh.pp": "pp send", "mesh.cp=4": "cp shift", "cp.ulysses": "cp all_to_all"}.items():
        assert expected in ops or not any(o.startswith(axis) for o in overrides), ops


def rank_kernel(overrides: list[str]) -> list[Entry]:
    """On one rank: the journal of the choice of a kernel."""
    rank, _, world = world_from_env()
    cfg = resolve(load_config(overrides), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"), in_order=True)
    with journal() as entries:
        shape = Shape.of(cfg.model, LocalShapes.of(cfg), packed=False, dtype=torch.bfloat16)
        choose_kernel("auto", shape, mesh, measure=lambda name, shape, device: 1.0 + rank)
    return entries


def test_choosing_kernel_gathers_over_pp_without_deadlock():
    journals = run_ranks(rank_kernel, 2, [*MODEL, "mesh.pp=2", "train.global_batch=2"])
    check({rank: of_journal(entries) for rank, entries in enumerate(journals)})
    assert ops_of(journals) == {"pp all_gather"}


# ---------------------------------------------------------------------------------------------------- groups for pairs


def rank_paired(overrides: list[str]) -> tuple:
    """As `rank_run`, on the groups that NCCL gets."""
    with mock.patch("tests.lib.parity.Mesh", partial(Mesh, in_order=True)):
        return rank_run(overrides)


@FULL
@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.pp=4", "schedule=interleaved", "model.tie_word_embeddings=true"],
        ["mesh.pp=2", "mesh.fsdp=2", "mesh.zero=3", "schedule=zb_v"],
    ],
)
def test_pair_groups_train_bitwise_equal(overrides):
    """gloo with the groups of NCCL gives the same bits as with its own groups."""
    overrides = [*MODEL, *FP64, "train.global_batch=4", *overrides]
    own, paired = assemble(run_ranks(rank_run, 4, overrides)), assemble(run_ranks(rank_paired, 4, overrides))
    assert own.losses == paired.losses and own.norms == paired.norms
    for kind, name in ((kind, name) for kind, tensors in own.tensors.items() for name in tensors):
        assert torch.equal(own.tensors[kind][name], paired.tensors[kind][name]), f"{kind} of {name}"
