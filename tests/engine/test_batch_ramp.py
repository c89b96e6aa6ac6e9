"""Batches that grow in stages (`train.batch_ramp`): sizes, order of the data, parity on meshes, resume and refusals."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from ndtrain.config import ConfigError, load_config, resolve
from ndtrain.config.batch_sizes import BatchSizes
from ndtrain.data import microbatches
from ndtrain.engine.callbacks import TRACED
from ndtrain.engine.train_step import TrainingStep
from ndtrain.engine.trainer import Trainer
from ndtrain.plan.predict import run_length
from ndtrain.schedule import build
from ndtrain.schedule import file as table
from tests.lib.helpers import arguments, checkpoint_of, config_refusal, given_process_group, rows, write_corpus
from tests.lib.parity import FP64, distance
from tests.lib.ranks import run_ranks

FULL = pytest.mark.full
SIZES = [4, 4, 4, 8, 8, 16, 16]  # of the steps of RAMP
RAMP = [
    *FP64, "train.batch_ramp=[[4,3],[8,2]]", "train.global_batch=16", "train.steps=7", "train.micro_batch=1",
    "checkpoint.every=0", "optim.lr=1e-2", "train.seq_len=32",
]  # fmt: skip
MOE = ["model=moe_debug", "moe.balance=hf"]  # each step begins with a forward of the whole batch
MESHES = {
    "pp2": ["mesh.pp=2"], "pp2-experts": ["mesh.pp=2", *MOE], "dp2-cp2": ["mesh.dp=2", "mesh.cp=2"],
    "fsdp2-tp2": ["mesh.fsdp=2", "mesh.tp=2"], "zb_h1": ["mesh.pp=2", "schedule=zb_h1"],
    "interleaved": ["mesh.pp=2", "schedule=interleaved", "schedule.chunks=2", "model.num_hidden_layers=4"],
    "fsdp4-bias": ["mesh.fsdp=4", "model=moe_debug", "moe.balance=bias"], "ep2": ["mesh.fsdp=2", "mesh.ep=2", *MOE],
}  # fmt: skip
RANKS = {"dp2-cp2": 4, "fsdp2-tp2": 4, "fsdp4-bias": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


def trained(args: list[str]) -> list[tuple[int, ...]]:
    """`Trainer.train` on one rank, in the process group that `run_ranks` made. Returns per step the number of its
    microbatches here, and that of its executor and of the forward before it."""
    seen, run = [], TrainingStep.forward_backward

    def recorded(self, number, batches, *rest):
        loss = run(self, number, batches, *rest)
        executors = [e for e in (self.executor, self.look_ahead) if e]
        seen.append((len(batches), *(e.pipeline.schedule.microbatches for e in executors)))
        return loss

    with pytest.MonkeyPatch.context() as patch, given_process_group():
        patch.setattr(TrainingStep, "forward_backward", recorded)
        trainer = Trainer(load_config(args))
        assert trainer.train() == 0
        trainer.close()
    return seen


def assert_same(folder: Path, other: Path, step: int) -> None:
    """Two runs have the same losses, numbers of experts and tokens, and the same weights and moments."""
    for a, b in zip(rows(folder), rows(other), strict=True):
        assert a["tokens"] == b["tokens"]
        assert all(abs(a[k] - b[k]) < 1e-10 for k in a if k in ("loss", "grad_norm") or k.startswith("moe/"))
    for path in checkpoint_of(other, step).glob("*.safetensors"):
        ours, theirs = load_file(checkpoint_of(folder, step) / path.name), load_file(path)
        assert all(distance(ours[name], theirs[name]) < 1e-10 for name in theirs)


@FULL
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_equals_one_process(tmp_path, corpus, name):
    mesh, ranks = MESHES[name], RANKS.get(name, 2)
    model = [word for word in mesh if word.startswith(("model", "moe."))]
    run_ranks(trained, 1, [*arguments(tmp_path / "one", corpus), *RAMP, *model])
    (seen, *_) = run_ranks(trained, ranks, [*arguments(tmp_path / "mesh", corpus), *RAMP, *mesh])
    replicas = {"dp2-cp2": 2, "fsdp2-tp2": 2, "fsdp4-bias": 4, "ep2": 2}.get(name, 1)
    assert [set(counts) for counts in seen] == [{size // replicas} for size in SIZES]
    found = rows(tmp_path / "mesh")
    assert [row["tokens"] for row in found] == (32 * np.cumsum(SIZES)).tolist()
    assert [round(row["tokens_per_s"] * row["step_time_s"]) for row in found] == [32 * size for size in SIZES]
    assert_same(tmp_path / "mesh", tmp_path / "one", 7)


def constant_batches(args: list[str]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the same steps on one process, each by a `TrainingStep` whose batch never grows. It gets
    the next sequences of a run with one sequence per step."""
    with given_process_group():
        trainer = Trainer(load_config(args))
        cfg, mesh, stages, done, reports = trainer.cfg, trainer.mesh, trainer.stages, 0, []
        source = trainer.data.sequences(cfg.with_batch(1), mesh, 0, None)
        for number, size in enumerate(SIZES, 1):
            batches = [microbatches(source, k, [0], 1)[0] for k in range(done, done + size)]
            reports.append(TrainingStep(cfg.with_batch(size), mesh, stages).run(number, batches).wait())
            done += size
        trainer.close()
    return [(r.loss, r.grad_norm) for r in reports]


