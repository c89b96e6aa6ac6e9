"""`--help` and `--version` of the commands that take a run's overrides."""

import subprocess
import sys
from pathlib import Path

import pytest

import ndtrain
import ndtrain.preflight.__main__ as preflight_command
from ndtrain.config.keys import config_folders, group_options, known_keys
from ndtrain.preflight.run import preflight
from ndtrain.run import cli, usage
from ndtrain.train import main

SCRIPTS = Path(__file__).resolve().parents[2] / "launch"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_train_help_lists_groups_and_sections(flag, capsys):
    assert main([flag]) == 0
    out = capsys.readouterr().out
    assert "usage: python -m ndtrain.train [KEY=VALUE ...]" in out and "docs/configuration.md" in out
    words = " ".join(out.split())  # a long list is wrapped
    for group, options in group_options(config_folders()).items():
        if group not in ("mesh", "checkpoint"):
            assert f" {group} {', '.join(sorted(options))}:" in words, group
    sections = {key for key, known in known_keys().items() if known.section} - {"callbacks"}
    assert all(f"\n  {section}.* " in out for section in sections)
    assert max(map(len, out.splitlines())) <= 120 and "hydra" not in out.split("flags:")[0].lower()


def test_train_help_lists_own_recipes(tmp_path, capsys):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/own.yaml").touch()
    assert main(["--config-dir", str(tmp_path), "--help"]) == 0
    assert "llama_small, mistral_7b, mixtral_8x7b, moe_debug, moe_small, own, qwen3_0_6b," in " ".join(
        capsys.readouterr().out.split()
    )


def test_usage_names_command_as_called(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ndtrain train"])
    assert "usage: ndtrain train [KEY=VALUE ...]" in usage.train()


def test_preflight_help_prints_usage(capsys):
    assert preflight_command.preflight is preflight
    assert cli.main(preflight, ["--help"], usage.preflight) == 0
    out = capsys.readouterr().out
    assert "-m ndtrain.preflight [the run's own KEY=VALUE ...]" in out and "exit status: 0" in out


def test_version_flag_prints_ndtrain_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ndtrain {ndtrain.__version__}\n"


@pytest.mark.parametrize("script", ["local.sh", "multihost.sh", "node.sh", "train.sbatch"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_launch_script_help_prints_its_comment(script, flag, tmp_path):
    """It prints the whole comment at the head of the script and does nothing else."""
    done = subprocess.run(["bash", SCRIPTS / script, flag], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    comment = [line.removeprefix("#").removeprefix(" ") for line in (SCRIPTS / script).read_text().splitlines()]
    last = comment[comment.index("set -euo pipefail") - 1]
    assert done.returncode == 0 and not done.stderr and not list(tmp_path.iterdir())
    assert done.stdout.rstrip().endswith(last) and "RESTARTS" in done.stdout and "SBATCH" not in done.stdout
    assert not done.stdout.startswith(("#", "\n", "!"))
