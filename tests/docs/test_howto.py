"""The plugins of the how-to pages load, are selected and train."""

import csv
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import ndtrain
from ndtrain.train import main
from tests.lib.helpers import given_process_group
from tests.lib.ranks import run_ranks

ROOT = Path(ndtrain.__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The modules of all pages, below `my_package`, and a few notes to train on, as files and in a database."""
    folder = tmp_path_factory.mktemp("howto")
    (folder / "my_package").mkdir()
    for page in (ROOT / "docs" / "howto").glob("*.md"):
        for body in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            if named := re.match(r"# my_package/(\w+\.py)\n", body):
                (folder / "my_package" / named[1]).write_text(body)
    (folder / "notes").mkdir()
    notes = [f"Note {i}: {'a ring, a mesh, a table. ' * 200}\n" for i in range(12)]
    for i, note in enumerate(notes):
        (folder / "notes" / f"{i}.txt").write_text(note)
    with sqlite3.connect(folder / "notes.db") as database:
        database.execute("create table notes (text text)")
        database.executemany("insert into notes values (?)", [(note,) for note in notes])
    return folder


SHARED = ["recipe=llama_debug", "train.steps=8", "data=text", "data.path=notes", "data.tokenizer=byte"]


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "WANDB_MODE": "offline"}
    return subprocess.run(
        [sys.executable, "-m", "ndtrain.train", *SHARED, *overrides],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def trained(folder: Path, *overrides: str) -> int:
    """The exit status of the same in a process that has torch loaded."""
    (status,) = run_ranks(main_in, 1, folder, [*SHARED, *overrides], timeout=300)
    return status


def main_in(folder: Path, args: list[str]) -> int:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with given_process_group():
        return main(args)


TOGETHER = ("signum", "row_scaled", "rates", "objectives", "csv_logger", "loss_guard", "scaled", "spaced")


def test_howto_plugins_train_together(folder: Path):
    """A family with an attention function trains too."""
    plugins = ",".join(f"my_package.{name}" for name in TOGETHER)
    status = trained(
        folder, f"plugins=[{plugins}]", "optim=signum", "optim.lr=1e-3", "optim.schedule=inverse_sqrt",
        "optim.warmup=1", "optim.min_lr=0",
        "logger=csv", "logger.columns=[step,loss,lr,head_z_loss]", "run.dir=together",
        "objective=rare_tokens", "objective.first=101", "objective.factor=3", "objective.z_loss=1e-4",
        "model=scaled", "model.residual_scale=0.5", "model.attention=spaced", "model.spacing=4",
    )  # fmt: skip
    assert status == 0
    rows = list(csv.reader((folder / "together" / "metrics.csv").open()))
    assert [row[0] for row in rows] == [str(step) for step in range(1, 9)]
    assert float(rows[-1][1]) < float(rows[0][1])
    assert float(rows[3][2]) == pytest.approx(1e-3 / 4**0.5)
    assert all(float(row[3]) > 1 for row in rows), "the mean squared log-sum-exp of 256 logits"
    config = json.loads(next((folder / "together" / "checkpoints").glob("step-*/config.json")).read_text())
    assert (config["residual_scale"], config["attention"], config["spacing"]) == (0.5, "spaced", 4)


@pytest.mark.full
def test_howto_callback_ends_run(folder: Path):
    done = train(folder, "plugins=[my_package.loss_guard]", "callbacks.loss_guard.most=0.5", "run.dir=guarded")
    assert done.returncode == 1 and "exceeds callbacks.loss_guard.most=0.5" in done.stderr


@pytest.mark.full
def test_howto_optimizer_of_whole_matrices_trains(folder: Path):
    assert trained(folder, "plugins=[my_package.row_scaled]", "optim=row_scaled", "run.dir=row_scaled") == 0


@pytest.mark.full
def test_howto_source_supplies_corpus(folder: Path):
    done = train(folder, "plugins=[my_package.notes]", "data=notes", "data.path=notes.db", "run.dir=from_notes")
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_howto_family_trains_and_saves_its_fields(folder: Path):
    scaled = ["plugins=[my_package.scaled]", "model=scaled", "model.residual_scale=0.5"]
    assert trained(folder, *scaled, "run.dir=family") == 0
    config = json.loads(next((folder / "family" / "checkpoints").glob("step-*/config.json")).read_text())
    assert config["model_type"] == "scaled" and config["residual_scale"] == 0.5


@pytest.mark.full
def test_howto_attention_function_trains_and_is_saved(folder: Path):
    spaced = ["plugins=[my_package.spaced]", "model.attention=spaced", "model.spacing=4"]
    assert trained(folder, *spaced, "run.dir=spaced") == 0
    config = json.loads(next((folder / "spaced" / "checkpoints").glob("step-*/config.json")).read_text())
    assert (config["model_type"], config["attention"], config["spacing"]) == ("ndtrain_llama", "spaced", 4)
