"""Ends a run that hangs, and says why.

A thread on every rank looks at what its rank waits for. Where that has lasted longer than the deadline, the rank calls
the others through the store, each says where it stands (`Report`), and one of them puts the reports together: which
ranks the others wait for, in what step, action and collective, over which axis. Then all exit, for a launcher to start
the run again. A rank that does not answer is named; one that cannot reach the store says what it knows itself.
"""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ndtrain.distributed.flight_recorder import RECORDER, Recorder
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.runtime import exit_status

PAUSE_S = 1.0  # at most, between two looks
GATHER_S = 3.0  # how long one waits for the others' reports
LAST_S = 6.0  # by then a rank that hangs is gone, whoever answers
SHOWN = 8  # ranks of one kind that the diagnosis names

# ------------------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True)
class Report:
    """Where a rank stands.

    Attributes:
        waits: the flight that its main work waits for; None: it does not wait.
        seconds: since when.
        counts: channel -> how many operations it has launched there.
        members: channel -> ranks.
        last: its last flights, oldest first.
        stack: where its main thread is, innermost last.
    """

    rank: int
    step: int
    action: str
    waits: dict[str, Any] | None
    seconds: float
    counts: dict[str, int]
    members: dict[str, list[int]]
    last: list[dict[str, Any]] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, recorder: Recorder, rank: int, thread: int) -> "Report":
        """As things are now. `thread` is that of the rank's main work."""
        record, seconds = recorder.longest_wait()
        frame = sys._current_frames().get(thread)
        stack = [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_stack(frame)] if frame else []
        return cls(
            rank,
            recorder.step,
            recorder.action,
            asdict(record) if record else None,
            seconds,
            dict(recorder.counts),
            {channel: list(ranks) for channel, ranks in recorder.members.items()},
            [asdict(f) for f in list(recorder.last)],
            stack,
        )


# ----------------------------------------------------------------------------------------------------------- diagnosis


def diagnose(reports: dict[int, Report], spec: MeshSpec) -> str:
    """Which ranks are at fault, in lines; the first says it in short.

    At fault is who launched another operation than the rest, under the same number on the same channel; else who is
    waited for and does not wait; else, where all wait for one another, nobody in particular.
    """
    silent = [r for r in range(spec.world_size) if r not in reports]
    lines = (
        [f"{_ranks(silent, spec)} {'does' if len(silent) == 1 else 'do'} not answer: dead, or cut off"]
        if silent
        else []
    )
    lines += _disagreement(reports, spec)
    waited_for = {r: late for r, report in reports.items() if (late := _late(report, reports))}
    for r in sorted({r for late in waited_for.values() for r in late} & set(reports)):
        if reports[r].waits is None or not reports[r].waits["channel"]:
            lines.append(f"{_ranks([r], spec)} is waited for: {_where(reports[r])}")
    for r in sorted(waited_for)[:SHOWN]:
        lines.append(f"{_ranks([r], spec)} waits for {_ranks(waited_for[r], spec, False)}: {_where(reports[r])}")
    rest = [r for r in sorted(reports) if reports[r].waits and r not in waited_for]
    lines += [f"{_ranks([r], spec)} waits: {_where(reports[r])}" for r in rest[:SHOWN]]
    return "\n  ".join(lines or ["no rank waits for another"])


def _late(report: Report, reports: dict[int, Report]) -> list[int]:
    """The ranks that have not launched what this one waits for. One that does not answer has not, for all we know."""
    w = report.waits
    if w is None or not w["channel"]:
        return []
    count = lambda r: reports[r].counts.get(w["channel"], 0) if r in reports else 0
    return [r for r in report.members.get(w["channel"], ()) if r != report.rank and count(r) < w["number"]]


def _disagreement(reports: dict[int, Report], spec: MeshSpec) -> list[str]:
    """The first operation of a channel that its ranks do not all know by the same name and size."""
    by_number: dict[tuple[str, int], dict[int, dict]] = {}
    for report in reports.values():
        for record in report.last:
            by_number.setdefault((record["channel"], record["number"]), {})[report.rank] = record
    for (channel, number), records in sorted(
        by_number.items(), key=lambda x: min(f["launched"] for f in x[1].values())
    ):
        kinds: dict[str, list[int]] = {}
        for rank, record in records.items():
            kinds.setdefault(_kind(record), []).append(rank)
        if len(kinds) > 1:
            said = "; ".join(f"{_ranks(ranks, spec)}: {kind}" for kind, ranks in sorted(kinds.items(), key=_rarest))
            return [f"ranks disagree on operation {number} over {channel}, so one of them left one out: {said}"]
    return []


def _rarest(kind: tuple[str, list[int]]) -> tuple[int, list[int]]:
    return len(kind[1]), kind[1]


def _kind(record: dict) -> str:
    """What is the same for all that take part in an operation, in words."""
    op = "message" if record["op"] in ("send", "receive") else record["op"]
    at = "" if op == "message" else f" in {record['action']}"  # its sender and its receiver are at different actions
    return f"{op} of {record['nbytes']:,} bytes, step {record['step']}{at}"


