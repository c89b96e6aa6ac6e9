"""Runs the program as a user does: its command line, its processes and its run folder."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ndtrain.config import ConfigError, load_config, resolve
from ndtrain.run.rendezvous import Meeting
from ndtrain.train import main

MODULE = ["-m", "ndtrain.train"]
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "mix",
    "potions",
]


def write_corpus(path: Path, words: int = 4000) -> Path:
    """A small deterministic text that a model can learn from."""
    path.write_text(" ".join(WORDS[i * i % 101 % len(WORDS)] for i in range(words)) + "\n")
    return path


def arguments(run_dir: Path, corpus: Path, *overrides: str) -> list[str]:
    """The overrides of a run of ten steps that takes a second: the debug recipe on a small corpus."""
    return [
        "recipe=llama_debug", "logger=jsonl", "data=text", f"data.path={corpus}", "data.tokenizer=byte",
        "train.steps=10", "optim.warmup=2", "hardware.device=cpu", "hardware.peak_tflops=0.1", f"run.dir={run_dir}",
        *overrides,
    ]  # fmt: skip


# what exit.json says of a run that was killed: a rank that has lost a peer reports it, unless it is ended first
KILLED = ("running", "died")


# ----------------------------------------------------------------------------------------------------------- running


def command(args: list[str], ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, *MODULE, *args]


def run(args: list[str], cwd: Path, ranks: int = 1, timeout: float = 60) -> subprocess.CompletedProcess:
    """Runs the command line to its end.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout` seconds.
    """
    with started(args, cwd, ranks) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(args: list[str], cwd: Path, ranks: int = 1) -> Iterator[subprocess.Popen]:
    """Starts the program in its own process group. At the end of the block all its processes are killed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    mark = {MARK: str(cwd)}  # torchrun starts each rank in its own session, so only the environment identifies them
    process = subprocess.Popen(
        command(args, ranks), cwd=cwd, start_new_session=True, env=os.environ | mark, preexec_fn=reset_signals, **pipes
    )
    try:
        yield process
    finally:
        for pid in processes(cwd):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


MARK = "NDTRAIN_TEST"
_meetings = itertools.count()  # every rank of a test runs `main` equally often


def reset_signals() -> None:
    """For `preexec_fn`: restores the default handlers of SIGINT and SIGHUP. A shell's background jobs ignore SIGINT,
    and so do the processes that they start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def environments() -> Iterator[tuple[Path, dict[str, str]]]:
    """(folder in /proc, environment at its start) of each living process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if pairs != [""]:  # a zombie has no environment
            yield folder, dict(p.partition("=")[::2] for p in pairs)


def processes(cwd: Path) -> dict[int, str]:
    """The living processes of `started` in `cwd`: pid -> rank ("" if it is no rank)."""
    marked = ((folder, variables) for folder, variables in environments() if variables.get(MARK) == str(cwd))
    return {int(folder.name): variables.get("RANK", "") for folder, variables in marked}


@contextmanager
def given_process_group() -> Iterator[None]:
    """Makes `main` use the process group that `tests.lib.ranks.run_ranks` has created, and its store."""

    def meet(*args) -> Meeting:
        return Meeting(dist.distributed_c10d._get_default_store(), f"meeting {next(_meetings)}")

    with (
        mock.patch("ndtrain.run.rendezvous.meet", meet),
        mock.patch("ndtrain.run.rendezvous.join", return_value=None),
        mock.patch("torch.distributed.destroy_process_group"),
    ):
        yield


def rank_main(args: list[str]) -> int:
    """For `run_ranks`: the exit status of `main` on one rank."""
    with given_process_group():
        return main(args)


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 60, pause: float = 0.002) -> Any:
    """Polls `condition` until its result is true, and returns that result.

    Raises:
        AssertionError: `timeout` seconds have passed.
    """
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout:.0f} s for {what}"
        time.sleep(pause)
    return value


def config_refusal(overrides: list[str], world: int = 1) -> str:
    """The one line with which `resolve` refuses a configuration."""
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(overrides), world)
    line = str(caught.value)
    assert "\n" not in line, line
    return line


def refusal(capsys, args: list[str]) -> str:
    """The one line of error with which `main` refuses `args`."""
    capsys.readouterr()
    code = main(args)
    out, err = capsys.readouterr()
    assert code == 2, f"exit status {code}\n{out}{err}"
    return one_error(err)


def one_error(stderr: str) -> str:
    """The single `error: ...` line in the output of the program and of torchrun, whose lines come last."""
    errors = [line for line in stderr.splitlines() if "error: " in line]
    assert len(errors) == 1 and errors[0].startswith("error: "), f"not one line of error:\n{stderr}"
    own = stderr[: stderr.index(errors[0])] + stderr[stderr.index(errors[0]) :].partition("torch/distributed")[0]
    assert "Traceback" not in own, stderr
    return errors[0].removeprefix("error: ")


# ------------------------------------------------------------------------------------------------------- run folders


def rows(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def checkpoint_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def tensor_bytes(checkpoint: Path) -> dict[str, bytes]:
    """Every safetensors file of a checkpoint, weights and moments."""
    return {p.name: p.read_bytes() for p in sorted(checkpoint.glob("*.safetensors"))}


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flips one bit of byte `at` of a file. A negative `at` counts from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
