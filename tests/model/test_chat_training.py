"""Epochs of conversations on a mesh equal a plain loop of `transformers` over the same conversations, padded and not
packed."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from ndtrain.config import ConfigError, load_config, resolve, resolve_epochs
from ndtrain.data import microbatches, open_data
from ndtrain.data.token_array import Packing
from ndtrain.engine.evaluate import evaluate
from ndtrain.model.families.hf_config import from_hf, read_hf_config
from ndtrain.train import main
from tests.data.test_chat import conversations_of, theirs
from tests.lib.chat_folders import write_model_folder
from tests.lib.helpers import WORDS, checkpoint_of, config_refusal, rank_main, refusal, rows, write_corpus
from tests.lib.ranks import run_ranks
from tests.model.test_families import open_transformers, tensors, worst

T, BATCH = 128, 4
FULL = pytest.mark.full
IGNORE = -100
__all__ = ["theirs"]  # a fixture

Sample = tuple[tuple[int, ...], tuple[int, ...]]  # ids, and which of them are learned


def write_chat(path: Path, count: int) -> list[list[dict[str, str]]]:
    draw = random.Random(0)
    text = lambda: " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 9)))
    turn = lambda: [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    chats = [[message for _ in range(draw.randint(1, 3)) for message in turn()] for _ in range(count)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return chats


def arguments(run_dir: Path, source: Path, *more: str) -> list[str]:
    return [
        "recipe=llama_debug", "logger=jsonl", "hardware.device=cpu", "hardware.peak_tflops=0.1", f"run.dir={run_dir}",
        "data=chat", f"data.path={source.parent}/chat.jsonl", f"data.tokenizer={source}", f"init_from={source}",
        "train.epochs=2", f"train.seq_len={T}", f"train.global_batch={BATCH}", "train.micro_batch=1",
        "precision.params=fp64", "precision.compute=fp64", "optim.lr=1e-3", "optim.schedule=constant",
        "optim.warmup=0", "optim.clip=null", "optim.weight_decay=0.1", "optim.betas=[0.9,0.95]", "data.validation=0",
        *more,
    ]  # fmt: skip


def samples_of_steps(args: list[str], source: Path) -> list[list[tuple[int, ...]]]:
    """The ids of the conversations of each step of two epochs, as ndtrain reads them."""
    cfg = load_config(args)
    cfg.model = from_hf(read_hf_config(source))
    data = open_data(cfg := resolve(cfg, 1))
    sequences = data.sequences(cfg, None, 0, None)
    assert 2 * data.packed.count % BATCH == 0, "the last step would begin a third epoch"
    found = []
    for step in range(2 * data.packed.count // BATCH):
        batches = microbatches(sequences, step, range(BATCH), 1, packing=Packing(data.eos_id))
        found.append([(*ids, last) for batch in batches for ids, last in _whole(batch)])
    return found


def _whole(batch: Any) -> list[tuple[tuple[int, ...], int]]:
    """(all ids but the last, the last one) of each conversation of a row."""
    (starts,) = batch.documents
    ends = [*starts[1:], batch.tokens.shape[1]]
    rows = [batch.tokens[0, a:b].tolist() for a, b in zip(starts, ends, strict=True)]
    return [(tuple(row[:-1]), row[-1]) for row in rows[: len(conversations_of(batch))]]


def train_transformers(model: torch.nn.Module, steps: list[list[Sample]]) -> tuple[list[float], dict]:
    """Trains on right-padded batches of conversations. The loss is the mean over the learned tokens of a step."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    parts = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(parts, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for samples in steps:
        longest = max(len(ids) for ids, _ in samples)
        pad = lambda values, fill, n=longest: torch.tensor([[*v, *[fill] * (n - len(v))] for v in values])
        ids, mask = pad([ids for ids, _ in samples], 0), pad([[1] * len(ids) for ids, _ in samples], 0)
        labels = pad([[i if k else IGNORE for i, k in zip(*sample, strict=True)] for sample in samples], IGNORE)
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


MESHES = {
    "one process": [],
    "tp cp": ["mesh.tp=2", "mesh.cp=2"],
    "pp fsdp": ["mesh.pp=2", "mesh.fsdp=2"],
    "dp fsdp tp cp": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.cp=2"],
    "ulysses": ["mesh.cp=2", "cp.kind=ulysses"],
}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[FULL] * (m != "one process")) for m in MESHES])
def test_two_chat_epochs_equal_transformers(mesh, theirs, tmp_path):
    source = tmp_path / "source"
    write_model_folder(source, "llama3", marked=True, dtype=torch.float32)
    chats = write_chat(tmp_path / "chat.jsonl", 24)
    masked = [theirs(source, chat, return_assistant_tokens_mask=True) for chat in chats]
    expected = [(tuple(m["input_ids"][:T]), tuple(m["assistant_masks"][:T])) for m in masked]
    assert max(len(m["input_ids"]) for m in masked) > T, "a conversation is cut off"
    args = arguments(tmp_path / "run", source, *MESHES[mesh])
    steps = samples_of_steps(arguments(tmp_path / "run", source), source)
    assert sorted(ids for step in steps for ids in step) == sorted(2 * [ids for ids, _ in expected])
    model = open_transformers(source, from_hf(read_hf_config(source)))
    losses, weights = train_transformers(model, [[(ids, dict(expected)[ids]) for ids in step] for step in steps])
    ranks = 2 ** sum(word.startswith("mesh.") for word in MESHES[mesh])
    assert (run_ranks(rank_main, ranks, args) if ranks > 1 else [main(args)]) == [0] * ranks
    assert [row["loss"] for row in rows(tmp_path / "run")] == pytest.approx(losses, abs=1e-10)
    off, at = worst(
        tensors(checkpoint_of(tmp_path / "run", len(steps)), "model"), weights, lambda a, b: (a - b).abs().max().item()
    )
    assert off < 1e-9, f"{at} is off by {off:.1e} after {len(steps)} steps"


