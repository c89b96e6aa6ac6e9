"""The hang watchdog: it ends a run that hangs and reports the cause.

A thread on every rank checks how long its rank has been waiting. Once a wait exceeds the deadline, that rank alerts the
others through the store. Each rank publishes its state (`Report`). One rank reads the reports and prints a diagnosis:
which ranks the others wait for, in which step, action and collective, over which axis. Then all ranks exit, and a
launcher can restart the run. The diagnosis names ranks that do not answer. A rank that cannot reach the store prints a
diagnosis from its own report.
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

PAUSE_S = 1.0  # longest interval between two checks
GATHER_S = 3.0  # time to wait for the reports of the other ranks
LAST_S = 6.0  # a hanging rank exits after this time, even if the store does not answer
SHOWN = 8  # number of ranks that a list in the diagnosis names

# ------------------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True)
class Report:
    """The state of a rank.

    Attributes:
        step, action: its current step and action.
        waits: the `CollectiveRecord` it has been waiting for longest, as a dict; None: it does not wait.
        seconds: the duration of that wait.
        counts: channel -> number of operations launched on it.
        members: channel -> global ranks.
        last: its last records as dicts, oldest first.
        stack: the call stack of its main thread, innermost frame last.
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
        """The current state. `thread` is the id of the thread that trains."""
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
            [asdict(r) for r in list(recorder.last)],
            stack,
        )


# ----------------------------------------------------------------------------------------------------------- diagnosis


