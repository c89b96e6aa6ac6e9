"""The scripts for a bare machine with a GPU: the lock file, and a session without an index."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "launch" / "gpu_wheels.txt").read_text()
BROUGHT = {"torch", "jinja2", "wandb"}  # what the machine has (torch needs jinja2), and what logger=jsonl leaves out
name_of = lambda requirement: re.match(r"[\w-]+", requirement)[0].lower()


def locked() -> dict[str, str]:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith(("#", "--"))]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    return {name_of(line): line.split()[0].partition("==")[2] for line in lines}


def test_lock_file_versions_satisfy_pyproject():
    from packaging.requirements import Requirement

    versions = locked()
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for need in map(Requirement, [*needs, "pytest>=8", "hypothesis>=6"]):
        if need.name not in BROUGHT:
            assert need.specifier.contains(versions[need.name.lower()]), need


def test_lock_file_includes_transitive_dependencies():
    """Requirements of locked packages are locked too, or come with PyTorch. tokenizers needs a hub only to download."""
    versions = locked()
    for name in versions:
        for need in distribution(name).requires or []:
            if ";" not in need:
                assert name_of(need) in {*versions, "huggingface-hub"}, f"{name} needs {need}"


def session(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess:
    given = os.environ | {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "WHEELS": str(folder / "none")} | env
    argv = [str(ROOT / "launch" / "gpu_session.sh"), *options]
    return subprocess.run(argv, cwd=ROOT, env=given, capture_output=True, text=True, timeout=300)


def test_session_without_folder_is_one_line_error(tmp_path):
    done = session(tmp_path, "suite=smoke")
    assert done.returncode == 2 and done.stderr == "error: usage: launch/gpu_session.sh FOLDER [OPTION...]\n"


@pytest.mark.full
def test_session_measures_and_resumes(tmp_path):
    out, more = tmp_path / "out", tmp_path / "more"
    smoke = ["suite=smoke", "device=cpu"]
    done = session(tmp_path, str(out), *smoke, "only=losses bf16", TESTS="1", MINUTES="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" in (out / "tests.log").read_text()
    done = session(tmp_path, str(more), *smoke, "only=losses", f"resume={out}/gpu-smoke.json", MINUTES="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (more / "tests.log").exists() and "1/1 tiny losses fp8: measured" in done.stdout
    cases = json.loads((more / "gpu-smoke.json").read_text())["cases"]
    assert list(cases) == ["tiny losses bf16", "tiny losses fp8"]
    assert {p.name for p in more.iterdir()} == {"gpu-smoke.json", "gpu-smoke.md", "bench.log", "compiled.tar.gz"}