# -------------------------------------------------------------------------------------------------------------- epochs


def test_epochs_run_resolves_steps_and_resumes(tmp_path, capsys):
    source, run_dir = tmp_path / "source", tmp_path / "run"
    write_model_folder(source, "qwen3", marked=True)
    write_chat(tmp_path / "chat.jsonl", 30)
    plan = ["precision.params=fp32", "precision.compute=fp32", "optim.schedule=cosine", "optim.warmup=1"]
    plan += ["optim.min_lr=0", "data.validation=0.2", "train.eval_every=2"]
    args = arguments(run_dir, source, *plan)
    assert main([*args, "train.stop_at=2"]) == 0
    count = int(capsys.readouterr().out.split(" conversations in ")[1].split()[0])
    last = math.ceil(2 * count / BATCH)
    assert last > 2 and f"\n  steps: {last}\n" in (run_dir / "config.yaml").read_text()
    assert main([*args, "resume=auto"]) == 0
    assert [row["step"] for row in rows(run_dir)] == list(range(1, last + 1))
    assert rows(run_dir)[-1]["lr"] == 0.0, "the schedule ends where the epochs do"
    assert rows(run_dir)[1]["eval_loss"] > 0
    newest = evaluate(checkpoint_of(run_dir, last), ["mesh.fsdp=1"])
    assert newest.loss == pytest.approx(rows(run_dir)[-1]["eval_loss"], abs=1e-5) and newest.tokens > 0
    everything = evaluate(checkpoint_of(run_dir, last), ["mesh.fsdp=1"], everything=True)
    assert everything.tokens > newest.tokens
    shorter = [arg for arg in args if arg != "train.epochs=2"]
    line = refusal(capsys, [*shorter, "train.epochs=0.5", "resume=auto"])
    assert line.startswith(
        f"train.epochs=0.5 (train.steps={math.ceil(count / 2 / BATCH)}): the run is already at step {last}"
    )
    assert "raise train.epochs to train on" in line


def test_epochs_of_text_corpus_resolve_to_steps(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    keys = ["recipe=llama_debug", "data=text", f"data.path={corpus}", "data.tokenizer=byte", "data.validation=0"]
    cfg = resolve(load_config([*keys, "train.epochs=1.5", "train.seq_len=64", "train.global_batch=8"]), 1)
    data = open_data(cfg)
    count = (corpus.stat().st_size + 1 - 1) // 64
    assert data.epoch_sequences(cfg) == count
    assert resolve_epochs(cfg, data.epoch_sequences(cfg)).train.steps == math.ceil(1.5 * count / 8)


def test_epochs_and_steps_together_are_refused():
    debug = ["recipe=llama_debug"]
    both = [*debug, "train.epochs=2", "train.steps=10"]
    assert config_refusal(both).startswith("train.steps=10 and train.epochs=2: both set the run's length")
    assert "train.epochs=0.0: must be positive" in config_refusal([*debug, "train.epochs=0"])
    stream = [*debug, "data=hf", "data.path=x", "data.streaming=true", "train.epochs=2"]
    assert config_refusal(stream).startswith("train.epochs=2: a stream has no known length: set train.steps")
    blend = [*debug, "data=blend", "data.blend=[{name: python, weight: 1}]", "train.epochs=2"]
    assert config_refusal(blend).startswith("train.epochs=2: data=blend repeats its corpora and has no epochs")
    cfg = load_config(debug)
    cfg.train.epochs = 2.0  # of a recipe
    assert resolve(cfg.with_given(["train.steps"]), 1).train.epochs is None


def test_resolve_epochs_checks_keys_that_depend_on_steps():
    cfg = lambda *more: resolve(load_config(["recipe=llama_debug", "train.epochs=2", "train.global_batch=4", *more]), 1)
    fitted = resolve_epochs(cfg("optim.schedule=cosine"), 20)
    assert fitted.frozen and fitted.train.steps == 10
    short = resolve_epochs(cfg("optim.schedule=cosine"), 6)
    assert (short.train.steps, short.optim.warmup) == (3, 1) and "is too long for 3 steps" in short.notes[-1]
    later = cfg("train.stop_at=2000")
    with pytest.raises(ConfigError, match=r"train.stop_at=2000 exceeds train.steps=10 \(train.epochs=2\)"):
        resolve_epochs(later, 20)
    with pytest.raises(ConfigError, match=r"optim.warmup=10 must be less than the 10 steps"):
        resolve_epochs(cfg("optim.warmup=10"), 20)
    with pytest.raises(ConfigError, match=r"train.profile=11 exceeds train.steps=10 \(train.epochs=2\)"):
        resolve_epochs(cfg("train.profile='11'"), 20)
    with pytest.raises(ConfigError, match=r"train.epochs=2: the length of the data is unknown"):
        resolve_epochs(cfg(), None)
    whole = cfg("train.steps=3", "train.epochs=null")
    assert resolve_epochs(whole, 20) is whole
