"""Finds the fastest mesh.

Every candidate is estimated, and candidates that cannot fit are left out. The most promising candidates are predicted.
Then the neighbours of the best are predicted, until no neighbour is better.
"""

import gc
import heapq
import json
import multiprocessing
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, islice
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, TypeVar

from ndtrain.arguments import ArgumentError, option
from ndtrain.config import Config, ConfigError, resolve
from ndtrain.config.registry import load_plugins
from ndtrain.data.workers import end_with_parent, interrupts_held
from ndtrain.device.cores import cpu_cores
from ndtrain.plan import accuracy as published
from ndtrain.plan.candidates import SPLIT, Candidate, Space, candidate_of, searched_run
from ndtrain.plan.estimate import ModelCosts, Place
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.options import IMBALANCE, RunOptions, at_least_1, unresolved_config, words_of, world_of, write_file
from ndtrain.plan.predict import Prediction, Predictor, plan_step, run_length
from ndtrain.plan.price import Rates
from ndtrain.plan.report import Progress, si

T = TypeVar("T")
R = TypeVar("R")
SHOWN = 10
_OF_MESH = 200  # the most candidates to keep per mesh
_ROUNDS = 8  # the most rounds of predicting neighbours of the best
_NEAR = 40  # the most neighbours to predict in a round


def _free_gb(key: str, text: str) -> float:
    """Return a number of GB, 0 or more.

    Raises:
        ArgumentError: the text is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentError(f"{key}={text}: must be a number of GB, 0 or more")
    return value


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The options of `plan search`."""

    predict: int = option("candidates to predict before the neighbours of the best ones", 100)
    processes: int = option("worker processes; default: one per core", cpu_cores())
    imbalance: float = option(IMBALANCE, 1.0, read=at_least_1)
    free_gb: float = option("GB of device memory to leave free", 0.0, read=_free_gb)
    against: str | None = option('a mesh to compare with, by its overrides: "mesh.tp=8 mesh.pp=16"', None)


class Ranked(NamedTuple):
    """A candidate that is worth predicting, with the estimated seconds of its step."""

    seconds: float
    candidate: Candidate


class TooLarge(NamedTuple):
    """A candidate that does not fit in memory. Its step time is not computed.

    `memory_bytes` is the requirement of the first or the last pipeline rank if that does not fit, otherwise of the rank
    that needs most.
    """

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
        best: the fastest candidate of each mesh, the fastest mesh first.
        against: the fastest of the candidates to compare with; None if not requested, or if none fits.
        counts: what was counted -> its number.
        fitting: all predicted candidates that fit, the fastest first, without waterfalls.
        own: the run with the mesh of its recipe and overrides, or one line that explains why it has no row.
    """

    best: list[Row]
    against: Row | None
    counts: dict[str, int]
    fitting: Sequence[Row] = ()
    own: Row | str = ""


class Workers(NamedTuple):
    """The processes that do the work of a search, and the display of its progress.

    Attributes:
        executor: processes; None: this process alone.
        progress: shows the progress of the work.
    """

    executor: Executor | None
    progress: Progress


def run(options: Options, overrides: Sequence[str]) -> None:
    """Search, print the table and write the JSON.

    Raises:
        ConfigError: the run's configuration is invalid, no candidate is legal or fits, or the file cannot be written.
    """
    hardware = load_hardware(options.hardware)
    against, own = words_of("against", options.against or ""), unresolved_config(overrides, hardware)
    cfg, overrides = searched_run(overrides, hardware)
    space = Space(cfg, world_of(cfg, options, hardware), hardware, Rates(imbalance=options.imbalance), options.free_gb)
    given = [arg for arg in overrides if not arg.startswith("mesh.") or not arg.endswith("=-1")]
    predicted: Predictions = {}
    with printing_so_far(space, predicted, given):
        with workers(options.processes) as pool:
            result = search(space, pool, options.predict, against, predicted)
        result = replace(result, own=own_row(space, own))
    print(as_text(space, result, given))
    if options.json:
        write_file("json", options.json, as_json(space, result, given))


def search(
    space: Space,
    pool: Workers | None,
    predict: int,
    against: Sequence[str] = (),
    predicted: Predictions | None = None,
) -> Result:
    """Return the best candidates of a space.

    Args:
        pool: the workers; None: this process, without progress.
        predict: number of candidates to predict at first.
        against: overrides of the candidates to compare with.
        predicted: filled as predictions are made, so that an interrupted caller has them.

    Raises:
        ConfigError: no candidate is legal or fits, or none has the overrides `against`.
    """
    ranked, counts = rank_all(space, pool)
    like = [r for r in ranked if set(against) <= set(r.candidate.overrides())] if against else []
    if against and not like:
        raise ConfigError(f"against={shlex.join(against)}: no valid candidate with these overrides can fit")
    predicted = {} if predicted is None else predicted
    predict_all(space, pool, shortlist(ranked, predict) + shortlist(like, max(8, predict // 4)), predicted)
    for group in (ranked, like):
        climb(space, pool, group, predicted)
    fitting = _fastest(predicted)
    if not fitting:
        least = min((p.memory_bytes for p in predicted.values()), default=0) / 1e9
        raise ConfigError(
            f"ranks={space.ranks}: none of {len(predicted)} predicted candidates fits in {space.memory_gb:g} GB; the "
            f"smallest needs at least {least:.0f} GB: use more ranks"
        )
    counts |= {"predicted": len(predicted), "predicted to fit": len(fitting)}
    best = of_each_mesh(fitting)[:SHOWN]
    rivals = [row for row in fitting if set(against) <= set(row.candidate.overrides())] if against else []
    shown = explained(space, pool, [*best, *rivals[:1]])
    return Result(shown[: len(best)], shown[-1] if rivals else None, counts, fitting)


def of_each_mesh(rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each mesh, in their order."""
    first: dict[Any, Row] = {}
    for row in rows:
        first.setdefault((row.candidate.mesh, row.candidate.ep), row)
    return list(first.values())


