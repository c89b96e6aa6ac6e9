"""A checkpoint of any mesh resumed on any other: saving it again gives the same bytes, and the training is the same."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ndtrain import checkpoint
from ndtrain.checkpoint import State
from ndtrain.config.batch_sizes import BatchSizes
from ndtrain.config.store import folder_at
from ndtrain.data import Sequences, microbatches, rows_of
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.mesh.sharding import BATCH_AXES
from ndtrain.parallel.build import initialise
from tests.lib.helpers import tensor_bytes
from tests.lib.parity import FP64
from tests.lib.ranks import run_ranks
from tests.lib.stages import RankStages
from tests.parallel.test_parity_tp_cp import MODEL, TIED

AXES = ("mesh.pp=", "mesh.dp=", "mesh.fsdp=", "mesh.cp=", "mesh.tp=")
RUN = [
    *MODEL, *FP64, TIED, "model.num_hidden_layers=6", "train.micro_batch=2", "train.steps=8", "optim.warmup=1",
    "optim.ema=0.9",
]  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 1003, 16 * 50 + 1).astype(np.uint16)  # 50 sequences
SAVED = 2  # the step
ORDER = {"run.seed": 0, "train.global_batch": 16}
MESHES = {  # 110 ordered pairs
    "one": [], "fsdp2": ["mesh.fsdp=2", "mesh.zero=1"], "tp8": ["mesh.tp=8"],
    "cp2-tp2": ["mesh.cp=2", "mesh.tp=2", "mesh.zero=2"],
    "fsdp2-cp2-tp2": ["mesh.fsdp=2", "mesh.cp=2", "mesh.tp=2"],
    "dp2-fsdp2-cp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.zero=1"],
    "pp3-zb_v": ["mesh.pp=3", "schedule=zb_v", "mesh.zero=3"],
    "pp2-tp2-interleaved": ["mesh.pp=2", "mesh.tp=2", "schedule=interleaved"],
    "pp2-dp2-cp2": ["mesh.pp=2", "mesh.dp=2", "mesh.cp=2", "schedule=zb_h1"],
    "pp2-fsdp2-tp2": ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.zero=2"],
    "inner-fsdp-whole-vocabulary": [
        "mesh.order=[pp,tp,cp,dp,fsdp]", "mesh.fsdp=2", "mesh.tp=2", "layout.rules.vocab=null"
    ],
}  # fmt: skip
OPTIMIZERS = {
    "adamw": [],
    "muon": ["optim=muon", "optim.ns_dtype=fp64", "optim.normalize=neurons"],  # with state that only owners hold
}
SAMPLE = {"cp2-tp2": ("pp2-tp2-interleaved",)}  # fsdp and dp: tests/checkpoint/test_resume.py


def ranks_of(overrides: list[str]) -> int:
    return math.prod(int(o.partition("=")[2]) for o in overrides if o.startswith(AXES))


class Row(NamedTuple):
    """A rank's report of a step. `tokens`: sequence of the global batch -> digest of its tokens."""

    step: int
    loss: float
    norm: float
    lr: float
    tokens: dict[int, str]


class Training(RankStages):
    """One rank's stages, which train on `TOKENS`."""

    @classmethod
    def of(cls, overrides: list[str]) -> "Training":
        return cls.build([*RUN, *overrides])

    def steps(self, step: TrainingStep, after: State, number_of: int) -> list[Row]:
        """Some steps after a state. Only the state determines their data."""
        t, sharding, mesh, reported = self.cfg.train, SequenceSharding.of(self.cfg), self.mesh, []
        sequences = Sequences(
            TOKENS, t.seq_len, BatchSizes(after.order["train.global_batch"]), after.order["run.seed"], True
        )
        rows = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), t.global_batch)
        for number in range(after.step + 1, after.step + 1 + number_of):
            batches = microbatches(sequences, number - 1, rows, t.micro_batch, sharding, mesh.index("cp"))
            tokens = dict(zip(rows, map(digest, sequences.tokens(number - 1, rows)), strict=True))
            report = step.run(number, batches).wait()
            reported.append(Row(number, report.loss, report.grad_norm, report.lr, tokens))
        return reported


def digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def write(overrides: list[str], folder: str) -> list[Row]:
    """On one rank: the first steps, from the seed, and a checkpoint of the last."""
    run = Training.of(overrides)
    initialise(run.stages, run.cfg.run.seed)
    reported = run.steps(TrainingStep(run.cfg, run.mesh, run.stages), State(0, 0, ORDER), SAVED)
    state = State(SAVED, 123, ORDER, 0, {"at": [1, 2]})
    checkpoint.save(folder_at(folder), run.stages, run.mesh, run.cfg, state)
    return reported


def straight_on(optimizer: str) -> list[Row]:
    """In one process: all steps, as one microbatch."""
    run = Training.of(["train.micro_batch=16", *OPTIMIZERS[optimizer]])
    initialise(run.stages, run.cfg.run.seed)
    step = TrainingStep(run.cfg, run.mesh, run.stages)
    return run.steps(step, State(0, 0, ORDER), SAVED + 1)


def resume(overrides: list[str], sources: dict[str, Path], out: Path) -> dict[str, tuple[State, list[Row]]]:
    """On one rank: resumes from each source, saves it again into a folder of its name, and runs the next step."""
    run = Training.of(overrides)
    step, resumed = TrainingStep(run.cfg, run.mesh, run.stages), {}
    for name, path in sources.items():
        state = checkpoint.inspect(path, run.cfg.model)
        assert checkpoint.load(path, run.stages, run.mesh) == []
        checkpoint.save(out / name, run.stages, run.mesh, run.cfg, state)
        resumed[name] = state, run.steps(step, state, 1)
    return resumed


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoint of a mesh and an optimizer, made once."""
    made = {}

    def get(name: str, optimizer: str = "adamw") -> Path:
        if (name, optimizer) not in made:
            folder = tmp_path_factory.mktemp(name)
            run_ranks(write, ranks_of(MESHES[name]), [*MESHES[name], *OPTIMIZERS[optimizer]], str(folder))
            made[name, optimizer] = folder / f"step-{SAVED:08d}"
        return made[name, optimizer]

    return get


@pytest.fixture(scope="module")
def straight():
    """The rows of an optimizer's run on one process, made once."""
    made: dict[str, list[Row]] = {}

    def get(optimizer: str = "adamw") -> list[Row]:
        if optimizer not in made:
            (made[optimizer],) = run_ranks(straight_on, 1, optimizer)
        return made[optimizer]

    return get


def check(by_rank: Sequence[list[Row]], expected: list[Row]) -> None:
    """Compares each rank's rows with those of one process."""
    for step, want in enumerate(expected):
        rows = [rank[step] for rank in by_rank]
        assert {i: d for row in rows for i, d in row.tokens.items()} == want.tokens, f"other data at step {want.step}"
        for row in rows:
            assert (row.step, row.lr) == (want.step, want.lr)
            assert abs(row.loss - want.loss) <= 1e-10 * max(1, abs(want.loss)), f"step {want.step}: {row.loss!r}"
            assert abs(row.norm - want.norm) <= 1e-9 * want.norm, f"step {want.step}"


def cases():
    """(mesh, sources) of AdamW's checkpoints."""
    for mesh in MESHES:
        others = [m for m in MESHES if m != mesh]
        yield pytest.param(mesh, others, marks=pytest.mark.full, id=f"{mesh}-from-any-other")
    for mesh, sources in SAMPLE.items():
        yield pytest.param(mesh, sources, id="-".join((mesh, "from", *sources)))


@pytest.mark.full  # the default sample reads files of hosts: test_layout_host.py
@pytest.mark.parametrize("optimizer", [pytest.param("adamw", id=""), "muon"])
@pytest.mark.parametrize(("mesh", "sources"), list(cases()))
def test_resume_on_any_mesh_from_any_other_is_same_run(mesh, sources, optimizer, written, straight, tmp_path):
    """The processes of the ranks resume from all the sources, one after the other."""
    paths = {name: written(name, optimizer) for name in sources}
    words = [*MESHES[mesh], *OPTIMIZERS[optimizer]]
    by_rank = run_ranks(resume, ranks_of(words), words, paths, tmp_path, timeout=300)
    for name, path in paths.items():
        assert tensor_bytes(tmp_path / name / path.name) == tensor_bytes(path), f"from {name}"
        for state, _ in (rank[name] for rank in by_rank):
            assert state == State(SAVED, 123, ORDER, 0, {"at": [1, 2]})
        check([rank[name][1] for rank in by_rank], straight(optimizer)[SAVED:])