def diagnose(reports: dict[int, Report], spec: MeshSpec) -> str:
    """The diagnosis as lines of text, the most important first.

    A rank is at fault if it launched another operation than the others under the same number on the same channel.
    Otherwise a rank is at fault if others wait for it and it does not wait itself. If all ranks wait for one another,
    no rank is named as the cause.

    Args:
        reports: rank -> its report; ranks that did not answer are missing.
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
    """The ranks that have not launched the operation that this rank waits for. A rank without a report counts as one
    that has not."""
    w = report.waits
    if w is None or not w["channel"]:
        return []
    count = lambda r: reports[r].counts.get(w["channel"], 0) if r in reports else 0
    return [r for r in report.members.get(w["channel"], ()) if r != report.rank and count(r) < w["number"]]


def _disagreement(reports: dict[int, Report], spec: MeshSpec) -> list[str]:
    """One line on the earliest operation whose ranks recorded different names or sizes; no line where all agree."""
    by_number: dict[tuple[str, int], dict[int, dict]] = {}
    for report in reports.values():
        for record in report.last:
            by_number.setdefault((record["channel"], record["number"]), {})[report.rank] = record
    for (channel, number), records in sorted(
        by_number.items(), key=lambda x: min(r["launched"] for r in x[1].values())
    ):
        kinds: dict[str, list[int]] = {}
        for rank, record in records.items():
            kinds.setdefault(_kind(record), []).append(rank)
        if len(kinds) > 1:
            versions = "; ".join(
                f"{_ranks(ranks, spec)}: {kind}" for kind, ranks in sorted(kinds.items(), key=_rarest_first)
            )
            return [f"ranks disagree on operation {number} over {channel}, so one of them left one out: {versions}"]
    return []


def _rarest_first(kind: tuple[str, list[int]]) -> tuple[int, list[int]]:
    return len(kind[1]), kind[1]


def _kind(record: dict) -> str:
    """A description of an operation that is the same on all its ranks."""
    op = "message" if record["op"] in ("send", "receive") else record["op"]
    at = "" if op == "message" else f" in {record['action']}"  # sender and receiver are in different actions
    return f"{op} of {record['nbytes']:,} bytes, step {record['step']}{at}"


def _where(report: Report) -> str:
    """The step, the action and the wait of a rank as text."""
    at = f"step {report.step}, {report.action}"
    w = report.waits
    if w is None:
        return f"{at}, in no collective, at {_innermost(report.stack)}"
    if not w["channel"]:
        return f"{at}, waiting {report.seconds:.0f} s for {w['op']}"
    since = f"launched in step {w['step']}, {w['action']}"
    return f"{at}, waiting {report.seconds:.0f} s in {w['op']} {w['number']} over {w['channel']}, {since}"


def _innermost(stack: list[str]) -> str:
    """The innermost frame, and the innermost one in ndtrain."""
    in_ndtrain = [line for line in stack if f"{os.sep}ndtrain{os.sep}" in line]
    return " < ".join(dict.fromkeys([*stack[-1:], *in_ndtrain[-1:]])) or "an unknown place"


def _ranks(ranks: list[int], spec: MeshSpec, coords: bool = True) -> str:
    """A list of ranks as text; with `coords`, a single rank with its coordinates."""
    if len(ranks) == 1:
        at = spec.where(ranks[0])
        return f"rank {ranks[0]} ({at})" if coords and at else f"rank {ranks[0]}"
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:SHOWN]))}{more}"


# ------------------------------------------------------------------------------------------------------------ watchdog


class HangWatchdog:
    """The watchdog of one rank. Its threads run until `close`.

    Args:
        connect: opens a new connection to the store of all ranks.
        run_dir: gets `logs/hang-rank-*.json` and exit.json.
        deadline_s: the longest wait allowed, in seconds.
    """

    def __init__(self, connect: Callable[[], Any], spec: MeshSpec, rank: int, run_dir: Path, deadline_s: float):
        self.spec, self.rank, self.run_dir, self.deadline_s = spec, rank, run_dir, deadline_s
        self._connect, self._main = connect, threading.get_ident()
        self._closed, self._called = threading.Event(), threading.Event()
        self._pause = min(PAUSE_S, deadline_s / 10)
        for work in (self._check, self._listen):
            threading.Thread(target=work, name="hang watchdog", daemon=True).start()

    def close(self) -> None:
        """Ends the threads."""
        self._closed.set()

    def _check(self) -> None:
        """Waits until this rank exceeds the deadline or another rank has called. It never uses the store, which may not
        answer."""
        while not self._closed.wait(self._pause):
            if self._called.is_set() or RECORDER.longest_wait()[1] > self.deadline_s:
                self._end()
                return

    def _listen(self) -> None:
        """Waits until another rank calls. A lost connection is ignored: the store ends with rank 0."""
        with suppress(Exception):
            store = self._connect()
            while not self._closed.wait(self._pause):
                if store.check(["hang/called"]):
                    self._called.set()
                    return

    def _end(self) -> None:
        """Ends this rank, after its report is published or `LAST_S` have passed."""
        report = Report.of(RECORDER, self.rank, self._main)
        self._write(report)
        threading.Thread(target=self._publish, args=(report,), daemon=True).start()
        time.sleep(LAST_S)  # that thread ends the process, unless the store does not answer
        self._diagnose({self.rank: report}, " (the store of the run does not answer: this host may be the one cut off)")
        _end_stuck_launcher()
        os._exit(1)

    def _publish(self, report: Report) -> None:
        """Puts the report in the store, alerts the other ranks, and ends this rank. The first rank here gathers all
        reports and prints the diagnosis; the others wait for it."""
        with suppress(Exception):
            store = self._connect()
            store.set(f"hang/report/{self.rank}", json.dumps(asdict(report)))
            store.set("hang/called", "1")
            if store.add("hang/reporters", 1) == 1:
                self._diagnose(self._gather(store))
                store.set("hang/diagnosed", "1")
                time.sleep(PAUSE_S)  # the store may end with this rank
            store.wait(["hang/diagnosed"])
            os._exit(1)

    def _gather(self, store: Any) -> dict[int, Report]:
        """The reports of all ranks that answer within `GATHER_S`."""
        reports, end = {}, time.monotonic() + GATHER_S
        while len(reports) < self.spec.world_size and time.monotonic() < end:
            for r in range(self.spec.world_size):
                if r not in reports and store.check([f"hang/report/{r}"]):
                    reports[r] = Report(**json.loads(store.get(f"hang/report/{r}")))
            time.sleep(0.05)
        return reports

    def _diagnose(self, reports: dict[int, Report], remark: str = "") -> None:
        """Prints the diagnosis and writes it to exit.json."""
        try:
            diagnosis = diagnose(reports, self.spec)
        except Exception as error:  # the run must end all the same
            diagnosis = f"no diagnosis: {error!r}"
        text = f"hang: nothing has moved for {self.deadline_s:g} s (hardware.timeout_s){remark}\n  {diagnosis}"
        last = f"the last actions of each rank: {self._folder}/hang-rank-*.json"
        print(f"error: {text}\n  {last}", file=sys.stderr, flush=True)
        exit_status.write_first(self.run_dir, "hang", rank=self.rank, error=text, step=RECORDER.step - 1)

    @property
    def _folder(self) -> Path:
        return self.run_dir / "logs"

    def _write(self, report: Report) -> None:
        """Writes the report to the run folder. An OSError is ignored."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(report), indent=1)
            (self._folder / f"hang-rank-{self.rank}.json").write_text(text + "\n")


def _end_stuck_launcher() -> None:
    """Kills torchrun if it still runs two seconds after this rank has exited. On a host without network torchrun blocks
    in a call to its store and ignores signals until TCP times out after a quarter of an hour."""
    if exit_status.JOB not in os.environ:
        return
    script = 'sleep 2; kill -0 "$1" 2>/dev/null && kill -KILL "$2"'
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with suppress(OSError):
        subprocess.Popen(
            ["sh", "-c", script, "sh", str(os.getpid()), str(os.getppid())], start_new_session=True, **nowhere
        )
