"""Companion files: a run from a Hugging Face folder keeps every file that is neither weights nor code unchanged."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ndtrain.checkpoint.__main__ import main as checkpoint_command
from ndtrain.checkpoint.companions import read_companions
from ndtrain.config import ConfigError
from ndtrain.engine.start import _companions
from ndtrain.model.families.hf_config import from_hf, read_hf_config, to_hf
from ndtrain.train import main
from tests.lib.chat_folders import STYLES, write_model_folder
from tests.lib.helpers import arguments, checkpoint_of, rank_main, write_corpus
from tests.lib.ranks import run_ranks

SMALL = ["train.seq_len=32", "train.global_batch=4", "optim.warmup=0", "train.steps=2"]
LEFT = {"README.md", "modeling_x.py", "pytorch_model.bin", ".gitattributes", "params.json"}


def start(folder: Path, source: Path, corpus: Path, *more: str) -> list[str]:
    return arguments(folder, corpus, f"init_from={source}", f"data.tokenizer={source}", *SMALL, *more)


def carried(folder: Path) -> dict[str, bytes]:
    """Every file but weights, ndtrain's own, config.json, and what is meant to stay behind."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    own = {"config.json", "state.json", "model.safetensors", "optimizer.safetensors"}
    return {name: path.read_bytes() for name, path in files.items() if name not in own}


