"""Shows pipeline schedules: their bubble, their live activations, and a drawing.

python -m ndtrain.schedule schedule=zb_v pp=4 microbatches=12 [key=value ...]
python -m ndtrain.schedule compare pp=4 microbatches=12 [schedule=1f1b,zb_v,...] [key=value ...]

{options}

Times are in the unit of cost. "alive" counts activations of one microbatch on all stages of a rank.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndtrain.arguments import ArgumentError, help_lines, option, parse, status_of, wants_help
from ndtrain.schedule import NAMES, Schedule, ScheduleError, Timeline, build, simulate
from ndtrain.schedule.draw import panel, timeline_svg
from ndtrain.schedule.file import write


def _time(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (value == 0 and key != "latency"):
        raise ArgumentError(f"{key}={text}: must be a time, greater than 0 (latency: 0 or more)")
    return value


@dataclass(frozen=True)
class Options:
    """The options of both commands."""

    schedule: str | None = option(
        f"{', '.join(NAMES)}; compare: several, separated by commas (default: all but csv)", None
    )
    pp: int | None = option("pipeline ranks", None)
    microbatches: int | None = option("microbatches per step", None)
    chunks: int | None = option("stages per rank; default: the schedule's own number", None)
    path: str | None = option("CSV file to read with schedule=csv", None)
    forward: float = option(
        "time of one microbatch's forward through all stages of a rank; with n chunks, each takes 1/n of it", 1.0,
        "cost.F", _time,
    )  # fmt: skip
    input_grad: float = option("time of its input gradient", 1.0, "cost.I", _time)
    weight_grad: float = option("time of its weight gradient", 1.0, "cost.W", _time)
    backward: float | None = option("time of its full backward; default: I + W", None, "cost.B", _time)
    latency: float = option("time of a message between two ranks; default: 0", 0.0, read=_time)
    out: str | None = option("SVG file for the drawing", None)
    csv: str | None = option("CSV file for the table (not with compare)", None)


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit status: 2 for bad arguments or an illegal schedule (one line explains it)."""
    if wants_help(args):
        print((__doc__ or "").format(options=help_lines(Options)).strip())
        return 0
    compare = args[:1] == ["compare"]
    try:
        options = parse(Options, args[compare:])
        (show_comparison if compare else show_one)(options)
        return 0
    except BrokenPipeError:  # the reader of our output has closed the pipe; no file of ours is at fault
        raise
    except (ArgumentError, ScheduleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def show_one(options: Options) -> None:
    """Print one schedule's figures per rank. Write its drawing and its table if requested."""
    timeline = predict(options.schedule, options)
    s = timeline.schedule
    title = _title(s)
    print(title)
    rows = [
        (rank, len(row), f"{busy:.4g}", _percent(1 - busy / timeline.makespan), f"{alive:.3g}")
        for rank, row, busy, alive in zip(range(s.pp), s.table, timeline.busy, timeline.peak_shares, strict=True)
    ]
    _print_table(("rank", "actions", "busy", "bubble", "alive"), rows)
    print(f"bubble {_percent(timeline.bubble)}, makespan {timeline.makespan:.6g}")
    if options.csv:
        write(s.table, options.csv)
    _draw(options, [(title, timeline)])


def show_comparison(options: Options) -> None:
    """Print one row of figures per schedule. Draw the schedules on one time scale if requested."""
    if options.csv:
        raise ScheduleError("csv: not supported by compare, which has several tables")
    names = options.schedule.split(",") if options.schedule else [n for n in NAMES if n != "csv"]
    timelines = [predict(name, options) for name in names]
    rows = [
        (
            t.schedule.name,
            t.schedule.stages // t.schedule.pp,
            f"{t.makespan:.6g}",
            _percent(t.bubble),
            f"{max(t.peak_shares):.3g}",
        )
        for t in timelines
    ]
    _print_table(("schedule", "chunks", "makespan", "bubble", "alive"), rows)
    _draw(options, [(t.schedule.name, t) for t in timelines])


def predict(name: str | None, options: Options) -> Timeline:
    """Build and simulate the schedule described by the command's options.

    Raises:
        ScheduleError: an option is missing, or `build` raises it.
    """
    pp, microbatches = options.pp, options.microbatches
    if not name or not pp or not microbatches:
        given = {"schedule": name, "pp": pp, "microbatches": microbatches}
        raise ScheduleError(
            f"{', '.join(key for key, value in given.items() if not value)}: missing; -h shows all keys"
        )
    schedule = build(name, pp, microbatches, options.chunks, options.path)
    cost = {"F": options.forward, "I": options.input_grad, "W": options.weight_grad}
    cost["B"] = options.backward or cost["I"] + cost["W"]
    chunks = schedule.stages / schedule.pp
    return simulate(schedule, {kind: c / chunks for kind, c in cost.items()}, options.latency)


def _title(s: Schedule) -> str:
    return f"{s.name}, pp={s.pp}, {s.microbatches} microbatches, {s.stages} stages"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: the first column aligned to the left, the others to the right."""
    lines = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for first, *rest in lines:
        print("  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]))


def _draw(options: Options, timelines: list[tuple[str, Timeline]]) -> None:
    if options.out:
        picture = timeline_svg([panel(t, title) for title, t in timelines], unit="time")
        Path(options.out).write_text(picture)
        print(f"drawn in {options.out}")


if __name__ == "__main__":
    sys.exit(status_of(main))
