"""Resume: an interrupted run equals an uninterrupted one, on any mesh; and `transformers` opens its checkpoints."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from ndtrain.config import load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.model import Transformer
from ndtrain.train import main
from tests.lib.helpers import arguments, checkpoint_of, given_process_group, rows, tensor_bytes, write_corpus
from tests.lib.ranks import run_ranks

MESHES = [  # (dp, fsdp, zero)
    (1, 1, 3), (2, 1, 3), (1, 2, 1), (1, 2, 2), (1, 2, 3), (4, 1, 3), (1, 4, 1), (1, 4, 3), (2, 2, 2), (2, 2, 3),
]  # fmt: skip
FULL = pytest.mark.full
FIRST, SECOND = (1, 2, 3), (2, 2, 2)  # meshes of the first five steps


def on(dp: int, fsdp: int, zero: int) -> list[str]:
    return [f"mesh.dp={dp}", f"mesh.fsdp={fsdp}", f"mesh.zero={zero}"]


def rank_main(args: list[str]) -> dict[int, list[str]]:
    """`main` on one rank, in the process group that `run_ranks` made. Returns per step the digest of every sequence
    that this rank trained on."""
    seen: dict[int, list[str]] = {}
    step_run = TrainingStep.forward_backward

    def recorded(self, number, batches, *rest):
        sequences = [row for b in batches for row in torch.cat([b.tokens, b.labels[:, -1:]], dim=1)]
        seen[number] = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in sequences]
        return step_run(self, number, batches, *rest)

    with mock.patch.object(TrainingStep, "forward_backward", recorded), given_process_group():
        assert main(args) == 0
    return seen


def train(mesh: tuple[int, int, int], args: list[str]) -> dict[int, list[str]]:
    """A run on a mesh; per step the digests of the global batch's sequences, in order."""
    ranks = run_ranks(rank_main, mesh[0] * mesh[1], [*args, *on(*mesh)])
    return {step: [d for rank in ranks for d in rank[step]] for step in ranks[0]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, corpus) -> Callable:
    """(folder, digests) of ten uninterrupted steps on a mesh, made once."""
    made = {}

    def get(mesh):
        if mesh not in made:
            folder = tmp_path_factory.mktemp("straight") / "run"
            made[mesh] = folder, train(mesh, arguments(folder, corpus))
        return made[mesh]

    return get


@pytest.fixture(scope="module")
def half(tmp_path_factory, corpus) -> Callable:
    """The folder of the first five steps on a mesh, made once. Tests copy it and do not change it."""
    made = {}

    def get(mesh):
        if mesh not in made:
            made[mesh] = tmp_path_factory.mktemp("half") / "run"
            train(mesh, arguments(made[mesh], corpus, "train.stop_at=5"))
        return made[mesh]

    return get


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: t for p in sorted(checkpoint.glob("*.safetensors")) for name, t in load_file(p).items()}


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference of weights and moments, relative to each tensor's largest element (at least 1)."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1)).item() for n in a)


# ---------------------------------------------------------------------------------------------------- two parts or one


@pytest.mark.parametrize(
    "mesh", [FIRST, *(pytest.param(m, marks=FULL) for m in [(1, 1, 3), (1, 2, 1), SECOND])], ids=str
)
def test_resume_on_same_mesh_is_bitwise_equal(mesh, straight, half, corpus, tmp_path):
    whole, digests = straight(mesh)
    folder = shutil.copytree(half(mesh), tmp_path / "run")
    later = train(mesh, arguments(folder, corpus, "resume=auto"))
    assert tensor_bytes(checkpoint_of(folder, 10)) == tensor_bytes(checkpoint_of(whole, 10))
    assert later == {step: digests[step] for step in range(6, 11)}
    exact = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[r[k] for k in exact] for r in rows(folder)] == [[r[k] for k in exact] for r in rows(whole)]


def pairs():
    for first in (FIRST, SECOND):
        for mesh in MESHES:
            if mesh != first:
                marks = [] if first == FIRST and mesh == SECOND else [FULL]
                yield pytest.param(first, mesh, marks=marks, id=f"{first}-{mesh}")


