"""The lock of a run folder: at most one run writes into a folder at a time, also on storage that many hosts share.

`<run.dir>/owner/` holds one numbered file for each run that has owned the folder; the highest number is the owner. A
file is created by a hard link, which is atomic and fails if the file exists. So of several runs that want the next
number exactly one gets it, and the numbers only grow.

The owner's heartbeat is the modification time of its file. It is used as a counter: the owner sets it every `BEAT_S`
to a value of its own, and an observer only sees whether it changes. No clock is compared with another one.

A run takes a folder over
- at once, if its owner has released it;
- at once, if its owner was an earlier start of the same Slurm job or of the same launch script;
- at once, if its owner ran on this machine and its process is gone;
- else after the heartbeat has not changed for `DEAD_S`.

The owner reads its file before it writes (`Claim.check`). If another run has taken over, it stops.
"""

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ndtrain.config import ConfigError
from ndtrain.runtime.run_owner import Owner

FOLDER = "owner"  # in the run folder
BEAT_S = 5.0  # interval of the heartbeat
DEAD_S = 60.0  # a run of another host is dead once its heartbeat has not changed for so long
POLL_S = 0.5  # interval at which an observer reads the heartbeat
STALL_S = 5.0  # after a longer gap between two readings the observer begins again: its own file system was slow
_FIRST_BEAT_S = 1_000_000_000  # modification time of beat 0; the release sets 0
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # file systems without hard links


class FolderLost(RuntimeError):
    """Another run has taken the run folder over, so this one must not write there any more."""


# -------------------------------------------------------------------------------------------------------------- claims


class Claim:
    """A run's claim to its folder, as all its ranks know it.

    Args:
        file: the owner file of the run.
        owner: its content.
    """

    def __init__(self, file: Path, owner: Owner):
        self.file, self.owner = file, owner
        _claims[_key(file.parent.parent)] = self

    def check(self) -> None:
        """Call it before writing into the folder.

        Raises:
            FolderLost: another run has taken the folder over.
        """
        if self.is_lost():
            other = _read(_newest(self.file.parent)[1])
            by = f" by {other}" if other and other.token != self.owner.token else ""
            raise FolderLost(
                f"{self.file.parent.parent} was taken over{by}, since this run did not move for {DEAD_S:g} s or more: "
                "it stops here and writes nothing more"
            )

    def is_lost(self) -> bool:
        """Whether another run has taken the folder over. False where the file system does not answer."""
        try:
            numbers = _numbers(self.file.parent)
            if max(numbers, default=0) > _number(self.file):
                return True
            return json.loads(self.file.read_text())["token"] != self.owner.token
        except FileNotFoundError:
            return self._is_replaced()
        except OSError as error:
            return error.errno == errno.ESTALE and self._is_replaced()
        except (ValueError, KeyError):
            return False

    def _is_replaced(self) -> bool:
        """For a missing owner file: whether another run is the owner. Where there is none, someone has removed the
        file, and this run restores it."""
        try:
            if set(_numbers(self.file.parent)) - {_number(self.file)}:
                return True
            self.file.parent.mkdir(exist_ok=True)
            mine = _create(self.file, self.owner)
            return not mine or max(_numbers(self.file.parent), default=0) > _number(self.file)
        except OSError:
            return False

    def release(self) -> None:
        """Forgets the claim."""
        if _claims.get(_key(self.file.parent.parent)) is self:
            del _claims[_key(self.file.parent.parent)]

    def as_message(self) -> list:
        """What another rank needs for `Claim.from_message`."""
        return [str(self.file), asdict(self.owner)]

    @classmethod
    def from_message(cls, message: list) -> "Claim":
        return cls(Path(message[0]), Owner(**message[1]))


class FolderLock(Claim):
    """The claim of rank 0, whose heartbeat a thread keeps up until `release`."""

    def __init__(self, file: Path, owner: Owner):
        super().__init__(file, owner)
        self._ended, self._pid = threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._beat, name="run folder lock", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(BEAT_S):
            beats += 1
            with suppress(OSError):  # a file system that is slow or full: the next beat may succeed
                _set_beat(self.file, beats)

    def release(self) -> None:
        """Gives the folder free. A second call does nothing, nor does that of a forked process."""
        super().release()
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        self._thread.join(BEAT_S)  # longer only where the file system hangs
        with suppress(OSError):
            if _read(self.file) == self.owner:
                os.utime(self.file, ns=(0, 0))


_claims: dict[str, Claim] = {}  # run folder -> the claim of this process


def _key(run_dir: Path) -> str:
    return os.path.abspath(run_dir)


def is_lost(run_dir: Path) -> bool:
    """Whether this process had claimed the folder, and another run has taken it over."""
    claim = _claims.get(_key(run_dir))
    return claim is not None and claim.is_lost()


