"""Draws curves into a PNG file: panels in rows next to one legend, with sizes on a logarithmic axis to base 2."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ndtrain.config import ConfigError
from ndtrain.measure.results import require_folder

HELP = "PNG file for the curves"
STYLES, MARKERS = ("-", "--", ":"), "osv^D<>pPX"
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]  # distinguishable with every kind of colour vision


class Point(NamedTuple):
    """A point: y is a median, low and high its spread if there are several samples."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


Points = dict[str, dict[str, list[Point]]]  # colour -> line style -> points


@dataclass(frozen=True)
class Panel:
    """Axes with curves.

    Attributes:
        y_label: includes the unit.
        points: one colour for each outer name, one line style for each inner name.
        x_name: formats an x value, including its unit.
        y_scale: of matplotlib; a linear scale begins at 0.
    """

    title: str
    x_label: str
    y_label: str
    points: Points
    x_name: Callable[[float], str]
    y_scale: str = "log"


def check(path: str) -> None:
    """Check that `path` can be drawn to, or is "".

    Raises:
        ConfigError: its folder or matplotlib is missing, or the name does not end in .png.
    """
    require_folder("plot", path)
    if path and Path(path).suffix.lower() != ".png":
        raise ConfigError(f"plot={path}: draws PNG files; let the name end in .png")
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"plot={path} needs matplotlib, which is not installed: pip install 'ndtrain[bench]'")


def draw(path: str, title: str, panels: Sequence[Panel], across: int, size: tuple[float, float] = (5.2, 4.2)) -> None:
    """Write the panels to the PNG file `path`. Do nothing if it is "".

    Args:
        across: panels in a row.
        size: width and height of a panel, inches.
    """
    if not path:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display and shares no state with other plots
    from matplotlib.figure import Figure

    down = -(-len(panels) // across)
    figure = Figure(figsize=(size[0] * across + 2.8, 0.6 + size[1] * down), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    lines: dict[str, Any] = {}
    places = figure.subplots(down, across, squeeze=False).flat
    for axes, panel in zip(places, panels, strict=False):
        lines |= _fill(axes, panel)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.legend(lines.values(), lines.keys(), loc="outside right center", fontsize=8, frameon=False, handlelength=3)
    figure.savefig(path, format="png", dpi=130)


def _fill(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw a panel and return its lines by name."""
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, yscale=panel.y_scale)
    axes.set_xscale("log", base=2)
    axes.grid(True, color="#dddddd")
    lines, ticks = {}, set()
    for i, (name, curves) in enumerate(panel.points.items()):
        for (suffix, points), style in zip(curves.items(), STYLES, strict=False):
            x, y, low, high = zip(*points, strict=True)
            ticks.update(x)
            look = {"color": COLOURS[i % len(COLOURS)], "linestyle": style, "marker": MARKERS[i], "markersize": 4}
            lines[name + suffix] = axes.plot(x, y, **look)[0]
            if None not in (*low, *high):
                axes.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
    axes.set_xticks(sorted(ticks), [panel.x_name(x) for x in sorted(ticks)], fontsize=8, rotation=30)
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    if panel.y_scale == "linear":
        axes.set_ylim(bottom=0)
    return lines