def _where(report: Report) -> str:
    at = f"step {report.step}, {report.action}"
    w = report.waits
    if w is None:
        return f"{at}, in no collective, at {_innermost(report.stack)}"
    if not w["channel"]:
        return f"{at}, waiting {report.seconds:.0f} s for {w['op']}"
    since = f"launched in step {w['step']}, {w['action']}"
    return f"{at}, waiting {report.seconds:.0f} s in {w['op']} {w['number']} over {w['channel']}, {since}"


def _innermost(stack: list[str]) -> str:
    """The innermost line of ours, and the innermost of all."""
    ours = [line for line in stack if f"{os.sep}ndtrain{os.sep}" in line]
    return " < ".join(dict.fromkeys([*stack[-1:], *ours[-1:]])) or "an unknown place"


def _ranks(ranks: list[int], spec: MeshSpec, coords: bool = True) -> str:
    """Ranks by number, a single one with its coordinates."""
    if len(ranks) == 1:
        at = spec.where(ranks[0])
        return f"rank {ranks[0]} ({at})" if coords and at else f"rank {ranks[0]}"
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:SHOWN]))}{more}"


# --------------------------------------------------------------------------------------------------------------- watch


class Watch:
    """Looks after one rank of a run until `close`.

    Args:
        connect: gives a connection of one's own to the store of all ranks.
        deadline_s: how long a wait may last.
    """

    def __init__(self, connect: Callable[[], Any], spec: MeshSpec, rank: int, run_dir: Path, deadline_s: float):
        self.spec, self.rank, self.run_dir, self.deadline_s = spec, rank, run_dir, deadline_s
        self._connect, self._main = connect, threading.get_ident()
        self._closed, self._called = threading.Event(), threading.Event()
        self._pause = min(PAUSE_S, deadline_s / 10)
        for work in (self._look, self._listen):
            threading.Thread(target=work, name="watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        """Until the deadline has passed here, or a call came. Never talks to the store, which may not answer."""
        while not self._closed.wait(self._pause):
            if self._called.is_set() or RECORDER.longest_wait()[1] > self.deadline_s:
                self._end()
                return

    def _listen(self) -> None:
        """Until another rank calls. A store that is gone is no news: it goes when rank 0 ends."""
        with suppress(Exception):
            store = self._connect()
            while not self._closed.wait(self._pause):
                if store.check(["hang/called"]):
                    self._called.set()
                    return

    def _end(self) -> None:
        report = Report.of(RECORDER, self.rank, self._main)
        self._write(report)
        threading.Thread(target=self._tell, args=(report,), daemon=True).start()
        time.sleep(LAST_S)  # whatever becomes of that thread
        self._say({self.rank: report}, " (the store of the run does not answer: this host may be the one cut off)")
        _end_stuck_launcher()
        os._exit(1)

    def _tell(self, report: Report) -> None:
        """Puts the report where all can read it; the first to come reads them all and speaks."""
        with suppress(Exception):
            store = self._connect()
            store.set(f"hang/report/{self.rank}", json.dumps(asdict(report)))
            store.set("hang/called", "1")
            if store.add("hang/speakers", 1) == 1:
                self._say(self._gather(store))
                store.set("hang/said", "1")
                time.sleep(PAUSE_S)  # the store may go with this rank
            store.wait(["hang/said"])
            os._exit(1)

    def _gather(self, store: Any) -> dict[int, Report]:
        found, end = {}, time.monotonic() + GATHER_S
        while len(found) < self.spec.world_size and time.monotonic() < end:
            for r in range(self.spec.world_size):
                if r not in found and store.check([f"hang/report/{r}"]):
                    found[r] = Report(**json.loads(store.get(f"hang/report/{r}")))
            time.sleep(0.05)
        return found

    def _say(self, reports: dict[int, Report], aside: str = "") -> None:
        try:
            found = diagnose(reports, self.spec)
        except Exception as error:  # the run must end all the same
            found = f"no diagnosis: {error!r}"
        text = f"hang: nothing has moved for {self.deadline_s:g} s (hardware.timeout_s){aside}\n  {found}"
        last = f"the last actions of each rank: {self._folder}/hang-rank-*.json"
        print(f"error: {text}\n  {last}", file=sys.stderr, flush=True)
        exit_status.write_first(self.run_dir, "hang", rank=self.rank, error=text, step=RECORDER.step - 1)

    @property
    def _folder(self) -> Path:
        return self.run_dir / "logs"

    def _write(self, report: Report) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(report), indent=1)
            (self._folder / f"hang-rank-{self.rank}.json").write_text(text + "\n")


def _end_stuck_launcher() -> None:
    """torchrun on a host that is cut off sits in a call to its store, deaf to signals, until TCP gives up after a
    quarter of an hour. Where it has not seen two seconds from now that this rank is gone, it is ended."""
    if exit_status.JOB not in os.environ:
        return
    script = 'sleep 2; kill -0 "$1" 2>/dev/null && kill -KILL "$2"'
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with suppress(OSError):
        subprocess.Popen(
            ["sh", "-c", script, "sh", str(os.getpid()), str(os.getppid())], start_new_session=True, **nowhere
        )