def own_row(space: Space, cfg: Config) -> Row | str:
    """Predict the run as given, with the mesh of its recipe. If it has no prediction, return the reason in one line.

    Args:
        cfg: the run before its mesh is known.
    """
    try:
        candidate = candidate_of(resolve(cfg, space.ranks))
        made = predict(space, candidate, explain=True)
    except ConfigError as error:
        return str(error)
    if isinstance(made, Prediction):
        return Row(candidate, made)
    need = f": a rank needs at least {made.memory_bytes / 1e9:.0f} GB" if made else ""
    return f"does not fit in {space.memory_gb:g} GB{need}"


# ------------------------------------------------------------------------------------------------------------- ranking


def rank_all(space: Space, pool: Workers | None) -> tuple[list[Ranked], dict[str, int]]:
    """Return the candidates that may fit, sorted by estimated step time, and the counts of candidates.

    Raises:
        ConfigError: no candidate is legal, or none may fit.
    """
    meshes = space.meshes()
    made = list(_mapped(pool, partial(_rank_mesh, space), meshes, "estimating the candidates of a mesh"))
    ranked = sorted(r for of_mesh in made for r in of_mesh.ranked)
    counts = {
        "meshes": len(meshes),
        "candidates": sum(of_mesh.candidates for of_mesh in made),
        "not pruned by memory": sum(of_mesh.fitting for of_mesh in made),
    }
    if not counts["candidates"]:
        raise ConfigError(f"ranks={space.ranks}: no mesh is valid with the given overrides: {_a_reason(space, meshes)}")
    if not ranked:
        raise ConfigError(
            f"ranks={space.ranks}: none of {counts['candidates']} candidates fits in {space.memory_gb:g} GB, "
            "counting only state and activations: use more ranks"
        )
    return ranked, counts


def _a_reason(space: Space, meshes: Sequence[tuple[int, ...]]) -> str:
    """Explain why the first mesh is not legal."""
    if not meshes:
        return "the given sizes do not divide the ranks"
    try:
        space.resolved(next(iter(space.unchecked(meshes[0]))))
    except ConfigError as error:
        return str(error)
    except StopIteration:
        pass
    return "no train.micro_batch divides the batch of a rank"


