"""Draws plans as SVG, for light and dark backgrounds."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from ndtrain.plan.fault_tolerance import DAY, HOUR, Curves
from ndtrain.plan.report import si
from ndtrain.plan.scaling_curves import Curve as ScalingCurve
from ndtrain.plan.scaling_curves import Scaling
from ndtrain.report.picture import WIDTH, Axis, document, heading, ink, text_width, ticks, widened

LEFT, RIGHT, EDGE = 60, 28, 16  # pixels
SMALL = ' font-size="12"'

# ---------------------------------------------------------------------------------------------------------- waterfall

USEFUL = "matmul at peak"
CAUSES = {  # cause of a loss -> its colour, and the prefixes of its parts' names
    "compute": ("c1", ("matmul", "attention", "memory-bound", "recompute", "launch")),
    "communication": ("c0", ("exposed",)),
    "pipeline": ("c3", ("bubble",)),
    "update and the rest": ("c4", ("",)),
}
LEAST = 0.0005  # share of the step; smaller parts are not drawn
ROW, LABEL, VALUE = 26, 150, 124  # pixels: height of a row; width of its name and of its value


def waterfall_svg(step: float, mfu: float, waterfall: Mapping[str, float]) -> str:
    """Draw how the peak is lost: one bar for each loss, from the whole step down to the matmuls at peak.

    Args:
        step: seconds of the step.
        waterfall: the seconds of each part, as `Prediction.waterfall` has them.
    """
    losses = [(name, s / step) for name, s in waterfall.items() if name != USEFUL and abs(s) > LEAST * step]
    rest = waterfall[USEFUL] / step
    x = Axis(0.0, 1.0, LABEL, WIDTH - VALUE)
    title = f"Where a step's {_seconds(step)} go: MFU {_percent(mfu)}"
    legend, below = _legend(50, [(cause, colour) for cause, (colour, _) in CAUSES.items()])
    top, foot = below + 34, below + 34 + ROW * (len(losses) + 2)
    parts = [heading(EDGE, title), legend]
    parts += [_rule(x.at(t / 5), top, x.at(t / 5), foot) for t in range(6)]
    parts += [ink(x.at(t / 2), foot + 18, f"{50 * t} %", "middle", SMALL) for t in range(3)]
    parts.append(ink((x.first + x.last) / 2, foot + 38, "share of the step, and of the peak", "middle"))
    parts.append(_bar(x, top, "the peak", 0.0, 1.0, "c5", "100 %"))
    end = 1.0
    for row, (name, share) in enumerate(losses, 1):
        y = top + ROW * row
        parts.append(_bar(x, y, name, end, end - share, _cause(name), f"{_percent(share)}, {_seconds(share * step)}"))
        end -= share
    parts.append(_bar(x, foot - ROW, USEFUL, 0.0, rest, "c2", f"{_percent(rest)}, {_seconds(rest * step)}"))
    at = x.at(mfu)
    parts.append(f'<path class="c2" d="M{at:.1f} {top}V{foot}" stroke="currentColor" stroke-dasharray="5 4"/>')
    notes = (f"Dashed: MFU, {_percent(mfu)}. It counts attention's FLOPs too,", "the masked ones included.")
    parts += [ink(EDGE, foot + 64 + 18 * i, note, more=SMALL) for i, note in enumerate(notes)]
    return document(title, WIDTH, foot + 98, parts)


def _bar(x: Axis, y: float, name: str, start: float, end: float, colour: str, value: str) -> str:
    left, right = sorted((x.at(start), x.at(end)))
    rect = f'<rect class="{colour}" x="{left:.1f}" y="{y + 3}" width="{max(1.0, right - left):.1f}" height="{ROW - 6}"'
    return "".join([
        ink(LABEL - 10, y + 17, name, "end"),
        f'{rect} fill="currentColor"/>',
        ink(WIDTH - VALUE + 10, y + 17, value),
    ])  # fmt: skip


def _cause(part: str) -> str:
    """Return the colour of a part of the step."""
    return next(colour for colour, names in CAUSES.values() if part.startswith(names))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# ------------------------------------------------------------------------------------------------------------ goodput

GAP = 70  # pixels between panels


def goodput_svg(curves: Curves) -> str:
    """Draw goodput over GPU counts, and below it the training time between two saves. A dashed line marks the run."""
    gpus = sorted({g for curve in curves.curves for g in curve.gpus})
    x = Axis(*widened(gpus[0], gpus[-1]), LEFT, WIDTH - RIGHT, log=True)
    shares = lambda curve: [100 * p.shares.training for p in curve.plans]
    least = min(min(shares(curve)) for curve in curves.curves)
    names = [(curve.name, f"c{i}") for i, curve in enumerate(curves.curves)]
    legend, top = _legend(50, names)
    y = Axis(min(90, 10 * math.floor(least / 10)), 100.0, top + 240, top + 42)
    intervals = lambda curve: [p.interval_s for p in curve.plans]
    times = [s for curve in curves.curves for s in intervals(curve)]
    below = Axis(min(times) / 1.3, max(times) * 1.3, y.first + GAP + 180, y.first + GAP, log=True)
    parts = [heading(EDGE, curves.title), legend]
    parts += _panel(
        x, y, _few(gpus), ticks(y.low, y.high, 6), lambda t: f"{t:g} %", "goodput: share of time that trains"
    )
    marks = [t for t in DURATIONS.values() if below.low <= t <= below.high]
    parts += _panel(x, below, _few(gpus), marks, _duration, "training between two saves")
    parts.append(ink((x.first + x.last) / 2, below.first + 40, "GPUs", "middle"))
    for axis, values in ((y, shares), (below, intervals)):
        parts += [_line(x, axis, c.gpus, values(c), f"c{i}") for i, c in enumerate(curves.curves)]
    parts += _marked(x, (y, below), curves.gpus, f"this run: {curves.gpus:,} GPUs")
    return document(curves.title, WIDTH, int(below.first) + 54, parts)


DURATIONS = {"1 s": 1, "10 s": 10, "1 min": 60, "10 min": 600, "1 h": HOUR, "6 h": 6 * HOUR, "1 day": DAY}


def _duration(seconds: float) -> str:
    return next(name for name, s in DURATIONS.items() if s == seconds)


def _marked(x: Axis, panels: Sequence[Axis], value: float, text: str) -> Iterator[str]:
    """Yield a dashed line through all panels, with a text next to its foot in the first panel."""
    at = x.at(value)
    dashed = 'stroke="currentColor" stroke-dasharray="5 4"'
    yield from (f'<path class="c5" d="M{at:.1f} {y.last:.1f}V{y.first:.1f}" {dashed}/>' for y in panels)
    left = at - x.first > text_width(text, 12) + 12
    yield ink(at - 6 if left else at + 6, panels[0].first - 8, text, "end" if left else "start", SMALL)


# ------------------------------------------------------------------------------------------------------------ scaling

FAMILY_COLOURS = {"fsdp": "c5", "+tp": "c0", "+cp": "c1", "+pp": "c3"}  # families of scaling.FAMILIES -> colours
REGIME_COLOURS = {  # regimes of scaling.REGIMES -> colours
    "compute bound": "c2",
    "communication hidden": "c6",
    "communication bound": "c4",
    "batch exhausted": "c5",
}
KINDS = {"strong": "fixed global batch", "weak": "global batch grows with GPUs"}


def scaling_svg(scaling: Scaling) -> str:
    """Draw MFU and tokens/s over GPU counts, one curve below another. Bands show the regimes of meshes with only dp and
    fsdp. Below each curve is a list of the GPU counts at which regimes begin and further axes begin to pay."""
    title = f"Scaling of {scaling.model} on {scaling.hardware}"
    names = {"fsdp": "dp and fsdp alone", "+tp": "tp too", "+cp": "cp too", "+pp": "pp too"}
    legend, foot = _legend(50, [(names[f], colour) for f, colour in FAMILY_COLOURS.items()])
    points = [p for curve in scaling.curves for p in curve.points if p.overrides is not None]
    most, rates = 10 * math.ceil(max(100 * p.mfu for p in points) / 10), [p.tokens_per_s for p in points]
    parts = [heading(EDGE, title), legend]
    for curve in scaling.curves:
        mfu = Axis(0.0, most, foot + 202, foot + 48)
        rate = Axis(min(rates) / 1.3, max(rates) * 1.3, mfu.first + GAP + 150, mfu.first + GAP, log=True)
        parts += _curve_panels(curve, mfu, rate)
        parts += _beginnings(LEFT, rate.first + 72, curve)
        foot = int(rate.first) + 92 + 20 * (len(curve.regimes) + len(curve.pays))
    return document(title, WIDTH, foot, parts)


def _curve_panels(curve: ScalingCurve, mfu: Axis, rate: Axis) -> Iterator[str]:
    """Yield the panel of MFU, and below it the panel of tokens/s."""
    gpus = sorted({p.gpus for p in curve.points})
    x = Axis(*widened(gpus[0], gpus[-1]), LEFT, WIDTH - RIGHT, log=True)
    kind, tokens = KINDS[curve.kind], lambda t: si(t, "")
    yield from _bands(x, (mfu, rate), curve)
    yield from _panel(x, mfu, _few(gpus), ticks(mfu.low, mfu.high, 6), lambda t: f"{t:g} %", f"MFU, {kind}")
    yield from _panel(x, rate, _few(gpus), _powers(rate.low, rate.high), tokens, f"tokens/s, {kind}")
    yield ink((x.first + x.last) / 2, rate.first + 40, "GPUs", "middle")
    yield from _families(x, mfu, rate, curve)


def _bands(x: Axis, panels: Sequence[Axis], curve: ScalingCurve) -> Iterator[str]:
    """Yield a band for each regime, from its first GPU count to the first GPU count of the next regime."""
    ends = [*(r.gpus for r in curve.regimes), x.high][1:]
    for regime, end in zip(curve.regimes, ends, strict=True):
        colour, left = REGIME_COLOURS[regime.what], x.at(regime.gpus)
        for y in panels:
            yield (
                f'<rect class="{colour}" x="{left:.1f}" y="{y.last:.1f}" width="{x.at(end) - left:.1f}" '
                f'height="{y.first - y.last:.1f}" fill="currentColor" fill-opacity="0.15"/>'
            )


def _families(x: Axis, mfu: Axis, rate: Axis, curve: ScalingCurve) -> Iterator[str]:
    """Yield the lines, those for larger families first and thicker, so that equal lines stay visible."""
    for i, family in reversed(list(enumerate(FAMILY_COLOURS))):
        points = [p for p in curve.points if p.family == family and p.overrides is not None]
        gpus, colour, width = [p.gpus for p in points], FAMILY_COLOURS[family], 2 + 1.2 * i
        if points:
            yield _line(x, mfu, gpus, [100 * p.mfu for p in points], colour, width)
            yield _line(x, rate, gpus, [p.tokens_per_s for p in points], colour, width)


def _beginnings(x: float, y: float, curve: ScalingCurve) -> Iterator[str]:
    """Yield a heading, then a line of text for each regime and for each axis that pays."""
    yield ink(x, y, "dp and fsdp alone are", more=SMALL)
    for row, begins in enumerate((*curve.regimes, *curve.pays), 1):
        pays = begins.what not in REGIME_COLOURS
        colour = FAMILY_COLOURS[f"+{begins.what}"] if pays else REGIME_COLOURS[begins.what]
        opacity = "" if pays else ' fill-opacity="0.3"'
        square = f'<rect class="{colour}" x="{x}" y="{y + 20 * row - 11}" width="13" height="13" fill="currentColor"'
        what = f"{begins.what} pays" if pays else begins.what
        where = f"from {begins.gpus:,} GPUs, batch {begins.global_batch:,}"
        yield f"{square}{opacity}/>" + ink(x + 20, y + 20 * row, f"{what} {where}", more=SMALL)


def _powers(low: float, high: float) -> list[float]:
    """Return the powers of ten from `low` to `high`. If there are fewer than two, include 2 and 5 times each power."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [[m * 10.0**k for k in powers for m in of if low <= m * 10.0**k <= high] for of in ((1,), (1, 2, 5))]
    return marks[0] if len(marks[0]) > 1 else marks[1]


