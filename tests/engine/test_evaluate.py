"""`ndtrain evaluate`: on every mesh, the loss that the training itself reported."""

import numpy as np
import pytest

from ndtrain.checkpoint.__main__ import main as checkpoint
from ndtrain.config import ConfigError
from ndtrain.engine.evaluate import evaluate
from ndtrain.engine.saved_configuration import configuration
from ndtrain.evaluate import main
from ndtrain.train import main as train
from tests.lib.helpers import arguments, checkpoint_of, given_process_group, rank_main, rows, write_corpus
from tests.lib.parity import FP64
from tests.lib.ranks import run_ranks

MESHES = {
    "fsdp2": (2, []), "tp2": (2, ["mesh.tp=2"]), "pp2-cp2": (4, ["mesh.pp=2", "mesh.cp=2"]),
    "pp2-gpipe": (2, ["mesh.pp=2", "schedule=gpipe"]), "dp2-tp2": (4, ["mesh.dp=2", "mesh.tp=2"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in fp64 on token files, which evaluates after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    for name, words in (("corpus", 3000), ("held", 700)):
        text = write_corpus(folder / f"{name}.txt", words)
        np.frombuffer(text.read_bytes(), np.uint8).astype("<u2").tofile(text.with_suffix(".bin"))
    plan = ["data=bin", "data.tokenizer=byte", f"data.path={folder / 'corpus.bin'}", "train.steps=4",
            f"data.validation_path={folder / 'held.bin'}", "train.eval_every=2", "checkpoint.every=2", *FP64,
            "optim.lr=1e-2"]  # fmt: skip
    assert train(arguments(folder / "run", folder / "corpus.txt", *plan)) == 0
    return folder / "run"


def losses(run) -> dict[int, float]:
    return {r["step"]: r["eval_loss"] for r in rows(run) if "eval_loss" in r}


def on_rank(path, overrides: list[str]) -> float:
    with given_process_group():
        return evaluate(path, overrides).loss


def test_evaluate_equals_loss_logged_in_training(run, capsys):
    want = losses(run)
    assert list(want) == [2, 4] and want[2] != pytest.approx(want[4], rel=1e-4)
    for step in want:
        assert evaluate(checkpoint_of(run, step)).loss == pytest.approx(want[step], abs=1e-9)
    assert evaluate(run, ["train.seq_len=32"]).loss != pytest.approx(want[4], abs=1e-6), "another length counts"
    assert main([str(run), "train.micro_batch=1"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed[0] == "eval_loss" and float(printed[1]) == pytest.approx(want[4], abs=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_evaluate_gives_same_loss_on_every_mesh(run, name):
    ranks, overrides = MESHES[name]
    for step, want in losses(run).items():
        for got in run_ranks(on_rank, ranks, checkpoint_of(run, step), overrides):
            assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.full
def test_evaluate_of_run_on_mesh_equals_its_logged_loss(run, tmp_path):
    """One process evaluates runs trained on two different meshes."""
    corpus = run.parent / "corpus.txt"
    plan = ["data=bin", "data.tokenizer=byte", f"data.path={run.parent / 'corpus.bin'}", "train.steps=3", *FP64,
            f"data.validation_path={run.parent / 'held.bin'}", "train.eval_every=3", "optim.lr=1e-2"]  # fmt: skip
    for mesh in ("mesh.tp=2", "mesh.pp=2"):
        folder = tmp_path / mesh[5:7]
        assert run_ranks(rank_main, 2, arguments(folder, corpus, *plan, mesh)) == [0, 0]
        assert evaluate(folder).loss == pytest.approx(losses(folder)[3], abs=1e-9)


@pytest.mark.full
def test_evaluate_on_other_data_uses_tokenizer_of_checkpoint(tmp_path, capsys):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(30):
        write_corpus(folder / f"{i}.txt", 200 + i)
    other = write_corpus(tmp_path / "other.txt", 500)
    plan = ["train.steps=3", "data.tokenizer=bpe", "model.vocab_size=300"]
    assert train(arguments(tmp_path / "run", folder, *plan)) == 0
    step = checkpoint_of(tmp_path / "run", 3)
    cfg = configuration(step, ["data=text", f"data.path={other}"], 1)
    assert cfg.data.tokenizer == str(step) and cfg.model.vocab_size == 300 == cfg.data.vocab_size
    assert configuration(step, [], 1).data.tokenizer == "bpe"
    capsys.readouterr()
    assert main([str(step), "data=text", f"data.path={other}", "split=all"]) == 0
    assert f"{len(other.read_text()):,} tokens" not in capsys.readouterr().out, "a bpe has fewer tokens than bytes"
    assert main([str(step), "data=text", f"data.path={other}"]) == 2
    assert "give split=all" in capsys.readouterr().err
    out = tmp_path / "cast"
    assert checkpoint(["cast", str(step), "dtype=fp32", f"out={out}"]) == 0
    ours = [f"data.path={other}", "data=text"]
    want = evaluate(step, ours, everything=True).loss
    length = f"train.seq_len={configuration(step, [], 1).train.seq_len}"
    assert evaluate(out, [*ours, length], everything=True).loss == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["model.vocab_size=3"], "model.vocab_size: the model comes from the checkpoint"),
        (["optim.lr=1"], "optim.lr: not used by an evaluation"),
        (["dat.path=x"], "did you mean 'data'?"),
        (["mesh.tp=3"], "mesh"),
        (["split=some"], "some: no such split"),
    ],
)
def test_bad_argument_is_one_line_error(run, capsys, words, line):
    capsys.readouterr()
    assert main([str(run), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and line in err and err.count("\n") == 1


def test_folder_without_usable_checkpoint_is_refused(run, tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        evaluate(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not name its training data: give data="):
        evaluate(tmp_path)
