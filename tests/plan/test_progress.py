"""The progress of a plan: lines in a file, one rewritten line on a terminal, and a first line at once."""

import io
import subprocess
import sys

from ndtrain.plan.__main__ import say_at_once
from ndtrain.plan.report import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_writes_lines_to_file():
    out = io.StringIO()
    assert list(Progress(out, every_s=0).count("abc", "predicting", 3)) == ["a", "b", "c"]
    lines = out.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"predicting: {n} of 3" for n in (1, 2, 3)]


def test_progress_writes_no_line_before_interval():
    out = io.StringIO()
    list(Progress(out, every_s=1000).count("abc", "predicting", 3))
    assert out.getvalue() == ""


def test_progress_clears_its_line_on_terminal():
    out = Terminal()
    list(Progress(out).count("abc", "predicting", 3))
    shown, *_, last = out.getvalue().split("\r")[1:]
    assert shown.startswith("predicting: 1 of 3") and last == "" and "\n" not in out.getvalue()


def test_first_line_repeats_plan_command(capsys):
    say_at_once(["search", "recipe=llama3_8b", "against=mesh.tp=8 mesh.fsdp=2"])
    assert capsys.readouterr().err == "plan search recipe=llama3_8b 'against=mesh.tp=8 mesh.fsdp=2'\n"
    say_at_once(["search", "--help"])
    say_at_once(["serch"])
    assert capsys.readouterr().err == ""


def test_the_first_line_does_not_wait_for_torch():
    """It is written as soon as the module of the command is imported."""
    code = "import sys, ndtrain.plan.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
