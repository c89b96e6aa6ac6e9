"""`ndtrain plan table`: the file it writes, and one line for each mistake."""

import csv
import io

import pytest

from ndtrain.plan.__main__ import main
from tests.plan.published.test_run import ROW

MORE = {"derived_step_time_s": "1.5", "memory_gb": "20", "ours": "kept, as it is"}
ROWS = [ROW | MORE, ROW | MORE | {"gpu": "TPUv4"}, ROW | MORE | {"tp": "1", "gpus": "8"}]
PREDICTED = ["predicted_step_time_s", "predicted_tokens_s_gpu", "predicted_mfu_full", "predicted_memory_gb"]


def written(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    source = written(folder / "in.csv", ROWS)
    assert main(["table", f"in={source}", f"out={folder}/out.csv"]) == 0
    return read(folder / "out.csv")


def test_rows_keep_their_columns_and_gain_predictions(made):
    assert len(made) == 3
    for row, source in zip(made, ROWS, strict=True):
        assert {key: row[key] for key in source} == source
    assert list(made[0])[-5:] == [*PREDICTED, "refused"]


def test_predictions_agree_with_each_other(made):
    row = made[0]
    step, tokens, mfu, memory = (float(row[key]) for key in PREDICTED)
    assert row["refused"] == "" and step > 0 and 0 < mfu < 1 and 0.5 < memory < 80
    assert tokens == pytest.approx(64 * 256 / 16 / step, rel=1e-2)
    matmul = 8 * (4 * 512**2 + 2 * 512 * 2048) + 1024 * 512
    assert mfu == pytest.approx(tokens * (6 * matmul + 12 * 8 * 512 * 256) / 989.5e12, rel=2e-2)


def test_tensor_parallelism_is_slower_for_a_small_model(made):
    """Per GPU: it halves its matmuls and adds collectives."""
    assert float(made[2]["predicted_tokens_s_gpu"]) > float(made[0]["predicted_tokens_s_gpu"])


def test_a_refused_row_has_no_predictions(made):
    assert made[1]["refused"].startswith("gpu=TPUv4: no description") and not any(made[1][key] for key in PREDICTED)


def test_predicted_table_can_be_predicted_again(made, tmp_path):
    source = written(tmp_path / "again.csv", made[:1])
    assert main(["table", f"in={source}", f"out={source}"]) == 0
    assert read(source) == made[:1]


MISTAKES = {
    "no file": ("in=nowhere.csv out=o.csv", "in=nowhere.csv: cannot be read (No such file or directory)"),
    "no column": ("in=short.csv out=o.csv", "in=short.csv: no column seq_len; required: layers, hidden"),
    "no text": ("in=binary.csv out=o.csv", "in=binary.csv: cannot be read (it is not CSV in UTF-8)"),
    "too many cells": ("in=long.csv out=o.csv", "in=long.csv: line 2 has more cells than the header"),
    "empty": ("in=empty.csv out=o.csv", "in=empty.csv: no column layers"),
    "no folder": ("in=good.csv out=nowhere/o.csv", "out=nowhere/o.csv: cannot be written"),
    "no option": ("in=good.csv", "out is missing"),
    "an override": ("in=good.csv out=o.csv mesh.tp=2", "mesh.tp: no such key"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_argument_is_one_line_error(name, tmp_path, monkeypatch, capsys):
    args, said = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    header = ",".join(ROW)
    (tmp_path / "short.csv").write_text("layers,hidden,heads\n1,2,3\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "long.csv").write_text(f"{header}\n{',' * 100}\n")
    (tmp_path / "good.csv").write_text(f"{header}\n")
    (tmp_path / "empty.csv").write_text("")
    assert main(["table", *args.split()]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and err.count("\n") == 1
