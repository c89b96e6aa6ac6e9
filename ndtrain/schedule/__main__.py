"""Shows pipeline schedules: their bubble, live activations, and a drawing.

python -m ndtrain.schedule schedule=zb_v pp=4 microbatches=12 [key=value ...]
python -m ndtrain.schedule compare pp=4 microbatches=12 [schedule=1f1b,zb_v,...] [key=value ...]

  schedule            {names};
                      compare: several of them, separated by commas (default: all but csv)
  pp, microbatches    ranks of the pipeline; microbatches of a step
  chunks              stages a rank (default: the schedule's own)
  path                with schedule=csv: the file
  cost.F cost.I cost.W cost.B
                      time of a forward, input gradient, weight gradient (default 1) and full backward (default
                      I + W) of one microbatch through all stages of a rank; of n chunks each takes 1/n of it
  latency             time of a message between two ranks (default 0)
  out                 the drawing to write, an SVG file
  csv                 the table to write (not with compare)

Times are in the unit of cost. "alive" counts activations of one microbatch on all stages of a rank.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ndtrain.schedule import NAMES, Schedule, ScheduleError, Timeline, build, simulate
from ndtrain.schedule.build import unknown
from ndtrain.schedule.draw import panel, timeline_svg
from ndtrain.schedule.file import write

Options = dict[str, Any]


def main(args: Sequence[str]) -> int:
    """Runs the command. Returns the exit status: 2 for bad arguments or an illegal schedule, after one line of
    error."""
    if {"-h", "--help"} & set(args):
        print((__doc__ or "").format(names=", ".join(NAMES)).strip())
        return 0
    compare = args[:1] == ["compare"]
    try:
        options = parse(args[compare:])
        (show_comparison if compare else show_one)(options)
        return 0
    except (ScheduleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def show_one(options: Options) -> None:
    """Prints the figures of one schedule by rank, and writes its drawing and its table."""
    timeline = predict(options.get("schedule"), options)
    s = timeline.schedule
    title = _title(s)
    print(title)
    rows = [
        (rank, len(row), f"{busy:.4g}", _percent(1 - busy / timeline.makespan), f"{alive:.3g}")
        for rank, row, busy, alive in zip(range(s.pp), s.table, timeline.busy, timeline.peak_shares, strict=True)
    ]
    _print_table(("rank", "actions", "busy", "bubble", "alive"), rows)
    print(f"bubble {_percent(timeline.bubble)}, makespan {timeline.makespan:.6g}")
    if "csv" in options:
        write(s.table, options["csv"])
    _draw(options, [(title, timeline)])


def show_comparison(options: Options) -> None:
    """Prints the figures of several schedules, one row each, and writes a drawing of all on one time scale.

    Raises:
        ScheduleError: `csv` is given, or an option is wrong.
    """
    if "csv" in options:
        raise ScheduleError("csv: not with compare, which has several tables")
    names = options.get("schedule", ",".join(n for n in NAMES if n != "csv")).split(",")
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
    """Builds and simulates a schedule with the options of the command.

    Raises:
        ScheduleError: an option is missing, or the schedule cannot be built.
    """
    missing = [] if name else ["schedule"]
    missing += [key for key in ("pp", "microbatches") if key not in options]
    if missing:
        raise ScheduleError(f"{', '.join(missing)}: missing; -h shows all keys")
    schedule = build(name, options["pp"], options["microbatches"], options.get("chunks"), options.get("path"))
    cost = {kind: options.get(f"cost.{kind}", 1.0) for kind in "FIW"}
    cost["B"] = options.get("cost.B", cost["I"] + cost["W"])
    chunks = schedule.stages / schedule.pp
    return simulate(schedule, {kind: c / chunks for kind, c in cost.items()}, options.get("latency", 0.0))


def parse(args: Sequence[str]) -> Options:
    """The options among `key=value` arguments.

    Raises:
        ScheduleError: an argument is not `key=value`, a key is unknown, or a value is not the number it should be.
    """
    options = {}
    for arg in args:
        key, equals, text = arg.partition("=")
        if key not in READERS:
            raise unknown("key", key, list(READERS))
        if not equals or not text:
            raise ScheduleError(f"{arg}: arguments are key=value")
        options[key] = READERS[key](key, text)
    return options


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ScheduleError(f"{key}={text}: must be a whole number, at least 1")
    return int(text)


def _time(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (value == 0 and key != "latency"):
        raise ScheduleError(f"{key}={text}: must be a time, greater than 0 (latency: 0 or more)")
    return value


def _text(key: str, text: str) -> str:
    return text


READERS: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("schedule", "path", "out", "csv"), _text),
    **dict.fromkeys(("pp", "microbatches", "chunks"), _count),
    **dict.fromkeys(("cost.F", "cost.I", "cost.W", "cost.B", "latency"), _time),
}


def _title(s: Schedule) -> str:
    return f"{s.name}, pp={s.pp}, {s.microbatches} microbatches, {s.stages} stages"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table. The first column is aligned to the left, the others to the right."""
    lines = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for first, *rest in lines:
        print("  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]))


def _draw(options: Options, timelines: list[tuple[str, Timeline]]) -> None:
    """Writes the drawing of (title, timeline) pairs to the file `out`, if that is given."""
    if "out" in options:
        picture = timeline_svg([panel(t, title) for title, t in timelines], unit="time")
        Path(options["out"]).write_text(picture)
        print(f"drawn in {options['out']}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
