"""Curves into a PNG file: rows of panels beside one legend, sizes on a logarithmic axis to base 2."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ndtrain.bench.results import require_folder
from ndtrain.config import ConfigError

HELP = "PNG file for the curves"
STYLES, MARKERS = ("-", "--", ":"), "osv^D<>pPX"
Points = dict[str, dict[str, list[tuple[float, float]]]]  # colour -> line style -> points (x, y)


@dataclass(frozen=True)
class Panel:
    """Axes with curves.

    Attributes:
        y_label: with its unit.
        points: one colour for each outer name, one line style for each inner one.
        x_name: what to write at an x, its unit included.
        y_scale: of matplotlib; a linear one begins at 0.
    """

    title: str
    x_label: str
    y_label: str
    points: Points
    x_name: Callable[[float], str]
    y_scale: str = "log"


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
    """Writes the panels, rows of the same length, to the PNG file `path`; does nothing where that is ""."""
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
    figure.savefig(path, format="png", dpi=130)


def _fill(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draws a panel; its lines by name."""
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, yscale=panel.y_scale)
    axes.set_xscale("log", base=2)
    axes.grid(True, color="#dddddd")
    lines, ticks = {}, set()
    for i, (name, curves) in enumerate(panel.points.items()):
        for (suffix, points), style in zip(curves.items(), STYLES, strict=False):
            x, y = zip(*points, strict=True)
            ticks.update(x)
            lines[name + suffix] = axes.plot(x, y, color=f"C{i}", linestyle=style, marker=MARKERS[i], markersize=4)[0]
    axes.set_xticks(sorted(ticks), [panel.x_name(x) for x in sorted(ticks)], fontsize=8, rotation=30)
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    if panel.y_scale == "linear":
        axes.set_ylim(bottom=0)
    return lines
