"""The trial that reads the runs of a multirun."""

import json

import pytest

from lab.optim.__main__ import main
from ndtrain.train import main as train
from tests.lib.helpers import arguments, write_corpus


@pytest.mark.full
def test_runs_of_a_multirun_become_cases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = arguments(tmp_path, write_corpus(tmp_path / "corpus.txt"), "train.steps=6", "checkpoint.every=0")[:-1]
    words = [word for word in words if not word.startswith("run.dir")]
    assert train(["--multirun", *words, "optim.lr=1e-3,1e-2", "run.dir=runs/lr-${optim.lr}"]) == 0
    out = tmp_path / "runs.json"
    assert main(["runs", "folder=runs", "keys=optim.name,optim.lr", "last=2", "points=3", f"out={out}"]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert [case["settings"] for case in cases] == [{"optim.name": "adamw", "optim.lr": lr} for lr in (1e-3, 1e-2)]
    for case in cases:
        lr = case["settings"]["optim.lr"]
        text = (tmp_path / "runs" / f"lr-{lr}" / "metrics.jsonl").read_text()
        losses = [json.loads(line)["loss"] for line in text.splitlines()]
        means = [[at + 2, sum(losses[at : at + 2]) / 2] for at in (0, 2, 4)]
        assert case["curve"] == [[at, pytest.approx(loss, rel=1e-5)] for at, loss in means]
        assert case["loss"] == pytest.approx(means[-1][1], rel=1e-5) and case["steps"] == 6


def test_folder_without_runs_is_refused(tmp_path, capsys):
    assert main(["runs", f"folder={tmp_path}"]) == 2
    assert "there is no metrics.jsonl in a folder below" in capsys.readouterr().err
