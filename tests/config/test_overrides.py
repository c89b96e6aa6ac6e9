"""Overrides whose values are written in another way than the schema's."""

import subprocess
import sys

import pytest

from ndtrain.config import ConfigError, check_overrides, load_config

PLAIN = "recipe=llama_debug"


@pytest.mark.parametrize("text", ["1e3", "1000.0", "1_000", "10.e2", "1E+3"])
def test_an_integer_may_be_written_as_a_float(text):
    cfg = load_config([PLAIN, f"train.steps={text}", "++train.stop_at=1e2"])
    assert (cfg.train.steps, cfg.train.stop_at) == (1000, 100)
    assert type(cfg.train.steps) is type(cfg.train.stop_at) is int


def test_a_sweep_of_integers_may_be_written_as_floats():
    assert check_overrides(["train.steps=1e3,2.0", "optim.lr=1e3,2.0"], hydra=True) == [
        "train.steps=1000,2",
        "optim.lr=1e3,2.0",
    ]


@pytest.mark.parametrize("text", ["1.5", "1e-1", "inf", "nan"])
def test_fraction_for_integer_key_is_refused(text):
    with pytest.raises(ConfigError, match=r"^train\.steps=.*: must be a whole number$"):
        load_config([PLAIN, f"train.steps={text}"])


def test_float_in_recipe_error_suggests_integer(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text("# @package _global_\ntrain:\n  steps: 1e3\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: train\.steps=1000\.0: must be a whole number: write 1000$"):
        load_config(["recipe=mine"], [str(tmp_path)])


def test_a_list_of_one_logger_is_that_logger():
    """Hydra warns only once, so the test runs in its own process. The warning must not be about loggers."""
    program = "from ndtrain.config import load_config; print(load_config(['logger=[wandb]']).logger.name)"
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "wandb\n" and "logger" not in done.stderr, done.stderr
    assert load_config([PLAIN, "logger=[wandb,jsonl]"]).logger.names == ["wandb", "jsonl"]
