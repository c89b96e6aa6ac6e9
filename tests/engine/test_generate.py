"""Text from a checkpoint: greedy output equals `transformers` token for token, with a cache and without."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ndtrain.engine.generate import end_tokens, generate, load_model
from ndtrain.generate import main
from ndtrain.model import Transformer
from ndtrain.model.sampling import next_tokens
from ndtrain.train import main as train
from tests.lib.helpers import arguments, write_corpus

CPU = torch.device("cpu")
NEW = 60  # beyond the window of 24
FAMILIES = ["llama3", "llama3.2", "mistral", "qwen2-window", "qwen3", "deepseek-v3", "moonlight"]


def without_cache(model: Transformer, prompt: list[int], new: int) -> list[int]:
    made = list(prompt)
    for _ in range(new):
        made.append(int(model.logits(torch.tensor([made]))[0, -1].argmax()))
    return made[len(prompt) :]


def enlarge_blocks(folder: Path) -> None:
    """Multiplies the blocks' matrices. With small ones, a model with tied embeddings repeats its last token."""
    for path in folder.glob("*.safetensors"):
        grown = lambda name, x: x * 6 if ".layers." in name and x.dim() > 1 else x
        save_file({name: grown(name, x) for name, x in load_file(path).items()}, path, {"format": "pt"})


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) for n in FAMILIES])
def test_greedy_output_equals_transformers(name, tmp_path):
    from tests.model.test_families import from_transformers, open_transformers

    from_transformers(tmp_path, name)
    enlarge_blocks(tmp_path)
    model, theirs = load_model(tmp_path, CPU, torch.float64), open_transformers(tmp_path)
    for prompt in ([5, 9, 77, 31], [1], list(range(20, 60))):
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        want = theirs.generate(torch.tensor([prompt]), **options)[0].tolist()[len(prompt) :]
        got = generate(model, prompt, NEW)
        assert got == want
        assert len(set(got)) > 5, "the text must not be one token"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """A run of a model with every operation on scores: a window, a softcap and linear biases."""
    folder = tmp_path_factory.mktemp("run")
    plan = ["train.steps=3", "optim.lr=3e-2", "model.sliding_window=9", "model.attn_logit_softcapping=5.0",
            "model.alibi=true", "model.model_type=mistral"]  # fmt: skip
    assert train(arguments(folder / "run", write_corpus(folder / "corpus.txt"), *plan)) == 0
    return folder / "run"


def test_generate_with_cache_equals_without(window):
    model = load_model(window / "checkpoints" / "step-00000003", CPU, torch.float64)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))
    prompt = [100, 101, 32, 97]
    got = generate(model, prompt, 30)
    assert got == without_cache(model, prompt, 30) and len(set(got)) > 3
    assert generate(model, prompt, 30, frozenset(got[4:5])) == got[: got.index(got[4]) + 1], (
        "it ends with the end token"
    )


def test_generate_command_prints_text_and_refuses_mistakes(window, capsys):
    assert main([str(window), "the quick", "", "max_new_tokens=5"]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("the quick") and out.err.count("5 tokens, ") == 2
    drawn = []
    for seed in (1, 1, 2):
        assert main([str(window), "the", "max_new_tokens=12", "temperature=2", f"seed={seed}"]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    assert main([str(window), "x=3", " topk=3", "max_new_tokens=1"]) == 0
    assert capsys.readouterr().out.startswith("x=3")
    assert end_tokens(window / "checkpoints" / "step-00000003") == {256}
    for words, line in (
        ([str(window)], "the text is missing"),
        (["nowhere", "a"], "nowhere: no such folder"),
        ([str(window), "a", "temperature=-1"], "temperature=-1: must be a number"),
        ([str(window), "a", "top_k=0"], "top_k=0: must be a whole number"),
        ([str(window), "a", "topk=3"], "topk=3: no such key; did you mean 'top_k'?"),
        ([str(window.parent), "a"], "there is no tokenizer.json"),
    ):
        assert main(words) == 2
        assert line in capsys.readouterr().err


def test_next_tokens_follow_temperature_and_top_k():
    logits, draw = torch.tensor([[0.0, 3.0, 2.0, -1.0]]).repeat(4000, 1), torch.Generator().manual_seed(0)
    assert next_tokens(logits).unique().tolist() == [1]
    drawn = next_tokens(logits, 1.0, None, draw)
    share = torch.bincount(drawn, minlength=4) / 4000
    assert torch.allclose(share, logits[0].softmax(0), atol=0.03)
    assert next_tokens(logits, 1.0, 2, draw).unique().tolist() == [1, 2]
    assert next_tokens(logits, 0.01, None, draw).unique().tolist() == [1]


def test_end_tokens_reads_several_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert end_tokens(tmp_path) == {2, 5}
