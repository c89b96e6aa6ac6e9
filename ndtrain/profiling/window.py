"""A window of steps that are recorded: `train.profile`."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from ndtrain.distributed.mesh import Mesh
from ndtrain.profiling import snapshot
from ndtrain.profiling.profile import Table, Tally, recording, settle


@dataclass(frozen=True)
class Profile:
    """What one rank recorded.

    Attributes:
        folder: where in the run folder it is written to.
    """

    steps: range
    rank: int
    device: torch.device
    recorded: profile
    table: Table
    folder: str = "profile"

    def __str__(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return f"profile of step {first}" if first == last else f"profile of steps {first} to {last}"

    def summary(self) -> str:
        """The table of where their time went."""
        return "\n  ".join([f"{self}, a step on rank {self.rank}:", *self.table.lines()])

    def write(self, folder: Path) -> None:
        """rank-0.json.gz, which Perfetto and chrome://tracing open, and the memory snapshot.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.recorded.export_chrome_trace(str(folder / f"rank-{self.rank}.json.gz"))
        snapshot.write(self.recorded, folder, self.rank, self.device)


class Window:
    """Records, on each rank, those of a run's steps that lie in it.

    Args:
        steps: their numbers; none: nothing is recorded.
    """

    def __init__(self, steps: range, mesh: Mesh):
        self.steps, self.mesh = steps, mesh
        self._recorder, self._step = ExitStack(), ExitStack()
        self._recorded: profile | None = None
        self._seen: list[int] = []

    def turn(self, step: int | None) -> Profile | None:
        """To be called before each step, and after the last with None. Returns the profile once its steps are over."""
        within = step in self.steps
        if self._recorded and not within:
            return self._finish()
        self._step.close()
        if within:
            if not self._recorded:
                self._recorded = self._recorder.enter_context(recording(self.mesh.device, profile_memory=True))
                snapshot.begin(self.mesh.device)
            self._step.enter_context(record_function(f"step {step}"))
            self._seen.append(step)
        return None

    def _finish(self) -> Profile:
        device = self.mesh.device
        settle(device)
        self.close()
        tally = Tally(device)
        tally.add(self._recorded.events())
        recorded, self._recorded = self._recorded, None
        steps = range(self._seen[0], self._seen[-1] + 1)
        return Profile(steps, self.mesh.rank, device, recorded, tally.table())

    def close(self) -> None:
        """Ends a recording that was not finished; else does nothing."""
        self._step.close()
        self._recorder.close()
