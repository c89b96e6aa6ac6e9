"""Options that the trials share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.islands.figures import disagreements, repeated
from lab.islands.watch import Finished
from ndtrain.arguments import option
from ndtrain.measure.results import require_folder
from ndtrain.plan.fault_tolerance import above_0


def number(text: str, default: float) -> Any:
    """Return a field for a positive number."""
    return option(text, default, read=above_0)


@dataclass(frozen=True)
class OutOptions:
    """Options of every trial."""

    out: str = option("JSON file for all results", "")

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: options that do not go together.
        """
        require_folder("out", self.out)


@dataclass(frozen=True)
class TrialOptions(OutOptions):
    """Options of the trials whose islands take overrides."""

    args: str = option("further overrides of the islands, separated by blanks", "")
    equal: bool = option("fail if a step has several losses; false: islands exchange more rarely than each step", True)

    def disagreements(self, finished: Sequence[Finished]) -> list[str]:
        """Return what is wrong with the losses of steps."""
        if not self.equal:
            return []
        different, again = disagreements(finished), repeated(finished)
        several = [f"steps {different[:5]} have several losses"] if different else []
        return [*several, *(f"{island} has done step {step} twice" for island, step in again[:5])]