@pytest.mark.parametrize(("first", "mesh"), list(pairs()))
def test_resume_on_another_mesh_has_same_data_and_weights(first, mesh, straight, half, corpus, tmp_path):
    whole, digests = straight(first)
    folder = shutil.copytree(half(first), tmp_path / "run")
    later = train(mesh, arguments(folder, corpus, "resume=auto"))
    assert later == {step: digests[step] for step in range(6, 11)}
    assert [r["step"] for r in rows(folder)] == list(range(1, 11))
    for row, want in zip(rows(folder), rows(whole), strict=True):
        assert abs(row["loss"] - want["loss"]) < 1e-6 * want["loss"], row["step"]
        assert (row["lr"], row["tokens"]) == (want["lr"], want["tokens"])
    assert largest_difference(checkpoint_of(folder, 10), checkpoint_of(whole, 10)) < 1e-6


def test_resume_with_other_micro_batch_has_same_weights(straight, half, corpus, tmp_path):
    whole, digests = straight(FIRST)
    folder = shutil.copytree(half(FIRST), tmp_path / "run")
    assert train((1, 1, 3), arguments(folder, corpus, "resume=auto", "train.micro_batch=8")) == {
        step: digests[step] for step in range(6, 11)
    }
    assert largest_difference(checkpoint_of(folder, 10), checkpoint_of(whole, 10)) < 1e-6


def test_resume_from_path_leaves_source_unchanged(tmp_path, corpus):
    """`resume=<path>` may name a run folder or one checkpoint; that source does not change."""
    one = tmp_path / "one"
    assert main(arguments(one, corpus, "checkpoint.every=2", "checkpoint.keep=9")) == 0
    before = tensor_bytes(checkpoint_of(one, 4))
    for name, source in {"two": checkpoint_of(one, 4), "three": one}.items():
        assert main(arguments(tmp_path / name, corpus, f"resume={source}", "train.stop_at=10")) == 0
    assert tensor_bytes(checkpoint_of(tmp_path / "two", 10)) == tensor_bytes(checkpoint_of(one, 10))
    assert [r["step"] for r in rows(tmp_path / "two")] == list(range(5, 11))
    assert tensor_bytes(checkpoint_of(one, 4)) == before


def test_checkpoint_names_moments_after_weights(tmp_path, corpus):
    assert main(arguments(tmp_path / "run", corpus, "train.steps=3")) == 0
    saved = tensors(checkpoint_of(tmp_path / "run", 3))
    weights = {n for n in saved if not n.startswith("exp_avg")}
    assert saved.keys() == weights | {f"{kind}.{n}" for n in weights for kind in ("exp_avg", "exp_avg_sq")}
    for name in weights:
        first, second = saved[f"exp_avg.{name}"], saved[f"exp_avg_sq.{name}"]
        assert first.shape == second.shape == saved[name].shape and first.dtype == torch.float32
        assert (second >= 0).all() and (first < 0).any() and (first > 0).any(), name


def test_resume_auto_starts_new_run_and_ignores_finished_run(tmp_path, corpus, capsys):
    args = arguments(tmp_path / "run", corpus, "resume=auto", "train.steps=3")
    assert main(args) == 0
    before, metrics = tensor_bytes(checkpoint_of(tmp_path / "run", 3)), rows(tmp_path / "run")
    capsys.readouterr()
    assert main(args) == 0
    assert "nothing to do" in "".join(capsys.readouterr())
    assert tensor_bytes(checkpoint_of(tmp_path / "run", 3)) == before and rows(tmp_path / "run") == metrics


def test_resume_from_older_step_replaces_later_rows(tmp_path, corpus):
    folder = tmp_path / "run"
    assert main(arguments(folder, corpus, "checkpoint.every=2", "checkpoint.keep=9")) == 0
    first = rows(folder)
    assert main(arguments(folder, corpus, f"resume={checkpoint_of(folder, 4)}")) == 0
    assert [(r["step"], r["loss"]) for r in rows(folder)] == [(r["step"], r["loss"]) for r in first]


