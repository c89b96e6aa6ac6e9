"""The processes of islands that a trial starts as commands, and what the kernel reports about a process."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

from tests.lib.helpers import MODULE, reset_signals
from tests.lib.namespaces import Host

TOKEN = {"NDTRAIN_ISLANDS_TOKEN": "a token of a trial"}
PORT = 29600
_MIB = 2**20


@dataclass
class Islands:
    """Islands of one process each, started as a user starts them. All are killed at the end of the `with` block.

    Args:
        folder: holds a run folder for each.
        args: the overrides that all have.
        names: of the islands.
        hosts: the host of each; empty: all are on this machine.
        port: of `islands.address`.
    """

    folder: Path
    args: Sequence[str]
    names: Sequence[str]
    hosts: Mapping[str, Host] = field(default_factory=dict)
    port: int = PORT
    running: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __enter__(self) -> "Islands":
        return self

    def __exit__(self, *error) -> None:
        for name in self.running:
            self.kill(name)

    @property
    def folders(self) -> dict[str, Path]:
        return {name: self.folder / name for name in self.names}

    def start(self, name: str, *more: str) -> None:
        """Start an island, or start it again."""
        known = [f"{self.hosts[n].address if self.hosts else '127.0.0.1'}:{self.port}" for n in self.names]
        address = f"[{','.join(dict.fromkeys(known))}]"
        group = [f"islands.count={len(self.names)}", f"islands.address={address}", "islands.wait_s=120"]
        argv = [sys.executable, *MODULE, *self.args, *group, f"run.dir={self.folder / name}", *more]
        with (self.folder / f"{name}.txt").open("a") as console:
            given = {"stdout": console, "stderr": subprocess.STDOUT}
            if self.hosts:
                self.running[name] = self.hosts[name].popen(argv, self.folder, TOKEN, **given)
            else:
                own = {"cwd": self.folder, "start_new_session": True, "preexec_fn": reset_signals}
                self.running[name] = subprocess.Popen(argv, env=os.environ | TOKEN, **own, **given)

    def kill(self, name: str) -> None:
        """End an island's process at once, without a chance to say anything."""
        self.running[name].kill()
        self.running[name].wait()

    def ended(self) -> dict[str, int]:
        """Return name -> exit status of the islands that have ended."""
        codes = {name: process.poll() for name, process in self.running.items()}
        return {name: code for name, code in codes.items() if code is not None}


@contextmanager
def hidden_output(console: Path) -> Iterator[None]:
    """Return a context in which `multiprocessing` starts the server of forked processes. They write to a file."""
    kept = [os.dup(number) for number in (1, 2)]
    with console.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            forkserver.ensure_running()
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
    yield


def usage(pid: int) -> dict[str, float] | None:
    """Return the resident memory in MiB, the threads and the open files of a process. Return None if it has ended."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(os.listdir(f"/proc/{pid}/fd"))
        memory = int(status["VmRSS"].split()[0]) * 1024 / _MIB
    except (OSError, KeyError):
        return None
    return {"rss_mib": memory, "threads": int(status["Threads"]), "files": files}


def listener(port: int, pids: Iterable[int]) -> int | None:
    """Return the process, out of `pids`, that listens at a TCP port of IPv4. Return None if none does."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    return next((pid for pid in pids if sockets & set(_open_files(pid))), None)


def _open_files(pid: int) -> Iterator[str]:
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            yield os.readlink(entry.path)
    except OSError:  # it has ended, or has closed the file
        return
