"""Builds a schedule from its name."""

from functools import lru_cache

from ndtrain.arguments import unknown
from ndtrain.schedule.check import check
from ndtrain.schedule.file import Path, read
from ndtrain.schedule.generate import GENERATORS, generate
from ndtrain.schedule.table import Action, Schedule, ScheduleError, Table

NAMES = (*GENERATORS, "csv")


def default_chunks(name: str) -> int | None:
    """Return the default number of chunks (stages) per rank, or None for csv: the file determines the number."""
    return GENERATORS[name].chunks if name in GENERATORS else None


@lru_cache(maxsize=4096)
def stage_ranks(name: str, pp: int, chunks: int | None = None) -> tuple[int, ...] | None:
    """Return the pp rank of each stage, or None for csv: the file determines the placement."""
    generator = GENERATORS.get(name)
    if generator is None:
        return None
    chunks = chunks or generator.chunks
    holder = {stage: rank for rank in range(pp) for stage in generator.stages(pp, rank, chunks)}
    return tuple(holder[stage] for stage in range(pp * chunks))


def build(name: str, pp: int, microbatches: int, chunks: int | None = None, path: Path | None = None) -> Schedule:
    """Build and check the schedule `name` for `pp` ranks and `microbatches` per step.

    The schedule is generated, except csv, which is read from `path`. `chunks` is the number of stages per rank. None
    uses the schedule's default, or the number in the file.

    Raises:
        ScheduleError: the name is unknown, the schedule does not support these sizes, or the file is not a schedule.
        IllegalSchedule: the file's table cannot run.
    """
    _check_sizes(name, pp, microbatches, chunks, path)
    if path is not None and name == "csv":
        table = read(path, pp, microbatches, chunks)
        return Schedule(name, table, microbatches, _rank_of(table))
    return _generated(name, pp, microbatches, chunks or GENERATORS[name].chunks)


@lru_cache(maxsize=128)
def _generated(name: str, pp: int, microbatches: int, chunks: int) -> Schedule:
    """Generate a schedule. Cached, because planners request the same schedules repeatedly. Do not modify the result."""
    table = generate(name, pp, microbatches, chunks)
    check(table, microbatches, pp * chunks)
    return Schedule(name, table, microbatches, _rank_of(table))


def forwards(schedule: Schedule) -> Schedule:
    """Return a schedule with only the forwards of the same microbatches on the same stages.

    Each rank runs its stages in ascending order, each for all microbatches. So no action waits for a later one of the
    same rank.
    """
    row = lambda rank: [Action("F", m, s) for s in schedule.stages_of(rank) for m in range(schedule.microbatches)]
    table = [row(rank) for rank in range(schedule.pp)]
    return Schedule(f"{schedule.name} forwards", table, schedule.microbatches, schedule.rank_of)


def _check_sizes(name: str, pp: int, microbatches: int, chunks: int | None, path: Path | None) -> None:
    if name not in NAMES:
        raise ScheduleError(unknown("schedule", name, NAMES))
    for key, value in (("pp", pp), ("microbatches", microbatches), ("chunks", chunks)):
        if value is not None and value < 1:
            raise ScheduleError(f"{key}={value}: must be at least 1")
    if name == "csv" and path is None:
        raise ScheduleError("csv needs the path of its file")
    generator = GENERATORS.get(name)
    if generator and chunks not in (None, generator.chunks) and not generator.any_chunks:
        raise ScheduleError(f"{name} has {generator.chunks} stage(s) per rank, not chunks={chunks}")


def _rank_of(table: Table) -> tuple[int, ...]:
    holder = {a.stage: rank for rank, row in enumerate(table) for a in row}
    return tuple(holder[stage] for stage in range(len(holder)))
