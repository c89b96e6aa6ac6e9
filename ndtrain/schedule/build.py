"""A schedule by its name."""

from functools import lru_cache

from ndtrain.arguments import unknown
from ndtrain.schedule.check import check
from ndtrain.schedule.file import Path, read
from ndtrain.schedule.generate import GENERATORS, generate
from ndtrain.schedule.table import Action, Schedule, ScheduleError, Table

NAMES = (*GENERATORS, "csv")


def default_chunks(name: str) -> int | None:
    """Chunks (stages) a rank where none are asked for; None with csv, whose file says."""
    return GENERATORS[name].chunks if name in GENERATORS else None


@lru_cache(maxsize=4096)
def stage_ranks(name: str, pp: int, chunks: int | None = None) -> tuple[int, ...] | None:
    """Stage -> pp rank, of a schedule that has such a placement; None with csv, whose file says."""
    generator = GENERATORS.get(name)
    if generator is None:
        return None
    chunks = chunks or generator.chunks
    holder = {stage: rank for rank in range(pp) for stage in generator.stages(pp, rank, chunks)}
    return tuple(holder[stage] for stage in range(pp * chunks))


def build(name: str, pp: int, microbatches: int, chunks: int | None = None, path: Path | None = None) -> Schedule:
    """The schedule `name` for `pp` ranks and `microbatches` a step, generated, or with csv read from `path`, and proved
    to run. `chunks` are stages a rank; None takes the schedule's default, or what the file holds.

    Raises:
        ScheduleError: an unknown name, sizes that the schedule cannot have, a file that is none.
        IllegalSchedule: the file's table cannot run.
    """
    _check_sizes(name, pp, microbatches, chunks, path)
    if path is not None and name == "csv":
        table = read(path, pp, microbatches, chunks)
        return Schedule(name, table, microbatches, _rank_of(table))
    return _generated(name, pp, microbatches, chunks or GENERATORS[name].chunks)


@lru_cache(maxsize=128)
def _generated(name: str, pp: int, microbatches: int, chunks: int) -> Schedule:
    """A planner asks for the same schedules again and again. Nobody changes one."""
    table = generate(name, pp, microbatches, chunks)
    check(table, microbatches, pp * chunks)
    return Schedule(name, table, microbatches, _rank_of(table))


def forwards(schedule: Schedule) -> Schedule:
    """The forwards alone of as many microbatches on the same stages: a rank's stages one after the other, each with all
    microbatches, so that nothing waits for what comes later on the same rank."""
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
        raise ScheduleError(f"{name} has {generator.chunks} stage(s) a rank, not chunks={chunks}")


def _rank_of(table: Table) -> tuple[int, ...]:
    holder = {a.stage: rank for rank, row in enumerate(table) for a in row}
    return tuple(holder[stage] for stage in range(len(holder)))