# ---------------------------------------------------------------------------------------------------- parts of a plot


def _panel(
    x: Axis, y: Axis, x_marks: Sequence[float], y_marks: Sequence[float], word: Callable[[float], str], title: str
) -> Iterator[str]:
    """Yield grid lines with their values, and the title above them. `word` formats a value of the y axis."""
    yield ink(x.first, y.last - 12, title, more=' font-weight="600"')
    for t in y_marks:
        yield _rule(x.first, y.at(t), x.last, y.at(t))
        yield ink(x.first - 6, y.at(t) + 4, word(t), "end", SMALL)
    for t in x_marks:
        yield _rule(x.at(t), y.first, x.at(t), y.first + 5)
        yield ink(x.at(t), y.first + 20, f"{t:,}", "middle", SMALL)


def _line(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float], colour: str, width: float = 2) -> str:
    points = [f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in zip(xs, ys, strict=True)]
    dots = "".join(f'<circle r="{width / 2 + 1.5:g}" cx="{p.split()[0]}" cy="{p.split()[1]}"/>' for p in points)
    path = f'<path d="M{"L".join(points)}" fill="none" stroke="currentColor" stroke-width="{width:g}"/>'
    return f'<g class="{colour}" fill="currentColor">{path}{dots}</g>'


def _rule(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<line class="grid" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y0:.1f}" y2="{y1:.1f}"/>'


def _few(counts: Sequence[int]) -> Sequence[int]:
    """Return some of the counts, evenly spaced and few enough to fit below an axis."""
    return counts[:: math.ceil(len(counts) / 6)]


def _legend(y: int, names: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Return rows of coloured squares with their names, and the baseline of the last row."""
    parts, x = [], EDGE
    for name, colour in names:
        width = 18 + text_width(name, 13)
        if x + width > WIDTH - EDGE:
            x, y = EDGE, y + 22
        parts.append(f'<rect class="{colour}" x="{x:.1f}" y="{y - 10}" width="12" height="12" fill="currentColor"/>')
        parts.append(ink(x + 18, y, name))
        x += width + 16
    return "".join(parts), y
