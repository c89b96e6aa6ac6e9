"""Checkpoints with one file per host: resumed on any mesh, merged into the shared layout, and refused if damaged."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ndtrain.checkpoint import CheckpointError, layouts
from ndtrain.checkpoint.merging import merge
from ndtrain.checkpoint.pieces import COLUMNS, host_file, index_file, open_tensors, write_index
from ndtrain.checkpoint.safetensors_io import DamagedFile
from ndtrain.checkpoint.verifying import verify
from ndtrain.config import world_from_env
from ndtrain.engine.generate import load_model
from ndtrain.mesh.row_map import Rows
from ndtrain.train import main as train
from tests.checkpoint import test_checkpoint_matrix as matrix
from tests.checkpoint.test_checkpoint_matrix import MESHES, SAVED, ranks_of, straight  # noqa: F401 (a fixture)
from tests.checkpoint.test_commands import said
from tests.lib.helpers import arguments, checkpoint_of, flip, rows, tensor_bytes, write_corpus
from tests.lib.ranks import run_ranks

STEP = f"step-{SAVED:08d}"
RANKS_OF_A_HOST = 2
HOST = "checkpoint.layout=host"
OPTIONS = ["checkpoint.every=2", "optim.ema=0.5", "optim.state_dtype=bf16", HOST]


def on_hosts(work: Callable, *args):
    """On one rank: `work`, as if two neighbouring ranks were one host."""
    rank = world_from_env()[0]
    with mock.patch.object(layouts, "first_rank_of_host", lambda: rank - rank % RANKS_OF_A_HOST):
        return work(*args)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str, str], Path]:
    """The checkpoint of a mesh in a layout, made once."""
    made = {}

    def get(name: str, layout: str) -> Path:
        if (name, layout) not in made:
            folder, overrides = tmp_path_factory.mktemp(name), [*MESHES[name], f"checkpoint.layout={layout}"]
            run_ranks(on_hosts, ranks_of(overrides), matrix.write, overrides, str(folder))
            made[name, layout] = folder / STEP
        return made[name, layout]

    return get


@pytest.mark.parametrize(("mesh", "sources"), list(matrix.cases()))
def test_resume_of_host_files_on_any_mesh_is_same_run(mesh, sources, written, straight, tmp_path):  # noqa: F811
    paths = {name: written(name, "host") for name in sources}
    ranks = ranks_of(MESHES[mesh])
    by_rank = run_ranks(on_hosts, ranks, matrix.resume, MESHES[mesh], paths, tmp_path, timeout=300)
    for name in sources:
        assert tensor_bytes(tmp_path / name / STEP) == tensor_bytes(written(name, "shared")), f"from {name}"
        matrix.check([rank[name][1] for rank in by_rank], straight()[SAVED:])


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.full] * (m != "fsdp2")) for m in MESHES])
def test_merged_host_files_are_the_shared_layout(mesh, written, tmp_path):
    path = written(mesh, "host")
    hosts = -(-ranks_of(MESHES[mesh]) // RANKS_OF_A_HOST)
    assert len(list(path.glob("model-host-*.safetensors"))) == hosts
    assert not any(verify(path).values())
    merge(path, tmp_path / "merged")
    shared, merged = written(mesh, "shared"), tmp_path / "merged"
    assert tensor_bytes(merged) == tensor_bytes(shared)
    states = [json.loads((folder / "state.json").read_text()) for folder in (shared, merged)]
    for state in states:
        del state["config"]["checkpoint"]["layout"], state["digest"]
    assert states[0] == states[1] and not any(verify(merged).values())


# ------------------------------------------------------------------------------------------------------- the pieces


def in_random_pieces(folder: Path, numel: int, draw: np.random.Generator) -> np.ndarray:
    """Write a matrix of random numbers in random pieces of its rows and columns. Return its elements."""
    rows, columns = numel, int(draw.integers(1, 40))
    values = draw.standard_normal(rows * columns).astype(np.float32)
    pieces: list[list[int]] = []
    stored: dict[int, list[np.ndarray]] = {}
    for first, last in pairs_of_bounds(columns, draw):
        for begin, end in pairs_of_bounds(rows, draw):
            held = Rows(begin * columns + first, last - first, end - begin, columns if end - begin > 1 else 0)
            file = int(draw.integers(0, 5))
            at = sum(map(len, stored.get(file, ())))
            stored.setdefault(file, []).append(values.reshape(rows, columns)[begin:end, first:last].ravel())
            pieces.append([file, at, *held])
    for file, parts in stored.items():
        save_file({"F32": torch.from_numpy(np.concatenate(parts))}, folder / host_file("model", file))
    described = {"x": ((rows, columns), torch.float32)}
    write_index(folder, "model", described, {"x": np.array(pieces, np.int64)})
    return values


def pairs_of_bounds(size: int, draw: np.random.Generator) -> list[tuple[int, int]]:
    inner = draw.choice(np.arange(1, size), min(size - 1, int(draw.integers(0, 5))), replace=False) if size > 1 else []
    bounds = [0, *sorted(int(b) for b in inner), size]
    return list(itertools.pairwise(bounds))


@pytest.mark.parametrize("seed", range(20))
def test_any_elements_are_read_from_any_pieces(seed, tmp_path):
    draw = np.random.default_rng(seed)
    values = in_random_pieces(tmp_path, int(draw.integers(1, 60)), draw)
    reader = open_tensors(tmp_path, "model")
    for _ in range(30):
        length = int(draw.integers(1, len(values) + 1))
        stride = int(draw.integers(length, len(values) + 1))
        start = int(draw.integers(0, len(values) - length + 1))
        number = 1 + (len(values) - start - length) // stride if draw.integers(2) else 1
        rows = Rows(start, length, number, stride if number > 1 else 0)
        if draw.integers(2):
            reader.expect("x", rows)
        want = np.concatenate([values[start + i * stride :][:length] for i in range(number)])
        assert (reader.read("x", rows).numpy() == want).all(), rows


def changed(column: str, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(table: np.ndarray) -> np.ndarray:
        table[len(table) // 2, COLUMNS.index(column)] = value
        return table

    return change


WRONG = {
    "a file that is not there": (changed("file", 77), "model-host-00077.safetensors cannot be read"),
    "a negative file": (changed("file", -1), "impossible sizes"),
    "a place outside the file": (changed("at", 10**6), "is outside model-host-"),
    "sizes that overflow": (changed("number", 2**62), "impossible sizes|outside its shape"),
    "a huge length": (changed("length", 2**63 - 1), "impossible sizes"),
    "no length": (changed("length", 0), "impossible sizes"),
    "a place outside the tensor": (changed("start", 10**6), "outside its shape"),
    "an element twice": (lambda t: np.concatenate([t, t[:1]]), "do not add up to its shape"),
    "a piece is missing": (lambda t: t[1:], "do not add up to its shape"),
    "one piece in the place of another": (lambda t: np.concatenate([t[:1], t[:1]]), "has pieces for|occurs twice"),
    "rows that overlap": (lambda t: np.array([[0, 0, 0, 4, 3, 2]]), "outside its shape"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_index_is_refused(what, tmp_path):
    change, message = WRONG[what]
    stored = torch.arange(12, dtype=torch.float32)
    save_file({"F32": stored}, tmp_path / host_file("model", 0))
    pieces = np.array([[0, 0, 0, 6, 1, 0], [0, 6, 6, 6, 1, 0]], np.int64)
    write_index(tmp_path, "model", {"x": ((3, 4), torch.float32)}, {"x": pieces})
    assert (open_tensors(tmp_path, "model").read("x", Rows(0, 12)) == stored).all()
    write_index(tmp_path, "model", {"x": ((3, 4), torch.float32)}, {"x": change(pieces)})
    with pytest.raises(DamagedFile, match=message):
        open_tensors(tmp_path, "model").read("x", Rows(0, 12))


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ("F32", "outside its shape"), ("F32 3 5", "do not add up"), ("F8 3 4", "does not describe tensor x"),
        ("F32 3 -4", "does not describe"), ("F32 3 " + "9" * 30, "does not describe"), ("", "does not describe"),
        ("I64 3 4", "does not describe"),
    ],
)  # fmt: skip
def test_wrong_description_is_refused(note, message, tmp_path):
    save_file({"F32": torch.arange(12, dtype=torch.float32)}, tmp_path / host_file("model", 0))
    table = torch.tensor([[0, 0, 0, 12, 1, 0]])
    save_file({"x": table}, tmp_path / index_file("model"), metadata={"x": note})
    with pytest.raises(DamagedFile, match=message):
        open_tensors(tmp_path, "model").read("x", Rows(0, 12))


# ------------------------------------------------------------------------------------------------- runs and commands


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of four steps in the layout `host`, with tensors of two dtypes in checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    corpus = write_corpus(folder / "corpus.txt")
    assert train(arguments(folder / "run", corpus, "train.steps=4", *OPTIONS)) == 0
    return folder / "run"


def test_commands_read_host_files(run, tmp_path, capsys):
    newest, merged = checkpoint_of(run, 4), tmp_path / "merged"
    assert "weights fp32, exp_avg bf16, exp_avg_sq bf16, ema fp32" in said(capsys, 0, "list", run)
    assert said(capsys, 0, "verify", run).count("good: ") == 2
    assert f"{merged}: {newest} in the layout shared" in said(capsys, 0, "merge", run, merged)
    assert said(capsys, 0, "diff", newest, merged).startswith("0 tensors differ")
    assert "already exists" in said(capsys, 2, "merge", run, merged)
    assert "has the layout shared already" in said(capsys, 2, "merge", merged, tmp_path / "again")
    for command in (["cast", newest, "dtype=bf16"], ["average", newest, merged]):
        said(capsys, 0, *command, f"out={tmp_path / command[0]}")
    averaged, weights = load_file(tmp_path / "average" / "model.safetensors"), load_file(merged / "model.safetensors")
    assert all(torch.equal(averaged[name], weights[name]) for name in weights) and averaged.keys() == weights.keys()


@pytest.mark.full
def test_transformers_and_generate_open_what_was_merged(run, tmp_path):
    merge(checkpoint_of(run, 4), tmp_path / "merged")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    ours = load_model(checkpoint_of(run, 4), torch.device("cpu"))
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs[name].float()), name


@pytest.mark.full
def test_new_run_starts_from_host_files(run, tmp_path):
    merge(checkpoint_of(run, 4), tmp_path / "merged")
    corpus = run.parent / "corpus.txt"
    for name, source in (("a", run), ("b", tmp_path / "merged")):
        assert train(arguments(tmp_path / name, corpus, "train.stop_at=2", f"init_from={source}")) == 0
    assert [r["loss"] for r in rows(tmp_path / "a")] == [r["loss"] for r in rows(tmp_path / "b")]


DAMAGE = list(itertools.product((index_file("model"), host_file("optimizer", 0)), ("flip", "cut", "gone")))


@pytest.mark.parametrize(("name", "how"), [DAMAGE[0], *(pytest.param(*d, marks=pytest.mark.full) for d in DAMAGE[1:])])
def test_damaged_host_files_are_named_and_older_checkpoint_is_used(name, how, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    file = checkpoint_of(folder, 4) / name
    if how == "cut":
        os.truncate(file, file.stat().st_size - 8)
    elif how == "flip":
        flip(file, file.stat().st_size - 9)
    else:
        file.unlink()
    named = "exp_avg_sq.lm_head.weight" if "host" in name and how == "flip" else name
    assert named in "".join(verify(file.parent).values())
    with pytest.raises(CheckpointError, match=re.escape(named)):
        merge(file.parent, tmp_path / "merged")
    assert not (tmp_path / "merged").exists() and not (tmp_path / ".writing-merged").exists()
    corpus = run.parent / "corpus.txt"
    assert train(arguments(folder, corpus, "train.steps=6", "resume=auto", *OPTIONS)) == 0
    assert "step-00000002" in (folder / "logs" / "rank-0.log").read_text()
    assert [r["step"] for r in rows(folder)] == [1, 2, 3, 4, 5, 6]
