"""One rank's part of a model on the mesh of its process group, for tests that work on it without a Trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ndtrain.config import Config, load_config, resolve, world_from_env
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import Stages, build_stages


@dataclass
class RankStages:
    """The stages of this rank, on the CPU. Their weights are not filled yet."""

    cfg: Config
    mesh: Mesh
    stages: Stages

    @classmethod
    def build(cls, overrides: Sequence[str]) -> Self:
        """Builds the stages that `overrides` configure for as many ranks as were started."""
        rank, _, world = world_from_env()
        cfg = resolve(load_config(list(overrides)), world)
        mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
        return cls(cfg, mesh, build_stages(cfg, mesh))