@pytest.mark.parametrize("path", [pytest.param(lambda p: p, marks=FULL), os.path.relpath], ids=["absolute", "relative"])
def test_resume_from_older_step_keeps_new_checkpoint(path, tmp_path, corpus, monkeypatch):
    """Resuming from step 4 abandons the later steps: resume=auto continues from what is saved next."""
    monkeypatch.chdir(tmp_path)
    folder, source = tmp_path / "run", path(checkpoint_of(tmp_path / "run", 4))
    options = ["checkpoint.every=2", "checkpoint.keep=1"]
    assert main(arguments(folder, corpus, "checkpoint.every=2", "checkpoint.keep=9")) == 0
    assert main(arguments(folder, corpus, *options, f"resume={source}", "train.stop_at=5")) == 0
    assert checkpoint_of(folder, 5).is_dir()
    assert main(arguments(folder, corpus, *options, "resume=auto", "train.stop_at=7")) == 0
    assert [r["step"] for r in rows(folder)] == list(range(1, 8))


@pytest.mark.parametrize("keep", [1, pytest.param(3, marks=FULL)])
def test_keep_leaves_newest_checkpoints(keep, tmp_path, corpus):
    folder = tmp_path / "run"
    assert main(arguments(folder, corpus, "checkpoint.every=2", f"checkpoint.keep={keep}")) == 0
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert kept == [f"step-{s:08d}" for s in range(2, 11, 2)][-keep:]


def test_keep_every_leaves_multiples_and_newest(tmp_path, corpus):
    """Multiples of keep_every are always saved, and kept forever in addition to the newest."""
    folder = tmp_path / "run"
    assert main(arguments(folder, corpus, "checkpoint.every=3", "checkpoint.keep=1", "checkpoint.keep_every=4")) == 0
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert kept == [f"step-{s:08d}" for s in (4, 8, 10)]


@FULL
@pytest.mark.parametrize("mesh", [(1, 1, 3), FIRST], ids=str)
def test_background_saves_do_not_change_run(mesh, straight, corpus, tmp_path):
    whole, _ = straight(mesh)
    folder = tmp_path / "run"
    options = ["checkpoint.async_save=true", "checkpoint.every=1", "checkpoint.keep=9"]
    train(mesh, arguments(folder, corpus, *options, "train.stop_at=6"))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [f"step-{s:08d}" for s in range(1, 7)]
    train(mesh, arguments(folder, corpus, *options, f"resume={checkpoint_of(folder, 3)}"))
    assert tensor_bytes(checkpoint_of(folder, 10)) == tensor_bytes(checkpoint_of(whole, 10))


def test_ema_of_resumed_run_is_bitwise_equal(tmp_path, corpus):
    """An interrupted run has the same average as an uninterrupted one."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(arguments(whole, corpus, "optim.ema=0.9")) == 0
    assert main(arguments(parts, corpus, "optim.ema=0.9", "train.stop_at=5")) == 0
    assert main(arguments(parts, corpus, "optim.ema=0.9", "resume=auto")) == 0
    assert tensor_bytes(checkpoint_of(parts, 10)) == tensor_bytes(checkpoint_of(whole, 10))
    saved = tensors(checkpoint_of(whole, 10))
    names = [n for n in saved if f"ema.{n}" in saved]
    assert len(names) == len([n for n in saved if n.startswith("ema.")]) > 10
    assert not any(torch.equal(saved[n], saved[f"ema.{n}"]) for n in names)


# ------------------------------------------------------------------------------------------------------- transformers


def ours(args: list[str], checkpoint: Path) -> Transformer:
    """The model of the run's configuration with the weights of the checkpoint."""
    model = Transformer(resolve(load_config(args), 1).model, loss_chunk=64)
    weights = {n: t for n, t in tensors(checkpoint).items() if not n.startswith("exp_avg")}
    model.load_state_dict(weights)
    return model


VARIANTS = {
    "llama": [],
    "split": ["checkpoint.max_file_bytes=100000"],
    "tied": ["model.tie_word_embeddings=true"],
    "qwen3": ["model.model_type=qwen3", "model.head_dim=24"],
    "qwen2": ["model.model_type=qwen2"],
    "fp64": ["precision.params=fp64", "precision.compute=fp64"],
}


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[FULL] * (v in ("qwen2", "fp64"))) for v in VARIANTS])
def test_transformers_opens_a_checkpoint(variant, tmp_path, corpus):
    folder = tmp_path / "run"
    args = arguments(folder, corpus, "train.steps=4", *VARIANTS[variant])
    assert main(args) == 0
    checkpoint = checkpoint_of(folder, 4)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = corpus.read_text()[:256]
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    assert ids.tolist() == [list(text.encode())] and tokenizer.decode(ids[0]) == text
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        logits = ours(args, checkpoint).to(theirs.dtype).logits(ids)
        assert (logits - theirs(ids).logits).abs().max() < 1e-5


