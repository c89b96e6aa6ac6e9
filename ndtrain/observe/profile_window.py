"""The window of steps that `train.profile` records."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from ndtrain.mesh.mesh import Mesh
from ndtrain.observe import snapshot
from ndtrain.observe.profile import Table, Tally, recording, settle


@dataclass(frozen=True)
class Profile:
    """The recording of one rank.

    Attributes:
        steps: the recorded steps.
        recorded: PyTorch's profiler.
        table: the time of a step.
        folder: the folder for the profile's files, within the run folder.
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
        """Return the table as text, with a title."""
        return "\n  ".join([f"{self}, a step on rank {self.rank}:", *self.table.lines()])

    def write(self, folder: Path) -> None:
        """Write the trace rank-0.json.gz, for Perfetto or chrome://tracing, and the memory snapshot.

        Raises:
            OSError: a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.recorded.export_chrome_trace(str(folder / f"rank-{self.rank}.json.gz"))
        snapshot.write(self.recorded, folder, self.rank, self.device)


class Window:
    """Records a window of steps of a run, on each rank.

    Args:
        steps: the numbers of the steps in the window; an empty range records nothing.
    """

    def __init__(self, steps: range, mesh: Mesh):
        self.steps, self.mesh = steps, mesh
        self._recorder, self._step = ExitStack(), ExitStack()
        self._recorded: profile | None = None
        self._seen: list[int] = []

    def turn(self, step: int | None) -> Profile | None:
        """Start or stop recording. Call it before each step, and with None after the last step.

        Return the profile once the window is over, otherwise None.
        """
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
        """End an unfinished recording. Do nothing if there is none."""
        self._step.close()
        self._recorder.close()
