"""The command line: valid inputs, and one line of error with the key and the fix for every invalid one."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from ndtrain.checkpoint.elements import digest
from ndtrain.config import load_config, resolve
from ndtrain.device.process_owner import LAUNCH
from ndtrain.run import exit_status, launch_query, stop_signals
from ndtrain.train import main
from tests.lib.disks import tmpfs
from tests.lib.helpers import (
    arguments,
    checkpoint_of,
    flip,
    one_error,
    rank_main,
    refusal,
    rows,
    run,
    started,
    tensor_bytes,
    wait_for,
    write_corpus,
)
from tests.lib.ranks import run_ranks

ORDER = "mesh.order=[dp,fsdp]"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> Path:
    """The folder of a run of 4 steps with the checkpoints of steps 3 and 4. Tests copy it and do not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(arguments(folder, corpus, "train.steps=4", "checkpoint.every=1")) == 0
    return folder


@pytest.fixture
def args(tmp_path, corpus):
    """arguments(...) of a run in a fresh folder."""
    return lambda *overrides: arguments(tmp_path / "run", corpus, *overrides)


@pytest.fixture
def damaged(tmp_path, finished):
    """A copy of the finished run, and its newest checkpoint, to be damaged."""
    folder = shutil.copytree(finished, tmp_path / "run")
    return folder, checkpoint_of(folder, 4)


# ------------------------------------------------------------------------------------------------- keys and values

