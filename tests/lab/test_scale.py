"""The trials of `lab.scale`: real ranks in forked processes, and a rank of a large run without others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lab.scale.__main__ import main
from lab.scale.counted_store import CountedStore

ROOT = Path(__file__).resolve().parents[2]


def test_counted_store_counts_operations_and_bytes_of_values():
    store = CountedStore(dist.HashStore())
    store.set("a", "four")
    store.multi_set(["b", "c"], ["1", "22"])
    assert store.get("a") == b"four" and store.multi_get(["b", "c"]) == [b"1", b"22"]
    assert store.check(["a", "d"]) is False and store.add("n", 2) == 2
    assert store.operations == {"set": 1, "multi_set": 1, "get": 1, "multi_get": 1, "check": 1, "add": 1}
    assert store.nbytes == 4 + 3 + 4 + 3
    nested = dist.PrefixStore("x", store)  # as gloo wraps it
    nested.set("k", "v")
    assert store.operations["set"] == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [(["ranks", "ranks=1"], "at least 2"), (["table", "ranks=x"], "whole numbers"), (["rank"], "trial")],
)
def test_bad_arguments_are_one_line(args, said, capsys):
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.full
def test_real_ranks_save_and_resume_on_another_mesh(tmp_path):
    """In a process of its own, because it forks."""
    out = tmp_path / "ranks.json"
    args = ["ranks", "ranks=8", "mesh=fsdp=4 tp=2", "resume=pp=2 dp=4", f"out={out}"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lab.scale", *args], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = json.loads(out.read_text())["runs"]
    assert first["faults"] == second["faults"] == []
    assert len(second["loss"]) == 6 and second["loss"][:3] == first["loss"]
    for run in (first, second):
        assert run["store_operations"]["median"] < 80 and run["open_files"]["most"] < 60, run


@pytest.mark.full
def test_table_counts_a_rank_of_each_run(tmp_path):
    out = tmp_path / "table.json"
    assert main(["table", "ranks=32,256", "recipe=llama3_405b", "hang=32", f"out={out}"]) == 0
    small, large = json.loads(out.read_text())["rows"]
    assert small["groups"] <= large["groups"] <= 2 and large["descriptors"] - small["descriptors"] == 2 * 3
    assert small["report_bytes"] < 1500 and large["report_bytes"] is None and small["files"] == large["files"]
