"""A start that is refused leaves the run folder as it found it, and none where there was none."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ndtrain.config import ConfigError
from ndtrain.runtime import exit_status, folder_lock


@contextmanager
def left_as_found(run_dir: Path) -> Iterator[None]:
    """On rank 0, around all that may refuse a run: a ConfigError that leaves the block removes what the block has added
    to the folder. The claim to the folder must be released by then. Folders are removed only if they are empty, and
    nothing is if another run owns the folder by now.
    """
    new = [folder for folder in (run_dir, *run_dir.absolute().parents) if not folder.exists()]
    owned = (run_dir / folder_lock.FOLDER).exists()
    log = run_dir / "logs" / "rank-0.log"
    logged, ending = log.exists(), _content(run_dir / exit_status.NAME)
    try:
        yield
    except ConfigError:
        with suppress(OSError):
            _remove_claim(run_dir / folder_lock.FOLDER, keep=owned)
            _put_back(run_dir / exit_status.NAME, ending)
            if not logged:
                log.unlink(missing_ok=True)
        for folder in (log.parent, *new):
            with suppress(OSError):
                folder.rmdir()
        raise


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _remove_claim(owners: Path, keep: bool) -> None:
    """Removes the released claims of a folder that had no owner before.

    Raises:
        OSError: another run owns the folder.
    """
    for file in owners.glob("*.json"):
        if file.stat().st_mtime_ns != 0:  # a heartbeat
            raise FileExistsError(str(file))
        if not keep:
            file.unlink(missing_ok=True)
    if not keep and owners.exists():
        owners.rmdir()


def _put_back(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink(missing_ok=True)
    elif _content(file) != content:
        file.write_bytes(content)
