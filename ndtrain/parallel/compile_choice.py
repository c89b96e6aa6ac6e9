"""The choice to compile the blocks and the loss of a run, or not (`train.compile`).

With `auto` a run compiles if that pays. On a GPU it compiles whenever the compiler can generate code. On a CPU
compiling saves some percent of a step and costs a minute at the start, so only long runs compile.
"""

import importlib.util
import os
import shutil
import sys

import torch

from ndtrain.config import ModelConfig, TrainConfig
from ndtrain.device.kind import kind_of
from ndtrain.mesh.host_device import gather_numbers
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import flops

# Compiling pays on a CPU if a rank has more model FLOPs than this: two hours of a core at 150 GFLOP/s. llama_small then
# saves 5 % of that time (docs/results.md), which is five times the minute that the compiler takes.
LONG_RUN = 1e15

MISSING = {"cuda": "no Triton for this GPU", "cpu": "no C++ compiler"}


def choose_compile(t: TrainConfig, m: ModelConfig, mesh: Mesh, trains: bool = True) -> tuple[bool, str]:
    """Return whether to compile, and a line for the user, which is empty if the user has decided. Both are the same on
    every rank of the mesh. All ranks call this together.

    Args:
        trains: True if the model is trained, and not only evaluated.
    """
    if t.compile_asked is not None:
        return t.compile_asked, ""
    kind = kind_of(mesh.device)
    why_not = _unneeded(rank_flops(t, m, mesh.spec), kind, trains)
    if not why_not and not _on_every_rank(_compiler_of(mesh.device), mesh):
        why_not = f"{MISSING[kind]} on {'this machine' if mesh.spec.world_size == 1 else 'some rank'}"
    if why_not:
        return False, f"train.compile=auto: off: {why_not}"
    return True, f"train.compile=auto: on: {'a GPU with Triton' if kind == 'cuda' else 'a long run'}"


def compiles(t: TrainConfig, m: ModelConfig, mesh: MeshSpec, device: torch.device) -> bool:
    """Return the choice of `choose_compile` for a training whose hosts are all like this one."""
    if t.compile_asked is not None:
        return t.compile_asked
    return not _unneeded(rank_flops(t, m, mesh), kind_of(device)) and _compiler_of(device)


def _unneeded(of_rank: float, device: str, trains: bool = True) -> str:
    """Return why compiling would not pay, or an empty text. It follows from the FLOPs of a rank and the kind of device
    alone, so all ranks agree."""
    if not trains:
        return "no training"
    if device == "cpu" and of_rank < LONG_RUN:
        return f"{of_rank:.0e} FLOPs per rank are too few to pay for compilation on a CPU (less than {LONG_RUN:.0e})"
    return ""


def rank_flops(t: TrainConfig, m: ModelConfig, mesh: MeshSpec) -> float:
    """Return the model FLOPs of each rank over the whole run."""
    return t.tokens * flops.flops_per_token(m, t.seq_len) / mesh.world_size


def _compiler_of(device: torch.device) -> bool:
    """Return True if PyTorch's compiler can generate code for the device on this host. The meta device represents
    another machine, which is assumed to have a compiler."""
    if device.type == "meta":
        return True
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (7, 0)
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


def _on_every_rank(here: bool, mesh: Mesh) -> bool:
    return bool(gather_numbers([float(here)], mesh.world, mesh.device).min() > 0)
