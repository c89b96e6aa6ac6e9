"""Draws one metric of one run or several as SVG, for web pages that show images only."""

from collections.abc import Sequence
from html import escape

import numpy as np

from ndtrain.report.curves import Curve, reduce_curve
from ndtrain.report.picture import COLOURS, WIDTH, Axis, document, heading, short_number, ticks, widened
from ndtrain.report.runs import METRICS, STEP_AXIS, ReportError, Run

HEIGHT = 320
LEFT, RIGHT, BOTTOM = 76, 20, 48
COLUMNS, NAME = 2, 20  # columns of the legend; most characters of a run's name in it
POINTS = 300  # most points of one curve


def render_svg(runs: Sequence[Run], key: str = "loss") -> str:
    """Draw the curves of a metric as SVG text, for light and dark backgrounds. The marks are the same as on the page.

    Raises:
        ReportError: no run has the metric.
    """
    metric = next(m for m in METRICS if m.key == key)
    curves = [reduce_curve(run.steps, run.values[key], POINTS) for run in runs]
    shown = [(i, run, curve) for i, (run, curve) in enumerate(zip(runs, curves, strict=True)) if len(curve.x)]
    if not shown:
        raise ReportError(f"metric={key}: no run has a finite value of this metric")
    top = 52 + 20 * ((len(shown) - 1) // COLUMNS + 1)
    plot = _Plot([run for _, run, _ in shown], [curve for _, _, curve in shown], top)
    parts = [
        heading(LEFT, metric.title),
        plot.axes(metric.axis),
        *(_legend(n, i, run.name) for n, (i, run, _) in enumerate(shown)),
    ]
    parts += [plot.run(i, run, curve) for i, run, curve in shown]
    return document(metric.title, WIDTH, HEIGHT, parts)


def _legend(place: int, i: int, name: str) -> str:
    row, column = divmod(place, COLUMNS)
    x, y = LEFT + (WIDTH - LEFT) / COLUMNS * column, 46 + 20 * row
    dash = _dash(i)
    name = name if len(name) <= NAME else name[: NAME - 1] + "…"
    line = f'<line x1="{x}" x2="{x + 20}" y1="{y}" y2="{y}" stroke="currentColor" stroke-width="3"{dash}/>'
    return f'<g class="c{i % len(COLOURS)}">{line}</g><text class="ink" x="{x + 26}" y="{y + 4}">{escape(name)}</text>'


def _dash(i: int) -> str:
    return ' stroke-dasharray="6 3"' if i // len(COLOURS) % 2 else ""


class _Plot:
    """The axes and the curves of a picture."""

    def __init__(self, runs: Sequence[Run], curves: Sequence[Curve], top: int):
        self.top, self.foot = top, HEIGHT - BOTTOM
        steps = widened(min(run.steps[0] for run in runs), max(run.steps[-1] for run in runs))
        values = widened(min(c.low.min() for c in curves), max(c.high.max() for c in curves))
        self.x, self.y = Axis(*steps, LEFT, WIDTH - RIGHT), Axis(*values, self.foot, self.top)

    def axes(self, name: str) -> str:
        """Return both axes with their grid. `name` labels the vertical axis."""
        lines = []
        for t in ticks(self.y.low, self.y.high, 5):
            y = self.y.at(t)
            lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text class="ink" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short_number(t)}</text>')
        for t in ticks(self.x.low, self.x.high, 5):
            x = self.x.at(t)
            lines.append(f'<text class="ink" x="{x:.1f}" y="{self.foot + 22}" text-anchor="middle">{t:,.6g}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        lines.append(f'<text class="ink" x="{middle}" y="{HEIGHT - 7}" text-anchor="middle">{STEP_AXIS}</text>')
        upright = f'transform="translate(18 {(self.top + self.foot) / 2:.1f}) rotate(-90)"'
        lines.append(f'<text class="ink" {upright} text-anchor="middle">{escape(name)}</text>')
        return f'<g font-size="12">{"".join(lines)}</g>'

    def run(self, i: int, run: Run, curve: Curve) -> str:
        points = lambda ys: [f"{self.x.at(a):.1f} {self.y.at(b):.1f}" for a, b in zip(curve.x, ys, strict=True)]
        parts = []
        if curve.mean is not curve.low:
            edge = [*points(curve.high), *reversed(points(curve.low))]
            parts.append(
                f'<path d="M{"L".join(edge)}Z" fill-opacity="0.2" stroke="currentColor" stroke-opacity="0.45"/>'
            )
        stroke = f'fill="none" stroke="currentColor" stroke-width="1.8"{_dash(i)}'
        parts.append(f'<path d="M{"L".join(points(curve.mean))}" {stroke}/>')
        if len(curve.x) <= 40:
            parts += [f'<circle r="2.5" cx="{p.split()[0]}" cy="{p.split()[1]}"/>' for p in points(curve.mean)]
        inside = lambda steps: [self.x.at(step) for step in steps if self.x.low <= step <= self.x.high]
        parts += [f'<path d="M{x - 5:.1f} {self.top - 11}h10l-5 8Z"/>' for x in inside(run.restarts)]
        foot = self.foot + 5
        parts += [
            f'<path d="M{x - 3:.1f} {foot - 3}l6 6m0 -6l-6 6" stroke="currentColor" stroke-width="1.6"/>'
            for x in inside(np.unique(run.skipped).tolist())
        ]
        return f'<g class="c{i % len(COLOURS)}" fill="currentColor">{"".join(parts)}</g>'
