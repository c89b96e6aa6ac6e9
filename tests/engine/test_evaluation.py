"""The validation loss: it covers exactly the whole split, is the same on every mesh, and does not change the
training."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ndtrain.config import AXES, Config, load_config, resolve, world_from_env
from ndtrain.data import microbatches, rows_of
from ndtrain.data.token_array import Packing
from ndtrain.data.validation import ValidationSet
from ndtrain.engine.train_step import Evaluation, TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.mesh.sharding import BATCH_AXES
from ndtrain.model import Transformer
from ndtrain.model.vocabulary import IGNORE
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.schedule import NAMES, build, forwards
from ndtrain.train import main
from tests.lib.helpers import arguments, rank_main, refusal, rows, tensor_bytes, write_corpus
from tests.lib.parity import EOS, FP64, make_batches
from tests.lib.ranks import run_ranks
from tests.parallel.test_parity_tp_cp import MODEL, PACKED, TIED

FULL = pytest.mark.full
RUN = [*MODEL, *FP64, "model.num_hidden_layers=4", "train.micro_batch=2"]
# name -> its overrides; 16 sequences a pass
MESHES = {
    "one": [], "fsdp2": ["mesh.fsdp=2"], "dp2-fsdp2-zero1": ["mesh.dp=2", "mesh.fsdp=2", "mesh.zero=1"],
    "tp2": ["mesh.tp=2"], "cp2": ["mesh.cp=2"], "pp2": ["mesh.pp=2"],
    "pp2-interleaved": ["mesh.pp=2", "schedule=interleaved"], "pp2-zb_v": ["mesh.pp=2", "schedule=zb_v"],
    "pp2-tp2": ["mesh.pp=2", "mesh.tp=2"], "fsdp2-cp2": ["mesh.fsdp=2", "mesh.cp=2"],
    "pp2-cp2-tp2": ["mesh.pp=2", "mesh.cp=2", "mesh.tp=2"], "full-recompute": ["mesh.fsdp=2", "recompute=full"],
    "compile": ["mesh.fsdp=2", "train.compile=true"],
}  # fmt: skip
SAMPLE = {("pp2-zb_v", True)}  # (name, packed and tied); the rest takes --full


def ranks_of(overrides: list[str]) -> int:
    sizes = dict(o.split("=") for o in overrides)
    return math.prod(int(sizes.get(f"mesh.{axis}", 1)) for axis in AXES)


def held_out(cfg: Config) -> tuple[np.ndarray, ...]:
    """Two splits whose lengths neither a sequence nor a pass divides."""
    draw = np.random.default_rng(5)
    arrays = [draw.integers(0, cfg.model.vocab_size, n).astype(np.uint16) for n in (37 * 16 + 6, 5 * 16 + 1)]
    for a in arrays:
        a[draw.random(a.size) < 0.1] = EOS
    return tuple(arrays)


def build_all(overrides: list[str]):
    rank, _, world = world_from_env()
    cfg = resolve(load_config([*RUN, *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    return cfg, mesh, stages


def evaluate(cfg: Config, mesh: Mesh, evaluation: Evaluation) -> float:
    t, packing = cfg.train, Packing(EOS) if cfg.data.pack else None
    held = ValidationSet(held_out(cfg), t.seq_len, t.global_batch)
    mine = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), t.global_batch)
    batches = lambda i: microbatches(held, i, mine, t.micro_batch, SequenceSharding.of(cfg), mesh.index("cp"), packing)
    return evaluation.run([held.readable(b) for b in batches(i)] for i in range(held.passes)).loss


def between_steps(overrides: list[str], evaluated: bool) -> tuple[list[float], list[float], bytes]:
    """On one rank: two steps with an evaluation before each. Returns the evaluations, the losses, this rank's weights
    and moments."""
    cfg, mesh, stages = build_all(overrides)
    step, evaluation = TrainingStep(cfg, mesh, stages), Evaluation(cfg, mesh, stages)
    evaluations, losses = [], []
    for number in (1, 2):
        if evaluated:
            evaluations.append(evaluate(cfg, mesh, evaluation))
        losses.append(step.run(number, make_batches(cfg, mesh, number, "uneven")).wait().loss)
    parts = [u.buffer(b) for u in stages.units.units.values() for b in ("master", "exp_avg", "exp_avg_sq")]
    return evaluations, losses, b"".join(p.numpy().tobytes() for p in parts)


@cache
def reference(*overrides: str) -> list[float]:
    (evaluations, _, _), = run_ranks(between_steps, 1, list(overrides), True)  # fmt: skip
    return evaluations


def cases():
    for name in MESHES:
        for other in (False, True):
            marks = [] if (name, other) in SAMPLE else [FULL]
            yield pytest.param(name, (PACKED, TIED) * other, marks=marks, id=f"{name}{'-packed-tied' * other}")


@pytest.mark.parametrize(("name", "variant"), list(cases()))
def test_evaluation_is_same_on_every_mesh_and_harmless(name, variant):
    overrides = [*MESHES[name], *variant]
    n = ranks_of(MESHES[name])
    results = run_ranks(between_steps, n, overrides, True)
    for evaluations, _, _ in results:
        assert evaluations == results[0][0], "ranks report different losses"
        assert evaluations == pytest.approx(reference(*variant), rel=1e-9)
    undisturbed = run_ranks(between_steps, n, overrides, False)
    assert [r[1:] for r in results] == [r[1:] for r in undisturbed], "an evaluation has changed the training"


def test_evaluation_loss_is_mean_over_all_tokens():
    cfg, mesh, stages = build_all([])
    loss = evaluate(cfg, mesh, Evaluation(cfg, mesh, stages))
    model = next(iter(stages.models.values()))
    assert isinstance(model, Transformer)
    total, count, length = 0.0, 0, cfg.train.seq_len
    for array in held_out(cfg):
        tokens = torch.from_numpy(array.astype(np.int64))
        for start in range(0, len(tokens) - 1, length):
            piece = tokens[start : start + length + 1]
            logits = model.logits(piece[None, :-1])[0]
            total += cross_entropy(logits, piece[1:], reduction="sum").item()
            count += len(piece) - 1
    assert count == sum(len(a) - 1 for a in held_out(cfg))
    assert loss == pytest.approx(total / count, rel=1e-12)


def test_validation_set_pads_last_rows_and_passes():
    arrays = (np.arange(11, dtype=np.uint16), np.arange(100, 104, dtype=np.uint16))
    held = ValidationSet(arrays, seq_len=4, global_batch=3)
    assert (held.count, held.passes) == (4, 2)
    assert held.tokens(0, range(3)).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, IGNORE, IGNORE]]
    assert held.tokens(1, [0]).tolist() == [[100, 101, 102, 103, IGNORE]]
    assert (held.tokens(1, [1, 2]) == IGNORE).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "csv"])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 2), (4, 7)])
def test_forwards_of_every_schedule_are_a_legal_order(name, pp, microbatches):
    table = forwards(build(name, pp, microbatches))
    done: set[tuple[int, int]] = set()
    left = [list(row) for row in table.table]
    while any(left):
        ready = [row for row in left if row and (row[0].stage == 0 or (row[0].microbatch, row[0].stage - 1) in done)]
        assert ready, f"every rank waits: {left}"
        for row in ready:
            a = row.pop(0)
            done.add((a.microbatch, a.stage))
    assert done == {(m, s) for m in range(microbatches) for s in range(table.stages)}


# ------------------------------------------------------------------------------------------------------- as a run does


def test_run_logs_evaluation_and_trains_as_without(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    held = write_corpus(tmp_path / "held.txt", words=500)
    plan = ["train.eval_every=4", "train.steps=6", "data=bin", "data.tokenizer=byte"]
    for path in (corpus, held):
        np.frombuffer(path.read_bytes(), np.uint8).astype("<u2").tofile(path.with_suffix(".bin"))
    plan += [f"data.path={corpus.with_suffix('.bin')}", f"data.validation_path={held.with_suffix('.bin')}"]
    assert main(arguments(tmp_path / "one", corpus, *plan)) == 0
    eval_losses = {r["step"]: r["eval_loss"] for r in rows(tmp_path / "one") if "eval_loss" in r}
    assert list(eval_losses) == [4, 6], "at every fourth step and at the end"
    assert run_ranks(rank_main, 2, arguments(tmp_path / "two", corpus, *plan, "mesh.pp=2")) == [0, 0]
    other = {r["step"]: r["eval_loss"] for r in rows(tmp_path / "two") if "eval_loss" in r}
    assert other == pytest.approx(eval_losses, rel=1e-5)
    assert main(arguments(tmp_path / "without", corpus, *plan, "train.eval_every=0")) == 0
    last = lambda name: tensor_bytes(tmp_path / name / "checkpoints" / "step-00000006")
    assert last("one") == last("without")


def test_eval_every_without_validation_split_is_refused(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.txt")
    said = refusal(capsys, arguments(tmp_path / "run", corpus, "train.eval_every=4", "data.validation=0"))
    assert said.startswith("train.eval_every=4: ") and "data.validation" in said
