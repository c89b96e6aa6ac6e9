"""Draws plans as SVG, for light and dark surroundings."""

import math
from collections.abc import Callable, Iterator, Sequence

from ndtrain.plan.fault_tolerance import DAY, HOUR, Curves
from ndtrain.plan.predict import Prediction
from ndtrain.report.picture import Axis, document, heading, ink, text_width, ticks

WIDTH, LEFT, RIGHT = 760, 64, 40  # pixels
SMALL = ' font-size="12"'

# ---------------------------------------------------------------------------------------------------------- waterfall

USEFUL = "matmul at peak"
CAUSES = {  # what a loss is due to -> its colour, and how the names of its parts begin
    "compute": ("c1", ("matmul", "attention", "memory-bound", "recompute", "launch")),
    "communication": ("c0", ("exposed",)),
    "pipeline": ("c3", ("bubble",)),
    "update and the rest": ("c4", ("",)),
}
LEAST = 0.0005  # of the step: smaller parts are left out
ROW, LABEL, VALUE = 26, 168, 150  # pixels: of a row; of its name, its value


def waterfall_svg(prediction: Prediction) -> str:
    """Where the peak goes: from the whole step down to the matmuls at peak, one bar for each loss."""
    step = prediction.step_time_s
    losses = [(name, s / step) for name, s in prediction.waterfall.items() if name != USEFUL and abs(s) > LEAST * step]
    rest = prediction.waterfall[USEFUL] / step
    top, foot = 84, 84 + ROW * (len(losses) + 2)
    x = Axis(0.0, 1.0, LABEL, WIDTH - VALUE)
    title = f"Where a step's {_seconds(step)} go: MFU {_percent(prediction.mfu)}"
    parts = [heading(16, title), _legend(16, 50, [(cause, colour) for cause, (colour, _) in CAUSES.items()])]
    parts += [_rule(x.at(t / 5), top, x.at(t / 5), foot) for t in range(6)]
    parts += [ink(x.at(t / 5), foot + 18, f"{20 * t} %", "middle", SMALL) for t in range(6)]
    parts.append(ink((x.first + x.last) / 2, foot + 38, "share of the step, which is the share of the peak", "middle"))
    parts.append(_bar(x, top, "the peak", 0.0, 1.0, "c5", "100 %"))
    end = 1.0
    for row, (name, share) in enumerate(losses, 1):
        y = top + ROW * row
        parts.append(_bar(x, y, name, end, end - share, _cause(name), f"{_percent(share)}, {_seconds(share * step)}"))
        end -= share
    parts.append(_bar(x, foot - ROW, USEFUL, 0.0, rest, "c2", f"{_percent(rest)}, {_seconds(rest * step)}"))
    mfu = x.at(prediction.mfu)
    parts.append(f'<path class="c2" d="M{mfu:.1f} {top}V{foot}" stroke="currentColor" stroke-dasharray="5 4"/>')
    note = f"Dashed: MFU, {_percent(prediction.mfu)}. It counts attention's FLOPs too, the masked ones included."
    parts.append(ink(16, foot + 64, note, more=SMALL))
    return document(title, WIDTH, foot + 80, parts)


def _bar(x: Axis, y: float, name: str, start: float, end: float, colour: str, value: str) -> str:
    left, right = sorted((x.at(start), x.at(end)))
    rect = f'<rect class="{colour}" x="{left:.1f}" y="{y + 3}" width="{max(1.0, right - left):.1f}" height="{ROW - 6}"'
    return "".join([
        ink(LABEL - 10, y + 17, name, "end"),
        f'{rect} fill="currentColor"/>',
        ink(WIDTH - VALUE + 10, y + 17, value),
    ])  # fmt: skip


def _cause(part: str) -> str:
    """The colour of a part of the step."""
    return next(colour for colour, names in CAUSES.values() if part.startswith(names))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# ------------------------------------------------------------------------------------------------------------ goodput

GAP = 70  # pixels between panels


