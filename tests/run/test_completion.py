"""Completion of the command line with Tab."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ndtrain.run import completion
from ndtrain.run.completion import candidates
from ndtrain.run.console import main
from tests.lib.debian import install_debian_packages

LINES = {  # the line up to the cursor -> what its last word may become
    "ndtrain tr": ["train"],
    "ndtrain train reci": ["recipe="],
    "ndtrain train recipe=llama_s": ["recipe=llama_small"],
    "ndtrain train optim": ["optim.", "optim="],
    "ndtrain train layo": ["layout."],
    "ndtrain train optim.sch": ["optim.schedule="],
    "ndtrain train optim.schedule=c": ["optim.schedule=constant", "optim.schedule=cosine"],
    "ndtrain train tp.overlap=": ["tp.overlap=true", "tp.overlap=false"],
    "ndtrain train model=llama_debug,llama_s": ["model=llama_debug,llama_small"],
    "ndtrain train +model.rope_th": ["+model.rope_theta="],
    "ndtrain train --c": ["--config-dir", "--cfg"],
    "ndtrain train --cfg j": ["job"],
    "ndtrain train --config-dir {dir}/mi": ["{dir}/mine/"],
    "ndtrain train --config-dir {dir}/mine recipe=o": ["recipe=own"],
    "ndtrain train data.path={dir}/mine/rec": ["data.path={dir}/mine/recipe/"],
    "ndtrain torchrun --nproc-per-node 2 -m ndtrain.train mesh.f": ["mesh.fsdp="],
    "ndtrain schedule --h": ["--help"],
    "ndtrain train 'run.na": [],
}


@pytest.mark.parametrize("line", LINES)
def test_candidates_complete_each_line(line, tmp_path):
    (tmp_path / "mine/recipe").mkdir(parents=True)
    (tmp_path / "mine/recipe/own.yaml").touch()
    fill = lambda text: text.replace("{dir}", str(tmp_path))
    assert candidates(fill(line)) == [fill(word) for word in LINES[line]]


def test_completion_flag_answers_query_and_refuses_mistakes(capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "ndtrain train recipe=llama3_8")
    assert main(["train", "-sc", "query=bash"]) == 0
    assert capsys.readouterr().out == "recipe=llama3_8b\n"
    assert main(["train", "--shell-completion", "install=fsh"]) == 2
    assert capsys.readouterr().err.startswith("error: -sc install=fsh: did you mean 'install=fish'?")


def test_completion_imports_no_torch():
    code = "import sys; from ndtrain.run.completion import candidates; candidates('ndtrain train optim.schedule'); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, timeout=60)


def ndtrain(folder: Path) -> dict[str, str]:
    """An environment in which every shell runs this checkout's `ndtrain`."""
    code = f"#!{sys.executable}\nimport sys\nfrom ndtrain.run.console import main\nsys.exit(main())\n"
    (folder / "ndtrain").write_text(code)
    (folder / "ndtrain").chmod(0o755)
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    return os.environ | paths | {"TERM": "dumb", "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}


BASH = 'eval "$(ndtrain train -sc install=bash)"\nPS1="> "\nbind "set bell-style none"\necho ready\n'
ZSH = 'eval "$(ndtrain train -sc install=zsh)"\nPS1="> "\nunsetopt beep zle_bracketed_paste\necho ready\n'
SHELLS = {  # the start file, what it holds, and the command
    "bash": ("rc", BASH, ["bash", "--rcfile", "rc", "-i"]),
    "zsh": (".zshrc", ZSH, ["zsh", "-i"]),
}
TYPED = {  # what is typed before Tab -> the words in the line then
    "train reci\tllama_s\t": "train recipe=llama_small",
    "train optim.sched\tcos\t": "train optim.schedule=cosine",
    "pre\trecipe=llama_d\t": "preflight recipe=llama_debug",
}


def installed(shell: str) -> None:
    """Skips where the shell is not there and cannot be installed."""
    if not shutil.which(shell) and (why := install_debian_packages(shell)):
        pytest.skip(f"no {shell} here: {why}")


@pytest.mark.full
@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("shell", SHELLS)
def test_completion_works_in_interactive_shell(shell, typed, tmp_path):
    """The test types like a user: after a partial completion the next keys continue the word."""
    installed(shell)
    file, text, command = SHELLS[shell]
    (tmp_path / file).write_text(text)
    env = ndtrain(tmp_path)
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe(shell, command, env)
    try:
        shown(fd, "ready")
        os.write(fd, b"ndtrain ")
        for part in typed.split("\t")[:-1]:
            os.write(fd, part.encode() + b"\t")
            time.sleep(0.1)  # the next keys are read after the completion anyway
        os.write(fd, b"\x01echo LINE: \r")
        assert f"LINE: ndtrain {TYPED[typed]}" in shown(fd, f"LINE: ndtrain {TYPED[typed]}")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(fd)


@pytest.mark.full
@pytest.mark.parametrize("line", ["ndtrain tr", "ndtrain train recipe=llama_s", "ndtrain train optim.schedule=c"])
def test_fish_lists_candidates(line, tmp_path):
    """fish prints its candidates for a line, each with a description after a tab."""
    installed("fish")
    code = f'ndtrain train -sc install=fish | source; complete -C "{line}"'
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], env=ndtrain(tmp_path), capture_output=True, text=True, timeout=90
    )
    assert [word.partition("\t")[0] for word in done.stdout.splitlines()] == LINES[line], done.stderr


def shown(fd: int, text: str, seconds: float = 90) -> str:
    """What the terminal has shown once `text` is among it."""
    out, end = "", time.monotonic() + seconds
    while text not in out:
        assert time.monotonic() < end, f"{text!r} is not in:\n{out}"
        if select.select([fd], [], [], 1)[0]:
            out += os.read(fd, 65536).decode(errors="replace")
    return out


def test_completion_lists_every_command():
    assert candidates("ndtrain ") == [*completion.COMMANDS, "--help", "--version"]
