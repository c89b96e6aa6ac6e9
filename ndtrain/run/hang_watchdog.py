"""The hang watchdog, which ends a hanging run and reports the cause.

A thread on every rank checks how long its rank has been waiting. With a GPU the host does not wait. In this case the
thread checks for how long the GPU has completed no pending operation (`DeviceProgress`).

The training thread of an island may hang without a wait, and other islands wait for it. In an island, the thread
therefore also checks for how long the recorder has recorded nothing.

If a wait exceeds the deadline, that rank alerts the others through the store. Each rank publishes its state (`Report`),
without its last records. One rank reads the reports, requests the records of the operations where the waits end, and
prints a diagnosis. It names the ranks that the others wait for, with the step, the action, the collective and the axis.
It also names ranks that do not answer. Then all ranks exit, and a launcher can
restart the run. A rank that cannot reach the store prints a diagnosis from its own report.

All these messages are signed (`SignedStore`), so a stranger who reaches the store cannot end the run.
"""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ndtrain.mesh.device_progress import DeviceProgress
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.run import exit_status
from ndtrain.run.hang_diagnosis import diagnose, questions
from ndtrain.run.hang_report import Place, Report
from ndtrain.run.rendezvous import Meeting
from ndtrain.run.signed_store import SignedStore

PAUSE_S = 1.0  # maximum interval between two checks
STOPPED_S = 5.0  # a check that is late by this time shows that the process was stopped
GATHER_S = 3.0  # time to wait for the reports of the other ranks
CALLED = "hang/called"  # key of the alert; its value is the rank that has exceeded the deadline
ANSWER_S = 1.0  # the shared connection is in use if it does not answer within this time
ANSWERS_S = 2.0  # time to wait for the records that it has requested
LAST_S = 8.0  # a hanging rank exits after this time, even if the store does not answer any more
REACH_S = 5.0  # and after this time, if the store has not received its report