@pytest.mark.parametrize("model", [[], MOE], ids=["dense", "experts"])
def test_each_step_equals_a_step_of_constant_batches(tmp_path, corpus, model):
    run_ranks(trained, 1, [*arguments(tmp_path / "ramp", corpus), *RAMP, *model])
    (expected,) = run_ranks(constant_batches, 1, [*arguments(tmp_path / "plain", corpus), *RAMP, *model])
    found = [(row["loss"], row["grad_norm"]) for row in rows(tmp_path / "ramp")]
    assert np.allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("stop", [2, pytest.param(4, marks=FULL)])
def test_resume_within_the_ramp_on_another_mesh(tmp_path, corpus, stop):
    run_ranks(trained, 1, [*arguments(tmp_path / "one", corpus), *RAMP])
    first = [*arguments(tmp_path / "two", corpus), *RAMP, "mesh.fsdp=2", f"train.stop_at={stop}"]
    run_ranks(trained, 2, first)
    run_ranks(trained, 2, [*arguments(tmp_path / "two", corpus), *RAMP, "mesh.pp=2", "resume=auto"])
    assert_same(tmp_path / "two", tmp_path / "one", 7)


# ---------------------------------------------------------------------------------------------------------- the sizes


def test_sizes_equal_those_of_a_list():
    draw = random.Random(0)
    for _ in range(200):
        ramp = tuple((draw.randint(1, 9), draw.randint(1, 5)) for _ in range(draw.randint(0, 4)))
        sizes = BatchSizes(draw.randint(1, 9), ramp)
        steps = [size for size, count in ramp for _ in range(count)] + [sizes.last] * 30
        assert [sizes.at(step) for step in range(len(steps))] == steps
        assert [sizes.before(step) for step in range(len(steps))] == [sum(steps[:step]) for step in range(len(steps))]
        for sequences in (0.3, 1, 7, 19.5, sum(steps[:-30]) + 3):
            needed = next(n for n in range(1, len(steps)) if sum(steps[:n]) >= sequences)
            assert sizes.steps_for(sequences) == needed


@pytest.mark.parametrize(
    ("epochs", "sequences", "batch", "steps"),
    [(2, 10, 4, 5), (1, 10, 4, 3), (0.1, 30, 1, 3), (0.01, 10, 4, 1), (3, 7, 7, 3), (2.5, 4, 5, 2)],
)
def test_steps_of_epochs_are_rounded_up(epochs, sequences, batch, steps):
    assert BatchSizes(batch).steps_for(epochs * sequences) == steps


def test_run_length_counts_the_tokens_of_the_ramp():
    cfg = load_config(["recipe=llama_debug", *RAMP])
    length = run_length(cfg, 1.0, 1)
    assert length.tokens == 32 * sum(SIZES) and length.days * 86400 == pytest.approx(sum(SIZES) / 16)


# ------------------------------------------------------------------------------------------------------------ refusals

BAD = {
    "not a pair": (["train.batch_ramp=[4,3]"], "train.batch_ramp: its elements are lists, which need brackets"),
    "three numbers": (["train.batch_ramp=[[4,3,1]]"], "each stage must be [sequences per step, number of steps]"),
    "no steps": (["train.batch_ramp=[[4,0]]"], "each stage must be"),
    "a smaller batch": (["train.batch_ramp=[[8,2],[4,2]]"], "batches must grow from stage to stage"),
    "not below the last": (["train.batch_ramp=[[16,2]]"], "up to less than train.global_batch=16"),
    "not divisible": (["train.batch_ramp=[[3,2]]", "mesh.dp=2"], "a batch of 3 in train.batch_ramp must be a multiple"),
    "islands": (["train.batch_ramp=[[4,2]]", "islands.count=2"], "train.batch_ramp: islands divide batches of one"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_ramp_is_refused(case):
    words, message = BAD[case]
    world = 2 ** " ".join(words).count("mesh.")
    text = config_refusal(["recipe=llama_debug", "train.global_batch=16", "train.micro_batch=1", *words], world)
    assert message in text and "\n" not in text


def test_ramp_longer_than_the_run_is_noted():
    cfg = resolve(load_config(["recipe=llama_debug", *RAMP, "train.steps=5", "optim.warmup=1"]), 1)
    assert any("train.batch_ramp lasts 5 steps, and train.steps=5" in note for note in cfg.notes)


def test_schedule_file_fits_only_one_batch(tmp_path):
    table.write(build("gpipe", 2, 16).table, path := tmp_path / "table.csv")
    words = [f"schedule.path={path}", "schedule=csv", "mesh.pp=2", "train.micro_batch=1", "train.global_batch=16"]
    resolve(load_config(["recipe=llama_debug", *words]), 2)
    text = config_refusal(["recipe=llama_debug", *words, "train.batch_ramp=[[4,1]]"], 2)
    assert "has 16 microbatches, but the configuration has 4" in text


def test_trace_of_the_first_step_of_a_stage_has_its_microbatches(tmp_path, corpus):
    ramp = f"train.batch_ramp=[[4,{TRACED - 1}],[8,9]]"
    words = ["train.trace=true", "mesh.pp=2", ramp, f"train.stop_at={TRACED}"]
    run_ranks(trained, 2, [*arguments(tmp_path / "run", corpus), *RAMP, *words])
    events = json.loads((tmp_path / "run" / "trace" / f"step-{TRACED:08d}.json").read_text())["traceEvents"]
    assert len({e["name"] for e in events if e["name"].startswith("F")}) == 2 * 8


def test_list_without_inner_brackets_in_a_file_names_file_and_key(tmp_path):
    (tmp_path / "recipe").mkdir()
    path = tmp_path / "recipe" / "own.yaml"
    path.write_text("# @package _global_\ntrain:\n  batch_ramp: [4, 3]\n")
    with pytest.raises(ConfigError, match=f"^{path}: train.batch_ramp: its elements are lists, which need brackets"):
        load_config(["recipe=own"], search=[str(tmp_path)])
