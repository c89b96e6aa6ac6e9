"""A checkpoint that the disk does not deliver: the file is named, and resume=auto uses the checkpoint before it."""

import errno
import json
import os
import random
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ndtrain.train import main
from tests.lib.faulty_reads import CUT, ERROR, build_library, reads, run_preloaded, watch
from tests.lib.helpers import arguments, checkpoint_of, given_process_group, rows, write_corpus
from tests.lib.ranks import run_ranks

FILES = (
    "state.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "model.safetensors", "optimizer.safetensors",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> Path:
    """The folder of a run of 4 steps with the checkpoints of steps 3 and 4. Tests copy it and do not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(arguments(folder, corpus, "train.steps=4", "checkpoint.every=1")) == 0
    return folder


# -------------------------------------------------------------------------------------------- real faults of a process

Case = tuple[str, str, float]  # file, kind of fault, when: share of the reads of that file in a whole load


def resume_each(finished: str, corpus: str, folder: str, cases: str) -> None:
    """Resumes a copy of a run for each case, and prints a JSON line with the exit status and the output of each. For
    a process with the preloaded library."""
    resume = partial(_resume, Path(finished), Path(corpus))
    in_all = dict(zip(FILES, resume(Path(folder, "whole"), FILES)["reads"], strict=True))
    for i, (name, kind, share) in enumerate(json.loads(cases)):
        at = 1 + int(share * in_all[name])
        outcome = resume(Path(folder, str(i)), [name], kind, at)
        print(json.dumps({"file": name, "kind": kind, "at": at, "of": in_all[name], **outcome}), flush=True)


def _resume(
    finished: Path, corpus: Path, run: Path, names: Sequence[str], kind: str | None = None, at: int = 0
) -> dict[str, Any]:
    shutil.copytree(finished, run)
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        watch([f"{run.name}/checkpoints/step-00000004/{name}" for name in names], kind, at)
        code = main(arguments(run, corpus, "resume=auto", "train.steps=4"))
    counts = [reads(i) for i in range(len(names))]
    watch([])
    steps = [row["step"] for row in rows(run)]
    shutil.rmtree(run)
    return {"reads": counts, "code": code, "said": output.getvalue(), "steps": steps}


def check_cases(cases: list[Case], finished: Path, corpus: Path, folder: Path) -> None:
    """Runs the cases in one process, and checks that each used the checkpoint before the unreadable one."""
    code = "import sys; from tests.checkpoint.test_unreadable import resume_each; resume_each(*sys.argv[1:])"
    args = [str(finished), str(corpus), str(folder), json.dumps(cases)]
    done = run_preloaded(code, build_library(folder), *args, timeout=120 + 20 * len(cases))
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(cases)
    for outcome in outcomes:
        warnings = [line for line in outcome["said"].splitlines() if line.startswith("warning: ")]
        assert outcome["code"] == 0, outcome
        assert len(warnings) == 1 and "step-00000004" in warnings[0] and outcome["file"] in warnings[0], outcome
        assert "at step 3" in outcome["said"] and outcome["steps"] == [1, 2, 3, 4], outcome


SAMPLE: list[Case] = [
    ("config.json", ERROR, 0.0), ("state.json", ERROR, 0.9), ("model.safetensors", CUT, 0.5),
    ("optimizer.safetensors", ERROR, 0.9),
]  # fmt: skip


def test_read_error_or_truncation_falls_back_to_older(finished, corpus, tmp_path):
    check_cases(SAMPLE, finished, corpus, tmp_path)


@pytest.mark.full
def test_fifty_random_read_errors_fall_back_to_older(finished, corpus, tmp_path):
    draw = random.Random(0)
    each = [(name, kind, draw.random()) for name in FILES for kind in (ERROR, CUT)]
    more = [(draw.choice(FILES[-2:]), draw.choice((ERROR, CUT)), draw.random()) for _ in range(50 - len(each))]
    check_cases(each + more, finished, corpus, tmp_path)


# -------------------------------------------------------------------------------------------- one rank that cannot read


def rank_that_cannot_read(rank: int, name: str, args: list[str]) -> tuple[int, str]:
    """`main` in the process group of `run_ranks`, whose files of this name rank `rank` cannot read."""
    real_open, real_read, output = open, os.preadv, StringIO()

    def fail(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        if os.environ["RANK"] == str(rank) and path.endswith(f"step-00000004/{name}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    opening = lambda file, *args, **more: (fail(file), real_open(file, *args, **more))[1]
    reading = lambda fd, *args: (fail(fd), real_read(fd, *args))[1]
    what, broken = ("os.preadv", reading) if name.startswith("optimizer") else ("io.open", opening)
    with (
        mock.patch(what, broken),
        redirect_stdout(output),
        redirect_stderr(output),
        given_process_group(),
    ):
        return main(args), output.getvalue()


@pytest.mark.parametrize("name", ["state.json", pytest.param("optimizer.safetensors", marks=pytest.mark.full)])
def test_all_ranks_fall_back_where_one_cannot_read(name, finished, corpus, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    args = arguments(folder, corpus, "resume=auto", "train.steps=4", "mesh.fsdp=2")
    outcomes = run_ranks(rank_that_cannot_read, 2, 1, name, args)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert f"{checkpoint_of(folder, 4)} is damaged: {name} cannot be read" in outcomes[0][1]
    assert "at step 3" in outcomes[0][1] and [row["step"] for row in rows(folder)] == [1, 2, 3, 4]


@pytest.mark.full
def test_all_ranks_refuse_without_readable_older_checkpoint(finished, corpus, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(checkpoint_of(folder, 3))
    args = arguments(folder, corpus, "resume=auto", "train.steps=4", "mesh.fsdp=2")
    outcomes = run_ranks(rank_that_cannot_read, 2, 1, "state.json", args)
    assert [code for code, _ in outcomes] == [2, 2], outcomes
    assert "error: resume=auto: every checkpoint in" in outcomes[0][1]
