"""The file `<run.dir>/exit.json`, which records that a run is running, or how it ended.

torchrun does not pass on the exit status of a rank, so launch scripts derive their own exit status from this file.

The file stays correct even on a full disk. `begin` allocates it, so a run that cannot write it does not start. `write`
replaces it. If the disk has no room for a second file, `write` overwrites the allocated bytes. A checksum at the end
detects a file that was only partly written.
"""

import errno
import json
import os
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ndtrain.device.process_owner import LAUNCH
from ndtrain.run import folder_lock

# why a run ended -> exit status of a launch script
CODES = {
    "running": 75,  # the run is running; if no process is alive, all were killed, and a restart may help
    "finished": 0,  # train.steps or train.stop_at was reached, and the last step is saved
    "stopped": 85,  # a signal or the stop file requested a stop; everything is saved, a restart continues
    "failed": 1,  # an error in the run itself, which a restart would repeat
    "config": 2,  # the configuration is wrong
    "hang": 75,  # a collective exceeded its deadline
    "died": 75,  # an external cause: a peer or the launcher was lost; a restart may help
}
NAME = "exit.json"
JOB = "TORCHELASTIC_RUN_ID"  # set by torchrun, the same for all attempts of a job
SIZE = 4096  # minimum size in bytes: one page, which most file systems overwrite without allocating another page
LONGEST = 1 << 20  # maximum size in bytes of a file that is read
_CHECK = "check"  # the last key: CRC-32 of the other fields
_CUT = "[...] "  # prefix of an error text whose beginning was cut off to fit the allocated bytes
_ESCAPED = 12  # maximum number of bytes per character in JSON
_AGAIN_S = 0.1  # seconds until a damaged file is read again, because it may just be overwritten


@dataclass(frozen=True)
class Exit:
    """The content of exit.json.

    Attributes:
        why: a key of `CODES`.
        signal: the source of the stop request: a signal's name, "stop file", or "the end of torchrun".
        step: the last completed step.
        checkpoint: the newest complete checkpoint in the run folder.
        requeue: True if the same command would continue the run.
        code: the exit status of a launch script.
        rank: the rank that raised the error.
        error: the text of the error.
        job: the id of the torchrun job.
        launch: id of the launch script's start; None: the run was started by hand.
    """

    why: str
    signal: str | None = None
    step: int | None = None
    checkpoint: str | None = None
    requeue: bool = False
    code: int = 1
    rank: int | None = None
    error: str | None = None
    job: str | None = None
    launch: str | None = None


def write(run_dir: Path, why: str, **facts) -> None:
    """Replace exit.json by a rename or, if that is not possible, overwrite it.

    OSErrors are ignored, because the run is about to end anyway. Write nothing if the folder now belongs to another
    run.

    Args:
        facts: further fields of `Exit`. `checkpoint` defaults to the newest checkpoint in the run folder.
    """
    if folder_lock.is_lost(run_dir):
        return
    with suppress(OSError):
        _store(run_dir / NAME, _status(run_dir, why, facts))


def begin(run_dir: Path) -> None:
    """Write "running" at the start of a run. It remains if all processes are killed before they write another status.

    Raises:
        OSError: the file cannot be written, so the run could not report how it ends.
    """
    if not folder_lock.is_lost(run_dir):
        _store(run_dir / NAME, _status(run_dir, "running", {}))


def write_first(run_dir: Path, why: str, **facts) -> None:
    """Call `write`, unless a rank has already written its error. The first error is the cause of the later ones."""
    before = read(run_dir)
    if before is None or before.why == "running":
        write(run_dir, why, **facts)


def read(run_dir: Path) -> Exit | None:
    """Return the content of exit.json, or None if it is missing or damaged."""
    try:
        found = _parse(run_dir / NAME)
        if found is None:
            time.sleep(_AGAIN_S)
            found = _parse(run_dir / NAME)
        return found
    except OSError:
        return None


def _status(run_dir: Path, why: str, facts: dict[str, Any]) -> Exit:
    from ndtrain.checkpoint import list_checkpoints  # not at the top: it imports torch, which launch scripts avoid

    code, job, launch = CODES[why], os.environ.get(JOB), os.environ.get(LAUNCH)
    if facts.get("checkpoint") is None:
        newest = next(iter(list_checkpoints(run_dir / "checkpoints")), None)
        facts = facts | {"checkpoint": newest and str(newest.absolute())}
    return Exit(why, requeue=code in (75, 85), code=code, job=job, launch=launch, **facts)


def _store(file: Path, status: Exit) -> None:
    """Replace the file, or overwrite its allocated bytes if the disk has no room for a second file."""
    part = file.with_name(f"{NAME}.{os.getpid()}")
    try:
        _write_through(part, _encode(status), os.O_CREAT | os.O_TRUNC)
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        try:
            _write_through(file, _encode(status, file.stat().st_size))
        except OSError:
            raise error from None


def _write_through(file: Path, content: bytes, flags: int = 0) -> None:
    """Write the bytes in one call, and wait until they are on disk, so that delayed write errors are raised here."""
    descriptor = os.open(file, os.O_WRONLY | flags, 0o644)
    try:
        if os.pwrite(descriptor, content, 0) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(status: Exit, size: int | None = None) -> bytes:
    """Return the file's content: JSON, padded with spaces to at least `SIZE` bytes.

    Args:
        size: required number of bytes. The beginning of a long error is cut off.
    """
    fields = asdict(status)
    content = _with_check(fields)
    if size is not None and len(content) > size and status.error:
        fields["error"] = status.error[-size:]
        content = _with_check(fields)
    while size is not None and len(content) > size and (error := fields["error"]):
        rest = error.removeprefix(_CUT)[(len(content) - size) // _ESCAPED + 1 :]
        fields["error"] = _CUT + rest if rest else None
        content = _with_check(fields)
    return content[:-1].ljust((size or SIZE) - 1) + b"\n"


def _with_check(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields | {_CHECK: _checksum(fields)}, indent=2) + "\n").encode()


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _parse(file: Path) -> Exit | None:
    """Return the content, or None if it is damaged. A file without a checksum is accepted.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        content = opened.read(LONGEST + 1)
    try:
        fields = json.loads(content) if len(content) <= LONGEST else None
        if fields.pop(_CHECK, None) not in (None, _checksum(fields)):
            return None
        return Exit(**fields)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def of_process(why: str) -> int:
    """Return the exit status of a process of the run.

    Under torchrun a stopped rank ends with 0. torchrun would treat any other status as a failure, and restart the
    ranks.
    """
    return 0 if why == "stopped" and JOB in os.environ else CODES[why]


def of_failed_rank(why: str) -> int:
    """Return the exit status of a rank that ends by an error: 1 under torchrun, for which exit.json has the reason."""
    return 1 if JOB in os.environ else CODES[why]


def is_restart(run_dir: Path) -> bool:
    """Return True if torchrun restarts a run that an earlier attempt of the same job left unfinished.

    This includes stopped attempts: to let a host join, torchrun sends the other hosts' ranks the same signal as a user.
    """
    before, job = read(run_dir), os.environ.get(JOB, "none")
    if before is None or before.why == "finished":
        return False
    named = job != "none" and before.job == job  # torchrun calls a job without a name "none"
    return named or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
