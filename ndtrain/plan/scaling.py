"""Predicts how throughput and MFU change with the number of GPUs, at a fixed and at a growing global batch."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from ndtrain.arguments import option
from ndtrain.config import Config, ConfigError
from ndtrain.config.schema import resolved
from ndtrain.device.cores import cpu_cores
from ndtrain.plan.candidates import Candidate, Space, searched_run
from ndtrain.plan.drawings import scaling_svg
from ndtrain.plan.estimate import Place
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.options import write_file
from ndtrain.plan.predict import Prediction, Predictor
from ndtrain.plan.scaling_curves import FAMILIES, REGIMES, Beginning, Curve, Point, Points, Scaling
from ndtrain.plan.search import (
    Predictions,
    Workers,
    climb,
    override_line,
    predict_all,
    rank_all,
    shortlist,
    workers,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `plan scaling`."""

    hardware: str = option("a100, h100, h200, b200, or your own description, FILE.yaml")
    least: int = option("smallest number of GPUs", 8)
    most: int = option("largest number of GPUs; each point in between doubles the one before", 1024)
    predict: int = option("candidates to predict per point and family", 8)
    processes: int = option("worker processes; default: one per core", cpu_cores())
    json: str | None = option("JSON file for the curves", None)
    svg: str | None = option("SVG file to draw the curves in", None)


FAMILY_AXES = {"fsdp": (), "+tp": ("tp",), "+cp": ("tp", "cp"), "+pp": ("tp", "cp", "pp")}  # axes that may be above 1
HIDDEN = 0.1  # communication / compute above which communication would be noticeable if nothing overlapped
EXPOSED = 0.1  # exposed communication / step time above which communication bounds the step
GAIN = 1.01


def run(options: Options, overrides: Sequence[str]) -> None:
    """Print both curves and write the files.

    Raises:
        ConfigError: the run's configuration is invalid, no mesh fits, or a file cannot be written.
    """
    hardware = load_hardware(options.hardware)
    cfg, overrides = searched_run(overrides, hardware)
    if options.most < options.least:
        raise ConfigError(f"most={options.most} is below least={options.least}: give GPUs from least to most")
    gpus, points = gpu_counts(options.least, options.most), Points()
    try:
        with workers(options.processes) as pool:
            made = scaling(cfg, hardware, gpus, options.predict, overrides, pool, points)
    except KeyboardInterrupt:
        print("interrupted: results so far\n" + as_text(scaling_of(cfg, hardware, points)), flush=True)
        raise
    if all(point.overrides is None for curve in made.curves for point in curve.points):
        raise ConfigError(
            f"most={options.most}: no mesh of at most this number of {hardware.name} fits: give more GPUs"
        )
    print(as_text(made))
    if options.svg:
        write_file("svg", options.svg, scaling_svg(made))
    if options.json:
        write_file("json", options.json, json.dumps(asdict(made), indent=1))


