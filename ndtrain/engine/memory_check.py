"""The check that a model's state fits into memory, before any of it is allocated.

The check uses a lower bound: the weights, gradients and optimizer state that a rank holds between steps, and with
ZeRO 3 the largest unsharded unit. A run that fits is never refused.
"""

from collections.abc import Iterable

import torch

from ndtrain.config import Config, ConfigError
from ndtrain.device.memory import memory_limit_bytes
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.model.flops import parameter_count
from ndtrain.parallel.build import state_plan
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.unit import StatePlan, hidden_in_shard, state_bytes


def require_memory(cfg: Config, device: torch.device, local_ranks: Iterable[int]) -> None:
    """Check that the state of the model fits on `device`, and that its offloaded part fits into host memory.

    Args:
        cfg: resolved.
        local_ranks: all ranks of this host. They share its memory, and each has its own GPU.

    Raises:
        ConfigError: the state does not fit. The message contains both numbers.
    """
    alike: dict[tuple[int, ...], list[int]] = {}  # only these coordinates decide what a rank holds
    for rank in local_ranks:
        alike.setdefault(tuple(MeshSpec.of(cfg.mesh).index(rank, axis) for axis in ("pp", "ep", "tp")), []).append(rank)
    needs = [need for ranks in alike.values() for need in [least_bytes(cfg, ranks[0])] * len(ranks)]
    if device.type == "cuda":
        most = torch.cuda.mem_get_info(device)[1]
        _require(cfg, max(on_device for on_device, _ in needs), most, "on a GPU", "GPU")
        in_host_memory = sum(on_host for _, on_host in needs)
    else:
        in_host_memory = sum(sum(need) for need in needs)
    ranks = f"{len(needs)} rank{'s' * (len(needs) > 1)}"
    _require(cfg, in_host_memory, memory_limit_bytes(), f"in host memory ({ranks} here)", "host")


def least_bytes(cfg: Config, rank: int) -> tuple[int, int]:
    """Return the minimum bytes that a rank needs on its device, and in host memory with `optim.offload`."""
    layouts, plan = list(Distribution.of(cfg).layouts(rank).flat().values()), state_plan(cfg)
    held = [state_bytes(plan, layout.groups.shards, layout.numel, hidden_in_shard(layout)) for layout in layouts]
    gathered = [layout.numel for layout in layouts if plan.zero == 3 and layout.groups.shards > 1]
    one_unit = max(gathered, default=0) * (plan.compute.itemsize + plan.master.itemsize)
    return sum(h.on_device for h in held) + one_unit, sum(h.on_host for h in held)


def _require(cfg: Config, needed: int, most: int, where: str, device: str) -> None:
    if needed > most:
        sizes = " ".join(f"mesh.{axis}={getattr(cfg.mesh, axis)}" for axis in ("pp", "fsdp", "tp"))
        raise ConfigError(
            f"model of {parameter_count(cfg.model):,} parameters: its weights, gradients and optimizer state need at "
            f"least {_size(needed)} {where} with {sizes} mesh.zero={cfg.mesh.zero}, but this {device} has "
            f"{_size(most)}: {_advice(state_plan(cfg), device)}"
        )


def _advice(plan: StatePlan, device: str) -> str:
    """Return advice on what to change, from the keys that this configuration has not used yet."""
    ways = [f"shard the model over more {device}s (mesh.fsdp, mesh.tp, mesh.pp)"]
    ways += ["set mesh.zero=3"] if plan.zero < 3 else []
    ways += ["set optim.state_dtype=bf16"] if all(spec.dtype is None for spec in plan.spec) else []
    return ", ".join(ways) + ", or choose a smaller model"


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"
