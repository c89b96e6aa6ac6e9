"""Builds a schedule from its name."""

import difflib
from collections.abc import Sequence

from ndtrain.schedule.check import check
from ndtrain.schedule.file import Path, read
from ndtrain.schedule.generate import GENERATORS, generate
from ndtrain.schedule.table import Action, Schedule, ScheduleError, Table

NAMES = (*GENERATORS, "csv")


def default_chunks(name: str) -> int | None:
    """The default number of chunks (stages) per rank; None for csv, whose file determines it."""
    return GENERATORS[name].chunks if name in GENERATORS else None


def build(name: str, pp: int, microbatches: int, chunks: int | None = None, path: Path | None = None) -> Schedule:
    """Generates the schedule `name`, or reads it from a file, and checks that it runs.

    Args:
        pp: number of pipeline ranks.
        microbatches: number of microbatches per step.
        chunks: stages per rank; None: the schedule's default, or the number in the file.
        path: with csv, the file.

    Raises:
        ScheduleError: the name is unknown, the schedule does not have such sizes, or the file is malformed.
        IllegalSchedule: the table of the file cannot run.
    """
    _check_sizes(name, pp, microbatches, chunks, path)
    if name == "csv":
        table = read(path, pp, microbatches, chunks)
    else:
        chunks = chunks or default_chunks(name)
        table = generate(name, pp, microbatches, chunks)
        check(table, microbatches, pp * chunks)
    return Schedule(name, table, microbatches, _rank_of(table))


def forwards(schedule: Schedule) -> Schedule:
    """The schedule of only the forwards of the same microbatches on the same stages. A rank runs its stages in
    ascending order, each with all microbatches, so that no forward needs a later one of its rank."""
    row = lambda rank: [Action("F", m, s) for s in schedule.stages_of(rank) for m in range(schedule.microbatches)]
    table = [row(rank) for rank in range(schedule.pp)]
    return Schedule(f"{schedule.name} forwards", table, schedule.microbatches, schedule.rank_of)


def _check_sizes(name: str, pp: int, microbatches: int, chunks: int | None, path: Path | None) -> None:
    if name not in NAMES:
        raise unknown("schedule", name, NAMES)
    for key, value in (("pp", pp), ("microbatches", microbatches), ("chunks", chunks)):
        if value is not None and value < 1:
            raise ScheduleError(f"{key}={value}: must be at least 1")
    if name == "csv" and path is None:
        raise ScheduleError("csv needs the path of its file")
    generator = GENERATORS.get(name)
    if generator and chunks not in (None, generator.chunks) and not generator.any_chunks:
        raise ScheduleError(f"{name} has {generator.chunks} stage(s) a rank, not chunks={chunks}")


def unknown(what: str, word: str, known: Sequence[str]) -> ScheduleError:
    """The error for a word that is not known. It suggests the most similar known word."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ScheduleError(f"{word}: no such {what}; {hint}known: {', '.join(known)}")


def _rank_of(table: Table) -> tuple[int, ...]:
    """The pp rank of each stage."""
    rank_of = {a.stage: rank for rank, row in enumerate(table) for a in row}
    return tuple(rank_of[stage] for stage in range(len(rank_of)))
