"""Fits the planner's rates to a table of published measurements, and reports how well they predict sources that they
were not fitted to."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from lab.published.cells import Row, count, number, text
from lab.published.least_squares import Parameter, at_start, fit
from lab.published.run import run_of
from lab.published.scatter import Points, scatter_svg
from lab.published.table import held_gib, read_table
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.plan.accuracy import Accuracy, accuracy, folds
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.options import refuse_overrides, write_file
from ndtrain.plan.predict import Prediction, Predictor, StepPlan
from ndtrain.plan.price import PUBLISHED, Rates

# The rates to fit: first to step times, then to memory. Starting values are from data sheets and from published
# benchmarks of single kernels and collectives. `launch_s`, `step_s` and the rates of memory have no such source. They
# start at the order of magnitude that the table's steps show, and not at the value of any row.
TIME = {
    "matmul": Parameter(0.75, 0.4, 1.0),
    "attention": Parameter(0.52, 0.2, 1.0),
    "sustained": Parameter(0.9, 0.6, 1.0),
    "memory": Parameter(0.75, 0.3, 1.0),
    "kernel_s": Parameter(3e-6, 1e-7, 2e-5),
    "launch_s": Parameter(4e-5, 2e-6, 1e-4),
    "link": Parameter(0.75, 0.2, 1.0),
    "network": Parameter(0.8, 0.1, 1.0),
    "interference": Parameter(0.15, 0.01, 1.0),
    "step_s": Parameter(0.08, 1e-3, 0.5),
}
MEMORY = {"memory_factor": Parameter(1.03, 1.0, 1.5), "memory_gb": Parameter(3.0, 0.5, 10.0)}
Fitted = dict[str, Parameter]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `plan fit`."""

    source: str = option("CSV file with the measurements; docs/plan_accuracy.md lists its columns", key="in")
    fit: bool = option("fit the rates; false: only report the errors of the planner's own rates", True)
    json: str | None = option("JSON file for all results", None)
    svg: str | None = option("SVG file to draw predicted over measured step times in", None)


class Measurement(NamedTuple):
    """A row that can be priced.

    Attributes:
        source: the row's source, without the number of an experiment.
        step_time_s: measured.
        plan: the plan of its step.
        memory: measured, in GiB; None: not measured.
    """

    source: str
    plan: StepPlan
    hardware: Hardware
    step_time_s: float
    memory: float | None


class Predicted(NamedTuple):
    """Predictions for some rows: seconds of a step, and memory in GiB."""

    step_times: np.ndarray
    memories: np.ndarray


def run(options: Options, overrides: Sequence[str]) -> None:
    """Fit the rates, print the tables and write the files.

    Raises:
        ConfigError: a file cannot be read or written, or no row of the table can be priced.
    """
    refuse_overrides(Options, overrides)
    rows = measurements(read_table("in", options.source)[1])
    if not rows:
        raise ConfigError(f"in={options.source}: no row has a measured step time and can be priced")
    problems = Problems.of(rows) if options.fit else None
    rates = problems.solve() if problems else PUBLISHED
    predicted = Predicted(step_times(rows, rates), memories(rows, rates))
    report = {"rates": asdict(rates), "sources": by_source(rows, predicted)}
    print(as_text("rates of " + ("all rows" if options.fit else "the planner"), report["sources"]))
    if problems:
        report["cross_validation"] = by_source(rows, cross_validated(rows, problems))
        print("\n" + as_text("five-fold cross-validation: rates of the other sources", report["cross_validation"]))
    print("\n" + "\n".join(f"{name:16} {value:.4g}" for name, value in asdict(rates).items()))
    if options.json:
        write_file("json", options.json, json.dumps(report, indent=1, default=asdict))
    if options.svg:
        write_file("svg", options.svg, drawn(rows, predicted.step_times))


def measurements(rows: Iterable[Row]) -> list[Measurement]:
    """Return the rows that can be priced and have a measured step time or measured tokens per second."""
    made = []
    for row in rows:
        try:
            run = run_of(row)
            measured = _step_time(row)
            if measured is None:
                continue
            plan = run.plan()
        except ConfigError:
            continue
        source = re.sub(r" exp \d+$", "", text(row, "source"))
        made.append(Measurement(source, plan, run.hardware, measured, number(row, "memory_gb")))
    return made


def _step_time(row: Row) -> float | None:
    measured, tokens = number(row, "derived_step_time_s"), number(row, "derived_tokens_s_gpu")
    if measured is None and tokens is not None:
        return count(row, "global_batch_seqs") * count(row, "seq_len") / (tokens * count(row, "gpus"))
    return measured


# ----------------------------------------------------------------------------------------------------------- the fit

Predict = Callable[[Sequence[Measurement], Rates], np.ndarray]


