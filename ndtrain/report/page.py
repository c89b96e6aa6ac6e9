"""The HTML page: data, style and script in one self-contained file."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from ndtrain.report.curves import reduce_curve, thin
from ndtrain.report.runs import STEP_AXIS, Run, differences, logged_metrics

POINTS = 120_000  # of all curves of a page together, which limits its size
MOST_POINTS, LEAST_POINTS = 1000, 40  # points of one curve
MARKS = 500  # most marks of one kind in a run
COLOURS = 7  # number of colours in page.css; further runs repeat them with dashed lines


def render_page(runs: Sequence[Run]) -> str:
    """Return the page of these runs as HTML text."""
    names = [run.name for run in runs]
    title = f"ndtrain: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    parts = {
        "title": escape(title),
        "style": _asset("page.css"),
        "tables": _tables(runs),
        "data": json.dumps(page_data(runs), separators=(",", ":")).replace("<", "\\u003c"),
        "script": _asset("page.js"),
    }
    return re.sub(r"\[\[(\w+)\]\]", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("ndtrain.report").joinpath(name).read_text(encoding="utf-8")


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the data that page.js draws: the logged `metrics`, and `runs` with their reduced curves."""
    metrics = logged_metrics(runs)
    most = max(LEAST_POINTS, min(MOST_POINTS, POINTS // (len(runs) * max(1, len(metrics)))))
    return {
        "step_axis": STEP_AXIS,
        "metrics": [{"key": m.key, "title": m.title, "axis": m.axis} for m in metrics],
        "runs": [
            {
                "name": run.name,
                "steps": [int(run.steps[0]), int(run.steps[-1])],
                "curves": {m.key: _curve(run, m.key, most) for m in metrics},
                "restarts": thin(run.restarts, MARKS),
                "skipped": thin(run.skipped, MARKS),
            }
            for run in runs
        ],
    }


def _curve(run: Run, key: str, most: int) -> dict[str, list[float]]:
    """Return the points as lists. `low` and `high` are included only if points cover several steps."""
    curve = reduce_curve(run.steps, run.values[key], most)
    data = {"x": curve.x.tolist(), "mean": _short(curve.mean)}
    if curve.mean is not curve.low:
        data |= {"low": _short(curve.low), "high": _short(curve.high)}
    return data


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


# ------------------------------------------------------------------------------------------------------------ tables


def _tables(runs: Sequence[Run]) -> str:
    """Return the tables: the runs' results and configuration differences. With a single run also its configuration."""
    keys = differences(runs)
    head = ["run", *keys, "ended", "step", "tokens", "loss", "best evaluation"]
    rows = [[run.name, *(_text(run.config, key) for key in keys), *_summary(run)] for run in runs]
    text = _table(head, rows, swatches=True)
    if len(runs) > 1 and not keys:
        text += "<p>The configurations do not differ.</p>"
    bare = [run.name for run in runs if not run.config]
    if bare:
        text += f"<p>No readable config.yaml: {escape(', '.join(bare))}.</p>"
    for run in runs if len(runs) == 1 and runs[0].config else ():
        whole = _table(["key", "value"], [[key, _text(run.config, key)] for key in run.config])
        text += f"<details><summary>Configuration</summary>{whole}</details>"
    return text


def _summary(run: Run) -> list[str]:
    return [run.ended, f"{run.steps[-1]:,}", f"{run.tokens:,}", _last(run), _best(run)]


def _last(run: Run) -> str:
    losses = run.values["loss"]
    losses = losses[np.isfinite(losses)]
    return f"{losses[-1]:.4f}" if len(losses) else "none"


def _best(run: Run) -> str:
    losses = run.values["eval_loss"]
    if not np.isfinite(losses).any():
        return "none"
    best = int(np.nanargmin(losses))
    return f"{losses[best]:.4f} at step {run.steps[best]:,}"


def _text(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "—"
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], swatches: bool = False) -> str:
    cells = lambda tag, row: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
    lines = [f"<tr>{cells('th', head)}</tr>"]
    for i, row in enumerate(rows):
        swatch = f'<i class="line c{i % COLOURS}{" dashed" * (i // COLOURS % 2)}"></i>' if swatches else ""
        lines.append(f'<tr><th scope="row">{swatch}{escape(row[0])}</th>{cells("td", row[1:])}</tr>')
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