def gpu_counts(least: int, most: int) -> list[int]:
    """Return the numbers of GPUs: `least`, doubled until `most`."""
    return [least << i for i in range((most // least).bit_length())]


def scaling(
    cfg: Config,
    hardware: Hardware,
    gpus: Sequence[int],
    predict: int,
    given: Sequence[str],
    pool: Workers | None,
    points: Points | None = None,
) -> Scaling:
    """Return the curves of a run that is not resolved.

    The strong curve has the run's global batch at all GPU counts, the weak curve only at the first of them.

    Args:
        predict: number of candidates to predict for each point.
        given: the user's overrides.
        points: filled as points are made, so that an interrupted caller has them.
    """
    points = Points() if points is None else points
    for kind in ("strong", "weak"):
        of_curve = points.setdefault(kind, [])
        fastest: dict[str, Candidate] = {}
        for n in gpus:
            batch = cfg.train.global_batch * (n // gpus[0] if kind == "weak" else 1)
            sized = cfg.unfrozen()
            sized.train.global_batch = batch
            words = [w for w in given if not w.startswith("train.global_batch=")] + [f"train.global_batch={batch}"]
            space = Space(sized, n, hardware)
            won, predicted = fastest_of(space, predict, fastest, pool)
            of_curve += [_point(space, f, won.get(f), predicted, words) for f in FAMILIES]
            fastest = won
    return scaling_of(cfg, hardware, points)


def scaling_of(cfg: Config, hardware: Hardware, points: Points) -> Scaling:
    """Return the curves through these points."""
    curves = (Curve(kind, tuple(own), tuple(regimes(own)), tuple(pays(own))) for kind, own in points.items())
    return Scaling(cfg.run.name, hardware.name, tuple(curves))


def fastest_of(
    space: Space, predict: int, before: Mapping[str, Candidate], pool: Workers | None
) -> tuple[dict[str, Candidate], Predictions]:
    """Return the fastest candidate that fits for each family, and all predictions.

    Families without such a candidate are left out. A family includes the meshes of the families before it.

    Args:
        before: the fastest candidates on fewer GPUs. Candidates that differ only in dp and fsdp are predicted too.
    """
    try:
        ranked, _ = rank_all(space, pool)
    except ConfigError:
        ranked = []
    predicted: Predictions = {}
    for family in FAMILIES:
        own = [r for r in ranked if _is_of(family, r.candidate)]
        wider = [r.candidate for r in own if family in before and _is_wider(r.candidate, before[family])]
        predict_all(space, pool, [c for c in (*shortlist(own, predict), *wider) if c not in predicted], predicted)
        climb(space, pool, own, predicted, predict)
    # Only after all families, because a later family's candidates may belong to an earlier family too.
    running = {c: p.step_time_s for c, p in predicted.items() if isinstance(p, Prediction)}
    of_family = {family: [c for c in running if _is_of(family, c)] for family in FAMILIES}
    return {family: min(own, key=running.__getitem__) for family, own in of_family.items() if own}, predicted


def _is_of(family: str, c: Candidate) -> bool:
    return all(c.size(axis) == 1 for axis in ("tp", "cp", "pp") if axis not in FAMILY_AXES[family])


def _is_wider(c: Candidate, other: Candidate) -> bool:
    """Return True if the candidates differ only in the sizes of dp and fsdp."""
    return c[1:] == other[1:] and all(c.size(axis) == other.size(axis) for axis in ("tp", "cp", "pp"))


def _point(space: Space, family: str, best: Candidate | None, predicted: Predictions, given: Sequence[str]) -> Point:
    batch, exhausted = space.cfg.train.global_batch, space.ranks > space.cfg.train.global_batch
    if best is None:
        regime = REGIMES[3] if family == "fsdp" and exhausted else ""
        return Point(space.ranks, batch, family, None, 0.0, 0.0, 0.0, regime)
    p = predicted[best]
    assert isinstance(p, Prediction), "the fastest one fits"
    regime = regime_of(space, best) if family == "fsdp" else ""
    words = tuple(shlex.split(override_line(best, given)))
    return Point(space.ranks, batch, family, words, p.step_time_s, p.tokens_per_s, p.mfu, regime)


# ------------------------------------------------------------------------------------------------------------- regimes


def regime_of(space: Space, candidate: Candidate) -> str:
    """Return the regime of a mesh of dp and fsdp.

    It depends on the prediction's waterfall, and on the time of all collectives without overlap.
    """
    cfg = space.resolved(candidate)
    predictor = Predictor(space.hardware, space.rates)
    p = predictor.predict(cfg)
    exposed = sum(s for part, s in p.waterfall.items() if part in ("exposed fsdp", "exposed dp"))
    if exposed > EXPOSED * p.step_time_s:
        return REGIMES[2]
    moved = Place(cfg, space.hardware, predictor.rates).unit_seconds(resolved(cfg.mesh.zero))
    return REGIMES[1] if moved > HIDDEN * (p.step_time_s - exposed) else REGIMES[0]


def regimes(points: Sequence[Point]) -> list[Beginning]:
    """Return where each regime of the family "fsdp" begins."""
    first: dict[str, Beginning] = {}
    for p in points:
        if p.regime:
            first.setdefault(p.regime, Beginning(p.regime, p.gpus, p.global_batch))
    return list(first.values())


def pays(points: Sequence[Point]) -> list[Beginning]:
    """Return where each axis begins to pay."""
    at = {(p.gpus, p.family): p for p in points}
    first: dict[str, Beginning] = {}
    for p in points:
        if p.family == FAMILIES[0] or p.overrides is None:
            continue
        before = at[p.gpus, FAMILIES[FAMILIES.index(p.family) - 1]]
        if p.tokens_per_s > GAIN * before.tokens_per_s:
            axis = p.family.removeprefix("+")
            first.setdefault(axis, Beginning(axis, p.gpus, p.global_batch))
    return list(first.values())


# -------------------------------------------------------------------------------------------------------------- output


def as_text(made: Scaling) -> str:
    parts = [f"{made.model} on {made.hardware}"]
    for curve in made.curves:
        growth = "fixed global batch" if curve.kind == "strong" else "global batch grows with the GPUs"
        parts.append(f"{curve.kind} scaling: {growth}\n" + "\n".join(_table(curve)))
        parts.append("\n".join(_beginnings(curve)))
    return "\n\n".join(parts)


def _table(curve: Curve) -> Iterator[str]:
    yield (
        f"{'GPUs':>7} {'batch':>7}"
        + "".join(f"{family + ' tokens/s':>16} {'MFU':>6}" for family in FAMILIES)
        + "   regime of fsdp"
    )
    for i in range(0, len(curve.points), len(FAMILIES)):
        row = curve.points[i : i + len(FAMILIES)]
        cells = "".join(
            f"{'-':>16} {'-':>6}" if p.overrides is None else f"{p.tokens_per_s:16,.0f} {p.mfu:6.1%}" for p in row
        )
        yield f"{row[0].gpus:7} {row[0].global_batch:7}{cells}   {row[0].regime or 'does not fit'}"


def _beginnings(curve: Curve) -> Iterator[str]:
    for one in curve.regimes:
        yield f"fsdp alone is {one.what} from {one.gpus} GPUs on, {one.global_batch} sequences"
    for one in curve.pays:
        yield f"{one.what} begins to pay at {one.gpus} GPUs, {one.global_batch} sequences"
