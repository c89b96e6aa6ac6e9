"""The table of a preflight: a row for each check, which names the ranks that differ."""

import statistics
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TextIO, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ndtrain.mesh.mesh import MeshSpec

NAMED = 4  # ranks or lines that a row names; it only counts the rest
_LOG_WIDTH = 500  # characters; lines of a log file are not folded

Key = TypeVar("Key")


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        figure: short text with the measured values.
        notes: the differences, each with its ranks.
        last: True if no further check can run.
    """

    check: str
    status: Status
    figure: str = ""
    notes: tuple[str, ...] = ()
    last: bool = False


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst status, or OK if there are none."""
    return max(statuses, key=list(Status).index, default=Status.OK)


class Ranks:
    """Names ranks in messages.

    Attributes:
        hosts: rank -> host name, for the ranks that have reported it.
    """

    def __init__(self, spec: MeshSpec):
        self.spec = spec
        self.hosts: dict[int, str] = {}

    def one(self, rank: int) -> str:
        """Return "rank 3 (node1, dp=1 tp=0)": its host, and its coordinates on axes with more than one rank."""
        known = ", ".join(x for x in (self.hosts.get(rank, ""), self.spec.where(rank)) if x)
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def some(self, ranks: Collection[int]) -> str:
        """Name some ranks: each one if they are few, else "every rank", whole hosts, or the first few and a count."""
        ranks = sorted(ranks)
        if len(ranks) <= NAMED:
            return ", ".join(map(self.one, ranks))
        if len(ranks) == self.spec.world_size:
            return "every rank"
        hosts = {self.hosts.get(r) for r in ranks}
        if None not in hosts and len(ranks) == sum(host in hosts for host in self.hosts.values()):
            return f"every rank on {listed(sorted(hosts))}"
        return listed([self.one(r) for r in ranks])

    def same_host(self, one: int, other: int) -> bool:
        return self.hosts.get(one) == self.hosts.get(other)

    def grouped(self, problems: Mapping[int, str]) -> tuple[str, ...]:
        """Return a line for each of the first few problems, with the ranks that have the problem."""
        by_text: dict[str, list[int]] = {}
        for rank, text in problems.items():
            by_text.setdefault(text, []).append(rank)
        return few([f"{text}: {self.some(ranks)}" for text, ranks in by_text.items()])


def listed(words: Sequence[str]) -> str:
    """Join the first few words with commas, and add the number of the others."""
    more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]) + more


def few(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the first few lines, and a line with the number of the others."""
    return (*lines[:NAMED], *[f"and {len(lines) - NAMED} more"] * (len(lines) > NAMED))


def odd_values(values: Mapping[int, str]) -> tuple[str, dict[int, str]]:
    """Return (most common value, {rank: its value} for the ranks that differ)."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {r: v for r, v in values.items() if v != usual}


def usual_rate(rates: Collection[float]) -> float:
    """Return the upper quartile. The median would not do: one slow host of three is at an end of four of the six
    links."""
    return statistics.quantiles(rates, n=4, method="inclusive")[2] if len(rates) > 1 else next(iter(rates))


def slow(rates: Mapping[Key, float], usual: float, failed: float, warned: float) -> tuple[Status, list[Key]]:
    """Return the keys with a rate below the share `warned` of the usual rate, slowest first. The status is FAILED if
    one is below the share `failed`."""
    odd = sorted((k for k, v in rates.items() if v < warned * usual), key=rates.__getitem__)
    return worst(Status.FAILED if rates[k] < failed * usual else Status.WARNING for k in odd), odd


def per_second(rate: float, unit: str = "B") -> str:
    """Return a rate as text: "1.3 GB/s", "17 MB/s"."""
    return _scaled(rate, {"T": 1e12, "G": 1e9, "M": 1e6}) + f"{unit}/s"


def bytes_of(n: float) -> str:
    """Return a number of bytes as text: "1.3 GiB", "17 MiB"."""
    return _scaled(n, {"T": 2**40, "G": 2**30, "M": 2**20}) + "iB"


def _scaled(n: float, sizes: dict[str, float]) -> str:
    """Return n in the largest unit that it reaches, or in the smallest unit if it reaches none."""
    prefix = next((p for p, size in sizes.items() if n >= size), list(sizes)[-1])
    n /= sizes[prefix]
    return f"{n:.3g} {prefix}" if n < 1000 else f"{n:.0f} {prefix}"


def show(rows: Sequence[Row], stream: TextIO | None = None) -> None:
    """Print the table and a summary line. The table is folded to the width if `stream` (None: stdout) is a terminal."""
    stream = stream or sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else _LOG_WIDTH, highlight=False, soft_wrap=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("figure")
    for row in rows:
        text = "\n".join(filter(None, (row.figure, *row.notes)))
        table.add_row(Text(row.check), Text(row.status.value, style=_STYLES[row.status]), Text(text))
    console.print(table)
    console.print(Text(_summary(rows)))
    stream.flush()


def _summary(rows: Sequence[Row]) -> str:
    by_status = {s: [row.check for row in rows if row.status == s] for s in Status}
    failed, warned = by_status[Status.FAILED], by_status[Status.WARNING]
    said = f"preflight failed: {', '.join(failed)}" if failed else "preflight passed"
    return said + (f"; warnings: {', '.join(warned)}" if warned else "")
