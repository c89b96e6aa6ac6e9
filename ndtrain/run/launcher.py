"""The launcher of a process: torchrun for a rank, the launch script for torchrun.

A process ends if its launcher was killed, because nobody would restart it, end it or read its exit status.

A process has a launcher only if the environment names one: torchrun sets the id of its job, and a launch script puts
its process id into `NDTRAIN_LAUNCH`. Other parents, such as a shell under nohup or a notebook, may end without effect.
"""

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 1.0  # interval at which a thread checks that the launcher is alive
DIED = 75  # exit status of a process that has lost its launcher, the same as `exit_status.CODES["died"]`
_TORCHRUN = "NDTRAIN_TORCHRUN"  # environment variable with PID-NAMESPACE of `ndtrain torchrun`
_PARENT = os.getppid()  # the parent at the start of this process; later, os.getppid() may return the adopter of orphans


class Launcher:
    """A parent or other ancestor of this process. If it ends, this process ends too.

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
        return self.pid is not None and os.getppid() != self.pid  # the kernel gives an orphan a new parent immediately


def _handle_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None if there is no such process."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def torchrun_of_rank() -> Launcher:
    """Return torchrun, the parent of each rank, or no launcher if torchrun has not started this process.

    If a wrapper between torchrun and the rank does not `exec` the rank, the wrapper counts as the launcher.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Launcher(None)
    return Launcher(_ended_before(os.environ.get(_TORCHRUN, "")) or _PARENT)


def name_torchrun() -> None:
    """Put the id of this process into the environment of the ranks that it will start."""
    os.environ[_TORCHRUN] = f"{os.getpid()}-{_namespace()}"


def script_of_torchrun(launch: str | None) -> Launcher:
    """Return the launch script, or no launcher if this process does not descend from it.

    There may be other processes between them, such as the program of a container.

    Args:
        launch: the value of `NDTRAIN_LAUNCH`, HOST-PID-SECONDS. A script on another host is no launcher. Neither is a
            script outside a container with its own process ids, where the id means another process.
    """
    host, _, pid = (launch or "").rpartition("-")[0].rpartition("-")
    descends = host == os.uname().nodename and pid.isdecimal() and int(pid) in _ancestors()
    return Launcher(int(pid) if descends else None)


def _ancestors() -> list[int]:
    """Return the process ids of the parent, its parent, and so on. Without /proc, return only the parent."""
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
    """End this process within `POLL_S` if its launcher ends while the block runs. For processes with nothing to save.

    Yield an event; setting it stops the check before the block ends.

    Args:
        line: text to print before this process ends; empty: print nothing.
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
    """Return the process id of torchrun if it had ended before this process recorded its parent, else None.

    Args:
        named: PID-NAMESPACE. Return None for another namespace, in which the same id means another process.
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
    """Return the id of the namespace of process ids; "" if the system has no such namespaces."""
    with suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return ""
