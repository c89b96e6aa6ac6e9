"""Draws timelines as SVG, predicted or measured, one panel above the other."""

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

from ndtrain.schedule.simulate import Span, Timeline
from ndtrain.schedule.table import show

# Distinguishable with every kind of colour vision, even though later chunks are lighter: tests/schedule checks this.
COLOURS = {"F": (27, 58, 107), "B": (204, 51, 17), "I": (51, 187, 238), "W": (240, 228, 66)}
LIGHTEST = 0.5  # share of white in the shade of the last chunk
LEGEND = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
MARGIN, LABEL, WIDTH = 16, 52, 1200  # pixels: margin, width of the row labels, width of the picture
ROW, CELL, HEAD, AXIS, GAP = 24, 21, 26, 26, 20  # heights in pixels: row, cell, title, axis, gap between panels
STYLE = """text{font:11px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#333}
.c text{text-anchor:middle}.t{font-size:14px;font-weight:600;fill:#111}.r{text-anchor:end}
.x{text-anchor:middle;fill:#666}.g{stroke:#e2e5e9}.l{fill:#eceef1}.w{fill:#fff}.k{fill:#000}"""


class Panel(NamedTuple):
    """One timeline of a picture: its title and, per pp rank, the spans of its actions."""

    title: str
    rows: Sequence[Sequence[Span]]


def panel(timeline: Timeline, title: str) -> Panel:
    """Return a panel. Its title includes the bubble and the peak of live activations."""
    return Panel(
        f"{title}: bubble {100 * timeline.bubble:.1f} %, at most {max(timeline.peak_shares):.3g} microbatches alive",
        timeline.spans,
    )


def timeline_svg(panels: Sequence[Panel], unit: str, same_scale: bool = True) -> str:
    """Draw timelines as SVG with one row per rank. Each panel begins with its first action.

    Colours show the kinds of actions. Lighter shades are later chunks of a rank. Numbers are microbatches.

    Args:
        unit: the unit of the spans.
        same_scale: draw all panels on the same time scale. If False, each panel fills the width.
    """
    extents = [_extent(p) for p in panels]
    longest = max(end - start for start, end in extents)
    top, parts = MARGIN + HEAD, [_legend(panels)]
    for p, (start, end) in zip(panels, extents, strict=True):
        scale = (WIDTH - 2 * MARGIN - LABEL) / (longest if same_scale else end - start)
        parts.append(f'<g transform="translate({MARGIN} {top})">{"".join(_panel(p, start, end, scale, unit))}</g>')
        top += HEAD + ROW * len(p.rows) + AXIS + GAP
    height = top - GAP + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f'<style>{STYLE}</style>\n<rect class="w" width="{WIDTH}" height="{height}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _extent(p: Panel) -> tuple[float, float]:
    """Return (first start, last end) of a panel."""
    spans = [s for row in p.rows for s in row]
    return min(s.start for s in spans), max(s.end for s in spans)


def _panel(p: Panel, start: float, end: float, scale: float, unit: str) -> Iterator[str]:
    bottom = HEAD + ROW * len(p.rows)
    yield f'<text class="t" y="13">{escape(p.title)}</text>\n'
    for rank in range(len(p.rows)):
        y = HEAD + rank * ROW
        yield f'<text class="r" x="{LABEL - 8}" y="{y + 15}">rank {rank}</text>'
        yield f'<rect class="l" x="{LABEL}" y="{y}" width="{(end - start) * scale:.1f}" height="{CELL}"/>\n'
    for tick in _ticks(end - start):
        x = LABEL + tick * scale
        yield f'<path class="g" d="M{x:.1f} {bottom}v5"/><text class="x" x="{x:.1f}" y="{bottom + 17}">{tick:g}</text>'
    yield f'<text class="r" x="{LABEL - 8}" y="{bottom + 17}">{escape(unit)}</text>\n'
    for rank, row in enumerate(p.rows):
        yield f'<g class="c" transform="translate({LABEL} {HEAD + rank * ROW})">\n'
        chunks = sorted({s.action.stage for s in row})
        for s in row:
            yield _cell(s, chunks.index(s.action.stage), len(chunks), start, scale)
        yield "</g>\n"


def _cell(s: Span, chunk: int, chunks: int, start: float, scale: float) -> str:
    x, width = (s.start - start) * scale, (s.end - s.start) * scale
    fill, text_class = _shade(s.action.kind, chunk, chunks)
    label = str(s.action.microbatch)
    text = ""
    if width > 7 * len(label) + 2:
        text = f'<text class="{text_class}" x="{x + width / 2:.1f}" y="15">{label}</text>'
    seam = 0.8 if width > 3 else 0  # separates neighbours of one colour
    rect = f'<rect x="{x:.1f}" width="{width - seam:.1f}" height="{CELL}" rx="1.5" fill="{fill}"/>'
    return f"<g><title>{show(s.action)}: {s.start:.4g} to {s.end:.4g}</title>{rect}{text}</g>\n"


def _shade(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Return (the colour of a cell, the CSS class of its text)."""
    white = LIGHTEST * chunk / max(1, chunks - 1)
    r, g, b = (round(c + (255 - c) * white) for c in COLOURS[kind])
    return f"#{r:02x}{g:02x}{b:02x}", "w" if _luminance(r, g, b) < 0.179 else "k"


def _luminance(*rgb: int) -> float:
    """Return the luminance from 0 (black) to 1 (white) in sRGB. At 0.179 black and white text have equal contrast."""
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb))
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _ticks(length: float) -> list[float]:
    """Return about ten round times for an axis."""
    rough = length / 10
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [i * step for i in range(ceil(length / step * 1.0001))]


def _legend(panels: Sequence[Panel]) -> str:
    """Draw the legend of the colours and shades that occur."""
    rows = [row for p in panels for row in p.rows]
    kinds = {s.action.kind for row in rows for s in row}
    chunks = max(len({s.action.stage for s in row}) for row in rows)
    parts, x = [], float(MARGIN + LABEL)
    for kind, word in LEGEND.items():
        if kind not in kinds:
            continue
        for chunk in range(chunks):
            colour = _shade(kind, chunk, chunks)[0]
            parts.append(f'<rect x="{x}" y="{MARGIN - 3}" width="13" height="13" rx="1.5" fill="{colour}"/>')
            x += 15
        parts.append(f'<text x="{x + 4}" y="{MARGIN + 8}">{word}</text>')
        x += 26 + 6.2 * len(word)
    parts.append(f'<rect class="l" x="{x}" y="{MARGIN - 3}" width="13" height="13"/>')
    words = "bubble; lighter shades are later chunks of a rank" if chunks > 1 else "bubble"
    parts.append(f'<text x="{x + 19}" y="{MARGIN + 8}">{words}</text>')
    return "".join(parts)
