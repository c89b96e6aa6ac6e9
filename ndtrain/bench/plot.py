"""Curves into a PNG file: rows of panels beside one legend, sizes on a logarithmic axis to base 2."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ndtrain.bench.arguments import require_folder
from ndtrain.config import ConfigError

COLOURS = (  # told apart in grey and by most colour-blind readers (Okabe and Ito), then some more
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B5A2B", "#7F7F7F", "#B8B000",
)  # fmt: skip
STYLES = ("-", "--", ":")
MARKERS = "osv^D<>pPX"
DOTS_PER_INCH = 130


@dataclass(frozen=True)
class Curve:
    """Points (x, y) under a name. `colour` and `style` count through `COLOURS` and `STYLES`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    style: int = 0


@dataclass(frozen=True)
class Panel:
    """Axes with curves.

    Attributes:
        y_label: with its unit.
        x_name: what to write at an x, its unit included.
        logarithmic: whether y is, too; otherwise it begins at 0.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    x_name: Callable[[float], str]
    logarithmic: bool = True


def check(path: str) -> None:
    """`path` can be drawn to, or is "".

    Raises:
        ConfigError: there is no folder for it, or no matplotlib.
    """
    require_folder("plot", path)
    if path and Path(path).suffix.lower() != ".png":
        raise ConfigError(f"plot={path}: draws PNG files; let the name end in .png")
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"plot={path} needs matplotlib, which is not installed: pip install 'ndtrain[bench]'")


def draw(path: str, title: str, rows: Sequence[Sequence[Panel]]) -> None:
    """Writes the panels, row by row, each of the same length, to the PNG file `path`; does nothing where that is
    ""."""
    if not path:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state shared with other plots
    from matplotlib.figure import Figure

    down, across = len(rows), len(rows[0])
    figure = Figure(figsize=(5.2 * across + 2.8, 0.4 + 4.2 * down), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    lines: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(down, across, squeeze=False).flat, chain(*rows), strict=True):
        lines |= _fill(axes, panel)
    figure.legend(lines.values(), lines.keys(), loc="outside right center", fontsize=8, frameon=False, handlelength=3)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _fill(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draws a panel; its lines by name."""
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if panel.logarithmic else "linear")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    lines = {
        c.name: axes.plot(
            c.x, c.y, color=COLOURS[c.colour], linestyle=STYLES[c.style], marker=MARKERS[c.colour], markersize=4,
            markerfacecolor="white" if c.style else COLOURS[c.colour], linewidth=1.3,
        )[0]
        for c in panel.curves
    }  # fmt: skip
    ticks = sorted({x for c in panel.curves for x in c.x})
    axes.set_xticks(ticks, [panel.x_name(x) for x in ticks], fontsize=8, rotation=30)
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    if not panel.logarithmic:
        axes.set_ylim(bottom=0)
    return lines
