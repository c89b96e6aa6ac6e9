"""Shared parts of SVG plots: the frame with light and dark themes, colours, axes and ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# The same as in page.css: on a light and on a dark background.
COLOURS = ("#0072b2", "#d55e00", "#008a64", "#b5478f", "#8f6b00", "#444444", "#3a95d0")
DARK_COLOURS = ("#56b4e9", "#ff8f45", "#2fcf9f", "#e596c5", "#f0e442", "#d0d0d0", "#8aa4ff")
FONT = "Helvetica,Arial,'DejaVu Sans',sans-serif"
SIZE = 13  # text size in pixels
WIDTH = 460  # of a picture: a phone shows it on 360 pixels, where text of 12 pixels is still 9 high


def document(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return the whole SVG.

    Its parts use the classes `ink` (text), `grid` (lines), and `c0`, `c1`, ..., which set the current colour.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{escape(FONT)}" font-size="{SIZE}" role="img"><title>{escape(title)}</title>{_style()}'
        f'<rect class="back" width="{width}" height="{height}"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _style() -> str:
    def rules(back: str, ink: str, rule: str, colours: Sequence[str]) -> str:
        runs = "".join(f".c{i}{{color:{colour}}}" for i, colour in enumerate(colours))
        return f".back{{fill:{back}}}.ink{{fill:{ink}}}.grid{{stroke:{rule}}}{runs}"

    light, dark = rules("#ffffff", "#1a1a1a", "#d5d9df", COLOURS), rules("#14171a", "#e8eaed", "#3a4047", DARK_COLOURS)
    return f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def heading(x: float, text: str) -> str:
    return f'<text class="ink" x="{x}" y="24" font-size="15" font-weight="600">{escape(text)}</text>'


def ink(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    """Return text whose baseline is at `y`. `more` adds attributes."""
    place = f' text-anchor="{anchor}"' * (anchor != "start")
    return f'<text class="ink" x="{x:.1f}" y="{y:.1f}"{place}{more}>{escape(text)}</text>'


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return an upper bound of the width of a text in pixels: its width in the widest font of `FONT`."""
    narrow, wide = "iljtfrI.,:;'|()[]/ ", "mwMW%@"
    ems = sum(0.36 if c in narrow else 0.97 if c in wide else 0.71 if c.isupper() else 0.62 for c in text)
    return ems * size * (1.1 if bold else 1)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """Format with at most five significant digits, with k, M or G from 10,000 on. page.js does the same."""
    for least, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.5g}{suffix}"
    return f"{value:.5g}"


def widened(low: float, high: float) -> tuple[float, float]:
    """Return the range of an axis. An empty range is widened."""
    if low < high:
        return low, high
    pad = abs(low) / 2 or 0.5
    return low - pad, high + pad


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to pixels from `first` to `last`.

    Attributes:
        log: the scale is logarithmic.
    """

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def at(self, value: float) -> float:
        scale = math.log if self.log else float
        low, high = scale(self.low), scale(self.high)
        return self.first + (scale(value) - low) / (high - low) * (self.last - self.first)