def owner_is_gone(run_dir: Path) -> bool | None:
    """Return True if the process of the folder's owner has ended or released the folder, False if it is alive, and None
    if that cannot be known on this machine."""
    file = _newest(run_dir / FOLDER)[1]
    owner, beat = _read(file), _beat_of(file)
    return True if beat == 0 else owner.is_gone(Owner.this_process()) if owner else None


def acquire(
    run_dir: Path,
    me: Owner | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FolderLock:
    """Makes this process the owner of an existing run folder. Waits at most `DEAD_S`, and only for an owner on another
    machine.

    Args:
        me: None: this process.

    Raises:
        ConfigError: a live run owns the folder.
        OSError: the folder cannot be written.
    """
    me = me or Owner.this_process()
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    while True:
        number, file = _newest(folder)
        if number and not _is_free(file, me, run_dir, clock, sleep):
            continue
        mine = folder / f"{number + 1:06d}.json"
        if _create(mine, me):
            if _newest(folder)[1] == mine:
                break
            mine.unlink(missing_ok=True)
    for path in folder.iterdir():  # before this run writes: an owner that lives after all finds its file missing
        if path != mine and not path.name.startswith("."):
            with suppress(OSError):
                path.unlink()
    return FolderLock(mine, me)


def _is_free(file: Path, me: Owner, run_dir: Path, clock: Callable[[], float], sleep: Callable[[float], None]) -> bool:
    """Whether the next owner may follow the one of `file`. False: look again, another run was faster.

    Raises:
        ConfigError: it is alive.
    """
    owner, beat = _read(file), _beat_of(file)
    if beat == 0:
        return True
    if owner is not None:
        gone = owner.is_gone(me)
        if gone or owner.is_earlier_start_of(me):
            return True
        if gone is False:
            raise _held(run_dir, owner, me)
    print(
        f"run.dir={run_dir} was not released by {owner or 'its last run'}: waiting up to {DEAD_S:g} s to see whether "
        "that run is alive",
        file=sys.stderr,
        flush=True,
    )
    since = read = clock()
    while clock() - since < DEAD_S:
        sleep(POLL_S)
        now = _beat_of(file)
        if clock() - read > STALL_S:
            since = clock()
        read = clock()
        if now is None or now == 0:
            return now == 0
        if now != beat:
            raise _held(run_dir, _read(file) or owner, me)
    return True


def _held(run_dir: Path, owner: Owner | None, me: Owner) -> ConfigError:
    if owner and owner.machine and (owner.machine, owner.pid) == (me.machine, me.pid):
        return ConfigError(
            f"run.dir={run_dir} belongs to another Trainer of this process, since {owner.since}: call its close(), or "
            "give another run.dir"
        )
    return ConfigError(
        f"run.dir={run_dir} belongs to a run that is alive: {owner or 'of unknown origin'}: stop it with "
        f"`touch {run_dir}/stop`, or give another run.dir"
    )


# --------------------------------------------------------------------------------------------------------- owner files


def _numbers(folder: Path) -> list[int]:
    return [int(name[:-5]) for name in os.listdir(folder) if re.fullmatch(r"[0-9]+\.json", name)]


def _number(file: Path) -> int:
    return int(file.name[:-5])


def _newest(folder: Path) -> tuple[int, Path]:
    """The owner file with the highest number, and that number; 0: there is none."""
    number = max(_numbers(folder), default=0)
    return number, folder / f"{number:06d}.json"


def _read(file: Path) -> Owner | None:
    """None where the file is missing or not complete."""
    try:
        return Owner(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _beat_of(file: Path) -> int | None:
    """The heartbeat; 0: released; None: there is no such file. The file is opened, since NFS may answer `stat` from a
    cache that is a minute old."""
    try:
        with open(file, "rb") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _set_beat(file: Path, number: int) -> None:
    seconds = _FIRST_BEAT_S + 2 * number  # FAT counts in two seconds
    os.utime(file, (seconds, seconds))


def _create(file: Path, owner: Owner) -> bool:
    """Creates an owner file with its content in one step. False: it exists already, and not for this owner."""
    text = json.dumps(asdict(owner), indent=1) + "\n"
    part = file.with_name(f".{owner.token}")
    try:
        part.write_text(text)
        _set_beat(part, 0)
        os.link(part, file)
        return True
    except FileExistsError:
        return _read(file) == owner  # NFS may say so of a link that it has just made
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(file, text)
    finally:
        with suppress(OSError):
            part.unlink()


def _create_without_links(file: Path, text: str) -> bool:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as opened:
        opened.write(text)
    _set_beat(file, 0)
    return True