class Problem:
    """A fit of rates to a sample of measurements. The residuals at the starting rates, and their derivatives, are
    computed once for all folds.

    Args:
        names: the rates to fit.
        measured: the measured value of each row.
    """

    def __init__(self, rows: Sequence[Measurement], names: Fitted, measured: Sequence[float], predict: Predict):
        self.rows, self.names, self.predict = rows, names, predict
        self.logarithms = np.log(measured)
        self.begin = at_start(partial(self._residuals, PUBLISHED, range(len(rows))), list(names.values()))

    def solve(self, rates: Rates, held_out: Collection[str] = ()) -> Rates:
        """Return `rates` with this problem's rates fitted. A source with four times the rows counts twice as much.

        Args:
            held_out: sources to leave out of the fit.
        """
        rows = [i for i, m in enumerate(self.rows) if m.source not in held_out]
        if not rows:
            return rates
        sources = [self.rows[i].source for i in rows]
        weights = np.array([sources.count(s) ** -0.5 for s in sources])
        residuals, names = partial(self._residuals, rates, rows), list(self.names.values())
        return self._rates(rates, fit(residuals, names, weights, self.begin.of(rows)))

    def _rates(self, rates: Rates, values: np.ndarray) -> Rates:
        return replace(rates, **dict(zip(self.names, map(float, values), strict=True)))

    def _residuals(self, rates: Rates, rows: Sequence[int], values: np.ndarray) -> np.ndarray:
        predicted = self.predict([self.rows[i] for i in rows], self._rates(rates, values))
        return np.log(predicted) - self.logarithms[rows]


class Problems(NamedTuple):
    """The fits of the rates of time, and of the rates of memory, which do not affect times."""

    time: Problem
    memory: Problem | None

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> "Problems":
        sample, known = sampled(rows), [m for m in rows if m.memory]
        time = Problem(sample, TIME, [m.step_time_s for m in sample], step_times)
        return cls(time, Problem(known, MEMORY, [m.memory or 0.0 for m in known], memories) if known else None)

    def solve(self, held_out: Collection[str] = ()) -> Rates:
        """Return the rates with the least error of step times and of memory, fitted without the held-out sources."""
        rates = self.time.solve(PUBLISHED, held_out)
        return self.memory.solve(rates, held_out) if self.memory else rates


def sampled(rows: Sequence[Measurement], most: int = 40) -> list[Measurement]:
    """Return at most `most` rows of each source, spread evenly over its step times."""
    kept: list[Measurement] = []
    for source in dict.fromkeys(m.source for m in rows):
        mine = sorted((m for m in rows if m.source == source), key=lambda m: m.step_time_s)
        stride = -(-len(mine) // most)
        kept += mine[stride // 2 :: stride]
    return kept


def cross_validated(rows: Sequence[Measurement], problems: Problems) -> Predicted:
    """Predict each row with rates that were fitted without its source."""
    made = Predicted(np.zeros(len(rows)), np.zeros(len(rows)))
    for held_out in folds([m.source for m in rows]):
        rates = problems.solve(held_out)
        mine = [i for i, m in enumerate(rows) if m.source in held_out]
        made.step_times[mine] = step_times([rows[i] for i in mine], rates)
        made.memories[mine] = memories([rows[i] for i in mine], rates)
    return made


def step_times(rows: Sequence[Measurement], rates: Rates) -> np.ndarray:
    """Predict the step time of each row, in seconds."""
    return np.array([_predicted(m, rates).step_time_s for m in rows])


def memories(rows: Sequence[Measurement], rates: Rates) -> np.ndarray:
    """Predict the memory of each row, in GiB."""
    return np.array([held_gib(m.hardware, Predictor(m.hardware, rates).memory(m.plan)) for m in rows])


def _predicted(m: Measurement, rates: Rates) -> Prediction:
    return Predictor(m.hardware, rates).price(m.plan, explain=False)


# -------------------------------------------------------------------------------------------------------- the report


def by_source(rows: Sequence[Measurement], predicted: Predicted) -> dict[str, Accuracy]:
    """Return source -> its errors, and "all" -> the errors of all rows."""
    groups = {s: [i for i, m in enumerate(rows) if m.source == s] for s in dict.fromkeys(m.source for m in rows)}
    return {
        name: accuracy(
            [rows[i].step_time_s for i in mine],
            [float(predicted.step_times[i]) for i in mine],
            [(known, float(predicted.memories[i])) for i in mine if (known := rows[i].memory)],
        )
        for name, mine in {**groups, "all": list(range(len(rows)))}.items()
    }


def as_text(title: str, sources: dict[str, Accuracy]) -> str:
    """Format the errors as a table."""
    share = lambda value: "" if value is None else f"{100 * value:.1f}"
    plain = lambda value: "" if value is None else f"{value:.2f}"
    lines = [title, f"{'source':44} rows median  quartiles     worst  <25 %   tau  memory"]
    for name, a in sources.items():
        low, high = map(share, a.quartiles)
        times = f"{a.rows:4} {share(a.median):>6} {low:>5} {high:>5} {share(a.worst):>9} {share(a.within_25):>6}"
        memory = f"{share(a.memory_median):>7} of {a.memory_rows}" if a.memory_rows else ""
        lines.append(f"{name[:44]:44} {times} {plain(a.tau):>5} {memory}".rstrip())
    return "\n".join(lines)


def drawn(rows: Sequence[Measurement], predicted: np.ndarray) -> str:
    """Draw predicted over measured step times, with the largest sources behind the others."""
    sources = [m.source for m in rows]
    points = [
        Points(
            source if len(source) < 38 else f"{source[:22]}...{source[-13:]}",
            [m.step_time_s for m in rows if m.source == source],
            [float(p) for m, p in zip(rows, predicted, strict=True) if m.source == source],
        )
        for source in sorted(dict.fromkeys(sources), key=lambda s: -sources.count(s))
    ]
    return scatter_svg("Step times of published runs; dashed: 25 % off", "step time, s", points)