def expected(source: Path) -> dict[str, bytes]:
    left = LEFT - ({"params.json"} if (source / "params.json").exists() else set())
    files = {name: c for name, c in carried(source).items() if name not in left and not name.startswith("original/")}
    config = json.loads(files["tokenizer_config.json"])
    del config["auto_map"]
    return files | {"tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode()}


def check(checkpoint: Path, source: Path, files: dict[str, bytes]) -> None:
    got = carried(checkpoint)
    assert got.keys() == files.keys()
    assert {name for name in files if got[name] != files[name]} == set()
    theirs, ours = read_hf_config(source), read_hf_config(checkpoint)
    assert from_hf(ours) == from_hf(theirs, name="hf")
    described = {"auto_map", "torch_dtype", "dtype", "rope_theta", "rope_scaling", "use_sliding_window"}
    described |= {"max_window_layers", "sliding_window"}
    assert {k: ours.get(k, "absent") for k in theirs if k not in described} == {
        k: v for k, v in theirs.items() if k not in described
    }
    assert "auto_map" not in ours and ours["dtype"] == "float32"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", 900)


@pytest.mark.parametrize("style", STYLES)
def test_companions_copy_files_and_fields_of_each_style(style, tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    write_model_folder(source, style)
    m = from_hf(read_hf_config(source))
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(to_hf(m) | {"dtype": "float32"}))
    read_companions(source, m).write(copy)
    check(copy, source, expected(source))


FULL = pytest.mark.full


@pytest.mark.parametrize("style", [pytest.param(s, marks=[FULL] * (s != "llama3")) for s in STYLES])
def test_checkpoint_keeps_every_file_of_init_from(style, corpus, tmp_path, capsys):
    source = tmp_path / "source"
    write_model_folder(source, style)
    files = expected(source)
    assert main(start(tmp_path / "run", source, corpus, "train.stop_at=1")) == 0
    first = checkpoint_of(tmp_path / "run", 1)
    check(first, source, files)
    moved = source.rename(tmp_path / "moved")
    args = start(tmp_path / "run", source, corpus, "resume=auto", "checkpoint.async_save=true")
    assert main(args) == 0
    said = capsys.readouterr().out
    assert f"init_from={source} no longer exists: the model and its files are read from the checkpoint {first}" in said
    check(checkpoint_of(tmp_path / "run", 2), moved, files)
    out = tmp_path / "half"
    assert checkpoint_command(["cast", str(tmp_path / "run"), "dtype=bf16", f"out={out}"]) == 0
    assert carried(out) == files
    assert read_hf_config(out) == read_hf_config(checkpoint_of(tmp_path / "run", 2)) | {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


@FULL
def test_resume_on_another_mesh_needs_no_init_from_folder(corpus, tmp_path):
    source = tmp_path / "source"
    write_model_folder(source, "llama3")
    files = expected(source)
    assert main(start(tmp_path / "run", source, corpus, "train.stop_at=1")) == 0
    source.rename(tmp_path / "moved")
    first = checkpoint_of(tmp_path / "run", 1)
    args = start(tmp_path / "run", source, corpus, "resume=auto", "mesh.tp=2", "checkpoint.keep=1")
    assert run_ranks(rank_main, 2, args) == [0, 0]
    assert not first.exists()
    check(checkpoint_of(tmp_path / "run", 2), tmp_path / "moved", files)


def test_resume_keeps_companions_if_init_from_changed(corpus, tmp_path):
    """The folder may have changed since the run started."""
    source = tmp_path / "source"
    write_model_folder(source, "llama3")
    files = expected(source)
    assert main(start(tmp_path / "run", source, corpus, "train.stop_at=1")) == 0
    (source / "LICENSE").write_text("changed")
    (source / "NEW.txt").write_text("later")
    assert main(start(tmp_path / "run", source, corpus, "resume=auto")) == 0
    assert carried(checkpoint_of(tmp_path / "run", 2)) == files


def test_companions_are_read_by_rank_0_only(tmp_path):
    write_model_folder(tmp_path, "qwen3")
    cfg = SimpleNamespace(model=from_hf(read_hf_config(tmp_path)))
    read = lambda rank: _companions(tmp_path, cfg, SimpleNamespace(rank=rank, background=None)).files
    assert "NOTICE" in read(0) and read(1) == {}


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_new_tokenizer_drops_token_files_and_fields(tokenizer, corpus, tmp_path):
    source = tmp_path / "source"
    write_model_folder(source, "mistral")
    args = start(tmp_path / "run", source, corpus, f"data.tokenizer={tokenizer}", "data.vocab_size=300")
    assert main(args) == 0
    saved = checkpoint_of(tmp_path / "run", 2)
    assert set(carried(saved)) == {
        "params.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"
    }  # fmt: skip
    ends = {"byte": 256, "bpe": 0}[tokenizer]
    assert json.loads((saved / "generation_config.json").read_text()) == {"eos_token_id": ends}
    assert not {"bos_token_id", "eos_token_id", "pad_token_id"} & read_hf_config(saved).keys()


def test_reformatted_tokenizer_counts_as_same(corpus, tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    write_model_folder(source, "qwen3")
    shutil.copytree(source, other)
    (other / "tokenizer.json").write_text(json.dumps(json.loads((source / "tokenizer.json").read_text())))
    (other / "chat_template.jinja").write_text("another")
    assert main(start(tmp_path / "run", source, corpus, f"data.tokenizer={other}")) == 0
    got = carried(checkpoint_of(tmp_path / "run", 2))
    assert got["generation_config.json"] == (source / "generation_config.json").read_bytes()
    assert got["chat_template.jinja"] == b"another"
    assert got["tokenizer.json"] == (other / "tokenizer.json").read_bytes()


def test_companions_skip_and_name_too_large_file(tmp_path, monkeypatch):
    write_model_folder(tmp_path, "qwen3")
    monkeypatch.setattr("ndtrain.checkpoint.companions._FILE_BYTES", 1000)
    companions = read_companions(tmp_path)
    assert "tokenizer.json" not in companions.files and "NOTICE" in companions.files
    (note,) = [note for note in companions.notes if "tokenizer.json" in note]
    assert str(tmp_path / "tokenizer.json") in note and "is not copied into the checkpoints" in note
    monkeypatch.setattr("ndtrain.checkpoint.companions._TOTAL_BYTES", 3000)
    assert sum(map(len, read_companions(tmp_path).files.values())) <= 3000
    monkeypatch.setattr("ndtrain.checkpoint.companions._FILES", 2)
    assert len(read_companions(tmp_path).files) == 2


def test_companions_error_names_unreadable_file(tmp_path, monkeypatch):
    write_model_folder(tmp_path, "qwen3")

    def fails(path: Path) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(ConfigError, match=r"NOTICE cannot be read: Input/output error"):
        read_companions(tmp_path)


def test_companions_for_moe_of_dense_folder_keep_token_fields(tmp_path):
    write_model_folder(tmp_path, "qwen3", dtype=torch.float32)
    dense = from_hf(read_hf_config(tmp_path))
    assert read_companions(tmp_path, dense).fields["favourite_colour"] == "blue"
    dense.model_type = "qwen3_moe"
    fields = read_companions(tmp_path, dense).fields
    assert fields["eos_token_id"] == 2 and fields["pad_token_id"] == 0
    assert not {"favourite_colour", "attention_dropout", "hidden_act"} & fields.keys()
