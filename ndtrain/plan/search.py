"""Finds the fastest mesh: every candidate is estimated, what cannot fit is left out, the most promising ones are
predicted, and then those next to the best, until none of them is better."""

import gc
import heapq
import json
import multiprocessing
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple, TypeVar

from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.config.registry import load_plugins
from ndtrain.data.workers import end_with_parent
from ndtrain.distributed.cores import cpu_cores
from ndtrain.plan.candidates import SPLIT, Candidate, Space, searched_run
from ndtrain.plan.estimate import ModelCosts, Place
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.options import IMBALANCE, RunOptions, at_least_1, world_of, write_file
from ndtrain.plan.predict import Prediction, Predictor, plan_step
from ndtrain.plan.price import Rates

T = TypeVar("T")
R = TypeVar("R")
SHOWN = 10
_OF_MESH = 200  # candidates of a mesh that are kept
_ROUNDS = 8  # of predicting those next to the best, at most
_NEAR = 40  # of them in a round


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Of `plan search`."""

    predict: int = option("candidates to predict before those next to the best ones", 100)
    processes: int = option("processes to work in; unless given one for each core", cpu_cores())
    imbalance: float = option(IMBALANCE, 1.0, read=at_least_1)
    against: str | None = option('a mesh to compare with, by its overrides: "mesh.tp=8 mesh.pp=16"', None)


class Ranked(NamedTuple):
    """A candidate that is worth a prediction, with the seconds of its estimate."""

    seconds: float
    candidate: Candidate


class TooLarge(NamedTuple):
    """Of a candidate that does not fit: what a rank needs that has too little, the first one where that is so. The time
    of the step is not computed."""

    memory_bytes: int


Predictions = dict[Candidate, Prediction | TooLarge]


class Row(NamedTuple):
    """A candidate and its prediction."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True)
class Result:
    """The result of a search.

    Attributes:
        best: the fastest first.
        against: the fastest of the candidates to compare with; None: not asked for, or none fits.
        counts: what was looked at -> how many.
    """

    best: list[Row]
    against: Row | None
    counts: dict[str, int]


def run(options: Options, overrides: Sequence[str]) -> None:
    """Searches, prints the table and writes the JSON.

    Raises:
        ConfigError: there is no such run, no candidate is legal or fits, or the file cannot be written.
    """
    hardware = load_hardware(options.hardware)
    cfg, overrides = searched_run(overrides, hardware)
    space = Space(cfg, world_of(cfg, options, hardware), hardware, Rates(imbalance=options.imbalance))
    with workers(options.processes) as pool:
        result = search(space, pool, options.predict, shlex.split(options.against or ""))
    given = [arg for arg in overrides if not arg.startswith("mesh.") or not arg.endswith("=-1")]
    print(as_text(space, result, given))
    if options.json:
        write_file("json", options.json, as_json(space, result, given))


