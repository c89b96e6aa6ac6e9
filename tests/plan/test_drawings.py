"""The planner's pictures: points match the axes, and no text covers another or leaves the picture."""

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from ndtrain.plan.drawings import FAMILY_COLOURS, REGIME_COLOURS, goodput_svg, scaling_svg, waterfall_svg
from ndtrain.plan.failures import Saving, Shares
from ndtrain.plan.fault_tolerance import Curve, Curves, Plan
from ndtrain.plan.predict import Prediction
from ndtrain.plan.scaling_curves import FAMILIES, REGIMES, Beginning, Point, Scaling
from ndtrain.plan.scaling_curves import Curve as ScalingCurve
from ndtrain.report.picture import text_width

SVG = "{http://www.w3.org/2000/svg}"
PARTS = {
    "matmul at peak": 0.8, "matmul below peak": 0.3, "attention": 0.25, "memory-bound": 0.15, "recompute": 0.1,
    "bubble": 0.2, "launch": 1e-5, "exposed tp": 0.1, "exposed cp": 0.0, "exposed fsdp": -0.02, "exposed pp": 0.02,
    "fixed": 0.005, "optimizer": 0.09499,
}  # fmt: skip


def prediction() -> Prediction:
    return Prediction(sum(PARTS.values()), 1e6, 1e4, 0.52, 0.55, 2**30, PARTS)


def waterfall() -> str:
    made = prediction()
    return waterfall_svg(made.step_time_s, made.mfu, made.waterfall)


def curves(run: int = 1024, counts: int = 15) -> Curves:
    plan = lambda name, share, interval: Plan(
        name, Saving(1.0, 0.0), 600.0, interval, 1.0, 1.0, Shares(share, 1 - share, 0, 0)
    )
    gpus = tuple(8 << k for k in range(counts))
    return Curves(
        "Goodput of a run on h100",
        run,
        tuple(
            Curve(name, gpus, tuple(plan(name, 1 - k * gpu / 5e5, 1e5 / gpu) for gpu in gpus))
            for k, name in enumerate(("synchronous", "asynchronous", "replica-tolerant"), 1)
        ),
    )


def scaling(*kinds: str, last: int = 131072) -> Scaling:
    """Each family is faster than the one before it from a later count on; meshes of fsdp alone end at 4,096."""

    def point(kind: str, family: int, gpus: int) -> Point:
        legal = bool(family) or gpus <= 4096
        mfu = legal * 0.5 / (1 + gpus / (1024 << 2 * family))
        batch = 262144 if kind == "strong" else 2 * gpus
        return Point(gpus, batch, FAMILIES[family], ("x",) if legal else None, 1.0, gpus * 1e4 * mfu, mfu, "")

    def curve(kind: str) -> ScalingCurve:
        gpus = [g for k in range(3, 18) if (g := 1 << k) <= last]
        begins = [Beginning(what, gpus[min(4 * i, len(gpus) - 1)], 262144) for i, what in enumerate(REGIMES)]
        pays = [Beginning(axis, last, 262144) for axis in ("tp", "cp", "pp")]
        points = [point(kind, family, g) for family in range(len(FAMILIES)) for g in gpus]
        return ScalingCurve(kind, tuple(points), tuple(begins), tuple(pays))

    return Scaling("llama3_405b", "h100", tuple(curve(kind) for kind in kinds))


def without_regimes(made: Scaling) -> Scaling:
    """As where no mesh of dp and fsdp alone fits, and further axes are needed on every number of GPUs."""
    return replace(made, curves=tuple(replace(curve, regimes=()) for curve in made.curves))


PICTURES = {
    "scaling": lambda: scaling_svg(scaling("strong", "weak")),
    "scaling, one curve": lambda: scaling_svg(scaling("weak")),
    "scaling, no regime": lambda: scaling_svg(without_regimes(scaling("strong", "weak"))),
    "scaling, one count": lambda: scaling_svg(scaling("strong", last=8)),
    "waterfall": lambda: waterfall(),
    "goodput": lambda: goodput_svg(curves()),
    "goodput, the first count": lambda: goodput_svg(curves(8)),
    "goodput, one count": lambda: goodput_svg(curves(8, counts=1)),
    "goodput, the last count": lambda: goodput_svg(curves(131072)),
    "goodput, a mark below the last count": lambda: goodput_svg(curves(262144, counts=16)),
}


def boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """(text, left, top, right, bottom) of every text."""
    placed = []
    for text in root.iter(f"{SVG}text"):
        size = float(text.get("font-size") or root.get("font-size"))
        width = text_width(text.text, size, text.get("font-weight") is not None)
        x, y = float(text.get("x")), float(text.get("y"))
        left = x - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
        placed.append((text.text, left, y - 0.75 * size, left + width, y + 0.2 * size))
    return placed


