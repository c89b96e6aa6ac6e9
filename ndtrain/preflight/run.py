"""All checks of a preflight, one after the other on all ranks, and rank 0's table of them."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ndtrain.config import Config, resolve, world_from_env
from ndtrain.distributed.flight_recorder import RECORDER
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.model.families.hf_config import from_hf, read_hf_config
from ndtrain.preflight import coordinator as coordinators
from ndtrain.preflight.coordinator import MARGIN_S, Coordinator
from ndtrain.preflight.host import device_of, judge_hosts, judge_matmul, probe_host, probe_matmul
from ndtrain.preflight.links import judge_links, probe_links
from ndtrain.preflight.network import (
    connect,
    judge_clocks,
    judge_collectives,
    judge_connections,
    probe_clock,
    probe_collectives,
)
from ndtrain.preflight.rank_context import Check, Found, RankContext
from ndtrain.preflight.report import Ranks, Row, Status, show
from ndtrain.preflight.storage import (
    Cleaner,
    judge_folder,
    judge_space,
    judge_storage,
    look_for_rank_0,
    probe_space,
    probe_storage,
)

DEADLINE_S = 60.0  # of a check; hardware.timeout_s where that is shorter

ALONE = [  # what needs no connection between ranks: they report through the launcher's store
    Check("hosts", probe_host, judge_hosts),
    Check("matmul", probe_matmul, judge_matmul),
    Check("disk space", probe_space, judge_space),
    Check("storage", probe_storage, judge_storage),
    Check("one folder", look_for_rank_0, judge_folder, needs="storage"),
]
TOGETHER = [
    Check("connections", connect, judge_connections, needs="devices", connected=True),
    Check("clocks", probe_clock, judge_clocks, needs="connections", connected=True),
    Check("collectives", probe_collectives, judge_collectives, needs="connections", connected=True),
    Check("links", probe_links, judge_links, needs="connections", connected=True),
]


class _Ended(Exception):
    """This process is asked to end."""


def preflight(cfg: Config) -> int:
    """Checks all that a run with this configuration rests on, and prints a table of it on rank 0. Leaves nothing
    behind.

    Returns:
        The exit status, the same on every rank: 0 where no check failed, else 1.

    Raises:
        ConfigError: the configuration does not fit the ranks; one line says why.
    """
    rank, _, world = world_from_env()
    if cfg.init_from:
        cfg.model = from_hf(read_hf_config(Path(cfg.init_from)), name=Path(cfg.init_from).name)
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
    except (dist.DistError, TimeoutError) as error:  # of the store, which alone is used here
        print(f"error (rank {rank}): the ranks cannot meet: {_one_line(error)}", file=sys.stderr, flush=True)
        return 1


class Preflight:
    """One rank's way through the checks; on rank 0 with the rows of the table so far."""

    def __init__(self, context: RankContext, coordinator: Coordinator):
        self.context, self.coordinator, self.leads = context, coordinator, context.rank == 0
        self.ranks, self.rows = Ranks(context.spec), list[Row]()

    def run(self, checks: list[Check], clean: Callable[[], None]) -> int:
        """The exit status. `clean` is called on every rank before it is known on any."""
        try:
            with _told_to_end():
                for check in checks:
                    self._check(check)
        except _Ended as request:
            self.rows.append(Row("the rest", Status.FAILED, f"stopped by {request}: perhaps another rank has died"))
            return 1
        finally:
            clean()
            if self.leads:
                show(self.rows)
        self.coordinator.report("end", {})
        if self.leads:
            self.coordinator.reports("end", time.monotonic() + MARGIN_S)  # they have cleaned up
            self.coordinator.rule("passed", not any(row.status == Status.FAILED for row in self.rows))
        passed = self.coordinator.decision("passed")
        self.coordinator.report("bye", {})
        if self.leads:
            self.coordinator.reports("bye", time.monotonic() + MARGIN_S)  # rank 0 may be the store
        return 0 if passed else 1

    def _check(self, check: Check) -> None:
        """Nothing where rank 0 rules so."""
        if self.leads:
            self.coordinator.rule(check.name, self._wanted(check))
        if not self.coordinator.decision(check.name):
            return
        until = time.monotonic() + self.coordinator.deadline_s + MARGIN_S
        self.coordinator.report(check.name, self._look(check))
        if self.leads:
            self._judge(check, self.coordinator.reports(check.name, until))

    def _wanted(self, check: Check) -> bool:
        failed = {row.check for row in self.rows if row.status == Status.FAILED}
        return check.needs not in failed and not any(row.last for row in self.rows)

    def _look(self, check: Check) -> Found:
        context = self.context

        def look() -> Found:
            if context.device.type == "cuda":
                torch.cuda.set_device(context.device)  # each thread has its own
            return check.look(context)

        try:
            return _within(self.coordinator.deadline_s, look)
        except (OSError, RuntimeError) as error:
            return {"error": _one_line(error)}

    def _judge(self, check: Check, found: dict[int, Found]) -> None:
        missing = [r for r in range(self.context.spec.world_size) if r not in found]
        errors = {r: f["error"] for r, f in found.items() if "error" in f}
        if missing:
            text = f"no report within {self.coordinator.deadline_s:g} s: {self.ranks.some(missing)}"
            self.rows.append(Row(check.name, Status.FAILED, "", (text, *self.ranks.grouped(errors)), last=True))
        elif errors:
            self.rows.append(Row(check.name, Status.FAILED, "", self.ranks.grouped(errors), last=check.connected))
        else:
            self.rows += check.judge(found, self.ranks, self.context.cfg)


def _within(seconds: float, work: Callable[[], Found]) -> Found:
    """What `work` returns. It runs in a thread, which is left behind if it takes longer.

    Raises:
        TimeoutError: it takes longer; what it waits for is named.
    """
    future: Future[Found] = Future()

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
def _told_to_end() -> Iterator[None]:
    """A SIGTERM (the launcher's, where another rank has died) ends what is under way, and the table is printed."""

    def on(number: int, frame: FrameType | None) -> None:
        raise _Ended(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
