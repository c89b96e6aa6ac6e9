"""The process groups of a mesh: every one has the timeout of the world, so that the hang watchdog comes first."""

import os
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.run.rendezvous import GRACE_S, Meeting, join
from tests.lib.ranks import run_ranks

CPU = torch.device("cpu")
DEADLINE_S = 1800.0  # hardware.timeout_s


def timeouts() -> dict[str, float]:
    """Seconds after which each group of a mesh fails, read from its backend."""
    world = dist.group.WORLD
    world._get_backend(CPU)._set_default_timeout(timedelta(seconds=DEADLINE_S + GRACE_S))
    mesh = Mesh(MeshSpec(("pp", "dp", "fsdp", "cp", "tp"), (2, 1, 2, 1, 2)), dist.get_rank(), CPU)
    groups = {axis: mesh.group(axis) for axis in ("pp", "fsdp", "tp")}
    groups |= {"flattened": mesh.group("fsdp", "tp"), "world": mesh.world, "background": mesh.background}
    ordered = Mesh(mesh.spec, dist.get_rank(), CPU, in_order=True)  # as on NCCL
    groups |= {"lane": ordered.group("fsdp", lane="reductions"), "none": mesh.group("dp")}
    groups |= {"pair": ordered.links("pp", [(0, 1), (1, 0)])[0, 1].group}
    wide = Mesh(MeshSpec(("pp", "dp", "fsdp", "cp", "tp"), (1, 1, 2, 1, 4)), dist.get_rank(), CPU)
    groups["subgroup"] = wide.subgroup("tp", 2)
    return {name: g._get_backend(CPU).options._timeout.total_seconds() for name, g in groups.items() if g is not None}


def test_nccl_timeouts_are_later_than_watchdog(monkeypatch):
    """This covers the timeout of the world and PyTorch's NCCL heartbeat monitor, whose default is eight minutes."""
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")  # so that it is restored
    monkeypatch.delenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    meeting = Meeting(dist.HashStore(), "attempt")
    with mock.patch("torch.distributed.init_process_group") as init:
        join("nccl", 0, 2, DEADLINE_S, torch.device("cuda", 0), meeting)
        assert init.call_args.kwargs["timeout"].total_seconds() > DEADLINE_S
        assert float(os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > DEADLINE_S
        monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "100")
        join("nccl", 0, 2, DEADLINE_S, torch.device("cuda", 0), meeting)
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "100", "the user's own"


def test_every_group_has_the_timeout_of_the_run():
    names = {"pp", "fsdp", "tp", "flattened", "world", "background", "lane", "pair", "subgroup"}
    assert run_ranks(timeouts, 8) == [dict.fromkeys(names, DEADLINE_S + GRACE_S)] * 8
