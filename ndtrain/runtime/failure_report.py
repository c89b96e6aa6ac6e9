"""How a rank says what went wrong: to the console, to torchrun, and in exit.json."""

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ndtrain.config import ConfigError, world_from_env
from ndtrain.runtime import exit_status
from ndtrain.runtime.stop_signals import StopRequest

PATIENCE_S = 5.0  # how long a rank that lost a peer lets that one speak, and the launcher end them all


def report_failure(error: BaseException, stop: StopRequest, run_dir: Path) -> None:
    """The traceback, at once; but a rank that only lost a peer waits, so that the rank at fault is heard first. The
    launcher ends it meanwhile, or had begun to before the loss came to light. Call it while `error` is handled."""
    rank = world_from_env()[0]
    lost = _lost_a_peer(error)
    if lost and stop.signal:
        print(f"rank {rank}: stopped by {stop.signal}, and a peer has left", file=sys.stderr)
        return
    if lost:
        time.sleep(PATIENCE_S)
    else:
        get_error_handler().record_exception(error)  # which torchrun's last lines then show
    _into_exit_file(error, run_dir)
    sys.excepthook(type(error), error, error.__traceback__)


@contextmanager
def record_failure(run_dir: Path) -> Iterator[None]:
    """An error that leaves the block is also in exit.json."""
    try:
        yield
    except Exception as error:
        _into_exit_file(error, run_dir)
        raise


def _into_exit_file(error: BaseException, run_dir: Path) -> None:
    why = "config" if isinstance(error, ConfigError) else "died" if _lost_a_peer(error) else "failed"
    text = str(error) if why == "config" else "".join(traceback.format_exception(error))
    exit_status.write_first(run_dir, why, rank=world_from_env()[0], error=text)


def _lost_a_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank does not answer. Gloo's are known by their source file."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
