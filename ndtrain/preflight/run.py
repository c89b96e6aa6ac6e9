"""Runs all checks of a preflight, one after another on all ranks. Rank 0 prints the table."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

from ndtrain import checkpoint
from ndtrain.config import Config, resolve, world_from_env
from ndtrain.device.gpu import use_gpu
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.preflight import coordinator as coordinators
from ndtrain.preflight.coordinator import MARGIN_S, Coordinator
from ndtrain.preflight.host import check_hosts, check_matmul, device_of, probe_host, probe_matmul
from ndtrain.preflight.links import check_links, probe_links
from ndtrain.preflight.network import (
    check_clocks,
    check_collectives,
    check_connections,
    connect,
    probe_clock,
    probe_collectives,
)
from ndtrain.preflight.rank_context import Check, Findings, RankContext
from ndtrain.preflight.report import Ranks, Row, Status, show
from ndtrain.preflight.storage import (
    Cleaner,
    check_folder,
    check_space,
    check_storage,
    probe_folder,
    probe_space,
    probe_storage,
)

DEADLINE_S = 60.0  # of a check; hardware.timeout_s if it is shorter

ALONE = [  # these need no connection between ranks: reports go through the launcher's store
    Check("hosts", probe_host, check_hosts),
    Check("matmul", probe_matmul, check_matmul),
    Check("disk space", probe_space, check_space),
    Check("storage", probe_storage, check_storage),
    Check("one folder", probe_folder, check_folder, needs="storage"),
]
TOGETHER = [
    Check("connections", connect, check_connections, needs="devices", connected=True),
    Check("clocks", probe_clock, check_clocks, needs="connections", connected=True),
    Check("collectives", probe_collectives, check_collectives, needs="connections", connected=True),
    Check("links", probe_links, check_links, needs="connections", connected=True),
]


class _Terminated(Exception):
    """This process has received SIGTERM."""


def preflight(cfg: Config) -> int:
    """Check everything that a run with this configuration needs, and print a table on rank 0. Leaves no files.

    Returns:
        The exit status, the same on every rank: 0 if no check failed, else 1.

    Raises:
        ConfigError: the configuration does not fit the ranks; the message gives the reason in one line.
    """
    rank, _, world = world_from_env()
    if cfg.init_from:
        folder = checkpoint.model_folder(cfg.init_from)
        cfg.model = checkpoint.starting_model(cfg, checkpoint.read_model(folder))
    resolve(cfg, world)
    deadline_s = min(DEADLINE_S, cfg.hardware.timeout_s)
    try:
        coordinator = Coordinator(coordinators.open_store(rank, world, deadline_s), rank, world, deadline_s)
        context = RankContext(cfg, MeshSpec.of(cfg.mesh), rank, device_of(cfg), coordinator.nonce, deadline_s)
        cleaner = Cleaner(context)
        try:
            return Preflight(context, coordinator).run(ALONE + TOGETHER * (world > 1), cleaner.remove_file)
        finally:
            cleaner.remove_file()
            cleaner.remove_folders()
    except (dist.DistError, TimeoutError) as error:  # raised by the store: failing checks are caught and reported
        print(f"error (rank {rank}): the ranks cannot connect: {_one_line(error)}", file=sys.stderr, flush=True)
        return 1


class Preflight:
    """Runs the checks on one rank. On rank 0 it holds the rows of the table so far."""

    def __init__(self, context: RankContext, coordinator: Coordinator):
        self.context, self.coordinator, self.leads = context, coordinator, context.rank == 0
        self.ranks, self.rows = Ranks(context.spec), list[Row]()

    def run(self, checks: list[Check], clean: Callable[[], None]) -> int:
        """Run the checks and return the exit status. Calls `clean` on every rank before any rank knows the status."""
        try:
            with _raises_on_sigterm():
                for check in checks:
                    self._run_check(check)
        except _Terminated as request:
            self.rows.append(Row("the rest", Status.FAILED, f"stopped by {request}: perhaps another rank has died"))
            return 1
        finally:
            clean()
            if self.leads:
                show(self.rows)
        self.coordinator.report("end", {})
        if self.leads:
            self.coordinator.reports("end", time.monotonic() + MARGIN_S)  # wait until they have cleaned up
            self.coordinator.decide("passed", not any(row.status == Status.FAILED for row in self.rows))
        passed = self.coordinator.decision("passed")
        self.coordinator.report("bye", {})
        if self.leads:
            self.coordinator.reports("bye", time.monotonic() + MARGIN_S)  # rank 0 may host the store
        return 0 if passed else 1

    def _run_check(self, check: Check) -> None:
        """Run a check, unless rank 0 decides against it."""
        if self.leads:
            self.coordinator.decide(check.name, self._wanted(check))
        if not self.coordinator.decision(check.name):
            return
        until = time.monotonic() + self.coordinator.deadline_s + MARGIN_S
        self.coordinator.report(check.name, self._probe(check))
        if self.leads:
            self._add_rows(check, self.coordinator.reports(check.name, until))

    def _wanted(self, check: Check) -> bool:
        failed = {row.check for row in self.rows if row.status == Status.FAILED}
        return check.needs not in failed and not any(row.last for row in self.rows)

    def _probe(self, check: Check) -> Findings:
        context = self.context

        def probe() -> Findings:
            use_gpu(context.device)
            return check.probe(context)

        try:
            return _within(self.coordinator.deadline_s, probe)
        except (OSError, RuntimeError) as error:
            return {"error": _one_line(error)}

    def _add_rows(self, check: Check, by_rank: dict[int, Findings]) -> None:
        missing = [r for r in range(self.context.spec.world_size) if r not in by_rank]
        errors = {r: f["error"] for r, f in by_rank.items() if "error" in f}
        if missing:
            text = f"no report within {self.coordinator.deadline_s:g} s: {self.ranks.some(missing)}"
            self.rows.append(Row(check.name, Status.FAILED, "", (text, *self.ranks.grouped(errors)), last=True))
        elif errors:
            self.rows.append(Row(check.name, Status.FAILED, "", self.ranks.grouped(errors), last=check.connected))
        else:
            self.rows += check.check(by_rank, self.ranks, self.context.cfg)


def _within(seconds: float, work: Callable[[], Findings]) -> Findings:
    """Run `work` in a thread and return its result. Abandon the thread if it takes longer than `seconds`.

    Raises:
        TimeoutError: it takes longer; the message names the collective it waits for.
    """
    future: Future[Findings] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="check", daemon=True).start()
    wait([future], timeout=seconds)
    if not future.done():
        work, _ = RECORDER.longest_wait()
        at = f", waiting in {work.op} over {work.channel}" if work else ""
        raise TimeoutError(f"not done within {seconds:g} s{at}")
    return future.result()


@contextmanager
def _raises_on_sigterm() -> Iterator[None]:
    """Stop the current check at a SIGTERM, which the launcher sends if another rank has died. The table is still
    printed."""

    def on(number: int, frame: FrameType | None) -> None:
        raise _Terminated(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
