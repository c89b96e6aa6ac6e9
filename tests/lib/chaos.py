"""Fault injection: a supervisor that disturbs a run and restarts it, as a launcher does, until it has finished.

A seed determines the faults: SIGKILL of a random rank at a random moment (in a step, in a save), a truncated file or a
flipped bit in the newest checkpoint, a full disk. Each restart may use another mesh.
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

PATIENCE_S = 120.0  # allowed for a start on a busy machine


@dataclass
class Report:
    """What happened to a run.

    Attributes:
        faults: kind -> number of injected faults.
        resumed: the step that each start resumed from.
        lost: names of checkpoints that are missing, though they were neither damaged on purpose nor due for removal.
    """

    faults: Counter = field(default_factory=Counter)
    resumed: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass
class Supervisor:
    """Runs a training to its end through a number of kills.

    Args:
        folder: the run folder.
        args: the run's overrides without its mesh; `checkpoint.keep` is at least 2.
        meshes: (ranks, overrides); the first start uses the first, later ones a random one.
        steps: the last step of the run.
        keep: `checkpoint.keep`.
        kinds: of faults: "step" and "save" (where the kill hits), "cut" and "flip" (the newest checkpoint is damaged
            after the kill), "disk" (the disk is full for a while before the kill; needs `disk`).
        draw: source of all random choices.
        disk: the checkpoint folder, a tmpfs that can be resized; None: it is none.
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
    damaged: set[int] = field(default_factory=set)  # inodes of checkpoints; one that is saved again has a new inode

    def run(self, kills: int) -> Report:
        """Starts and kills the run `kills` times, or until its last steps, and then lets it finish."""
        mesh = self.meshes[0]
        for number in range(kills):
            left = self.steps - self._step()
            if left < 2:
                break
            # leaves enough steps for the remaining kills
            self._inject_fault(mesh, self.draw.choice(self.kinds), max(1, left // (kills - number + 1)))
            mesh = self.draw.choice(self.meshes)
        self._set_free_space(None)
        self._finish(mesh)
        return self.report

    def _finish(self, mesh: tuple[int, list[str]]) -> None:
        self.report.resumed.append(self._step())
        with started_ranks(rank_main, mesh[0], [*self.args, *mesh[1]]) as (ranks, folder):
            for p in ranks:
                p.join(PATIENCE_S)
            assert all(p.exitcode == 0 for p in ranks), "".join(e.read_text() for e in folder.glob("error-*"))

    def _inject_fault(self, mesh: tuple[int, list[str]], kind: str, most: int) -> None:
        self.report.faults[kind] += 1
        self.report.resumed.append(self._step())
        before = {p.name: p.stat().st_ino for p in self._published()}
        with started_ranks(rank_main, mesh[0], [*self.args, *mesh[1]]) as (ranks, folder):
            goal = self._step() + self.draw.randint(1, most)
            alive = lambda: all(p.exitcode in (None, 0) for p in ranks)
            self._await(lambda: self._logged() >= goal or not alive(), folder)
            if kind == "disk":
                self._set_free_space(0)
                self._await(lambda: self._logged() >= min(goal + 3, self.steps) or not alive(), folder)
            if kind == "save":
                self._await(lambda: self._writing() or self._logged() >= self.steps or not alive(), folder, pause=0)
            assert alive(), "".join(e.read_text() for e in folder.glob("error-*")) or "a rank has ended by itself"
            time.sleep(self.draw.uniform(0, 0.02 if kind == "save" else 0.15))
            os.kill(self.draw.choice(ranks).pid, signal.SIGKILL)
            time.sleep(self.draw.uniform(0, 0.1))  # the launcher ends the others soon after
        self._set_free_space(None)
        self._record_lost(before)
        if kind in ("cut", "flip"):
            self._damage(kind)

    def _await(self, condition, folder: Path, pause: float = 0.002) -> None:
        wait_for(condition, f"the run: {[e.read_text() for e in folder.glob('error-*')]}", PATIENCE_S, pause)

    # --------------------------------------------------------------------------------------------------- the folder

    def _published(self) -> list[Path]:
        return list_checkpoints(self.folder / "checkpoints")

    def _step(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        return int(self._published()[0].name[5:]) if self._published() else 0

    def _logged(self) -> int:
        steps = rows(self.folder)
        return steps[-1]["step"] if steps else 0

    def _writing(self) -> bool:
        return any((self.folder / "checkpoints").glob(".writing-*"))

    def _record_lost(self, before: dict[str, int]) -> None:
        """Records missing checkpoints. One may be missing only if `keep` newer ones exist, or if it was damaged."""
        now = [p.name for p in self._published()]
        gone = [name for name in before if name not in now and before[name] not in self.damaged]
        self.report.lost += [name for name in gone if sum(n > name for n in now) < self.keep]

    def _damage(self, kind: str) -> None:
        """Damages the newest checkpoint, if there is an older one to resume from."""
        checkpoints = self._published()
        if len(checkpoints) < 2:
            return
        self.damaged.add(checkpoints[0].stat().st_ino)
        path = self.draw.choice(sorted(p for p in checkpoints[0].iterdir() if p.stat().st_size > 8))
        size = path.stat().st_size
        if kind == "cut":
            os.truncate(path, self.draw.randrange(size))
        else:
            flip(path, self.draw.randrange(size), self.draw.randrange(8))

    def _set_free_space(self, size: int | None) -> None:
        """Resizes the disk so that `size` bytes are free; None: to 256 MiB."""
        if self.disk is None:
            return
        for _ in range(100):  # the run keeps writing, and a disk cannot be made smaller than its content
            number = 1 << 28 if size is None else max(4096, shutil.disk_usage(self.disk).used + size)
            mount = ["mount", "-o", f"remount,size={number}", str(self.disk)]
            if subprocess.run(mount, capture_output=True).returncode == 0:
                return
        raise RuntimeError(f"{self.disk} cannot be made {number} bytes large")
