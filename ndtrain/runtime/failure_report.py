"""Reports the failure of a rank on the console, to torchrun and in exit.json."""

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ndtrain.config import ConfigError, world_from_env
from ndtrain.runtime import exit_status
from ndtrain.runtime.launcher_report import record_error
from ndtrain.runtime.stop_signals import StopRequest

PATIENCE_S = 5.0  # delay of a rank that lost a peer: the peer reports first, and the launcher may end all ranks


def report_failure(error: BaseException, stop: StopRequest, run_dir: Path) -> None:
    """Prints the traceback and writes exit.json.

    A rank that only lost a peer waits `PATIENCE_S` first, so that the rank at fault reports first. In general the
    launcher ends it meanwhile. If it has been signalled already, one line replaces the traceback. Call this in the
    handler of `error`.
    """
    rank = world_from_env()[0]
    lost = _lost_a_peer(error)
    if lost and stop.signal:
        print(f"rank {rank}: stopped by {stop.signal}, and a peer has left", file=sys.stderr)
        return
    if lost:
        time.sleep(PATIENCE_S)
    record_error(error)
    _write_exit_status(error, run_dir)
    sys.excepthook(type(error), error, error.__traceback__)


@contextmanager
def record_failure(run_dir: Path) -> Iterator[None]:
    """Writes an error that leaves the block to exit.json, and lets it propagate."""
    try:
        yield
    except Exception as error:
        _write_exit_status(error, run_dir)
        raise


def _write_exit_status(error: BaseException, run_dir: Path) -> None:
    why = "config" if isinstance(error, ConfigError) else "died" if _lost_a_peer(error) else "failed"
    text = str(error) if why == "config" else "".join(traceback.format_exception(error))
    exit_status.write_first(run_dir, why, rank=world_from_env()[0], error=text)


def _lost_a_peer(error: BaseException) -> bool:
    """Whether an error only means that another rank does not answer. Gloo's errors are recognised by their source
    file."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
