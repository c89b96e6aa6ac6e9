"""Predicts the rows of a table of published measurements. Runs of other trainers are priced as if ndtrain ran them."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.published.cells import Row
from lab.published.machine import GIB
from lab.published.run import Run, run_of
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.options import refuse_overrides
from ndtrain.plan.predict import Prediction, Predictor
from ndtrain.plan.price import PUBLISHED
from ndtrain.plan.report import Progress

NECESSARY = ("layers", "hidden", "heads", "seq_len", "global_batch_seqs", "gpu")
PREDICTED = ("predicted_step_time_s", "predicted_tokens_s_gpu", "predicted_mfu_full", "predicted_memory_gb")
REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `plan table`."""

    source: str = option("CSV file with a row per run; docs/plan_accuracy.md lists its columns", key="in")
    out: str = option("CSV file to write: the same rows, followed by the predicted columns")


def run(options: Options, overrides: Sequence[str]) -> None:
    """Predict every row, write the table, and print the refused rows.

    Raises:
        ConfigError: a file cannot be read or written, or lacks a column.
    """
    refuse_overrides(Options, overrides)
    columns, rows = read_table("in", options.source)
    predicted = [predicted_columns(row) for row in Progress().count(rows, "predicting a row", len(rows))]
    own = [*PREDICTED, REFUSED]
    both = [row | p for row, p in zip(rows, predicted, strict=True)]
    write_table(options.out, [*(c for c in columns if c not in own), *own], both)
    refusals = [f"line {line}: {p[REFUSED]}" for line, p in enumerate(predicted, 2) if p[REFUSED]]
    print("\n".join([*refusals, f"{len(rows) - len(refusals)} of {len(rows)} rows predicted: {options.out}"]))


def predicted_columns(row: Row) -> dict[str, str]:
    """Return the new columns of a row. If it cannot be predicted, `refused` has the reason and the others are empty."""
    try:
        priced = run_of(row)
        prediction = predictor_of(priced).price(priced.plan(), explain=False)
    except ConfigError as error:
        return dict.fromkeys(PREDICTED, "") | {REFUSED: str(error)}
    return dict(zip(PREDICTED, _cells(prediction, priced.hardware), strict=True)) | {REFUSED: ""}


def _cells(p: Prediction, hardware: Hardware) -> tuple[str, ...]:
    return (
        f"{p.step_time_s:.4f}",
        f"{p.tokens_per_s_per_device:.2f}",
        f"{p.mfu:.6f}",
        f"{held_gib(hardware, p.memory_bytes):.2f}",
    )


def held_gib(hardware: Hardware, nbytes: float) -> float:
    """Return the GiB to report for a run that is known to have run.

    It is at most the device's memory: PyTorch's allocator frees cached blocks before it fails.
    """
    return min(nbytes, 1e9 * (hardware.memory_gb or float("inf"))) / GIB


_predictors: dict[str, Predictor] = {}


def predictor_of(priced: Run) -> Predictor:
    """Return the predictor of a run's hardware. There is one for each hardware."""
    return _predictors.setdefault(repr(priced.hardware), Predictor(priced.hardware, PUBLISHED))


# ------------------------------------------------------------------------------------------------------------- files


def read_table(key: str, path: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return (columns, rows) of a CSV file with a header.

    Raises:
        ConfigError: the file cannot be read, lacks a necessary column, or has a line with more cells than the header.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            columns = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = columns
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or "it is not CSV in UTF-8"
        raise ConfigError(f"{key}={path}: cannot be read ({why}): give a CSV file with a header") from error
    if missing := [name for name in NECESSARY if name not in columns]:
        raise ConfigError(f"{key}={path}: no column {missing[0]}; required: {', '.join(NECESSARY)}")
    for line in _too_long(rows):
        raise ConfigError(f"{key}={path}: line {line} has more cells than the header: quote texts that hold a comma")
    return columns, rows


def _too_long(rows: Sequence[dict]) -> Iterator[int]:
    return (line for line, row in enumerate(rows, 2) if None in row)


def write_table(path: str, columns: Sequence[str], rows: Sequence[dict[str, str]]) -> None:
    """Write a CSV file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"out={path}: cannot be written ({error.strerror})") from error
