"""How far the planner's predictions of published runs are off."""

from ndtrain.plan.fitting.accuracy import WITHIN, Accuracy
from ndtrain.plan.hardware import Hardware

# All rows of the five-fold cross-validation by source in docs/plan_table.md: no row was predicted by rates that its own
# source was fitted to.
ERRORS = Accuracy(
    rows=457,
    median=0.079,
    quartiles=(-0.095, 0.038),
    worst=-0.668,
    within_25=0.915,
    tau=0.93,
    memory_rows=402,
    memory_median=0.087,
)


def applies_to(hardware: Hardware) -> bool:
    """Return True for GPUs whose rates come from their data sheets, as those of the published runs do."""
    return hardware.device == "cuda" and hardware.measured is None


def band(predicted: float) -> tuple[float, float]:
    """Return the range in which the measured step time lies as often as `ERRORS.within_25` says, in the same unit."""
    return predicted / (1 + WITHIN), predicted / (1 - WITHIN)


def note() -> str:
    """Return the accuracy in one line."""
    low, high = band(1.0)
    fast, slow = (1 / (1 + error) for error in reversed(ERRORS.quartiles))
    return (
        f"of {ERRORS.rows} published runs {ERRORS.within_25:.0%} took {low:.2f} to {high:.2f} times their predicted "
        f"time, half of them {fast:.2f} to {slow:.2f}; predicted memory was {ERRORS.memory_median:.0%} off (median)"
    )
