"""`ndtrain checkpoint`: list, verify, diff, average and cast, on the checkpoints of one run."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from ndtrain.checkpoint.__main__ import main
from ndtrain.checkpoint.comparing import diff
from ndtrain.config import ConfigError
from ndtrain.engine.generate import load_model
from ndtrain.train import main as train
from tests.lib.helpers import arguments, checkpoint_of, flip, rows, write_corpus

MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    corpus = write_corpus(folder / "corpus.txt")
    plan = ["train.steps=4", "checkpoint.every=2", "optim.ema=0.5", "optim.lr=1e-2", "checkpoint.max_file_bytes=300000"]
    assert train(arguments(folder / "run", corpus, *plan)) == 0
    return folder / "run"


def said(capsys, status: int, *args) -> str:
    """What a command prints; it exits with `status`."""
    capsys.readouterr()
    assert main([str(a) for a in args]) == status
    out = capsys.readouterr()
    return out.out if status < 2 else out.err


def weights(folder) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("model*.safetensors")) for k, v in load_file(path).items()}


def test_list_names_every_checkpoint_folder(run, capsys, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", folder)
    shutil.copytree(folder / "step-00000002", folder / ".writing-step-00000006")
    next(iter(sorted((folder / "step-00000002").glob("optimizer*")))).unlink()
    damaged, whole, half = said(capsys, 0, "list", tmp_path).splitlines()
    assert "step-00000002" in damaged and damaged.endswith("is missing") and "  damaged: optimizer-00001-of-" in damaged
    assert "step 4  " in whole and f"{rows(run)[-1]['tokens']:,} tokens" in whole and whole.endswith("complete")
    assert "weights fp32, exp_avg fp32, exp_avg_sq fp32, ema fp32" in whole and "mesh one process" in whole
    assert half.endswith("half written")
    assert "holds no checkpoint" in said(capsys, 2, "list", run.parent / "corpus.txt")
    assert "nowhere: no such folder" in said(capsys, 2, "list", "nowhere")


def test_verify_names_the_bad_files(run, capsys, tmp_path):
    good = said(capsys, 0, "verify", run)
    assert good.count("good: ") == 2 and "bad" not in good
    copy = tmp_path / "step-00000004"
    shutil.copytree(checkpoint_of(run, 4), copy)
    names = sorted(p.name for p in copy.glob("*.safetensors"))
    flip(copy / names[0], -5)  # in the last tensor of the file
    (copy / names[-1]).write_bytes((copy / names[-1]).read_bytes()[:-8])
    flip(copy / "tokenizer.json", 100)
    bad = said(capsys, 1, "verify", copy)
    header = (copy / names[0]).read_bytes()
    last = list(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]))[-1]
    assert f"the content of {last} does not match its checksum" in bad
    assert f"{names[-1]} has " in bad and "tokenizer.json does not match its checksum" in bad
    assert bad.count("bad: ") == 3
    state = json.loads((checkpoint_of(run, 4) / "state.json").read_text())
    (copy / "state.json").write_text(json.dumps(state | {"step": 5}))
    assert "state.json does not match its checksum" in said(capsys, 1, "verify", copy)


def test_verify_finds_any_flipped_bit_of_tensor(run, tmp_path, capsys):
    copy = tmp_path / "step-00000004"
    shutil.copytree(checkpoint_of(run, 4), copy)
    path = sorted(copy.glob("model*.safetensors"))[0]
    whole, start = path.read_bytes(), 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for at in range(start, len(whole), len(whole) // 7):
        flip(path, at, at % 8)
        assert "the content of " in said(capsys, 1, "verify", copy)
        path.write_bytes(whole)
    said(capsys, 0, "verify", copy)


def test_diff_reports_largest_difference_per_tensor(run, capsys, tmp_path):
    a, b = checkpoint_of(run, 2), checkpoint_of(run, 4)
    assert said(capsys, 0, "diff", a, a).splitlines() == ["0 tensors differ, 84 are equal"]
    difference = diff(a, b)
    assert difference.config["step"] == (2, 4)
    ours, theirs = weights(a), weights(b)
    for d in difference.tensors:
        if d.name in ours:
            x, y = ours[d.name].double(), theirs[d.name].double()
            assert d.largest == (x - y).abs().max().item() and d.elements == (x != y).sum()
            assert d.relative == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-12)
    assert {d.name for d in difference.tensors} >= {n for n in ours if not torch.equal(ours[n], theirs[n])}
    other = dict(ours) | {"model.norm.weight": torch.ones(3)}
    other["lm_head.weight"] = other["lm_head.weight"].bfloat16()
    other["extra"] = other.pop("model.layers.0.mlp.up_proj.weight")
    other["model.layers.0.input_layernorm.weight"] = ours["model.layers.0.input_layernorm.weight"] * float("nan")
    (tmp_path / "hf").mkdir()
    save_file(other, tmp_path / "hf" / MODEL)
    text = said(capsys, 1, "diff", a, tmp_path / "hf")
    assert "shape model.norm.weight: (64,) | (3,)" in text and "dtype lm_head.weight: fp32 | bf16" in text
    assert "only in A: model.layers.0.mlp.up_proj.weight" in text and "only in B: extra" in text
    assert "model.layers.0.input_layernorm.weight: 64 of 64 elements, largest nan" in text


def test_an_average_is_the_weighted_mean(run, capsys, tmp_path):
    a, b, out = checkpoint_of(run, 2), checkpoint_of(run, 4), tmp_path / "out"
    said(capsys, 0, "average", a, b, f"out={out}", "weights=1,3")
    x, y, got = weights(a), weights(b), weights(out)
    assert list(got) and got.keys() == x.keys()
    for name in got:
        assert torch.equal(got[name], (x[name].double() * 0.25 + y[name].double() * 0.75).float()), name
    assert (out / "tokenizer.json").read_bytes() == (b / "tokenizer.json").read_bytes()
    assert not (out / "state.json").exists() and not list(tmp_path.glob(".writing-*"))


@pytest.mark.full
def test_average_loads_in_transformers_and_init_from(run, capsys, tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    said(capsys, 0, "average", checkpoint_of(run, 2), checkpoint_of(run, 4), f"out={out}")
    got = weights(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(model.lm_head.weight, got["lm_head.weight"])
    plan = ["train.steps=1", "optim.warmup=0", f"init_from={out}", f"run.dir={tmp_path / 'next'}", "logger=jsonl",
            "data=text", f"data.path={run.parent / 'corpus.txt'}", f"data.tokenizer={out}", "train.seq_len=32",
            "train.global_batch=2", "hardware.device=cpu", "hardware.peak_tflops=0.1"]  # fmt: skip
    assert train(plan) == 0


def test_cast_rounds_weights_or_exports_ema(run, capsys, tmp_path):
    source = checkpoint_of(run, 4)
    said(capsys, 0, "cast", run, "dtype=bf16", f"out={tmp_path / 'bf16'}")
    for name, value in weights(source).items():
        assert torch.equal(weights(tmp_path / "bf16")[name], value.bfloat16()), name
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    said(capsys, 0, "cast", source, "dtype=fp64", "ema=true", f"out={tmp_path / 'ema'}")
    stored = {k: v for p in source.glob("optimizer*.safetensors") for k, v in load_file(p).items()}
    for name, value in weights(tmp_path / "ema").items():
        assert torch.equal(value, stored[f"ema.{name}"].double()), name
    assert not torch.equal(stored["ema.lm_head.weight"], weights(source)["lm_head.weight"])


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["verfy", "x"], "verfy: no such command; did you mean 'verify'?"),
        (["cast", "RUN", "out=OUT"], "dtype is missing"),
        (["cast", "RUN", "dtype=bf8", "out=OUT"], "bf8: no such dtype"),
        (["cast", "RUN", "dtype=bf16", "out=RUN"], "already exists"),
        (["cast", "nowhere", "dtype=bf16", "out=OUT"], "nowhere: no such folder"),
        (["average", "RUN", "out=OUT"], "average takes two checkpoints or more; 1 given"),
        (["average", "RUN", "RUN", "out=OUT", "weights=1,2,3"], "weights: 3 weights for 2 checkpoints"),
        (["average", "RUN", "RUN", "out=OUT", "weights=1,-1"], "their sum must not be 0"),
        (["diff", "RUN"], "diff takes two"),
        (["list", "RUN", "deep=1"], "deep=1: no such folder, and this command has no keys"),
    ],
)
def test_bad_argument_is_one_line_error(run, capsys, tmp_path, args, line):
    words = [w.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for w in args]
    text = said(capsys, 2, *words)
    assert text.startswith("error: ") and line in text and text.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_average_of_other_models_is_refused(run, capsys, tmp_path):
    for name, change in (("lacks", lambda w: w.pop("model.norm.weight")),
                         ("shape", lambda w: w.update({"model.norm.weight": torch.ones(3)}))):  # fmt: skip
        other = weights(checkpoint_of(run, 4))
        change(other)
        (tmp_path / name).mkdir()
        save_file(other, tmp_path / name / MODEL)
        text = said(capsys, 2, "average", run, tmp_path / name, f"out={tmp_path / 'out'}")
        assert "model.norm.weight" in text and "average checkpoints of one model" in text
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".writing-*"))


def unreadable(name: str) -> Callable:
    """`os.preadv` on a disk that does not deliver the elements in files of this name."""
    real = os.preadv

    def read(fd: int, *args) -> int:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *args)

    return read


def test_every_command_names_unreadable_file(run, capsys, tmp_path):
    folder, out = checkpoint_of(run, 4), tmp_path / "out"
    name = sorted(p.name for p in folder.glob("model*.safetensors"))[0]
    broken = f"{folder / name} cannot be read (Input/output error)"
    with mock.patch("os.preadv", unreadable(name)):
        assert broken in said(capsys, 1, "verify", folder)
        for command in (["diff", folder, folder], ["average", folder, folder, f"out={out}"],
                        ["cast", folder, "dtype=bf16", f"out={out}"]):  # fmt: skip
            text = said(capsys, 2, *command)
            assert broken in text and text.count("\n") == 1 and not out.exists()
        with pytest.raises(ConfigError) as refused:
            load_model(folder, torch.device("cpu"))
    assert f"init_from={folder}: {name} cannot be read (Input/output error)" == str(refused.value)


GROWTH = """
import resource, sys
from pathlib import Path
import torch
from ndtrain.checkpoint.comparing import diff
from ndtrain.checkpoint.rewriting import average
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
average([Path(sys.argv[1]), Path(sys.argv[2])], Path(sys.argv[3]), dtype=torch.bfloat16)
diff(Path(sys.argv[1]), Path(sys.argv[2]))
print((peak() - before) * 1024)
"""


@pytest.mark.full
def test_average_holds_no_whole_tensor_in_memory(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        save_file({"big": torch.randn(16 * 2**20), "other": torch.randn(16 * 2**20)}, tmp_path / name / MODEL)
    args = [sys.executable, "-c", GROWTH, *(str(tmp_path / name) for name in ("a", "b", "out"))]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100e6, "two files of 128 MiB"
