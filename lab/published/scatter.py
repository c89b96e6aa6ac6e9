"""Draws predicted over measured values as SVG."""

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

from ndtrain.report.picture import WIDTH

# Okabe and Ito's palette, which is distinguishable with every kind of colour vision, and greys
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#111111", "#8c6d00", "#7f7f7f", "#5b3a8c")
LEFT, TOP = 60, 44  # pixels
SIDE = WIDTH - LEFT - 20  # width and height of the plot
STYLE = """text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#333}
.t{font-size:14px;font-weight:600;fill:#111}.m{text-anchor:middle}.e{text-anchor:end}
.g{stroke:#e2e5e9}.d{stroke:#333}.b{stroke:#999;stroke-dasharray:5 4}"""


class Points(NamedTuple):
    """The rows of one source."""

    name: str
    measured: Sequence[float]
    predicted: Sequence[float]


def scatter_svg(title: str, axis: str, sources: Sequence[Points], band: float = 0.25) -> str:
    """Draw an SVG with two logarithmic axes of the same scale. Points on the diagonal are predicted exactly.

    Args:
        axis: the quantity and its unit.
        band: relative error that the two dashed lines mark.
    """
    values = [v for s in sources for v in (*s.measured, *s.predicted)]
    low, high = floor(2 * log10(min(values))) / 2, ceil(2 * log10(max(values))) / 2
    place = lambda v: (log10(v) - low) / (high - low) * SIDE
    height = TOP + SIDE + 60 + 20 * len(sources)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="t" x="16" y="26">{escape(title)}</text>',
        f'<g transform="translate({LEFT} {TOP})">',
        *_grid(low, high, place),
        *_lines(low, high, band),
        f'<text class="m" x="{SIDE / 2}" y="{SIDE + 42}">measured {escape(axis)}</text>',
        f'<text class="m" transform="translate(-40 {SIDE / 2}) rotate(-90)">predicted {escape(axis)}</text>',
    ]
    for i, source in enumerate(sources):
        colour = COLOURS[i % len(COLOURS)]
        parts += [
            f'<circle cx="{place(m):.1f}" cy="{SIDE - place(p):.1f}" r="3.5" fill="{colour}" fill-opacity="0.6"/>'
            for m, p in zip(source.measured, source.predicted, strict=True)
        ]
        y = SIDE + 66 + 20 * i
        parts.append(f'<circle cx="5" cy="{y - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="17" y="{y}">{escape(source.name)}</text>')
    return "\n".join([*parts, "</g></svg>"])


def _grid(low: float, high: float, place) -> Iterator[str]:
    for power in range(ceil(low), floor(high) + 1):
        x = place(10**power)
        yield f'<path class="g" d="M{x:.1f} 0V{SIDE}M0 {SIDE - x:.1f}H{SIDE}"/>'
        yield f'<text class="m" x="{x:.1f}" y="{SIDE + 18}">{10.0**power:g}</text>'
        yield f'<text class="e" x="-8" y="{SIDE - x + 4:.1f}">{10.0**power:g}</text>'


def _lines(low: float, high: float, band: float) -> Iterator[str]:
    """Yield the diagonal, and the two lines of the band."""
    yield f'<path class="d" d="M0 {SIDE}L{SIDE} 0" fill="none"/>'
    for factor in (1 + band, 1 - band):
        shift = log10(factor) / (high - low) * SIDE
        x0, x1 = max(0.0, -shift), min(SIDE, SIDE - shift)
        yield f'<path class="b" d="M{x0:.1f} {SIDE - x0 - shift:.1f}L{x1:.1f} {SIDE - x1 - shift:.1f}" fill="none"/>'