@pytest.mark.parametrize("name", PICTURES)
def test_texts_neither_overlap_nor_leave_the_picture(name):
    root = ElementTree.fromstring(PICTURES[name]())
    width, height = float(root.get("width")), float(root.get("height"))
    texts = boxes(root)
    for text, left, top, right, bottom in texts:
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, text
    for a, b in itertools.combinations(texts, 2):
        apart = a[3] <= b[1] or b[3] <= a[1] or a[4] <= b[2] or b[4] <= a[2]
        assert apart, f"{a[0]!r} covers {b[0]!r}"


@pytest.mark.parametrize("name", PICTURES)
def test_every_colour_is_declared_for_light_and_dark(name):
    light, dark = PICTURES[name]().split("prefers-color-scheme:dark")
    used = set(re.findall(r'class="(c\d)"', dark))
    assert used and all(f".{c}{{color:" in light and f".{c}{{color:" in dark for c in used)


def test_waterfall_bars_connect_peak_to_mfu():
    root = ElementTree.fromstring(waterfall())
    bars = [(float(r.get("x")), float(r.get("width"))) for r in root.iter(f"{SVG}rect") if r.get("height") == "20"]
    left, whole = bars[0]
    ends = [1.0]
    for name, seconds in PARTS.items():
        if name not in ("matmul at peak", "launch", "exposed cp"):
            ends.append(ends[-1] - seconds / sum(PARTS.values()))
    assert len(bars) == len(ends) + 1
    for (x, width), start, end in zip(bars[1:-1], ends, ends[1:], strict=False):
        edges = sorted((left + whole * start, left + whole * end))
        assert x == pytest.approx(edges[0], abs=0.1) and width == pytest.approx(edges[1] - edges[0], abs=1.0)
    assert bars[-1] == (left, pytest.approx(0.4 * whole, abs=0.1))
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"matmul at peak", "40.0 %, 800 ms", "exposed fsdp", "-1.0 %, -20 ms"} <= texts and "launch" not in texts


def test_goodput_points_match_axes():
    drawn = curves()
    root = ElementTree.fromstring(goodput_svg(drawn))
    texts = {text.text: text for text in root.iter(f"{SVG}text")}
    y_of = lambda text: float(texts[text].get("y")) - 4
    lines = [g for g in root.iter(f"{SVG}g") if g.get("class")]
    assert len(lines) == 2 * len(drawn.curves)
    for line, curve in zip(lines, drawn.curves, strict=False):
        dots = [(float(c.get("cx")), float(c.get("cy"))) for c in line.iter(f"{SVG}circle")]
        for (_, y), plan in zip(dots, curve.plans, strict=True):
            per_percent = (y_of("80 %") - y_of("100 %")) / 20
            assert y == pytest.approx(y_of("100 %") + per_percent * 100 * (1 - plan.shares.training), abs=0.2)
        x_of_run = float(re.search(r'class="c5" d="M([\d.]+)', goodput_svg(drawn))[1])
        assert dots[curve.gpus.index(drawn.gpus)][0] == pytest.approx(x_of_run, abs=0.1)
        assert dots[0][0] == float(texts["8"].get("x"))


def test_every_family_and_regime_has_a_colour():
    assert tuple(FAMILY_COLOURS) == FAMILIES and tuple(REGIME_COLOURS) == REGIMES


def test_scaling_lines_and_bands_match_axes():
    drawn = scaling("strong", "weak")
    root = ElementTree.fromstring(scaling_svg(drawn))
    lines = [g for g in root.iter(f"{SVG}g") if g.get("class")]
    assert len(lines) == 2 * 2 * len(FAMILIES)
    texts = [(t.text, float(t.get("x")), float(t.get("y"))) for t in root.iter(f"{SVG}text")]
    zero, half = (next(y for text, _, y in texts if text == mark) - 4 for mark in ("0 %", "50 %"))
    fsdp = next(g for g in lines if g.get("class") == "c5")
    points = [p for p in drawn.curves[0].points if p.family == "fsdp" and p.overrides]
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in fsdp.iter(f"{SVG}circle")]
    for (_, y), point in zip(dots, points, strict=True):
        assert y == pytest.approx(zero + (half - zero) * point.mfu / 0.5, abs=0.1)
    at_512 = next(x for text, x, _ in texts if text == "512")
    assert dots[[p.gpus for p in points].index(512)][0] == pytest.approx(at_512, abs=0.1)
    bands = [r for r in root.iter(f"{SVG}rect") if r.get("fill-opacity") == "0.15"]
    for band, regime in zip(bands[::2], drawn.curves[0].regimes, strict=False):
        assert band.get("class") == REGIME_COLOURS[regime.what]
        begins = dots[[p.gpus for p in points].index(regime.gpus)][0] if regime.gpus <= 4096 else None
        assert begins is None or float(band.get("x")) == pytest.approx(begins, abs=0.1)
