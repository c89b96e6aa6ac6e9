"""The lock of a run folder: at most one run at a time writes into a folder, also on storage shared by many hosts.

The folder of its checkpoints has a lock of its own if it is in an object store.

`<run.dir>/owner/` has a numbered file for each run that has owned the folder. The run with the highest number is the
owner. A file is created by a hard link, which is atomic and fails if the file exists. If several runs want the next
number, exactly one gets it, and the numbers only grow. In an object store, an upload fails if the object exists.

The owner's file has a heartbeat (`device/heartbeat`). Clocks of different hosts are never compared.

A run takes over a folder
- at once, if its owner has released it;
- at once, if its owner was an earlier start of the same Slurm job or of the same launch script;
- at once, if its owner ran on this machine and its process is gone;
- else if the heartbeat has not changed for `DEAD_S`.

The owner reads its file before it writes (`Claim.check`). If another run has taken over, it stops.
"""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ndtrain.config import ConfigError
from ndtrain.config.store import folder_at, in_store
from ndtrain.device.heartbeat import DEAD_S, Heartbeat, Silence, beat_of, release_beat, set_beat
from ndtrain.device.process_owner import Owner, read_owner

FOLDER = "owner"  # in the run folder
POLL_S = 0.5  # interval at which an observer reads the heartbeat
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # file systems without hard links


class FolderLost(RuntimeError):
    """Another run has taken over the run folder, so this run must not write to it any more."""


# -------------------------------------------------------------------------------------------------------------- claims


class Claim:
    """A run's claim to its folder. Every rank of the run has an instance.

    Args:
        file: the owner file of the run.
        owner: the content of this file.
    """

    def __init__(self, file: Path, owner: Owner):
        self.file, self.owner = file, owner
        _claims[_key(self.folder)] = self

    @property
    def folder(self) -> Path:
        """The folder that is claimed."""
        return self.file.parent.parent

    def check(self) -> None:
        """Check that this run still owns the folder. Call this before writing to the folder.

        Raises:
            FolderLost: another run has taken over the folder.
        """
        if self.is_lost():
            other = read_owner(_newest(self.file.parent)[1])
            by = f" by {other}" if other and other.token != self.owner.token else ""
            raise FolderLost(
                f"{self.folder} was taken over{by}, because this run made no progress for {DEAD_S:g} s "
                "or more: it stops now, and writes nothing more"
            )

    def check_checkpoints(self) -> None:
        """Check the folder of the checkpoints too. Call this before one of them is published or set aside.

        Raises:
            FolderLost: another run has taken over one of the folders.
        """
        self.check()

    def is_lost(self) -> bool:
        """Return True if another run has taken over the folder. Return False if the file system does not answer."""
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
        """Return True if another run is the owner, after this run's owner file was found missing.

        If there is no other owner, someone has removed the file, and this run restores it.
        """
        try:
            if set(_numbers(self.file.parent)) - {_number(self.file)}:
                return True
            _make(self.file.parent)
            mine = _create(self.file, self.owner)
            return not mine or max(_numbers(self.file.parent), default=0) > _number(self.file)
        except OSError:
            return False

    def release(self) -> None:
        """Forget the claim in this process."""
        if _claims.get(_key(self.folder)) is self:
            del _claims[_key(self.folder)]

    def as_message(self) -> list:
        """Return the claim as a list for another rank's `Claim.from_message`."""
        return [str(self.file), asdict(self.owner)]

    @classmethod
    def from_message(cls, message: list) -> "Claim":
        return cls(folder_at(message[0]), Owner(**message[1]))


class FolderLock(Claim):
    """The claim of rank 0. A thread updates its heartbeat until `release`.

    Attributes:
        checkpoints: the lock of the object store with this run's checkpoints, if they are in one.
    """

    def __init__(self, file: Path, owner: Owner):
        super().__init__(file, owner)
        self._pid = os.getpid()
        self.checkpoints: FolderLock | None = None
        self._heartbeat = Heartbeat(file, "run folder lock")

    def check_checkpoints(self) -> None:
        super().check_checkpoints()
        if self.checkpoints:
            self.checkpoints.check()

    def release(self) -> None:
        """Release the folder. A second call, or a call in a forked process, does nothing."""
        if self.checkpoints:
            self.checkpoints.release()
        super().release()
        if self._heartbeat.stopped or os.getpid() != self._pid:
            return
        self._heartbeat.stop()
        with suppress(OSError):
            if read_owner(self.file) == self.owner:
                release_beat(self.file)


_claims: dict[str, Claim] = {}  # run folder -> the claim of this process


def _key(folder: Path) -> str:
    return str(folder) if in_store(folder) else os.path.abspath(folder)


def is_lost(run_dir: Path) -> bool:
    """Return True if this process has claimed the folder and another run has taken it over."""
    claim = _claims.get(_key(run_dir))
    return claim is not None and claim.is_lost()


