"""One metric of one run or several as an SVG, for pages that show pictures only."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from ndtrain.report.curves import Curve, reduce_curve
from ndtrain.report.runs import METRICS, ReportError, Run

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, BOTTOM = 64, 24, 48
POINTS = 300  # of one curve
# as page.css, on light and on dark
COLOURS = ("#0072b2", "#d55e00", "#008a64", "#b5478f", "#8f6b00", "#444444", "#3a95d0")
DARK_COLOURS = ("#56b4e9", "#ff8f45", "#2fcf9f", "#e596c5", "#f0e442", "#d0d0d0", "#8aa4ff")
FONT = "Helvetica,Arial,'DejaVu Sans',sans-serif"


def render_svg(runs: Sequence[Run], key: str = "loss") -> str:
    """The curves of a metric as an SVG text, for light and dark surroundings. Marks are those of the page.

    Raises:
        ReportError: no run has the metric.
    """
    metric = next(m for m in METRICS if m.key == key)
    curves = [reduce_curve(run.steps, run.values[key], POINTS) for run in runs]
    shown = [(i, run, curve) for i, (run, curve) in enumerate(zip(runs, curves, strict=True)) if len(curve.x)]
    if not shown:
        raise ReportError(f"metric={key}: no run has a finite value of it")
    top = 52 + 20 * ((len(shown) - 1) // 3 + 1)
    plot = _Plot([run for _, run, _ in shown], [curve for _, _, curve in shown], top)
    parts = [f'<text class="ink" x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(metric.title)}</text>']
    parts += [plot.axes(), *(_legend(n, i, run.name) for n, (i, run, _) in enumerate(shown))]
    parts += [plot.run(i, run, curve) for i, run, curve in shown]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{escape(FONT)}" font-size="13" role="img"><title>{escape(metric.title)}</title>{_style()}'
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _style() -> str:
    def rules(back: str, ink: str, rule: str, colours: Sequence[str]) -> str:
        runs = "".join(f".c{i}{{color:{colour}}}" for i, colour in enumerate(colours))
        return f".back{{fill:{back}}}.ink{{fill:{ink}}}.grid{{stroke:{rule}}}{runs}"

    light, dark = rules("#ffffff", "#1a1a1a", "#d5d9df", COLOURS), rules("#14171a", "#e8eaed", "#3a4047", DARK_COLOURS)
    return f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def _legend(place: int, i: int, name: str) -> str:
    x, y = LEFT + 225 * (place % 3), 46 + 20 * (place // 3)
    dash = _dash(i)
    name = name if len(name) <= 24 else name[:23] + "…"
    line = f'<line x1="{x}" x2="{x + 20}" y1="{y}" y2="{y}" stroke="currentColor" stroke-width="3"{dash}/>'
    return f'<g class="c{i % len(COLOURS)}">{line}</g><text class="ink" x="{x + 26}" y="{y + 4}">{escape(name)}</text>'


def _dash(i: int) -> str:
    return ' stroke-dasharray="6 3"' if i // len(COLOURS) % 2 else ""


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _range(low: float, high: float) -> tuple[float, float]:
    """The range of an axis, which is not empty."""
    if low < high:
        return low, high
    pad = abs(low) / 2 or 0.5
    return low - pad, high + pad


class _Plot:
    """The axes, and the curves in them."""

    def __init__(self, runs: Sequence[Run], curves: Sequence[Curve], top: int):
        self.top, self.foot = top, HEIGHT - BOTTOM
        self.x = _range(min(run.steps[0] for run in runs), max(run.steps[-1] for run in runs))
        self.y = _range(min(c.low.min() for c in curves), max(c.high.max() for c in curves))

    def at_x(self, step: float) -> float:
        return LEFT + (step - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def at_y(self, value: float) -> float:
        return self.foot - (value - self.y[0]) / (self.y[1] - self.y[0]) * (self.foot - self.top)

    def axes(self) -> str:
        lines = []
        for t in ticks(*self.y, 5):
            y = self.at_y(t)
            lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text class="ink" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{t:.4g}</text>')
        for t in ticks(*self.x, 6):
            x = self.at_x(t)
            lines.append(f'<text class="ink" x="{x:.1f}" y="{self.foot + 22}" text-anchor="middle">{t:,.6g}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        lines.append(f'<text class="ink" x="{middle}" y="{HEIGHT - 7}" text-anchor="middle">step</text>')
        return f'<g font-size="12">{"".join(lines)}</g>'

    def run(self, i: int, run: Run, curve: Curve) -> str:
        points = lambda ys: [f"{self.at_x(a):.1f} {self.at_y(b):.1f}" for a, b in zip(curve.x, ys, strict=True)]
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
        inside = lambda steps: [self.at_x(step) for step in steps if self.x[0] <= step <= self.x[1]]
        parts += [f'<path d="M{x - 5:.1f} {self.top - 11}h10l-5 8Z"/>' for x in inside(run.restarts)]
        foot = self.foot + 5
        parts += [
            f'<path d="M{x - 3:.1f} {foot - 3}l6 6m0 -6l-6 6" stroke="currentColor" stroke-width="1.6"/>'
            for x in inside(np.unique(run.skipped).tolist())
        ]
        return f'<g class="c{i % len(COLOURS)}" fill="currentColor">{"".join(parts)}</g>'