class _OnMesh(NamedTuple):
    """The best candidates on a mesh by their estimates, the number of candidates, and the number that may fit."""

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
    return nbytes <= 1e9 * space.memory_gb


def shortlist(ranked: Sequence[Ranked], count: int) -> list[Candidate]:
    """Return about `count` candidates to predict first, in equal parts from three lists.

    The lists have the best candidates, the best of each (pp, cp, tp, ep), and the best of each of these with each
    recompute and zero. Estimates are less accurate between such families than within one.
    """
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
    pool: Workers | None,
    ranked: Sequence[Ranked],
    predicted: Predictions,
    near: int = _NEAR,
) -> None:
    """Predict the neighbours of the best three candidates, until these three no longer change.

    As long as no candidate fits, use the three that need the least memory.

    Args:
        near: the most candidates to predict in a round.
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


def predict_all(space: Space, pool: Workers | None, candidates: Sequence[Candidate], into: Predictions) -> None:
    """Predict the candidates. Store each prediction in `into` as soon as it is known. Leave illegal candidates out."""
    for candidate, prediction in _in_order(pool, partial(predict, space), candidates):
        if prediction is not None:
            into[candidate] = prediction


def _in_order(
    pool: Workers | None, fn: Callable[[Candidate], R], candidates: Iterable[Candidate], parts: int = 24
) -> Iterator[tuple[Candidate, R]]:
    """Yield each candidate with its result of `fn`, in the order of `_shared`."""
    order = sorted(dict.fromkeys(candidates), key=_shared)
    return zip(order, _mapped(pool, fn, order, "predicting a candidate", parts), strict=True)


def _shared(c: Candidate) -> tuple:
    """Return a sort key that puts candidates with the same pieces, and then the same program, next to each other.

    So one process works on them in sequence and can reuse both.
    """
    pieces = c.size("tp"), c.size("cp"), c.cp_kind, c.ep, c.micro_batch, c.recompute
    return pieces, c.size("pp"), c.zero, c.stages.schedule, c.stages.chunks or 0, c.stages.split


def predict(space: Space, candidate: Candidate, explain: bool = False) -> Prediction | TooLarge | None:
    """Predict a candidate. Return None if it is not legal.

    Raises:
        ConfigError: the candidate is legal but cannot be predicted.
    """
    load_plugins(space.cfg.plugins)
    try:
        cfg = space.resolved(candidate)
    except ConfigError:
        return None
    predictor = Predictor(space.hardware, space.rates)
    plan = plan_step(cfg, space.hardware.device, predictor.rates.imbalance)
    ends = (replace(plan, reported=rank) for rank in (0, -1))  # usually one of these needs most, so check them first
    for part in (*ends, plan):
        memory = predictor.memory(part)
        if not fits(space, memory):
            return TooLarge(memory)
    return predictor.price(plan, explain)


def explained(space: Space, pool: Workers | None, rows: Sequence[Row]) -> list[Row]:
    """Return the same rows with waterfalls in their predictions."""
    of = dict(_in_order(pool, partial(predict, space, explain=True), (row.candidate for row in rows), parts=2))
    return [Row(c, p) for c, _ in rows if isinstance(p := of[c], Prediction)]


@contextmanager
def workers(processes: int) -> Iterator[Workers]:
    """Yield the workers: `processes` processes, or this process alone if it is 1.

    If the block fails or is interrupted, end the processes that still work.

    Raises:
        ConfigError: the system has ended a process.
    """
    progress = Progress()
    if processes == 1:
        yield Workers(None, progress)
        return
    executor = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_begin_worker)
    resource_tracker.ensure_running()  # started later, it would unblock the signal that is held below
    with interrupts_held():
        executor.submit(int)  # starts all processes
    try:
        yield Workers(executor, progress)
    except BaseException as error:
        executor.shutdown(wait=False)
        for process in multiprocessing.active_children():
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                f"processes={processes}: the system killed a process, probably because memory ran out: use fewer "
                "processes"
            ) from error
        raise
    finally:
        progress.clear()
    executor.shutdown()


def _begin_worker() -> None:
    end_with_parent()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # as in the parent process
    # A prediction makes hundreds of thousands of small tuples. Python's garbage collector would traverse them again and
    # again: that was 40 % of a search's time.
    gc.set_threshold(200_000, 20, 100)


def _mapped(pool: Workers | None, fn: Callable[[T], R], items: Iterable[T], what: str, parts: int = 24) -> Iterator[R]:
    """Apply `fn` to each item. Each process gets chunks of neighbouring items, about `parts` chunks in all.

    Args:
        what: the work, for the progress.
    """
    every = list(items)
    if pool is None:
        return map(fn, every)
    if pool.executor is None or len(every) < 8:
        made = map(fn, every)
    else:
        made = _results(pool.executor, fn, every, -(-len(every) // parts))
    return pool.progress.count(made, what, len(every))


def _results(executor: ProcessPoolExecutor, fn: Callable[[T], R], items: list[T], size: int) -> Iterator[R]:
    """Yield the results in order. Each process gets `size` items at a time.

    Does not use `executor.map`, which cancels its futures when the search is interrupted: the pool of Python 3.11 fails
    with InvalidStateError if its processes end while there are cancelled futures.
    """
    chunks = [executor.submit(_apply, fn, items[at : at + size]) for at in range(0, len(items), size)]
    for chunk in chunks:
        yield from chunk.result()


def _apply(fn: Callable[[T], R], items: list[T]) -> list[R]:
    return [fn(item) for item in items]


# -------------------------------------------------------------------------------------------------------------- output


def reason(row: Row, best: Row) -> str:
    """Explain why a candidate is slower than the best one: list the parts of its step that changed most."""
    own, first = row.prediction, best.prediction
    grown = {part: s - first.waterfall.get(part, 0.0) for part, s in own.waterfall.items()}
    parts = sorted(grown.items(), key=lambda item: -abs(item[1]))
    said = [f"{part} {seconds:+.3g} s" for part, seconds in parts[:3] if abs(seconds) > 0.002 * first.step_time_s]
    slower = own.step_time_s - first.step_time_s
    return f"{slower:+.3g} s: " + ", ".join(said) if said else f"{slower:+.3g} s"


@contextmanager
def printing_so_far(space: Space, predicted: Predictions, given: Sequence[str]) -> Iterator[None]:
    """Print the best predictions so far if Ctrl-C interrupts the block."""
    try:
        yield
    except KeyboardInterrupt:
        print(so_far(space, predicted, given), flush=True)
        raise


def so_far(space: Space, predicted: Predictions, given: Sequence[str]) -> str:
    """Return the table of an interrupted search, or one line if no predicted candidate fits."""
    best = of_each_mesh(_fastest(predicted))[:SHOWN]
    if not best:
        return f"interrupted: none of {len(predicted)} predicted candidates fits so far"
    return "interrupted: the best so far\n" + as_text(space, Result(best, None, {"predicted": len(predicted)}), given)


def as_text(space: Space, result: Result, given: Sequence[str]) -> str:
    """Format the result as a table for people, with the override line of each row below it."""
    first, counts = result.best[0], ", ".join(f"{n} {what}" for what, n in result.counts.items())
    rows = [(str(i), row) for i, row in enumerate(result.best, 1)]
    rows += [("vs", result.against)] if result.against else []
    own = [("own", result.own)] if isinstance(result.own, Row) else []
    limit = f" of {space.hardware.memory_gb:g} GB" if space.hardware.memory_gb else ""
    lines = [f"{space.ranks} ranks of {space.hardware.name}{limit}: {counts}", "", _head(space)]
    lines += [_line(space, name, row) for name, row in (*rows, *own)]
    lines += [f"own  {result.own}"] if result.own and not own else []
    lines += _notes(space, first)
    lines += ["", "why each is slower than the first, and the overrides to select it"]
    for name, row in rows:
        why = "the fastest" if row is first else reason(row, first)
        lines += [f"{name:>3}  {why}", f"     {override_line(row.candidate, given)}"]
    lines += [f"own  {reason(row, first)}: the run as given" for _, row in own]
    return "\n".join(lines)


def _notes(space: Space, first: Row) -> list[str]:
    """Return notes on the table's figures: the length of the run, and the accuracy of predictions."""
    length = run_length(space.cfg, first.prediction.step_time_s, space.ranks)
    notes = [f"days and GPU hours are for {si(length.tokens, '').strip()} tokens (train.steps)"] if length else []
    return ["", *notes, *([published.note()] if published.applies_to(space.hardware) else [])]