def owner_is_gone(run_dir: Path) -> bool | None:
    """Return True if the process of the folder's owner has ended or has released the folder, False if it is alive.

    Return None if this machine cannot determine it.
    """
    file = _newest(run_dir / FOLDER)[1]
    owner, beat = read_owner(file), beat_of(file)
    return True if beat == 0 else owner.is_gone(Owner.this_process()) if owner else None


def acquire(
    folder: Path,
    me: Owner | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FolderLock:
    """Make this process the owner of an existing run folder, or of its checkpoints in an object store.

    Wait up to `DEAD_S` if this machine cannot determine whether the current owner is alive (usually on another host).

    Args:
        me: the new owner. None: this process.

    Raises:
        ConfigError: a live run owns the folder.
        OSError: the folder cannot be written.
    """
    me = me or Owner.this_process()
    owners = folder / FOLDER
    _make(owners)
    while True:
        number, file = _newest(owners)
        if number and not _is_free(file, me, folder, clock, sleep):
            continue
        mine = owners / f"{number + 1:06d}.json"
        if _create(mine, me):
            if _newest(owners)[1] == mine:
                break
            mine.unlink(missing_ok=True)
    for path in owners.iterdir():  # before this run writes, so that a former owner that is still alive notices its loss
        if path != mine and not path.name.startswith("."):
            with suppress(OSError):
                path.unlink()
    return FolderLock(mine, me)


def _is_free(file: Path, me: Owner, folder: Path, clock: Callable[[], float], sleep: Callable[[float], None]) -> bool:
    """Return True if the folder may be taken over from the owner of `file`, False if another run was faster.

    Raises:
        ConfigError: the owner is alive.
    """
    owner, beat = read_owner(file), beat_of(file)
    if beat == 0:
        return True
    if owner is not None:
        gone = owner.is_gone(me)
        if gone or owner.is_earlier_start_of(me):
            return True
        if gone is False:
            raise _held(folder, owner, me)
    print(
        f"{_configured_by(folder)}={folder} was not released by {owner or 'its last run'}: waiting up to "
        f"{DEAD_S:g} s to see whether that run is alive",
        file=sys.stderr,
        flush=True,
    )
    silence = Silence(beat, clock)
    while silence.seconds < DEAD_S:
        sleep(POLL_S)
        now = beat_of(file)
        if now is None or now == 0:
            return now == 0
        if now != beat:
            raise _held(folder, read_owner(file) or owner, me)
        silence.look(now)
    return True


def _held(folder: Path, owner: Owner | None, me: Owner) -> ConfigError:
    key = _configured_by(folder)
    if owner and owner.machine and (owner.machine, owner.pid) == (me.machine, me.pid):
        return ConfigError(
            f"{key}={folder} belongs to another Trainer of this process, since {owner.since}: call its close(), or "
            f"give another {key}"
        )
    stop = "stop it" if in_store(folder) else f"stop it with `touch {folder}/stop`"
    return ConfigError(
        f"{key}={folder} belongs to a run that is alive: {owner or 'of unknown origin'}: {stop}, or give another {key}"
    )


def _configured_by(folder: Path) -> str:
    return "checkpoint.folder" if in_store(folder) else "run.dir"


# --------------------------------------------------------------------------------------------------------- owner files


def _make(folder: Path) -> None:
    if not in_store(folder):  # it has no folders
        folder.mkdir(exist_ok=True)


def _numbers(folder: Path) -> list[int]:
    listed = folder.glob("*.json") if in_store(folder) else folder.iterdir()
    names = [path.name for path in listed]
    return [int(name[:-5]) for name in names if re.fullmatch(r"[0-9]+\.json", name)]


def _number(file: Path) -> int:
    return int(file.name[:-5])


def _newest(folder: Path) -> tuple[int, Path]:
    """Return the highest number of an owner file, and this file; 0 if there is no owner file."""
    number = max(_numbers(folder), default=0)
    return number, folder / f"{number:06d}.json"


def _create(file: Path, owner: Owner) -> bool:
    """Create an owner file with its content in one step. Return False if the file already exists for another owner."""
    text = json.dumps(asdict(owner), indent=1) + "\n"
    if in_store(file):
        return _create_in_store(file, owner, text.encode())
    part = file.with_name(f".{owner.token}")
    try:
        part.write_text(text)
        set_beat(part, 0)
        os.link(part, file)
        return True
    except FileExistsError:
        return read_owner(file) == owner  # NFS may report this error for the link that it has just created
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(file, text)
    finally:
        with suppress(OSError):
            part.unlink()


def _create_in_store(file: Path, owner: Owner, content: bytes) -> bool:
    try:
        created = cast(Any, file).create(content)
    except OSError:  # an older store: of several runs, the last one wins. The others notice it before they publish
        if file.exists():
            return False
        file.write_bytes(content)
        created = True
    return created or read_owner(file) == owner  # the request was repeated after a lost answer


def _create_without_links(file: Path, text: str) -> bool:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as opened:
        opened.write(text)
    set_beat(file, 0)
    return True