def search(space: Space, pool: Executor | None, predict: int, against: Sequence[str] = ()) -> Result:
    """The best candidates of a space.

    Args:
        pool: where to work; None: here.
        predict: how many to predict at first.
        against: overrides of the candidates to compare with.

    Raises:
        ConfigError: no candidate is legal, or none fits.
    """
    ranked, counts = rank_all(space, pool)
    like = [r for r in ranked if set(against) <= set(r.candidate.overrides())] if against else []
    if against and not like:
        raise ConfigError(f"against={shlex.join(against)}: no legal candidate has these overrides and may fit")
    predicted: Predictions = {}
    predict_all(space, pool, shortlist(ranked, predict) + shortlist(like, max(8, predict // 4)), predicted)
    for group in (ranked, like):
        climb(space, pool, group, predicted)
    best = _fastest(predicted)
    if not best:
        least = min((p.memory_bytes for p in predicted.values()), default=0) / 1e9
        raise ConfigError(
            f"ranks={space.ranks}: of {len(predicted)} predicted candidates none fits into "
            f"{space.hardware.memory_gb} GB; the smallest needs at least {least:.0f} GB: take more ranks"
        )
    counts |= {"predicted": len(predicted), "predicted to fit": len(best)}
    rivals = [row for row in best if set(against) <= set(row.candidate.overrides())] if against else []
    shown = explained(space, pool, [*best[:SHOWN], *rivals[:1]])
    return Result(shown[: len(best[:SHOWN])], shown[-1] if rivals else None, counts)


# ------------------------------------------------------------------------------------------------------------- ranking


def rank_all(space: Space, pool: Executor | None) -> tuple[list[Ranked], dict[str, int]]:
    """The candidates that may fit, the fastest by its estimate first, and how many there are.

    Raises:
        ConfigError: none is legal.
    """
    meshes = space.meshes()
    made = _mapped(pool, partial(_rank_mesh, space), meshes)
    ranked = sorted(r for of_mesh in made for r in of_mesh.ranked)
    counts = {
        "meshes": len(meshes),
        "candidates": sum(of_mesh.candidates for of_mesh in made),
        "not pruned by memory": sum(of_mesh.fitting for of_mesh in made),
    }
    if not counts["candidates"]:
        raise ConfigError(f"ranks={space.ranks}: no mesh is legal with what is given: {_a_reason(space, meshes)}")
    if not ranked:
        raise ConfigError(
            f"ranks={space.ranks}: none of {counts['candidates']} candidates fits into {space.hardware.memory_gb} GB "
            "by its state and activations alone: take more ranks"
        )
    return ranked, counts


def _a_reason(space: Space, meshes: Sequence[tuple[int, ...]]) -> str:
    """Why the first mesh is not legal."""
    if not meshes:
        return "the given sizes do not divide the ranks"
    try:
        space.resolved(next(iter(space.unchecked(meshes[0]))))
    except ConfigError as error:
        return str(error)
    except StopIteration:
        pass
    return "train.micro_batch has no size that divides the batch of a rank"


class _OnMesh(NamedTuple):
    """The best candidates on a mesh by their estimates, and how many there are and may fit."""

    ranked: list[Ranked]
    candidates: int
    fitting: int


def _rank_mesh(space: Space, mesh: tuple[int, ...]) -> _OnMesh:
    load_plugins(space.cfg.plugins)
    ranked, count, costs = [], 0, None
    rates = Predictor(space.hardware, space.rates).rates
    for place, cfg in space.places(mesh):
        costs = costs or ModelCosts.of(cfg)
        shared = Place(cfg, space.hardware, rates, costs)
        for candidate in space.on(place, cfg, costs.head):
            count += 1
            estimate = shared.estimate(candidate)
            if fits(space, estimate.memory_bytes):
                ranked.append(Ranked(estimate.seconds, candidate))
    return _OnMesh(heapq.nsmallest(_OF_MESH, ranked), count, len(ranked))


def fits(space: Space, nbytes: float) -> bool:
    return space.hardware.memory_gb is None or nbytes <= 1e9 * space.hardware.memory_gb


def shortlist(ranked: Sequence[Ranked], count: int) -> list[Candidate]:
    """The first ones, as many again that are the first of their pp, cp and tp, and so on with the recompute: an
    estimate is coarser between such families than within one."""
    families: list[Callable[[Candidate], Any]] = [
        lambda c: c,
        lambda c: (c.size("pp"), c.size("cp"), c.size("tp"), c.ep),
        lambda c: (c.size("pp"), c.size("cp"), c.size("tp"), c.ep, c.recompute, c.zero),
    ]
    chosen: dict[Candidate, None] = {}
    for family in families:
        firsts: dict[Any, Candidate] = {}
        for r in ranked:
            firsts.setdefault(family(r.candidate), r.candidate)
            if len(firsts) == -(-count // len(families)):
                break
        chosen |= dict.fromkeys(firsts.values())
    return list(chosen)


# ---------------------------------------------------------------------------------------------------------- predicting


def climb(
    space: Space,
    pool: Executor | None,
    ranked: Sequence[Ranked],
    predicted: Predictions,
    near: int = _NEAR,
) -> None:
    """Predicts what is next to the best three, as long as these change; while none fits, to the smallest ones.

    Args:
        near: how many to predict in a round.
    """
    within, before = {r.candidate for r in ranked}, None
    for _ in range(_ROUNDS):
        known = [c for c in predicted if c in within]
        fitting = [row.candidate for row in _fastest(predicted) if row.candidate in within]
        best = (fitting or sorted(known, key=lambda c: predicted[c].memory_bytes))[:3]
        if best == before:
            return
        before = best
        open_ones = (r.candidate for r in ranked if r.candidate not in predicted)
        beside = list(islice((c for c in open_ones if any(c.is_next_to(b) for b in best)), near))
        if not beside:
            return
        predict_all(space, pool, beside, predicted)


def _fastest(predicted: Predictions) -> list[Row]:
    rows = [Row(c, p) for c, p in predicted.items() if isinstance(p, Prediction)]
    return sorted(rows, key=lambda row: row.prediction.step_time_s)


def predict_all(space: Space, pool: Executor | None, candidates: Sequence[Candidate], into: Predictions) -> None:
    into |= {c: p for c, p in _in_order(pool, partial(predict, space), candidates) if p is not None}


def _in_order(
    pool: Executor | None, fn: Callable[[Candidate], R], candidates: Iterable[Candidate], parts: int = 24
) -> Iterator[tuple[Candidate, R]]:
    """Each candidate with `fn` of it, in the order of `_shared`."""
    order = sorted(dict.fromkeys(candidates), key=_shared)
    return zip(order, _mapped(pool, fn, order, parts), strict=True)


def _shared(c: Candidate) -> tuple:
    """Sorts candidates so that a process works on those one after another that share recorded pieces, and on those of
    them that share a program."""
    pieces = c.size("tp"), c.size("cp"), c.cp_kind, c.ep, c.micro_batch, c.recompute
    return pieces, c.size("pp"), c.zero, c.stages.schedule, c.stages.chunks or 0, c.stages.split


def predict(space: Space, candidate: Candidate, explain: bool = False) -> Prediction | TooLarge | None:
    """None: the candidate is not legal.

    Raises:
        ConfigError: it is, and cannot be predicted.
    """
    load_plugins(space.cfg.plugins)
    try:
        cfg = space.resolved(candidate)
    except ConfigError:
        return None
    predictor = Predictor(space.hardware, space.rates)
    plan = plan_step(cfg, space.hardware.device, predictor.rates.imbalance)
    ends = (replace(plan, reported=rank) for rank in (0, -1))  # one of them mostly needs most, and two are made soon
    for part in (*ends, plan):
        memory = predictor.memory(part)
        if not fits(space, memory):
            return TooLarge(memory)
    return predictor.price(plan, explain)


def explained(space: Space, pool: Executor | None, rows: Sequence[Row]) -> list[Row]:
    """The same rows, whose predictions have waterfalls."""
    of = dict(_in_order(pool, partial(predict, space, explain=True), (row.candidate for row in rows), parts=2))
    return [Row(c, p) for c, _ in rows if isinstance(p := of[c], Prediction)]


@contextmanager
def workers(processes: int) -> Iterator[Executor | None]:
    """Processes to work in; with one, None."""
    if processes == 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_begin_worker) as pool:
        yield pool


def _begin_worker() -> None:
    end_with_parent()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # as in the process that started it
    # A prediction makes hundreds of thousands of small tuples, which Python's collector of cycles would walk over and
    # over: that was 40 % of a search's time.
    gc.set_threshold(200_000, 20, 100)


def _mapped(pool: Executor | None, fn: Callable[[T], R], items: Iterable[T], parts: int = 24) -> list[R]:
    """`fn` of each, in parts that are neighbours."""
    every = list(items)
    if pool is None or len(every) < 8:
        return [fn(item) for item in every]
    return list(pool.map(fn, every, chunksize=-(-len(every) // parts)))


# -------------------------------------------------------------------------------------------------------------- output


def reason(row: Row, best: Row) -> str:
    """Why a candidate is slower than the best one: which parts of its step grew."""
    own, first = row.prediction, best.prediction
    grown = {part: s - first.waterfall.get(part, 0.0) for part, s in own.waterfall.items()}
    parts = sorted(grown.items(), key=lambda item: -abs(item[1]))
    said = [f"{part} {seconds:+.3g} s" for part, seconds in parts[:3] if abs(seconds) > 0.002 * first.step_time_s]
    slower = own.step_time_s - first.step_time_s
    return f"{slower:+.3g} s: " + ", ".join(said) if said else f"{slower:+.3g} s"


def as_text(space: Space, result: Result, given: Sequence[str]) -> str:
    """A table for people, with the override line of each row below it."""
    first, counts = result.best[0], ", ".join(f"{n} {what}" for what, n in result.counts.items())
    rows = [(str(i), row) for i, row in enumerate(result.best, 1)] + (
        [("vs", result.against)] if result.against else []
    )
    limit = f" of {space.hardware.memory_gb:g} GB" if space.hardware.memory_gb else ""
    lines = [f"{space.ranks} ranks of {space.hardware.name}{limit}: {counts}", "", HEAD]
    lines += [_line(name, row) for name, row in rows]
    lines += ["", "why each is slower than the first, and its overrides"]
    for name, row in rows:
        why = "the fastest" if row is first else reason(row, first)
        lines += [f"{name:>3}  {why}", f"     {override_line(row.candidate, given)}"]
    return "\n".join(lines)


HEAD = (
    f"{'':>3}  {'step s':>8} {'tokens/s/dev':>13} {'MFU':>6} {'HFU':>6} {'memory GB':>10}   "
    "mesh, zero, microbatch, schedule, recompute"
)


def _line(name: str, row: Row) -> str:
    p, c = row.prediction, row.candidate
    axes = " ".join(text.removeprefix("mesh.") for text in c.overrides()[:5] if not text.endswith("=1")) or "one rank"
    written = [text for text in c.overrides()[5:] if not text.startswith(("recompute.", SPLIT))]
    rest = [text.rpartition(".")[2] for text in written] + (
        [f"split={_runs(c.stages.split)}"] if c.stages.split else []
    )
    return (
        f"{name:>3}  {p.step_time_s:8.3f} {p.tokens_per_s_per_device:13,.0f} {p.mfu:6.1%} {p.hfu:6.1%} "
        f"{p.memory_bytes / 1e9:10.1f}   {axes} {' '.join(rest)}"
    )


def _runs(sizes: Sequence[int]) -> str:
    """Numbers, with how often each one stands there in a row: 0,126x1,0."""
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    return ",".join(f"{times}x{size}" if times > 1 else str(size) for size, times in runs)


def override_line(candidate: Candidate, given: Sequence[str]) -> str:
    """The overrides to paste: those that the user has given, and those of the candidate. A split that replaces a
    recipe's is the candidate's own."""
    given = [arg for arg in given if arg != f"{SPLIT}=null" or not candidate.stages.split]
    keys = {arg.partition("=")[0] for arg in given}
    own = [text for text in candidate.overrides() if text.partition("=")[0] not in keys]
    return shlex.join([*given, *own])


def as_json(space: Space, result: Result, given: Sequence[str]) -> str:
    first = result.best[0]
    body = lambda row: {
        **asdict(row.prediction),
        "overrides": override_line(row.candidate, given),
        "reason": "" if row is first else reason(row, first),
    }
    plan = {
        "hardware": asdict(space.hardware),
        "ranks": space.ranks,
        "counts": result.counts,
        "best": [body(row) for row in result.best],
        "against": body(result.against) if result.against else None,
    }
    return json.dumps(plan, indent=1)
