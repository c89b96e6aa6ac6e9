"""The errors of the planner's predictions of published runs."""

from ndtrain.plan.accuracy import WITHIN, Accuracy
from ndtrain.plan.hardware import Hardware

# All rows of the five-fold cross-validation by source in docs/plan_accuracy.md. The rates that predicted a row were
# fitted without the row's source.
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
    """Return True for GPUs whose rates come from their data sheets, as in the published runs."""
    return hardware.device == "cuda" and hardware.measured is None


def band(predicted: float) -> tuple[float, float]:
    """Return the range that contains the measured step time with probability `ERRORS.within_25`, in the same unit."""
    return predicted / (1 + WITHIN), predicted / (1 - WITHIN)


def note() -> str:
    """Return the accuracy in one line."""
    low, high = band(1.0)
    fast, slow = (1 / (1 + error) for error in reversed(ERRORS.quartiles))
    return (
        f"of {ERRORS.rows} published runs {ERRORS.within_25:.0%} took {low:.2f} to {high:.2f} times their predicted "
        f"time, half of them {fast:.2f} to {slow:.2f}; predicted memory was {ERRORS.memory_median:.0%} off (median)"
    )
