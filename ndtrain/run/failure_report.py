"""Reports of a rank's failure: on the console, to torchrun and in exit.json."""

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ndtrain.arguments import status_of
from ndtrain.config import ConfigError, log_name, registry, world_from_env
from ndtrain.run import exit_status
from ndtrain.run.launcher_report import print_error, record_error
from ndtrain.run.stop_signals import StopRequest

log = logging.getLogger("ndtrain")

REFUSAL_S = 1.0  # delay of a rank above 0 that refuses a run, because rank 0 usually refuses it too
PATIENCE_S = 5.0  # delay of a rank that lost a peer: the peer reports first, and the launcher may end all ranks


def report_failure(error: BaseException, stop: StopRequest, run_dir: Path) -> str:
    """Log and print the traceback (one line for a plugin's error), write exit.json and return why the run ended.

    A rank that only lost a peer first waits `PATIENCE_S`, so that the failed rank reports first. Usually the launcher
    ends the waiting rank in this time. If the launcher has already signalled the rank, print one line and return. Call
    this function in the handler of `error`.

    Returns:
        A key of `exit_status.CODES`: for a rank that only lost a peer, the reason that another rank wrote first.
    """
    rank = world_from_env()[0]
    log.error("rank %d failed", rank, exc_info=error)
    lost = _lost_a_peer(error)
    if lost and stop.signal:
        print(f"rank {rank}: stopped by {stop.signal}, and lost a peer", file=sys.stderr)
        return "died"
    if lost:
        time.sleep(PATIENCE_S)
    if line := _plugin_line(error):
        _write_exit_status(error, run_dir)
        print_error(line)
        return "failed"
    record_error(error)
    _write_exit_status(error, run_dir)
    sys.excepthook(type(error), error, error.__traceback__)
    cause = exit_status.read(run_dir) if lost else None
    return cause.why if cause and cause.why != "running" else "died" if lost else "failed"


def exit_with_plugin_error(error: Exception) -> None:
    """Print one line and exit if a plugin raised the error. Otherwise return.

    Raises:
        SystemExit: with the status of a failed run.
    """
    if line := _plugin_line(error):
        print_error(line)
        raise SystemExit(exit_status.CODES["failed"]) from error


def status_of_command(main: Callable[[Sequence[str]], int]) -> int:
    """Run a command without a log file, as `arguments.status_of` does, and return its status.

    For an error in a plugin, print the traceback and the line that names the plugin, and return the status of a failed
    run.
    """
    try:
        return status_of(main)
    except Exception as error:
        line = registry.plugin_failure(error)
        if line is None:
            raise
        traceback.print_exception(error)
        print_error(line)
        return exit_status.CODES["failed"]


@contextmanager
def record_failure(run_dir: Path) -> Iterator[None]:
    """Write an error raised in the block to the log and to exit.json, and let it propagate."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, ConfigError):  # the command line logs a ConfigError in one line
            log.error("rank %d failed", world_from_env()[0], exc_info=error)
        if isinstance(error, Exception):
            _write_exit_status(error, run_dir)
        raise


def _write_exit_status(error: BaseException, run_dir: Path) -> None:
    why = "config" if isinstance(error, ConfigError) else "died" if _lost_a_peer(error) else "failed"
    if why == "config" and world_from_env()[0] > 0:
        time.sleep(REFUSAL_S)
        if exit_status.read(run_dir) is None:  # rank 0 has refused the run too, and has removed its folder
            return
    line = str(error) if why == "config" else _plugin_line(error)
    text = line or "".join(traceback.format_exception(error))
    exit_status.write_first(run_dir, why, rank=world_from_env()[0], error=text)


def _plugin_line(error: BaseException) -> str | None:
    """Return the line for an error in a plugin's code; None for any other error."""
    if isinstance(error, ConfigError) or _lost_a_peer(error):
        return None
    line = registry.plugin_failure(error)
    return line and f"{line}; the traceback is in the run's logs/{log_name()}"


def _lost_a_peer(error: BaseException) -> bool:
    """Return True if the error only means that another rank does not answer.

    Errors of gloo are recognised by their source file.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
