"""A dry run: the program of rank r of N on tensors without memory."""

import torch

from ndtrain.config import Config
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.parallel.pp import Placement
from ndtrain.parallel.recompute_budget import typical_batch
from ndtrain.plan.step import RankRecord, record_step
from ndtrain.plan.world import pretended_world


def dry_run(cfg: Config, rank: int, device: str) -> RankRecord:
    """Builds the stages of a rank and runs one training step, as on a device of this kind.

    Args:
        cfg: resolved.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: the rank cannot be built.
    """
    spec, meta = MeshSpec.of(cfg.mesh), torch.device("meta")
    with pretended_world(rank, spec.world_size, device):
        batches = [typical_batch(cfg, meta) for _ in range(cfg.microbatches)]
        return record_step(cfg, Mesh(spec, rank, meta), batches, separate_host=device == "cuda")


def stage_ranks(cfg: Config) -> list[int]:
    """The first, a middle and the last rank of each place in the pipeline."""
    spec, ranks = MeshSpec.of(cfg.mesh), []
    others = [axis for axis in spec.order if axis != "pp"]
    for pp in range(spec.size("pp")):
        members = spec.members(spec.rank(dict.fromkeys(others, 0) | {"pp": pp}), *others)
        ranks += [members[0], members[len(members) // 2], members[-1]]
    return list(dict.fromkeys(ranks))


def stages_at(cfg: Config, rank: int) -> tuple[int, ...]:
    """The stages of the pipeline that a rank has."""
    return tuple(Placement.of(cfg).schedule.stages_of(MeshSpec.of(cfg.mesh).coords(rank)["pp"]))
