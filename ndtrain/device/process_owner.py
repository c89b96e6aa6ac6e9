"""The owner of a folder: a process, identified uniquely, with a check if it is still alive."""

import json
import os
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

LAUNCH = "NDTRAIN_LAUNCH"  # set by launch scripts and `ndtrain torchrun`: HOST-PID-SECONDS, unique for every start


@dataclass(frozen=True)
class Owner:
    """The content of an owner file.

    Attributes:
        machine: id of the kernel's boot and of the process namespace. Process ids are comparable if it is equal.
        started: start time of process `pid` in clock ticks since boot; None: unknown.
        job, restart: the Slurm job with its cluster, and the number of times that Slurm has requeued it.
        launch: id of the launch script's start.
        since: time of the claim in UTC, on the owner's clock.
        token: unique for every claim.
    """

    host: str
    machine: str
    pid: int
    started: int | None
    job: str | None
    restart: int
    launch: str | None
    since: str
    token: str

    @classmethod
    def this_process(cls) -> "Owner":
        env, job = os.environ, os.environ.get("SLURM_JOB_ID")
        return cls(
            host=os.uname().nodename,
            machine=_machine(),
            pid=os.getpid(),
            started=_process_start(os.getpid()),
            job=f"{env['SLURM_CLUSTER_NAME']}:{job}" if job and env.get("SLURM_CLUSTER_NAME") else job,
            restart=int(env.get("SLURM_RESTART_COUNT") or 0),
            launch=env.get(LAUNCH),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            token=uuid.uuid4().hex,
        )

    def is_earlier_start_of(self, other: "Owner") -> bool:
        """Return True if Slurm or a launch script has ended this run and started it again as `other`."""
        queued_again = self.job is not None and self.job == other.job and self.restart < other.restart
        return queued_again or (self.launch is not None and self.launch == other.launch and self._differs(other))

    def _differs(self, other: "Owner") -> bool:
        return (self.machine, self.pid, self.started) != (other.machine, other.pid, other.started)

    def is_gone(self, here: "Owner") -> bool | None:
        """Return True if the owner's process has ended, False if it is alive, None if this machine cannot tell."""
        if self.machine != here.machine or not self.machine:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # the process exists but belongs to another user
            pass
        started = _process_start(self.pid)
        if started is None:  # the process is a zombie, or /proc does not show it
            return True if _is_zombie(self.pid) else None
        return None if self.started is None else started != self.started

    def __str__(self) -> str:
        job = f", Slurm job {self.job.rpartition(':')[2]}" if self.job else ""
        return f"pid {self.pid} on host {self.host}{job}, since {self.since}"


def read_owner(file: Path) -> Owner | None:
    """Return the process that a file describes; None if the file is missing, incomplete or damaged."""
    try:
        return Owner(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> str:
    """Return the id of this machine's boot and process namespace; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, beginning with the state; empty if there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _process_start(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _is_zombie(pid: int) -> bool:
    return _stat_fields(pid)[:1] in (["Z"], ["X"])