def _head(space: Space) -> str:
    free = f" {'free GB':>8}" if space.hardware.memory_gb else ""
    length = f" {'tokens/day':>10} {'days':>7} {'GPU hours':>10}" if space.cfg.train.steps else ""
    return (
        f"{'':>3}  {'step s':>8} {'tokens/s/dev':>13} {'MFU':>6} {'HFU':>6} {'memory GB':>10}{free}{length}   "
        "mesh, zero, microbatch, schedule, recompute"
    )


def _line(space: Space, name: str, row: Row) -> str:
    p, c = row.prediction, row.candidate
    axes = " ".join(text.removeprefix("mesh.") for text in c.overrides()[:5] if not text.endswith("=1")) or "one rank"
    written = [text for text in c.overrides()[5:] if not text.startswith(("recompute.", SPLIT))]
    rest = [text.rpartition(".")[2] for text in written] + (
        [f"split={_runs(c.stages.split)}"] if c.stages.split else []
    )
    return (
        f"{name:>3}  {p.step_time_s:8.3f} {p.tokens_per_s_per_device:13,.0f} {p.mfu:6.1%} {p.hfu:6.1%} "
        f"{p.memory_bytes / 1e9:10.1f}{_resources(space, p)}   {axes} {' '.join(rest)}"
    )


