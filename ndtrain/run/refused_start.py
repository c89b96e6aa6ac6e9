"""Cleanup after a refused start, which leaves the run folder unchanged, or leaves no folder if there was none."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ndtrain.config import ConfigError, log_name
from ndtrain.run import exit_status, folder_lock


@contextmanager
def left_as_found(run_dir: Path) -> Iterator[None]:
    """Undo the changes to the run folder if the block raises a ConfigError. Use this on rank 0 around all checks.

    The claim to the folder must be released before the error leaves the block. Only empty folders are removed. No file
    is removed if another run now owns the folder.
    """
    new = [folder for folder in (run_dir, *run_dir.absolute().parents) if not folder.exists()]
    owned = (run_dir / folder_lock.FOLDER).exists()
    log = run_dir / "logs" / log_name()
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
    """Remove the released claims, unless `keep`, which is set if the folder had owners before.

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
