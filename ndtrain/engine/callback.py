"""The interface of callbacks, which run at fixed points of every step."""

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from ndtrain.checkpoint import State
from ndtrain.checkpoint.companions import Companions
from ndtrain.config import Config
from ndtrain.data import Data, Source
from ndtrain.engine.train_step import StepReport, TrainingStep
from ndtrain.mesh.mesh import Mesh
from ndtrain.observe import Metrics
from ndtrain.parallel.build import Stages

# columns of a step report's `signals`; only islands have the last one
STOP, MEMORY, DATA_WAIT, ISLANDS = range(4)


class Run(Protocol):
    """The part of a `Trainer` that its callbacks use."""

    cfg: Config
    mesh: Mesh
    stages: Stages
    model: nn.ModuleList
    train_step: TrainingStep
    data: Data
    source: Source
    state: State
    metrics: Metrics | None
    report: StepReport | None
    companions: Companions
    resumed: Path | None
    claim: Any
    last_step: int
    stopping: bool
    stopped_by: str | None
    failure: str

    @property
    def loss(self) -> float | None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


class Callback:
    """Code that runs at fixed points of every step, on every rank. A plugin registers a subclass (`register_callback`).

    Attributes:
        trainer: the run, set before `on_train_start`.
    """

    trainer: Run

    def on_train_start(self) -> None:
        """Run before the first step."""

    def before_step(self) -> None:
        """Run before step `trainer.state.step + 1`."""

    def after_step(self) -> dict[str, float]:
        """Run after step `trainer.state.step`, whose numbers may still be on the device. Return further metrics of the
        step."""
        return {}

    def needs_report(self) -> bool:
        """Return True if `on_report` must run before this step's `on_step_end`. On a GPU the host then waits for the
        step. Otherwise reports arrive one step late."""
        return False

    def on_report(self, report: StepReport, metrics: dict[str, float]) -> None:
        """Run when the numbers of a step are available, step by step in order.

        Args:
            metrics: what the `after_step` of all callbacks returned.
        """

    def on_step_end(self) -> None:
        """Run after the step. `trainer.stopping` is True if it was the last one."""

    def on_train_end(self) -> None:
        """Run after the last step."""

    def close(self) -> None:
        """Run on every way out, also after an error."""


def due(every: int, step: int) -> bool:
    """Return True if `step` is a multiple of `every`. Return False if `every` is 0."""
    return bool(every) and step % every == 0