def goodput_svg(curves: Curves) -> str:
    """Goodput over GPU counts, and below it the training time between two saves. A dashed line marks the run."""
    gpus = sorted({g for curve in curves.curves for g in curve.gpus})
    x = Axis(gpus[0], gpus[-1], LEFT, WIDTH - RIGHT, log=True)
    shares = lambda curve: [100 * p.shares.training for p in curve.plans]
    least = min(min(shares(curve)) for curve in curves.curves)
    y = Axis(10 * math.floor(least / 10), 100.0, 320, 92)
    intervals = lambda curve: [p.interval_s for p in curve.plans]
    times = [s for curve in curves.curves for s in intervals(curve)]
    below = Axis(min(times) / 1.3, max(times) * 1.3, 320 + GAP + 180, 320 + GAP, log=True)
    names = [(curve.name, f"c{i}") for i, curve in enumerate(curves.curves)]
    parts = [heading(LEFT - 48, curves.title), _legend(LEFT - 48, 50, names)]
    parts += _panel(
        x, y, gpus[::2], ticks(y.low, y.high, 6), lambda t: f"{t:g} %", "goodput: share of time that trains"
    )
    marks = [t for t in DURATIONS.values() if below.low <= t <= below.high]
    parts += _panel(x, below, gpus[::2], marks, _duration, "training between two saves")
    parts.append(ink((x.first + x.last) / 2, below.first + 40, "GPUs", "middle"))
    for axis, values in ((y, shares), (below, intervals)):
        parts += [_line(x, axis, c.gpus, values(c), f"c{i}") for i, c in enumerate(curves.curves)]
    parts += _marked(x, (y, below), curves.gpus, f"this run: {curves.gpus:,} GPUs")
    return document(curves.title, WIDTH, int(below.first) + 54, parts)


DURATIONS = {"1 s": 1, "10 s": 10, "1 min": 60, "10 min": 600, "1 h": HOUR, "6 h": 6 * HOUR, "1 day": DAY}


def _duration(seconds: float) -> str:
    return next(name for name, s in DURATIONS.items() if s == seconds)


def _marked(x: Axis, panels: Sequence[Axis], value: float, text: str) -> Iterator[str]:
    """A dashed line through all panels, with a text beside its foot in the first one."""
    at = x.at(value)
    dashed = 'stroke="currentColor" stroke-dasharray="5 4"'
    yield from (f'<path class="c5" d="M{at:.1f} {y.last:.1f}V{y.first:.1f}" {dashed}/>' for y in panels)
    left = at - x.first > text_width(text, 12) + 12
    yield ink(at - 6 if left else at + 6, panels[0].first - 8, text, "end" if left else "start", SMALL)


# ---------------------------------------------------------------------------------------------- what plots consist of


def _panel(
    x: Axis, y: Axis, x_marks: Sequence[float], y_marks: Sequence[float], word: Callable[[float], str], title: str
) -> Iterator[str]:
    """Grid lines with their values, and above them the title. `word`: a value of the y axis."""
    yield ink(x.first, y.last - 12, title, more=' font-weight="600"')
    for t in y_marks:
        yield _rule(x.first, y.at(t), x.last, y.at(t))
        yield ink(x.first - 6, y.at(t) + 4, word(t), "end", SMALL)
    for t in x_marks:
        yield _rule(x.at(t), y.first, x.at(t), y.first + 5)
        yield ink(x.at(t), y.first + 20, f"{t:,}", "middle", SMALL)


def _line(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float], colour: str) -> str:
    points = [f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in zip(xs, ys, strict=True)]
    dots = "".join(f'<circle r="2.5" cx="{p.split()[0]}" cy="{p.split()[1]}"/>' for p in points)
    path = f'<path d="M{"L".join(points)}" fill="none" stroke="currentColor" stroke-width="2"/>'
    return f'<g class="{colour}" fill="currentColor">{path}{dots}</g>'


def _rule(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<line class="grid" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y0:.1f}" y2="{y1:.1f}"/>'


def _legend(x: float, y: float, names: Sequence[tuple[str, str]]) -> str:
    """Squares of colours and what they stand for, in one row."""
    parts = []
    for name, colour in names:
        parts.append(f'<rect class="{colour}" x="{x:.1f}" y="{y - 10}" width="12" height="12" fill="currentColor"/>')
        parts.append(ink(x + 18, y, name))
        x += 18 + text_width(name, 13) + 22
    return "".join(parts)
