"""The curves of one run or several as CSV text, for spreadsheets and your own programs."""

import csv
import io
import math
from collections.abc import Sequence

from ndtrain.report.runs import Metric, Run, logged_metrics


def render_csv(runs: Sequence[Run]) -> str:
    """Return CSV text with the columns run, step, and the key of every metric that a run has.

    Each logged step of a run is one row. Values have the units of metrics.jsonl. A cell is empty if the step has no
    finite value.
    """
    metrics, text = logged_metrics(runs), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "step", *(m.key for m in metrics)])
    for run in runs:
        for i, step in enumerate(run.steps.tolist()):
            writer.writerow([run.name, step, *(_cell(run, m, i) for m in metrics)])
    return text.getvalue()


def _cell(run: Run, metric: Metric, i: int) -> str:
    value = run.values[metric.key][i]
    return f"{value / metric.scale:.15g}" if math.isfinite(value) else ""  # 15 digits hide the rounding of the scale