@pytest.mark.full
def test_split_files_resume_as_one_file_does(tmp_path, corpus):
    """Files of at most 100 kB with an index that names every tensor once; resumed as one, also into whole files."""
    split, whole = tmp_path / "split", tmp_path / "whole"
    assert main(arguments(split, corpus, "train.stop_at=5", "checkpoint.max_file_bytes=100000")) == 0
    assert main(arguments(whole, corpus)) == 0
    checkpoint = checkpoint_of(split, 5)
    for stem in ("model", "optimizer"):
        index = json.loads((checkpoint / f"{stem}.safetensors.index.json").read_text())
        files = sorted(checkpoint.glob(f"{stem}-*.safetensors"))
        assert len(files) > 3 and sorted(set(index["weight_map"].values())) == [f.name for f in files]
        weight_map = {name: f.name for f in files for name in load_file(f)}
        assert weight_map == index["weight_map"]
    assert main(arguments(split, corpus, "resume=auto")) == 0
    assert tensor_bytes(checkpoint_of(split, 10)) == tensor_bytes(checkpoint_of(whole, 10))


@pytest.mark.parametrize("mesh", [(1, 1, 3), pytest.param((1, 2, 3), marks=FULL)], ids=str)
def test_init_from_starts_at_step_1_with_given_weights(mesh, tmp_path, corpus):
    """The first loss is transformers' loss on the same tokens; the step counts from 1; the architecture is theirs."""
    assert main(arguments(tmp_path / "one", corpus, "model.hidden_size=96", "train.steps=4")) == 0
    source = checkpoint_of(tmp_path / "one", 4)
    tokens = np.random.default_rng(0).integers(0, 512, 8 * 64 + 1)
    tokens.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    data = [
        "data=bin",
        f"data.path={tmp_path}/tokens.bin",
        "data.shuffle=false",
        f"init_from={source}",
        "train.steps=3",
    ]
    train(mesh, arguments(tmp_path / "two", corpus, *data))
    ids = torch.from_numpy(np.stack([tokens[k * 64 : k * 64 + 65] for k in range(8)]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        expected = cross_entropy(theirs(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    records = rows(tmp_path / "two")
    assert abs(records[0]["loss"] - expected) < 1e-5 and [r["step"] for r in records] == [1, 2, 3]
    config = json.loads((checkpoint_of(tmp_path / "two", 3) / "config.json").read_text())
    assert config["hidden_size"] == 96


def test_init_from_a_run_folder_takes_its_newest_checkpoint(tmp_path, corpus):
    args = arguments(tmp_path / "one", corpus, "model.hidden_size=96", "train.steps=4", "checkpoint.every=2")
    assert main(args) == 0
    newest = checkpoint_of(tmp_path / "one", 4)
    assert checkpoint_of(tmp_path / "one", 2).is_dir()
    start = [f"init_from={tmp_path}/one", "train.steps=2", "optim.lr=1e-30", "optim.warmup=0"]
    assert main(arguments(tmp_path / "two", corpus, *start)) == 0
    of = lambda path: load_file(path / "model.safetensors")
    want, got = of(newest), of(checkpoint_of(tmp_path / "two", 2))
    assert want.keys() == got.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert [r["step"] for r in rows(tmp_path / "two")] == [1, 2]
    assert f"init_from: {newest}" in (tmp_path / "two" / "config.yaml").read_text(), "no record of the checkpoint"


def test_init_from_reads_sharded_bf16_folder(tmp_path, corpus):
    """A folder that `transformers` itself wrote, sharded and in half precision."""
    assert main(arguments(tmp_path / "one", corpus, "train.steps=4")) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_of(tmp_path / "one", 4)).bfloat16()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    args = arguments(tmp_path / "two", corpus, f"init_from={tmp_path}/hf", "train.steps=3", "optim.lr=1e-30")
    assert main(args) == 0
    weights = ours(args, checkpoint_of(tmp_path / "two", 3)).state_dict()
    want = theirs.state_dict()
    assert all(torch.equal(t.bfloat16(), want[n]) for n, t in weights.items())
