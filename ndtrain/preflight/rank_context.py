"""The context of a rank during preflight, and the definition of a check."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ndtrain.config import Config
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.preflight.report import Ranks, Row

Findings = dict[str, Any]  # a rank's report on one check, in JSON's types


@dataclass
class RankContext:
    """One rank, its configuration and its device.

    Attributes:
        nonce: a random word that the ranks of this preflight share.
        deadline_s: time limit of a check.
        mesh: None until the ranks are connected.
    """

    cfg: Config
    spec: MeshSpec
    rank: int
    device: torch.device
    nonce: str
    deadline_s: float
    mesh: Mesh | None = None

    @property
    def run_dir(self) -> Path:
        return Path(self.cfg.run.dir)

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Check:
    """A probe on every rank, and rank 0's check of the probes' findings.

    Attributes:
        probe: runs on every rank; an OSError or RuntimeError is reported too.
        check: runs on rank 0, on the findings of all ranks.
        needs: a row that must not have failed, or the probe does not run.
        connected: the probe uses connections between ranks. After an error, no other check uses them.
    """

    name: str
    probe: Callable[[RankContext], Findings]
    check: Callable[[dict[int, Findings], Ranks, Config], list[Row]]
    needs: str = ""
    connected: bool = False
