"""Shows runs: one HTML page with their curves and what differs in their configurations, one curve as an SVG, or all
curves as a CSV.

python -m ndtrain.report RUN [RUN ...] [out=report.html]
python -m ndtrain.report RUN [RUN ...] svg=loss.svg [metric=loss]
python -m ndtrain.report RUN [RUN ...] csv=curves.csv

RUN is a run folder, or a folder with run folders in it, as a sweep makes. The page needs no other file and no network.
The CSV has a row for each run and step, under the keys and in the units of metrics.jsonl.

{options}
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndtrain.arguments import ArgumentError, help_lines, one_of, option, parse, status_of, wants_help
from ndtrain.report import ReportError, find_runs, render_csv, render_page, render_svg
from ndtrain.report.runs import METRICS, read_runs

KEYS = [m.key for m in METRICS]


def _ending(ending: str) -> Callable[[str, str], str]:
    """Return a reader of file names with this ending."""

    def read(key: str, text: str) -> str:
        if Path(text).suffix.lower() != ending:
            raise ArgumentError(f"{key}={text}: the output is {ending[1:].upper()}: give a name that ends in {ending}")
        return text

    return read


@dataclass(frozen=True)
class Options:
    out: str | None = option("HTML page to write; default: report.html", None, read=_ending(".html"))
    svg: str | None = option("SVG file of one metric, instead of a page", None, read=_ending(".svg"))
    csv: str | None = option("CSV file with the values of all curves, instead of a page", None, read=_ending(".csv"))
    metric: str = option(
        f"metric of the SVG file: {', '.join(KEYS)}", "loss", read=lambda key, text: one_of(key, text, KEYS)
    )  # fmt: skip


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit status: 2 for bad arguments or runs (one line explains it)."""
    if wants_help(args):
        print((__doc__ or "").format(options=help_lines(Options)).strip())
        return 0
    paths = [arg for arg in args if "=" not in arg or Path(arg).is_dir()]  # a sweep names its folders lr=0.1
    try:
        options = parse(Options, [arg for arg in args if arg not in paths])
        if not paths:
            raise ArgumentError("RUN is missing: give a run folder, e.g. runs/llama_small")
        runs = read_runs(find_runs(list(map(Path, paths))))
        written = []
        if options.svg:
            written.append(_write(Path(options.svg), render_svg(runs, options.metric)))
        if options.csv:
            written.append(_write(Path(options.csv), render_csv(runs)))
        if options.out or not (options.svg or options.csv):
            written.append(_write(Path(options.out or "report.html"), render_page(runs)))
    except (ArgumentError, ReportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    steps = sum(len(run.steps) for run in runs)
    print(f"{len(runs)} run{'s' * (len(runs) > 1)}, {steps:,} steps: wrote {' and '.join(written)}")
    return 0


def _write(path: Path, text: str) -> str:
    """Write the file. Return its name and size."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error
    return f"{path} ({len(text.encode()) / 1024:,.0f} KiB)"


if __name__ == "__main__":
    sys.exit(status_of(main))