REFUSED = {  # overrides -> what the error must contain
    "unknown key": (["mesh.fsdq=2"], ["mesh.fsdq", "did you mean 'mesh.fsdp'"]),
    "unknown key, deeper word": (["train.globl_batch=2"], ["train.globl_batch", "'train.global_batch'"]),
    "unknown key in another group": (["trian.steps=2"], ["trian.steps", "'train.steps'"]),
    "unknown key with +": (["+mesh.tpp=2"], ["mesh.tpp", "'mesh.tp'"]),
    "unknown key with ++": (["++optim.lrr=2"], ["optim.lrr", "'optim.lr'"]),
    "unknown top key with +": (["+resum=auto"], ["resum", "'resume'"]),
    "unknown recipe": (["recipe=llama_smal"], ["recipe=llama_smal", "'llama_small'", "llama_debug", "llama3_8b"]),
    "unknown model": (["model=gpt5"], ["model=gpt5", "llama_debug"]),
    "unknown schedule": (["schedule=2f2b"], ["schedule=2f2b", "1f1b", "gpipe"]),
    "unknown LR schedule": (["optim.schedule=cosin"], ["optim.schedule=cosin", "'cosine'"]),
    "unknown precision": (["precision.compute=fp23"], ["precision.compute=fp23", "fp32"]),
    "unknown logger": (["logger=wandbb"], ["logger=wandbb", "'wandb'"]),
    "not a number": (["train.steps=many"], ["train.steps", "many"]),
    "nothing": (["train.steps=null"], ["train.steps"]),
    "a list": (["model.name=[1,2]"], ["model.name"]),
    "a sweep without --multirun": (["run.seed=1,2"], ["run.seed=1,2"]),
    "no value": (["train.steps"], ["train.steps"]),
    "zero steps": (["train.steps=0"], ["train.steps=0", "at least 1"]),
    "stop beyond the end": (["train.stop_at=11"], ["train.stop_at=11", "train.steps=10"]),
    "warmup too long": (["optim.warmup=10"], ["optim.warmup=10", "less than the 10"]),
    "heads do not divide": (["model.num_attention_heads=5"], ["model.num_attention_heads=5", "must be a multiple of"]),
    "a mesh for two ranks": (["mesh.dp=2"], ["dp=2", "needs 2 ranks but 1 started", "torchrun --nproc-per-node 2"]),
    "two rests": (["mesh.dp=-1", "mesh.fsdp=-1"], ["mesh.dp", "mesh.fsdp", "only one"]),
    "axis of size 0": (["mesh.fsdp=0"], ["mesh.fsdp=0", "at least 1"]),
    "incomplete order": ([ORDER], ["mesh.order", "pp"]),
    "zero stage": (["mesh.zero=4"], ["mesh.zero=4", "1, 2 or 3"]),
    "batch not divisible": (["train.global_batch=7"], ["micro_batch", "try train.global_batch=8"]),
    "more stages than layers": (["schedule=interleaved", "schedule.chunks=9"], ["9 stages", "num_hidden_layers=2"]),
    "chunks of 1f1b": (["schedule.chunks=2"], ["schedule=1f1b", "chunks=2"]),
    "chunks of zb_v": (["schedule=zb_v", "schedule.chunks=3"], ["schedule=zb_v", "2"]),
    "no table": (["schedule=csv"], ["schedule.path", "csv"]),
    "no such table": (["schedule=csv", "schedule.path=none.csv"], ["schedule=csv", "none.csv"]),
    "split": (["schedule.split=[3]"], ["schedule.split=[3]", "2 in all"]),
    "no budget": (["recompute=budget"], ["recompute.budget is missing"]),
    "a budget of no size": (["recompute=budget", "recompute.budget=2GG"], ["recompute.budget=2GG", "2GiB"]),
    "a budget below the least": (["recompute=budget", "recompute.budget=1kB"], ["recompute.budget=1000", "at least"]),
    "an op that cannot be kept": (["recompute=selective", "recompute.keep=[cor]"], ["recompute.keep", "'core'"]),
    "no number of blocks": (["recompute=every", "recompute.every=some"], ["recompute.every=some", "auto"]),
    "a blend of nothing": (["data=blend"], ["data.blend is empty", "weight"]),
    "a decay of 1": (["optim.ema=1"], ["optim.ema=1", "(0, 1)"]),
    "no skipped step": (["train.max_skipped=0"], ["train.max_skipped=0", "at least 1"]),
    "biases of a mistral": (["model.model_type=mistral", "model.attention_bias=true"], ["model.attention_bias"]),
    "no GPU": (["hardware.device=cuda"], ["hardware.device=cuda", "cpu or auto"]),
    "a kernel of GPUs": (
        ["hardware.device=cpu", "precision.compute=bf16", "hardware.attention=flash"],
        ["hardware.attention=flash", "set it to auto"],
    ),
    "resume nowhere": (["resume=/no/such/run"], ["resume=/no/such/run", "does not exist", "resume=auto"]),
    "resume a folder without a checkpoint": (["resume=/usr"], ["resume=/usr", "holds no checkpoint", "resume=auto"]),
    "start from the hub": (
        ["init_from=meta-llama/Llama-3.2-1B"],
        ["`hf download meta-llama/Llama-3.2-1B --local-dir models/Llama-3.2-1B`", "init_from=models/Llama-3.2-1B"],
    ),
    "start from nowhere": (["init_from=/no/such/model"], ["init_from=/no/such/model", "config.json"]),
    "a model of another size than the folder": (["init_from=/usr", "model.hidden_size=96"], ["model.hidden_size=96"]),
    "start from a folder without a model": (["init_from=/usr"], ["init_from=/usr", "config.json"]),
    "a model beside the folder's": (["init_from=/usr", "model=llama_debug"], ["model=llama_debug: init_from=/usr"]),
    "empty run folder name": (["run.dir="], ["run.dir"]),
    "empty run name": (["run.name="], ["run.name is empty"]),
    "window of a llama": (["model.sliding_window=8"], ["model.sliding_window=8", "model.model_type=llama", "mistral"]),
    "rule of an unknown dim": (["layout.rules.vocabs=tp"], ["layout.rules.vocabs", "did you mean 'vocab'"]),
    "rule with a new dim": (["+layout.rules.hidden=tp"], ["layout.rules.hidden", "vocab"]),
    "rule with an unknown axis": (["layout.rules.mlp=tpp"], ["layout.rules.mlp=tpp", "tp"]),
    "rule with an axis that cuts nothing": (["layout.rules.mlp=dp"], ["layout.rules.mlp=dp", "only tp"]),
    "rules that part heads": (["layout.rules.heads=null"], ["layout.rules.kv_heads=tp", "layout.rules.heads"]),
    "attention kind": (["cp.kind=rings"], ["cp.kind=rings", "'ring'", "ulysses"]),
    "attention balance": (["cp.balance=zigzagg"], ["cp.balance=zigzagg", "'zigzag'"]),
    "more positions than the model has": (
        ["train.seq_len=512"],
        ["train.seq_len=512", "max_position_embeddings=256", "set model.max_position_embeddings=512"],
    ),
    "a model beyond memory": (
        ["model=llama3_8b", "model.hidden_size=65536", "model.num_hidden_layers=1000"],
        ["parameters", "at least", "GiB in host memory (1 rank here)", "mesh.fsdp"],
    ),
    "cap": (["model.attn_logit_softcapping=0"], ["model.attn_logit_softcapping=0", "positive"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_override_is_refused(name, args, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides, expected = REFUSED[name]
    line = refusal(capsys, args(*overrides))
    assert all(word in line for word in expected), line
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "a refused run leaves a run behind"


WORLDS = {  # (ranks started, overrides) -> what the error must contain; refused before any process group
    "too few ranks": (2, ["mesh.dp=4"], ["dp=4", "needs 4 ranks but 2 started"]),
    "too many ranks": (4, ["mesh.fsdp=2"], ["fsdp=2", "needs 2 ranks but 4 started", "mesh.fsdp=-1"]),
    "no mesh": (2, [], ["needs 1 rank", "2 started", "mesh.fsdp=-1"]),
    "no rest": (4, ["mesh.dp=3", "mesh.fsdp=-1"], ["dp=3", "does not divide the 4 ranks"]),
    "batch over the mesh": (8, ["mesh.fsdp=8"], ["train.global_batch=8", "= 16", "try train.global_batch=16"]),
    "layers over pp": (8, ["mesh.pp=8"], ["8 stages", "model.num_hidden_layers=2", "mesh.pp"]),
    "layers over chunks": (4, ["mesh.pp=4", "schedule=zb_v"], ["8 stages", "model.num_hidden_layers=2", "mesh.pp"]),
    "split over pp": (
        3,
        ["mesh.pp=3", "schedule.split=[1,0,1]"],
        ["split=[1, 0, 1]", "3 stages", "only the first and the last"],
    ),
    "heads over tp": (3, ["mesh.tp=3"], ["mesh.tp=3", "model.num_attention_heads=4"]),
    "K/V heads over tp": (
        4,
        ["mesh.tp=4", "model.num_attention_heads=12", "model.num_key_value_heads=6", "model.head_dim=8"],
        ["mesh.tp=4", "model.num_key_value_heads=6"],
    ),
    "mlp over tp": (4, ["mesh.tp=4", "model.intermediate_size=178"], ["mesh.tp=4", "model.intermediate_size=178"]),
    "vocabulary over tp": (4, ["mesh.tp=4", "model.vocab_size=3"], ["mesh.tp=4", "layout.rules.vocab=null"]),
    "tokens over tp": (4, ["mesh.tp=4", "train.seq_len=65"], ["mesh.tp=4", "130", "tp.sequence_parallel"]),
    "whole heads on a cut stream": (
        2,
        ["mesh.tp=2", "layout.rules.heads=null", "layout.rules.kv_heads=null"],
        ["layout.rules.heads=null", "tp.sequence_parallel=false"],
    ),
    "zigzag over cp": (
        2,
        ["mesh.cp=2", "train.seq_len=66"],
        ["train.seq_len=66", "2 x mesh.cp = 4", "cp.balance=zigzag", "train.seq_len=64"],
    ),
    "stripes over cp": (
        2,
        ["mesh.cp=2", "train.seq_len=65", "cp.balance=striped"],
        ["train.seq_len=65", "mesh.cp = 2"],
    ),
    "ulysses beyond heads": (8, ["mesh.cp=8", "cp.kind=ulysses"], ["cp.ulysses=8", "model.num_attention_heads=4"]),
    "ulysses beyond a rank's heads": (
        8,
        ["mesh.cp=4", "mesh.tp=2", "cp.kind=ulysses"],
        ["cp.ulysses=4", "mesh.tp = 2"],
    ),
    "ulysses over cp": (4, ["mesh.cp=4", "cp.ulysses=3"], ["cp.ulysses=3", "mesh.cp=4"]),
}


ROW = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3"
CSVS = {  # table -> what the error must contain
    "not an action": (ROW.replace("0F1", "0X1"), ["row 1", "column 2", "0X1"]),
    "twice": (f"{ROW},0F1", ["row 1", "column 9", "F(microbatch 1, stage 0)", "twice"]),
    "backward first": (
        ROW.replace("0F0,0F1", "0B0,0F1").replace("0B0,0B1", "0F0,0B1"),
        ["row 1", "column 1", "B(microbatch 0, stage 0)"],
    ),
    "a rank too many": (f"{ROW}\n{ROW.replace('0F', '1F').replace('0B', '1B')}", ["2 rows", "pp=1"]),
    "too few microbatches": ("0F0,0B0", ["1 microbatch", "4"]),
}


@pytest.mark.parametrize("name", CSVS)
def test_bad_schedule_csv_is_refused_by_row_and_column(name, args, capsys, tmp_path):
    text, expected = CSVS[name]
    (tmp_path / "table.csv").write_text(text)
    line = refusal(capsys, args("schedule=csv", f"schedule.path={tmp_path / 'table.csv'}"))
    assert all(word in line for word in expected), line


@pytest.mark.parametrize("name", WORLDS)
def test_override_invalid_for_world_size_is_refused(name, args, capsys, monkeypatch):
    world, overrides, expected = WORLDS[name]
    monkeypatch.setenv("WORLD_SIZE", str(world))
    line = refusal(capsys, args(*overrides))
    assert all(word in line for word in expected), line


# ------------------------------------------------------------------------------------------------------------- data


def bin_file(path: Path, tokens: list[int]) -> list[str]:
    np.array(tokens, np.uint16).tofile(path)
    return ["data=bin", f"data.path={path}"]


CORPORA = {  # a maker of the overrides -> what the error must contain
    "missing": (lambda d: [f"data.path={d}/nothing.txt"], ["data.path", "nothing.txt", "no such file"]),
    "no path": (lambda d: ["data.path=null"], ["data.path is missing", "data=text"]),
    "empty file": (lambda d: [f"data.path={d}/empty.txt"], ["data.path", "empty.txt", "nothing to train on"]),
    "empty folder": (lambda d: [f"data.path={d}/none"], ["data.path", "none", "no file"]),
    "no match": (lambda d: [f"data.path='{d}/*.text'"], ["data.path", "*.text", "no file matches"]),
    "too short": (lambda d: [f"data.path={d}/short.txt"], ["fewer than one sequence", "seq_len + 1 = 65", "lower"]),
    "not text": (lambda d: [f"data.path={d}/latin.txt"], ["data.path", "latin.txt", "not UTF-8"]),
    "broken jsonl": (lambda d: ["data=jsonl", f"data.path={d}/bad.jsonl"], ["bad.jsonl:2", "not a JSON object"]),
    "jsonl without the field": (lambda d: ["data=jsonl", f"data.path={d}/other.jsonl"], ["data.text_key", "body"]),
    "id beyond the vocabulary": (
        lambda d: bin_file(d / "ids.bin", [*range(100), 512, *range(100)]),
        ["token id 512 at offset 100", "model.vocab_size=512", "at least 513"],
    ),
    "odd bin": (lambda d: ["data=bin", f"data.path={d}/odd.bin"], ["odd.bin", "not a multiple", "data.dtype"]),
    "empty bin": (lambda d: bin_file(d / "none.bin", []), ["none.bin", "no tokens"]),
    "no tokenizer": (lambda d: ["data.tokenizer=/no/file"], ["data.tokenizer=/no/file", "byte, bpe"]),
    "vocabulary too small": (lambda d: ["model.vocab_size=200"], ["model.vocab_size=200", "at least 257"]),
    "cache not writable": (lambda d: [f"data.cache={d}/short.txt/x"], ["data.cache", "writable"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPORA)
def test_unusable_corpus_is_refused(name, args, capsys, tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("ten bytes.")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "odd.bin").write_bytes(b"\0" * 301)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "other.jsonl").write_text('{"body": "a"}\n')
    make, expected = CORPORA[name]
    line = refusal(capsys, args("data.validation=0", *make(tmp_path)))
    assert all(word in line for word in expected), line


# ------------------------------------------------------------------------------------------------------- run folder


def test_no_overrides_at_all_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "nothing to train: name a recipe" in refusal(capsys, [])
    assert launch_query.main(["folder"]) == 2 and "nothing to train" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_stop_file_of_earlier_run_is_removed(args, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    assert main(args()) == 0
    assert len(rows(tmp_path / "run")) == 10 and not (tmp_path / "run" / "stop").exists()
    assert f"removed {tmp_path / 'run' / 'stop'}, which was left by an earlier run" in capsys.readouterr().err


REQUESTS = {  # a request to stop -> (content, seconds before the run looks, whether it is kept)
    "of an earlier run": ("", 100, False),
    "in the start-up of this one": ("", 5, True),
    "of this launch script": ("n0-1-{began}", 5, True),
    "of another launch script": ("n0-2-7.5", 5, False),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_stop_file_of_this_launch_is_kept(name, tmp_path, monkeypatch):
    """The clock of the file system is ten minutes ahead."""
    content, age, kept = REQUESTS[name]
    began, file, ahead = time.time() - 10, tmp_path / "stop", 600
    monkeypatch.setenv(LAUNCH, f"n0-1-{began}")
    file.write_text(content.format(began=began))
    os.utime(file, (time.time() + ahead - age,) * 2)
    assert stop_signals.remove_stale(file, time.time() + ahead) != kept
    assert file.exists() == kept == bool(stop_signals.StopRequest(file, signals=False).asked())


def test_stopped_rank_under_torchrun_exits_0(monkeypatch):
    """torchrun would start the ranks again after any other status."""
    monkeypatch.delenv(exit_status.JOB, raising=False)
    assert [exit_status.of_process(why) for why in ("finished", "stopped", "failed")] == [0, 85, 1]
    monkeypatch.setenv(exit_status.JOB, "job")
    assert [exit_status.of_process(why) for why in ("finished", "stopped", "failed")] == [0, 0, 1]


def test_launch_query_ignores_exit_json_of_other_launch(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCH, "n0-1-2")
    exit_status.write(tmp_path, "died")
    assert launch_query.ended(tmp_path, 1) == 75
    monkeypatch.setenv(LAUNCH, "n0-2-3")  # the folder belongs to the other run
    assert launch_query.ended(tmp_path, 1) == 2 and launch_query.ended(tmp_path, 0) == 0
    assert launch_query.ended(tmp_path, 137) == 75, "killed before it came to own the folder"
    monkeypatch.delenv(LAUNCH)
    assert launch_query.ended(tmp_path, 1) == 75


def test_a_folder_that_holds_a_run_is_refused(finished, corpus, capsys):
    before = (finished / "config.yaml").read_bytes()
    line = refusal(capsys, arguments(finished, corpus))
    assert f"run.dir={finished}" in line and "resume=auto" in line
    assert (finished / "config.yaml").read_bytes() == before


REFUSED_LATE = {  # what is refused once the run folder is taken
    "a corpus that is missing": ["data.path=/no/such/corpus"],
    "a checkpoint that is missing": ["resume=/no/such/run"],
    "a sample of an empty prompt": ["train.sample_every=1", "train.sample_prompts=[]"],
}


@pytest.mark.parametrize("name", REFUSED_LATE)
def test_a_refused_run_leaves_no_folder(name, corpus, tmp_path, capsys):
    refusal(capsys, arguments(tmp_path / "runs" / "new", corpus, *REFUSED_LATE[name]))
    assert list(tmp_path.iterdir()) == []
    mine = tmp_path / "mine"
    mine.mkdir()
    refusal(capsys, arguments(mine, corpus, *REFUSED_LATE[name]))
    assert list(mine.iterdir()) == [], "a folder that was there before"


def test_a_refused_resume_leaves_the_run_as_it_was(damaged, corpus, capsys):
    folder, _ = damaged
    content = lambda: {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent.name != "owner"}
    before = content()
    for overrides in (["model.hidden_size=128"], ["data.path=/no/such/corpus"]):
        refusal(capsys, arguments(folder, corpus, "resume=auto", "train.steps=9", *overrides))
    after = content()
    logs = {path for path in before if path.parent.name == "logs"}
    assert {p: c for p, c in after.items() if p not in logs} == {p: c for p, c in before.items() if p not in logs}


@pytest.mark.parametrize("place", ["/proc/run", "/sys/run", "corpus/run", "corpus"])
def test_impossible_run_folder_is_refused(place, args, corpus, capsys):
    place = place.replace("corpus", str(corpus))
    line = refusal(capsys, args(f"run.dir={place}"))
    assert f"run.dir={place}" in line and "give another" in line


def test_a_read_only_run_folder_is_refused(tmp_path, corpus, capsys):
    folder = tmp_path / "run"
    with tmpfs(folder) as mount:
        mount("ro")
        line = refusal(capsys, arguments(folder, corpus))
    assert f"run.dir={folder}" in line and "Read-only" in line and "give another" in line


# ------------------------------------------------------------------------------------------------ unusable checkpoints


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.hidden_size=128", "hidden_size is 64 in the checkpoint and 128 in this run"),
        ("model.num_hidden_layers=3", "num_hidden_layers is 2 in the checkpoint and 3 in this run"),
        ("model.rope_theta=500", "rope_theta is 10000"),
        ("model.tie_word_embeddings=true", "tie_word_embeddings is False in the checkpoint and True in this run"),
        ("model.model_type=qwen3", "qwen3"),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "path"])
def test_resume_with_other_architecture_is_refused(override, field, resume, finished, corpus, tmp_path, capsys):
    folder = finished if resume == "auto" else tmp_path / "run"
    resume = "auto" if resume == "auto" else str(finished)
    line = refusal(capsys, arguments(folder, corpus, f"resume={resume}", override))
    assert "another architecture" in line and field in line and str(finished) in line


def test_resume_error_names_every_difference_and_fix(finished, corpus, capsys):
    before = (finished / "config.yaml").read_bytes()
    line = refusal(capsys, arguments(finished, corpus, "resume=auto", "model=moe_debug"))
    named = ("model.model_type", "model.num_experts", "model.num_experts_per_tok", "remove the recipe")
    assert all(word in line for word in named) and "rope_parameters" not in line, line
    assert (finished / "config.yaml").read_bytes() == before


def test_resume_auto_needs_only_run_folder(damaged, capsys):
    """The folder of its `init_from` may be gone. A run that is refused late leaves the configuration unchanged."""
    folder, _ = damaged
    saved = (folder / "config.yaml").read_text().replace("init_from: null", "init_from: /no/such/model")
    (folder / "config.yaml").write_text(saved)
    line = refusal(capsys, ["resume=auto", f"run.dir={folder}", "train.steps=6", "data.path=/no/such/corpus"])
    assert "/no/such/corpus" in line and (folder / "config.yaml").read_text() == saved
    assert main([f"resume={folder}", "train.steps=6"]) == 0
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
    assert "  steps: 6\n" in (folder / "config.yaml").read_text()


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def flip_in(path: Path, word: bytes, bit: int = 0) -> None:
    """Flips one bit of the last letter of the first `word` in a file."""
    flip(path, path.read_bytes().index(word) + len(word) - 1, bit)


def flip_tensor(path: Path, name: str, element: int, bit: int) -> None:
    """Flips one bit of one fp32 element."""
    length = int.from_bytes(path.read_bytes()[:8], "little")
    begin = json.loads(path.read_bytes()[8 : 8 + length])[name]["data_offsets"][0]
    flip(path, 8 + length + begin + 4 * element + bit // 8, bit % 8)


def edit_state(checkpoint: Path, **fields) -> None:
    """Changes fields of state.json (None: takes them out) and makes its digest right again."""
    body = json.loads((checkpoint / "state.json").read_text()) | fields
    del body["digest"]
    body = {key: value for key, value in body.items() if fields.get(key, "") is not None}
    (checkpoint / "state.json").write_text(json.dumps(body | {"digest": digest(body)}))


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
DAMAGES = {  # a change of the newest checkpoint -> the word of the error that names it
    "weight": (lambda p: flip_tensor(p / MODEL, GATE, 1000, bit=0), f"the content of {GATE}"),
    "first bit": (lambda p: flip_tensor(p / MODEL, NORM, 0, bit=0), f"the content of {NORM}"),
    "sign": (lambda p: flip_tensor(p / MODEL, NORM, 63, bit=31), f"the content of {NORM}"),
    "exp_avg": (lambda p: flip_tensor(p / OPTIMIZER, f"exp_avg.{GATE}", 7, bit=22), f"the content of exp_avg.{GATE}"),
    "exp_avg_sq": (lambda p: flip_tensor(p / OPTIMIZER, f"exp_avg_sq.{NORM}", 1, 2), f"content of exp_avg_sq.{NORM}"),
    "header length": (lambda p: flip(p / MODEL, 1), MODEL),
    "header, a dtype": (lambda p: flip_in(p / MODEL, b'"dtype":"F32', bit=1), MODEL),
    "header, an offset": (lambda p: flip_in(p / MODEL, b'"data_offsets":[1'), MODEL),
    "header, a name": (lambda p: flip_in(p / OPTIMIZER, b"exp_avg_sq.model.norm.w"), OPTIMIZER),
    "header, the format": (lambda p: flip_in(p / MODEL, b'"pt'), MODEL),
    "header, a brace": (lambda p: flip(p / OPTIMIZER, 8), OPTIMIZER),
    "state": (lambda p: flip_in(p / "state.json", b'"tok'), "state.json"),
    "state, the step": (lambda p: flip_in(p / "state.json", b'"step": 4'), "state.json"),
    "state, not JSON": (lambda p: flip(p / "state.json", 0), "state.json"),
    "config": (lambda p: flip_in(p / "config.json", b'"hidden_size": 64'), "config.json"),
    "tokenizer": (lambda p: flip(p / "tokenizer.json", 1000), "tokenizer.json"),
    "model cut": (lambda p: cut(p / MODEL, 4), MODEL),
    "optimizer cut": (lambda p: cut(p / OPTIMIZER, 100_000), OPTIMIZER),
    "state cut": (lambda p: cut(p / "state.json", 10), "state.json"),
    "state empty": (lambda p: (p / "state.json").write_text(""), "state.json"),
    "config cut": (lambda p: cut(p / "config.json", 10), "config.json"),
    "model missing": (lambda p: (p / MODEL).unlink(), MODEL),
    "state missing": (lambda p: (p / "state.json").unlink(), "state.json"),
    "config missing": (lambda p: (p / "config.json").unlink(), "config.json"),
    "state, deep": (lambda p: (p / "state.json").write_text("[" * 100_000), "nested too deeply"),
    "state, step in words": (lambda p: edit_state(p, step="4"), "state.json has no valid step"),
    "state, half a step": (lambda p: edit_state(p, step=3.5), "state.json has no valid step"),
    "state, another step": (lambda p: edit_state(p, step=5), "holds step 5: rename the folder to step-00000005"),
    "state, no tokens": (lambda p: edit_state(p, tokens=None), "state.json has no valid tokens"),
    "state, no files": (lambda p: edit_state(p, files=None), "state.json has no valid files"),
    "state, files elsewhere": (lambda p: edit_state(p, sha256={"../../a": ""}), "state.json has no valid sha256"),
    "state, no order": (lambda p: edit_state(p, order=None), "state.json has no valid order"),
    "state, no checksums": (lambda p: edit_state(p, checksums={}), "no checksum of tensor model.embed_tokens.weight"),
    "state, checksums of another kind": (lambda p: edit_state(p, checksums={NORM: [3, 4]}), "has no valid checksums"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(damage, damaged, corpus, tmp_path, capsys):
    _, newest = damaged
    spoil, named = DAMAGES[damage]
    spoil(newest)
    line = refusal(capsys, arguments(tmp_path / "other", corpus, f"resume={newest}", "train.steps=5"))
    assert str(newest) in line and named in line, line
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


# each kind of check once; the others run with --full
AUTO = ("weight", "exp_avg", "header, the format", "state, the step", "config", "optimizer cut", "state missing")


@pytest.mark.parametrize("damage", [pytest.param(d, marks=[pytest.mark.full] * (d not in AUTO)) for d in DAMAGES])
def test_resume_auto_uses_checkpoint_before_damaged_one(damage, damaged, corpus, finished, capsys):
    folder, newest = damaged
    spoil, named = DAMAGES[damage]
    spoil(newest)
    assert main(arguments(folder, corpus, "resume=auto", "train.steps=4", "checkpoint.every=1")) == 0
    out, err = capsys.readouterr()
    (warning,) = [line for line in err.splitlines() if line.startswith("warning: ") and str(newest) in line]
    assert named in warning
    assert "resumed" in out + err and "at step 3" in out + err
    assert tensor_bytes(newest) == tensor_bytes(checkpoint_of(finished, 4))
    assert [r["step"] for r in rows(folder)] == [1, 2, 3, 4]


def test_misnamed_checkpoint_is_skipped_and_set_aside(damaged, corpus, capsys):
    """Otherwise it would count as the newest one forever."""
    folder, newest = damaged
    false = newest.with_name("step-99999999999999999999")
    shutil.copytree(newest, false)
    assert main(arguments(folder, corpus, "resume=auto", "train.steps=4")) == 0
    out, err = capsys.readouterr()
    (warning,) = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert f"{false} holds step 4: rename the folder to step-00000004" in warning
    assert "at step 4" in out + err and not false.exists()
    assert false.with_name(f"superseded-{false.name}").is_dir() and newest.is_dir()


@pytest.mark.parametrize("damage", ["weight", "state", "config cut"])
def test_resume_auto_refuses_if_all_checkpoints_are_damaged(damage, damaged, corpus, capsys):
    folder, newest = damaged
    for checkpoint in (newest, checkpoint_of(folder, 3)):
        DAMAGES[damage][0](checkpoint)
    assert main(arguments(folder, corpus, "resume=auto")) == 2
    *warnings, line = capsys.readouterr().err.splitlines()
    assert all(w.startswith("warning: ") for w in warnings)
    assert {str(newest), str(checkpoint_of(folder, 3))} <= {w.split()[1] for w in warnings}
    assert line.startswith("error: resume=auto: every checkpoint") and "damaged" in line


@pytest.mark.full
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"])
def test_any_flipped_bit_of_checkpoint_is_refused(file, damaged, corpus, tmp_path, capsys):
    """Flips every 37th byte of a header or a small file, and 20 bytes of the tensors."""
    _, newest = damaged
    path = newest / file
    size = path.stat().st_size
    small = 8 + int.from_bytes(path.read_bytes()[:8], "little") if path.suffix == ".safetensors" else size
    for at in [*range(0, small, 37), *range(small, size, (size - small) // 20 + 1)]:
        flip(path, at, bit=at % 8)
        line = refusal(capsys, arguments(tmp_path / "other", corpus, f"resume={newest}", "train.steps=5"))
        assert str(newest) in line, f"byte {at}: {line}"
        flip(path, at, bit=at % 8)


# ---------------------------------------------------------------------------------------------- the real command line


@pytest.mark.quiet
@pytest.mark.full
def test_wrong_mesh_under_torchrun_is_one_error_at_once(tmp_path, corpus):
    began = time.monotonic()
    done = run(arguments(tmp_path / "run", corpus, "mesh.dp=4"), tmp_path, ranks=2)
    assert done.returncode != 0 and "needs 4 ranks but 2 started" in one_error(done.stderr)
    assert time.monotonic() - began < 20


@pytest.mark.full
def test_error_on_rank_0_only_ends_torchrun_at_once(finished, corpus, tmp_path):
    began = time.monotonic()
    done = run(arguments(finished, corpus, "mesh.fsdp=-1"), tmp_path, ranks=2)
    assert done.returncode != 0 and "already holds a run" in one_error(done.stderr)
    assert time.monotonic() - began < 20


def test_one_process_trains_without_torchrun(tmp_path, corpus, monkeypatch):
    """It trains, also with the default logger, writes only to the run folder, and imports no compiler."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    folder = tmp_path / "run"
    done = run(arguments(folder, corpus, "logger=wandb", "mesh.fsdp=-1"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"finished step 10 of 10: saved {checkpoint_of(folder, 10)}" in done.stdout + done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "ndtrain.engine.executor" in imported and not {"torch._dynamo", "sympy"} & imported
    steps = rows(folder)
    assert [r["step"] for r in steps] == list(range(1, 11)) and steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert {p.name for p in folder.iterdir()} > {"checkpoints", "config.yaml", "logs", "metrics.jsonl", "wandb"}
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "files outside the run folder"
    state = json.loads((checkpoint_of(folder, 10) / "state.json").read_text())
    assert (state["step"], state["tokens"]) == (10, steps[-1]["tokens"]) and state["config"]["train"]["steps"] == 10


def test_one_process_refuses_on_stderr_with_status_2(tmp_path, corpus):
    done = run(arguments(tmp_path / "run", corpus, "mesh.fsdq=2"), tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "did you mean 'mesh.fsdp'" in one_error(done.stderr)


@pytest.mark.parametrize(
    ("world", "overrides", "each"),
    [
        (1, [], 8), (2, ["mesh.dp=2"], 4), (4, ["mesh.fsdp=2", "mesh.tp=2"], 4), (1, ["train.micro_batch=2"], 2),
        (2, ["mesh.pp=2"], 2), (4, ["mesh.pp=2", "mesh.dp=2"], 1), (2, ["mesh.pp=2", "train.global_batch=12"], 3),
        (2, ["mesh.pp=2", "train.global_batch=10"], 2), (2, ["mesh.pp=2", "train.global_batch=3"], 1),
    ],
)  # fmt: skip
def test_default_micro_batch_is_share_of_rank(world, overrides, each):
    """An explicit micro_batch wins, and a pipeline needs several microbatches."""
    cfg = resolve(load_config(["recipe=llama_small", *overrides]), world)
    assert cfg.train.micro_batch == each


@pytest.mark.full
def test_mesh_size_minus_1_uses_all_ranks(tmp_path, corpus):
    assert run_ranks(rank_main, 2, arguments(tmp_path / "run", corpus, "mesh.fsdp=-1", "train.steps=3")) == [0, 0]
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").mesh.fsdp == 2
    assert [r["step"] for r in rows(tmp_path / "run")] == [1, 2, 3]
    assert " rank 1 INFO " in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A folder with a user's recipe `tiny`."""
    path = tmp_path / "mine" / "recipe" / "tiny.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\ndefaults:\n  - override /model: llama_debug\ntrain:\n  seq_len: 16\n")
    return tmp_path / "mine"


def test_cfg_job_prints_resolved_run(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--config-dir", str(recipe), "--cfg", "job", "recipe=tiny", "optim.lr=0.5"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert (shown.model.hidden_size, shown.train.seq_len, shown.optim.lr) == (64, 16, 0.5) and "recipe" not in shown
    assert [p.name for p in tmp_path.iterdir()] == ["mine"], "files outside the run folder"


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--multirun"]])
@pytest.mark.parametrize(
    ("override", "expected"),
    [("mesh.fsdq=2", "'mesh.fsdp'"), ("+mesh.fsdq=2", "'mesh.fsdp'"), ("recipe=llama_smal", "'llama_small'")],
)
def test_hydra_flags_print_same_errors(flags, override, expected, tmp_path, capsys):
    assert expected in refusal(capsys, [*flags, f"run.dir={tmp_path}/run", override])


def test_multirun_writes_one_folder_per_job(tmp_path, corpus):
    """Each job has a folder and a name of its own, and loggers a group and tags."""
    done = run([*arguments(Path("-"), corpus)[:-1], "--multirun", "train.steps=3", "run.seed=1,2"], tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / "runs" / "llama_debug" / f"run.seed={seed}" for seed in "12"]
    one, two = map(rows, folders)
    assert len(one) == len(two) == 3 and one[0]["loss"] != two[0]["loss"]
    for seed, folder in enumerate(folders, start=1):
        cfg = OmegaConf.load(folder / "config.yaml")
        assert (cfg.run.name, cfg.run.dir) == (f"llama_debug run.seed={seed}", f"runs/llama_debug/run.seed={seed}")
        assert (cfg.logger.group, cfg.logger.tags) == ("llama_debug", [f"run.seed={seed}"])
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["llama_debug", "sweeps"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "folders"),
    [
        (["run.dir=a", "optim.lr=1e-3,2e-3"], ["a/optim.lr=0.001", "a/optim.lr=0.002"]),
        (["run.dir=a-${optim.lr}", "optim.lr=1e-3,2e-3"], ["a-0.001", "a-0.002"]),
        (["run.name=x,y"], ["runs/x", "runs/y"]),
        (["run.name=s-${run.seed}", "run.seed=1,2"], ["runs/s-1", "runs/s-2"]),
        (["hydra.sweep.dir=a", "run.seed=1,2"], ["a/run.seed=1", "a/run.seed=2"]),
        (["hydra.sweep.dir=a", "hydra.sweep.subdir=b${hydra:job.num}", "run.seed=1,2"], ["a/b0", "a/b1"]),
        (["data.text_key='../x','../../x'"], [f"runs/llama_debug/data.text_key={up}_x" for up in ("..", ".._..")]),
        (["run.name=n", f"data.text_key={'x' * 90},y"], ["runs/n/0", "runs/n/data.text_key=y"]),
    ],
)
def test_sweep_folders_follow_run_dir(overrides, folders, tmp_path, corpus):
    given = [*arguments(Path("-"), corpus)[:-1], "--multirun", "train.steps=1", "optim.warmup=0"]
    done = run([*given, *overrides], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(str(p.parent.relative_to(tmp_path)) for p in tmp_path.rglob("metrics.jsonl")) == sorted(folders)


@pytest.mark.full
def test_stop_signal_ends_sweep(tmp_path, corpus):
    args = [*arguments(Path("-"), corpus)[:-1], "--multirun", "train.steps=100000", "run.seed=1,2"]
    first = tmp_path / "runs" / "llama_debug" / "run.seed=1"
    with started(args, tmp_path) as process:
        wait_for(lambda: rows(first), "a step")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 85
    assert not (first.parent / "run.seed=2").exists()


@pytest.mark.full
def test_multirun_prints_one_error_line_per_job(finished, corpus, tmp_path):
    same = [f"hydra.sweep.dir={finished}", "hydra.sweep.subdir=."]
    done = run(["--multirun", *arguments(finished, corpus), "run.seed=1,2", *same], tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 2 and all("already holds a run" in one_error(line) for line in lines)


def test_user_recipe_trains(recipe, tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rest = arguments(tmp_path / "run", corpus, "train.steps=3")[1:]
    assert main(["--config-dir", recipe.name, "recipe=tiny", *rest]) == 0
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").train.seq_len == 16
