"""A supervisor that lets a run suffer and starts it again, as a launcher does, until it is done.

What it does to the run is drawn from a seed: SIGKILL of a random rank at a random moment (in a step, in a save),
files of the newest checkpoint cut short or with a bit turned over, a full disk; and the next start is on another mesh.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ndtrain.checkpoint import list_checkpoints
from tests.lib.helpers import flip, rank_main, rows, wait_for
from tests.lib.ranks import started_ranks

PATIENCE_S = 120.0  # for a start on a busy machine


@dataclass
class Report:
    """What a run went through.

    Attributes:
        faults: how often each kind.
        resumed: the step that each start went on from.
        lost: checkpoints that were there, were not damaged on purpose, and neither are there nor had to make room.
    """

    faults: Counter = field(default_factory=Counter)
    resumed: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass
class Supervisor:
    """Brings a run to its end through a number of kills.

    Args:
        args: the run's overrides but for its mesh; with `checkpoint.keep` at least 2.
        meshes: (ranks, overrides); the first is drawn for the first start, any for a later one.
        kinds: of faults: "step" and "save" (where the kill hits), "cut" and "flip" (and then the newest checkpoint is
            damaged), "disk" (the run goes on without room for a while before it is killed; needs `disk`).
        disk: the checkpoints' folder is a tmpfs that may be made smaller; None: it is not.
    """

    folder: Path
    args: list[str]
    meshes: Sequence[tuple[int, list[str]]]
    steps: int
    keep: int
    kinds: Sequence[str]
    draw: random.Random
    disk: Path | None = None
    report: Report = field(default_factory=Report)
    damaged: set[int] = field(default_factory=set)  # inodes of checkpoints: one saved anew is another

    def run(self, kills: int) -> Report:
        """Starts the run `kills` times to be killed, as far as it lasts, and then to its end."""
        mesh = self.meshes[0]
        for number in range(kills):
            left = self.steps - self._step()
            if left < 2:
                break
            # so far that as many kills as are still to come find steps to hit
            self._suffer(mesh, self.draw.choice(self.kinds), max(1, left // (kills - number + 1)))
            mesh = self.draw.choice(self.meshes)
        self._room(None)
        self._finish(mesh)
        return self.report

    def _finish(self, mesh: tuple[int, list[str]]) -> None:
        self.report.resumed.append(self._step())
        with started_ranks(rank_main, mesh[0], [*self.args, *mesh[1]]) as (ranks, folder):
            for p in ranks:
                p.join(PATIENCE_S)
            assert all(p.exitcode == 0 for p in ranks), "".join(e.read_text() for e in folder.glob("error-*"))

    def _suffer(self, mesh: tuple[int, list[str]], kind: str, most: int) -> None:
        self.report.faults[kind] += 1
        self.report.resumed.append(self._step())
        before = {p.name: p.stat().st_ino for p in self._published()}
        with started_ranks(rank_main, mesh[0], [*self.args, *mesh[1]]) as (ranks, folder):
            goal = self._step() + self.draw.randint(1, most)
            alive = lambda: all(p.exitcode in (None, 0) for p in ranks)
            self._await(lambda: self._logged() >= goal or not alive(), folder)
            if kind == "disk":
                self._room(0)
                self._await(lambda: self._logged() >= min(goal + 3, self.steps) or not alive(), folder)
            if kind == "save":
                self._await(lambda: self._writing() or self._logged() >= self.steps or not alive(), folder, pause=0)
            assert alive(), "".join(e.read_text() for e in folder.glob("error-*")) or "a rank has ended by itself"
            time.sleep(self.draw.uniform(0, 0.02 if kind == "save" else 0.15))
            os.kill(self.draw.choice(ranks).pid, signal.SIGKILL)
            time.sleep(self.draw.uniform(0, 0.1))  # the launcher ends the others soon after
        self._room(None)
        self._account(before)
        if kind in ("cut", "flip"):
            self._damage(kind)

    def _await(self, condition, folder: Path, pause: float = 0.002) -> None:
        wait_for(condition, f"the run: {[e.read_text() for e in folder.glob('error-*')]}", PATIENCE_S, pause)

    # --------------------------------------------------------------------------------------------------- the folder

    def _published(self) -> list[Path]:
        return list_checkpoints(self.folder / "checkpoints")

    def _step(self) -> int:
        """Of the newest checkpoint."""
        return int(self._published()[0].name[5:]) if self._published() else 0

    def _logged(self) -> int:
        found = rows(self.folder)
        return found[-1]["step"] if found else 0

    def _writing(self) -> bool:
        return any((self.folder / "checkpoints").glob(".writing-*"))

    def _account(self, before: dict[str, int]) -> None:
        """A checkpoint may be gone only where `keep` newer ones are there, or where it was damaged and set aside."""
        now = [p.name for p in self._published()]
        gone = [name for name in before if name not in now and before[name] not in self.damaged]
        self.report.lost += [name for name in gone if sum(n > name for n in now) < self.keep]

    def _damage(self, kind: str) -> None:
        """The newest checkpoint, where an older one is there to go back to."""
        found = self._published()
        if len(found) < 2:
            return
        self.damaged.add(found[0].stat().st_ino)
        path = self.draw.choice(sorted(p for p in found[0].iterdir() if p.stat().st_size > 8))
        size = path.stat().st_size
        if kind == "cut":
            os.truncate(path, self.draw.randrange(size))
        else:
            flip(path, self.draw.randrange(size), self.draw.randrange(8))

    def _room(self, size: int | None) -> None:
        """Leaves `size` bytes free; None: enough."""
        if self.disk is None:
            return
        for _ in range(100):  # the run writes on, and no disk is made smaller than what it holds
            number = 1 << 28 if size is None else max(4096, shutil.disk_usage(self.disk).used + size)
            mount = ["mount", "-o", f"remount,size={number}", str(self.disk)]
            if subprocess.run(mount, capture_output=True).returncode == 0:
                return
        raise RuntimeError(f"{self.disk} cannot be made {number} bytes large")
