"""The launcher of a process: torchrun for a rank, the launch script for torchrun. A process whose launcher was killed
ends too, since nobody would restart it, end it or read its exit status.

A process has a launcher only if the launcher is named in the environment: torchrun names its job, and a launch script
puts its process id into `NDTRAIN_LAUNCH`. Other parents may end as they like: a shell under nohup, a notebook.
"""

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 1.0  # interval at which a thread looks for the launcher
DIED = 75  # exit status of a process that has lost its launcher, as `exit_status.CODES["died"]`
_TORCHRUN = "NDTRAIN_TORCHRUN"  # PID-NAMESPACE of `ndtrain torchrun`
_PARENT = os.getppid()  # of this process at its start: later it may be the process that adopts orphans


class Launcher:
    """A process that this one ends with: its parent, or an ancestor above it.

    Args:
        pid: process id of the launcher; None: this process has no launcher.
    """

    def __init__(self, pid: int | None):
        self.pid = pid
        self._handle = None if pid in (None, _PARENT) else _handle_of(pid)

    def is_gone(self) -> bool:
        """Return True if the launcher has ended."""
        if self._handle is not None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            return bool(poll.poll(0))
        return self.pid is not None and os.getppid() != self.pid  # the kernel gives an orphan another parent at once


def _handle_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None if there is no such process."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def torchrun_of_rank() -> Launcher:
    """Return torchrun, whose child each rank is, or no launcher if torchrun has not started this process. A wrapper
    between the two that does not `exec` the rank counts as the launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Launcher(None)
    return Launcher(_ended_before(os.environ.get(_TORCHRUN, "")) or _PARENT)


def name_torchrun() -> None:
    """Puts this process into the environment of the ranks that it will start."""
    os.environ[_TORCHRUN] = f"{os.getpid()}-{_namespace()}"


def script_of_torchrun(launch: str | None) -> Launcher:
    """Return the launch script, or no launcher if this process does not descend from it. The program of a container may
    stand between them.

    Args:
        launch: the value of `NDTRAIN_LAUNCH`, HOST-PID-SECONDS. A script of another host is no launcher, nor is one
            whose process id means another process here, in a container with ids of its own.
    """
    host, _, pid = (launch or "").rpartition("-")[0].rpartition("-")
    descends = host == os.uname().nodename and pid.isdecimal() and int(pid) in _ancestors()
    return Launcher(int(pid) if descends else None)


def _ancestors() -> list[int]:
    """Return the process ids of the parent, of its parent, and so on; the parent alone where there is no /proc."""
    found = [_PARENT]
    while found[-1] > 1:
        try:
            fields = Path(f"/proc/{found[-1]}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        found.append(int(fields[1]))
    return found


@contextmanager
def ends_with(launcher: Launcher, line: str) -> Iterator[threading.Event]:
    """Ends this process within `POLL_S` once its launcher is gone, until the block ends or the event that it yields is
    set. For a process that has nothing to save.

    Args:
        line: printed then, unless it is empty.
    """
    left = threading.Event()

    def watch() -> None:
        while not left.wait(POLL_S):
            if launcher.is_gone():
                with suppress(OSError, ValueError):  # the console may have gone too
                    print(line, file=sys.stderr, end="\n" * bool(line), flush=True)
                os._exit(DIED)

    if launcher.pid is not None:
        threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield left
    finally:
        left.set()


def _ended_before(named: str) -> int | None:
    """Return the process id of a torchrun that had ended before this process noted its parent, else None.

    Args:
        named: PID-NAMESPACE. The ids of another container mean other processes.
    """
    pid, _, namespace = named.partition("-")
    if not pid.isdigit() or namespace != _namespace() or not namespace:
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return int(pid)
    except OSError:
        pass
    return None


def _namespace() -> str:
    """Return the id of the namespace of this process's id, or nothing if the system has none."""
    with suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return ""
