"""The console command `ndtrain`."""

import os
import subprocess
import sys

import pytest

import ndtrain
from ndtrain.run.console import COMMANDS, main


def run(*args: str) -> subprocess.CompletedProcess:
    """As the installed command runs, in a process of its own."""
    code = "import sys; from ndtrain.run.console import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


def test_console_prints_help_and_version(capsys):
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert usage.startswith("usage: ndtrain COMMAND") and all(f"  {command} " in usage for command in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ndtrain {ndtrain.__version__}\n"
    assert main([]) == 2 and "usage: ndtrain" in capsys.readouterr().err


def test_an_unknown_command_names_the_near_miss(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("error: trian: no such command; did you mean 'train'? known: train, data")


def test_ctrl_c_prints_one_line(monkeypatch, capsys):
    """Ctrl-C while a command imports its modules, which takes seconds."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("ndtrain.run.console.runpy.run_module", interrupted)
    monkeypatch.setattr(sys, "argv", ["ndtrain"])
    assert main(["train", "recipe=llama_debug"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (["schedule", "schedule=1f1b", "pp=2", "microbatches=4"], 0, "makespan"),
        (["schedule", "schedule=1f2b", "pp=2", "microbatches=4"], 2, "did you mean '1f1b'"),
        pytest.param(
            ["train", "recipe=llama_debug", "mesh.tq=2"],
            2,
            "mesh.tq: no such key; did you mean 'mesh.tp'",
            marks=pytest.mark.full,
        ),
        pytest.param(["bench", "--help"], 0, "peers", marks=pytest.mark.full),
    ],
)
def test_console_command_runs_like_its_module(args, status, text):
    done = run(*args)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr


@pytest.mark.parametrize(
    "args",
    [
        pytest.param("bench --help", marks=pytest.mark.full),
        pytest.param("checkpoint --help", marks=pytest.mark.full),
        "schedule schedule=1f1b pp=2 microbatches=4",
    ],
)
def test_closed_output_pipe_gives_no_traceback(args):
    """`ndtrain bench --help | head -1`, where head has ended before the command writes."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from ndtrain.run.console import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *args.split()]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")
