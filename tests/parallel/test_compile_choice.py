"""train.compile=auto: on if it pays, the same on every rank, with a line that explains why it is off."""

import os
from unittest import mock

import pytest
import torch

from ndtrain.config import ConfigError, load_config, resolve, world_from_env
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel import compile_choice
from ndtrain.parallel.compile_choice import LONG_RUN, choose_compile, compiles, rank_flops
from tests.lib.ranks import run_ranks

LONG = ["recipe=llama_debug", "train.steps=10000000"]
NO_COMPILER = {"CXX": "no-such-compiler"}


def choice(*overrides: str, trains: bool = True) -> tuple[bool, str]:
    rank, _, world = world_from_env()
    cfg = resolve(load_config(list(overrides)), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    return choose_compile(cfg.train, cfg.model, mesh, trains)


def test_explicit_compile_setting_wins():
    assert choice("recipe=llama_debug", "train.compile=true") == (True, "")
    assert choice(*LONG, "train.compile=false") == (False, "")
    with pytest.raises(ConfigError, match="no such choice; known: auto, true, false"):
        resolve(load_config(["train.compile='yes'"]), 1)


@pytest.mark.parametrize("recipe", ["llama_debug", "llama_small"])
def test_short_cpu_run_is_not_compiled(recipe):
    on, line = choice(f"recipe={recipe}")
    assert not on and line.startswith("train.compile=auto: off: ") and "too few to pay for compilation" in line


def test_long_cpu_run_is_compiled_if_compiler_exists():
    with mock.patch.object(compile_choice.shutil, "which", lambda name: name):
        assert choice(*LONG) == (True, "train.compile=auto: on: a long run")
        assert choice(*LONG, trains=False) == (False, "train.compile=auto: off: no training")
    with mock.patch.dict(os.environ, NO_COMPILER):
        assert choice(*LONG) == (False, "train.compile=auto: off: no C++ compiler on this machine")


def test_compile_threshold_is_long_run_flops():
    cfg = resolve(load_config(["recipe=llama_debug", "train.steps=1000"]), 1)
    steps = int(1000 * LONG_RUN / rank_flops(cfg.train, cfg.model, MeshSpec.of(cfg.mesh))) + 1
    with mock.patch.object(compile_choice.shutil, "which", lambda name: name):
        for more, on in ((0, True), (-2, False)):
            longer = resolve(load_config(["recipe=llama_debug", f"train.steps={steps + more}"]), 1)
            assert compiles(longer.train, longer.model, MeshSpec.of(longer.mesh), torch.device("cpu")) is on


@pytest.mark.parametrize(
    ("installed", "capability", "on"), [(True, (9, 0), True), (True, (6, 1), False), (False, (9, 0), False)]
)
def test_gpu_run_is_compiled_if_triton_supports_it(installed, capability, on):
    cfg = resolve(load_config(["recipe=llama_debug"]), 1)
    with (
        mock.patch.object(compile_choice.importlib.util, "find_spec", lambda name: object() if installed else None),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
    ):
        assert compiles(cfg.train, cfg.model, MeshSpec.of(cfg.mesh), torch.device("cuda", 0)) is on


def one_rank_without() -> tuple[bool, str]:
    os.environ["CXX"] = "no-such-compiler" if world_from_env()[0] == 1 else "true"  # a program that every host has
    return choice(*LONG, "mesh.dp=2")


def test_ranks_agree_not_to_compile_if_one_cannot():
    """One that lacks a compiler keeps all from compiling."""
    assert run_ranks(one_rank_without, 2) == [(False, "train.compile=auto: off: no C++ compiler on some rank")] * 2