def _resources(space: Space, p: Prediction) -> str:
    """Format the cells for free memory and for the length of the run."""
    limit, length = space.hardware.memory_gb, run_length(space.cfg, p.step_time_s, space.ranks)
    free = f" {limit - p.memory_bytes / 1e9:8.1f}" if limit else ""
    if length is None:
        return free
    return f"{free} {si(length.tokens_per_day, ''):>10} {length.days:7.3g} {length.gpu_hours:10,.0f}"


def _runs(sizes: Sequence[int]) -> str:
    """Format numbers, and write repeated numbers as a count: 0,126x1,0."""
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    return ",".join(f"{times}x{size}" if times > 1 else str(size) for size, times in runs)


def override_line(candidate: Candidate, given: Sequence[str]) -> str:
    """Return the overrides to paste: the user's, and the candidate's.

    If the candidate has a split of its own, leave out the null that discards the recipe's split.
    """
    given = [arg for arg in given if arg != f"{SPLIT}=null" or not candidate.stages.split]
    keys = {arg.partition("=")[0] for arg in given}
    own = [text for text in candidate.overrides() if text.partition("=")[0] not in keys]
    return shlex.join([*given, *own])


def as_json(space: Space, result: Result, given: Sequence[str]) -> str:
    first = result.best[0]
    body = lambda row: {
        **asdict(row.prediction),
        **_resources_json(space, row.prediction),
        "overrides": override_line(row.candidate, given),
        "reason": "" if row is first else reason(row, first),
    }
    plan = {
        "hardware": asdict(space.hardware),
        "ranks": space.ranks,
        "counts": result.counts,
        "best": [body(row) for row in result.best],
        "against": body(result.against) if result.against else None,
        "own": body(result.own) if isinstance(result.own, Row) else result.own,
    }
    return json.dumps(plan, indent=1)


def _resources_json(space: Space, p: Prediction) -> dict[str, Any]:
    """Return the figures of `_resources` for JSON: the free bytes of a device, and the length of the run."""
    limit, length = space.hardware.memory_gb, run_length(space.cfg, p.step_time_s, space.ranks)
    return {"free_bytes": limit and int(1e9 * limit) - p.memory_bytes, "run": length and length._asdict()}