class HangWatchdog:
    """The watchdog of one rank. Its threads run until `close`.

    Args:
        meeting: the store of all ranks' messages. The threads of the process share its connection, because the host of
            the store has an open file for each connection of each rank.
        run_dir: the folder for `logs/hang-rank-*.json` and exit.json.
        deadline_s: maximum duration of a wait, in seconds.
        on_device: True to track the operations on this process's GPU.
        island: name of the island that the run is; empty: it is none. An island also ends if its training thread does
            nothing for the deadline.
    """

    def __init__(
        self,
        meeting: Meeting,
        spec: MeshSpec,
        rank: int,
        run_dir: Path,
        deadline_s: float,
        on_device: bool = False,
        island: str = "",
    ):
        RECORDER.device = DeviceProgress() if on_device else None
        self.spec, self.rank, self.run_dir, self.deadline_s = spec, rank, run_dir, deadline_s
        self._island, self._seen, self._seen_at = island, (0,), time.monotonic()
        self._checked_at = self._runs_since = time.monotonic()
        self._meeting, self._main = meeting, threading.get_ident()
        self._closed, self._called, self._published = (threading.Event() for _ in range(3))
        self._caller: int | None = None  # the other rank that has sent the alert; None: no alert, or from this rank
        self._pause = min(PAUSE_S, deadline_s / 10)
        for work in (self._check, self._listen):
            threading.Thread(target=work, name="hang watchdog", daemon=True).start()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        RECORDER.device = None

    def _check(self) -> None:
        """Wait until this rank exceeds the deadline or another rank sends an alert.

        This thread never uses the store, which may not answer.
        """
        while not self._closed.wait(self._pause):
            if (device := RECORDER.device) is not None:
                device.poll()
            if self._called.is_set() or self._stuck_s() > self.deadline_s:
                self._end()
                return

    def _stuck_s(self) -> float:
        """Return the seconds for which this rank has waited, or for which the training thread of an island has done
        nothing. The time before the process was last stopped (SIGSTOP) does not count."""
        now = time.monotonic()
        if now - self._checked_at > self._pause + STOPPED_S:
            self._runs_since = now
        self._checked_at = now
        if (place := (RECORDER.step, RECORDER.action, RECORDER.op, RECORDER.moves)) != self._seen:
            self._seen, self._seen_at = place, now
        counts = self._island and RECORDER.step > 0  # before the first step, weights are read
        return min(now - self._runs_since, max(RECORDER.longest_wait()[1], now - self._seen_at if counts else 0.0))

    def _listen(self) -> None:
        """Wait for an alert from another rank. A lost connection is ignored, because the store ends with rank 0."""
        with suppress(Exception):
            messages = self._meeting.messages
            while not self._closed.wait(self._pause):
                caller = messages.read(CALLED)
                if caller == self.rank:  # this rank ends already
                    return
                if isinstance(caller, int) and 0 <= caller < self.spec.world_size:
                    self._caller = caller
                    self._called.set()
                    return

    def _end(self) -> None:
        """End this rank after its report is published, or after `LAST_S` at the latest."""
        report, end = Report.of(RECORDER, self.rank, self._main), time.monotonic() + LAST_S
        self._write(report)
        threading.Thread(target=self._publish, args=(report,), daemon=True).start()
        if self._published.wait(REACH_S):  # the publishing thread ends the process, unless the store is lost now
            time.sleep(max(0.0, end - time.monotonic()))
        self._diagnose(
            report, {self.rank: report}, " (the run's store does not answer: this host may be the one that is cut off)"
        )
        _end_stuck_launcher()
        os._exit(exit_status.of_failed_rank("hang"))

    def _publish(self, report: Report) -> None:
        """Put the report into the store, alert the other ranks, and end this rank.

        The first rank that claims the role of reporter gathers all reports and prints the diagnosis. The other ranks
        wait for it.
        """
        with suppress(Exception):
            messages = self._answering().messages
            messages.put(_report_of(self.rank), asdict(report.brief()))
            self._published.set()
            if self._caller is None:
                messages.put(CALLED, self.rank)
            if messages.claim("hang/reporter", self.rank) == self.rank:
                self._diagnose(report, self._gather(report, messages))
                messages.put("hang/diagnosed", self.rank)
                time.sleep(PAUSE_S)  # the store may end with this rank
            else:
                messages.put(_records_of(self.rank), report.near(_places(messages.wait(_ASKED, LAST_S))))
            messages.wait("hang/diagnosed", LAST_S)
            os._exit(exit_status.of_failed_rank("hang"))

    def _answering(self) -> Meeting:
        """Return a connection to the store that answers: the shared one, unless another thread waits in it."""
        answered = threading.Event()

        def ask() -> None:
            with suppress(Exception):
                self._meeting.messages.has(CALLED)
                answered.set()

        threading.Thread(target=ask, daemon=True).start()
        return self._meeting if answered.wait(ANSWER_S) else self._meeting.reconnected()

    def _gather(self, own: Report, messages: SignedStore) -> dict[int, Report]:
        """Return the reports of all ranks that answer within `GATHER_S`, with the records that the diagnosis needs."""
        keys = {_report_of(r): r for r in range(self.spec.world_size)}
        reports = {}
        for key, value in messages.wait_all(keys, GATHER_S).items():
            with suppress(ValueError):
                reports[keys[key]] = Report.from_json(value, keys[key], self.spec.world_size)
        asked = questions(reports)
        messages.put(_ASKED, asked)
        channels = {channel for channel, _ in asked}
        others = {_records_of(r): r for r, of in reports.items() if channels & of.counts.keys() and r != self.rank}
        answers = {others[key]: value for key, value in messages.wait_all(others, ANSWERS_S).items()}
        answers[self.rank] = own.near(asked)
        return {r: report.with_records(answers.get(r)) for r, report in reports.items()}

    def _diagnose(self, own: Report, reports: dict[int, Report], remark: str = "") -> None:
        """Print the diagnosis and write it to exit.json."""
        try:
            diagnosis = diagnose(reports, self.spec)
        except Exception as error:  # the run must end in any case
            diagnosis = f"no diagnosis: {error!r}"
        of = f"island {self._island}: " if self._island else ""
        text = f"hang: {of}{self._cause()}{remark}\n  {diagnosis}"
        last = f"the last actions of each rank: {self._folder}/hang-rank-*.json"
        print(f"error: {text}\n  {last}", file=sys.stderr, flush=True)
        exit_status.write_first(self.run_dir, "hang", rank=self.rank, error=text, step=own.reached - 1)

    def _cause(self) -> str:
        """Return the reason why the run ends: the deadline of this rank, or of the rank that sent the alert."""
        moved = f"nothing has moved for {self.deadline_s:g} s (hardware.timeout_s)"
        return moved if self._caller is None else f"alert from rank {self._caller}: {moved}"

    @property
    def _folder(self) -> Path:
        return self.run_dir / "logs"

    def _write(self, report: Report) -> None:
        """Write the report to the run folder. An OSError is ignored."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(report), indent=1)
            (self._folder / f"hang-rank-{self.rank}.json").write_text(text + "\n")


_ASKED = "hang/asked"  # key of the operations whose records are needed


def _report_of(rank: int) -> str:
    return f"hang/report/{rank}"


def _records_of(rank: int) -> str:
    return f"hang/records/{rank}"


def _places(value: Any) -> list[Place]:
    """Return the operations in a message. Ignore everything that is not an operation."""
    pairs = value if isinstance(value, list) else []
    return [(pair[0], pair[1]) for pair in pairs if isinstance(pair, list) and list(map(type, pair)) == [str, int]]


def _end_stuck_launcher() -> None:
    """Kill torchrun if it still runs two seconds after this rank has exited.

    On a host without network, torchrun blocks in a call to its store. It then ignores signals until TCP times out after
    15 minutes.
    """
    if exit_status.JOB not in os.environ:
        return
    script = 'sleep 2; kill -0 "$1" 2>/dev/null && kill -KILL "$2"'
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with suppress(OSError):
        subprocess.Popen(
            ["sh", "-c", script, "sh", str(os.getpid()), str(os.getppid())], start_new_session=True, **nowhere
        )
