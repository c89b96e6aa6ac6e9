"""Steps with a non-finite loss or gradient: all ranks skip them and count them, and too many in a row end the run.
Also the average of the weights."""

import io
from contextlib import redirect_stderr
from unittest import mock

import pytest
import torch

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.engine.executor import Executor
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.train import main
from tests.lib.helpers import arguments, checkpoint_of, rank_main, rows, tensor_bytes, write_corpus
from tests.lib.parity import FP64, make_batches
from tests.lib.ranks import run_ranks
from tests.parallel.test_parity_tp_cp import MODEL

KINDS = ("master", "exp_avg", "exp_avg_sq", "ema")
RUN = [*MODEL, "train.global_batch=8", "train.micro_batch=2", "optim.schedule=constant", "optim.ema=0.75"]
MESHES = {
    "one": [], "dp2": ["mesh.dp=2"], "fsdp2": ["mesh.fsdp=2"], "pp2": ["mesh.pp=2"],
    "cp2-tp2": ["mesh.cp=2", "mesh.tp=2"], "zero2": ["mesh.fsdp=2", "mesh.zero=2"],
    "no-clip": ["mesh.fsdp=2", "optim.clip=null"],
}  # fmt: skip
RANKS = {"one": 1, "cp2-tp2": 4}
SAMPLE = {("pp2", "gradient", "fp32"), ("zero2", "gradient", "fp64"), ("dp2", "loss", "fp32")}  # the rest takes --full


def spoil(step: TrainingStep, kind: str, number: list[int], bad: tuple[int, ...]) -> None:
    """The last rank's loss becomes infinite, or an element of its gradient not a number, in the steps `bad`."""
    rank, _, world = world_from_env()
    if rank != world - 1:
        return
    if kind == "loss":
        run = step.executor.run
        step.executor.run = lambda *args: run(*args) + (float("inf") if number[0] in bad else 0.0)
        return
    units: ShardedUnits = step.executor.units
    close = units.close

    def spoiled(name: str) -> None:
        close(name)
        if number[0] in bad:
            units.units[name].full_grad[0] = float("nan")

    units.close = spoiled


def steps(overrides: list[str], plan: list[tuple[int, int]], kind: str, bad: tuple[int, ...]):
    """On one rank: a step for each (number, batch) of `plan`. Returns whether it was skipped, and the state after
    it."""
    rank, _, world = world_from_env()
    cfg = resolve(load_config([*RUN, *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, now = TrainingStep(cfg, mesh, stages), [0]
    spoil(step, kind, now, bad)
    skipped, states = [], [state(stages)]
    for now[0], batch in plan:
        skipped.append(step.run(now[0], make_batches(cfg, mesh, batch, "uneven")).wait().skipped)
        states.append(state(stages))
    return skipped, states


def state(stages) -> bytes:
    parts = [u.buffer(kind) for u in stages.units.units.values() for kind in KINDS]
    return b"".join(p.numpy().tobytes() for p in parts)


def cases():
    for mesh in MESHES:
        for kind in ("loss", "gradient"):
            for name, precision in (("fp32", []), ("fp64", FP64)):
                marks = [] if (mesh, kind, name) in SAMPLE else [pytest.mark.full]
                yield pytest.param(mesh, kind, precision, marks=marks, id=f"{mesh}-{kind}-{name}")


@pytest.mark.parametrize(("mesh", "kind", "precision"), list(cases()))
def test_non_finite_step_is_skipped_on_every_rank(mesh, kind, precision):
    n, overrides = RANKS.get(mesh, 2), [*MESHES[mesh], *precision]
    results = run_ranks(steps, n, overrides, [(1, 1), (2, 2), (3, 3), (4, 4)], kind, (2, 3))
    without = run_ranks(steps, n, overrides, [(1, 1), (2, 4)], kind, ())
    for (skipped, states), (_, expected) in zip(results, without, strict=True):
        assert skipped == [False, True, True, False]
        assert states[1] == states[2] == states[3]
        assert states[1] == expected[1] and states[4] == expected[2], (
            "the step after is not as if none had been skipped"
        )
        assert states[4] != states[3] and states[1] != states[0]


def test_ema_ignores_skipped_steps():
    cfg = resolve(load_config([*RUN, *FP64]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, units = TrainingStep(cfg, mesh, stages), list(stages.units.units.values())
    expected = [u.master.clone() for u in units]
    for number in (1, 2, 3):
        step.run(number, make_batches(cfg, mesh, number, "none")).wait()
        expected = [0.75 * e + 0.25 * u.master for e, u in zip(expected, units, strict=True)]
    for unit, want in zip(units, expected, strict=True):
        torch.testing.assert_close(unit.ema, want, rtol=1e-13, atol=1e-15)


# ------------------------------------------------------------------------------------------------------- as a run does


class Spoiled:
    """`Executor.run`, whose loss is not a number from its `first` call to its `last`."""

    def __init__(self, first: int, last: int):
        self.run, self.first, self.last, self.calls = Executor.run, first, last, 0

    def __call__(self, executor: Executor, *args):
        self.calls += 1
        loss = self.run(executor, *args)
        return loss * float("nan") if self.first <= self.calls <= self.last else loss

    def patch(self):
        return mock.patch.object(Executor, "run", lambda executor, *args: self(executor, *args))


def spoiled_main(args: list[str], first: int, last: int) -> tuple[int, str]:
    """On one rank: the exit status, and what it wrote to stderr."""
    said = io.StringIO()
    with Spoiled(first, last).patch(), redirect_stderr(said):
        return rank_main(args), said.getvalue()


def test_run_continues_and_counts_skipped_steps(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.txt")
    with Spoiled(3, 4).patch():
        assert main(arguments(tmp_path / "run", corpus, "train.max_skipped=3")) == 0
    records = rows(tmp_path / "run")
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 2, *[2] * 6]
    assert [r["loss"] is None for r in records] == [False, False, True, True, *[False] * 6]
    said = "".join(capsys.readouterr())
    assert "warning: step 3 skipped: loss nan" in said and "warning: step 4 skipped" in said
    more = arguments(tmp_path / "run", corpus, "train.steps=12", "resume=auto")
    assert main(more) == 0
    records = rows(tmp_path / "run")
    assert [r["skipped_steps"] for r in records][-2:] == [2, 2], "a resumed run goes on counting"
    marked = {r["step"]: r["resumed_step"] for r in records if "resumed_step" in r}
    assert marked == {11: 10}, "only the first row after a resume says so"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_max_skipped_in_a_row_ends_run(ranks, tmp_path, corpus_of_words):
    plan = ["train.max_skipped=3", "checkpoint.every=3", "checkpoint.keep=9", "resume=auto"]
    args = arguments(tmp_path / "run", corpus_of_words, *plan, *["mesh.dp=2"] * (ranks - 1))
    results = run_ranks(spoiled_main, ranks, args, 4, 9)
    assert [code for code, _ in results] == [1] * ranks
    (line,) = [x for _, said in results for x in said.splitlines() if x.startswith("error: ")]
    assert "3 steps in a row were skipped (train.max_skipped)" in line and "sequence" in line
    assert [r["step"] for r in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    good, stopped = (tensor_bytes(checkpoint_of(tmp_path / "run", s)) for s in (3, 6))
    assert good == stopped


@pytest.fixture
def corpus_of_words(tmp_path):
    return write_corpus(tmp_path / "corpus.txt")
