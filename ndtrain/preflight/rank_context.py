"""A rank as the checks see it, and what a check is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ndtrain.config import Config
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.preflight.report import Ranks, Row

Found = dict[str, Any]  # what a rank reports, as JSON has it


@dataclass
class RankContext:
    """One rank and what it works with.

    Attributes:
        nonce: a word that the ranks of this preflight share.
        deadline_s: of a check.
        mesh: once the ranks are connected.
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

    def settle(self) -> None:
        """Returns when the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Check:
    """What every rank looks at, and what rank 0 makes of it.

    Attributes:
        look: on every rank; an OSError or RuntimeError is a finding.
        judge: on rank 0, from all ranks' findings.
        needs: a row that must not have failed, or this is not looked at.
        connected: it goes over connections between ranks: after an error nothing goes over them any more.
    """

    name: str
    look: Callable[[RankContext], Found]
    judge: Callable[[dict[int, Found], Ranks, Config], list[Row]]
    needs: str = ""
    connected: bool = False
