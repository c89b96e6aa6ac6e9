"""`python -m ndtrain.train`: train one run from the command line.

torchrun --nproc-per-node 2 -m ndtrain.train recipe=llama_small mesh.fsdp=2
python -m ndtrain.train --cfg job recipe=llama_small        # shows the resolved config
"""

import faulthandler
import logging
import sys
from contextlib import ExitStack
from functools import partial

from ndtrain.run import launcher  # first: it records the parent process, which may end while torch is imported

# isort: split
import torch.distributed as dist

from ndtrain.config import Config, ConfigError, world_from_env
from ndtrain.engine.setup import prepare
from ndtrain.engine.trainer import Trainer
from ndtrain.run import cli, exit_status, stop_signals, usage
from ndtrain.run.failure_report import exit_with_plugin_error, record_failure, report_failure
from ndtrain.run.folder_lock import FolderLost
from ndtrain.run.stop_signals import StopRequest

log = logging.getLogger("ndtrain")

# Seconds allowed for destroy_process_group. torchrun kills the remaining ranks 30 s after a signal.
PART_S = 20.0


def train(cfg: Config) -> int:
    """Run the training that `cfg` describes, and return the exit status of the process.

    Raises:
        ConfigError: the run cannot start; the message is one line with the reason.
    """
    try:
        return _run(cfg)
    except Exception as error:
        exit_with_plugin_error(error)
        raise


def _run(cfg: Config) -> int:
    # The process group is not destroyed after an error: gloo would wait for messages that failed peers never send.
    with ExitStack() as closing:
        starting = closing.enter_context(launcher.ends_with(launcher.torchrun_of_rank(), _alone_at_start()))
        setup = prepare(cfg)
        # Install the handler only now: a rank still waiting for a failed peer has to die from the launcher's SIGTERM.
        stop = StopRequest(setup.run_dir / stop_signals.STOP_FILE if setup.rank == 0 else None)
        closing.callback(setup.claim.release)
        closing.callback(stop.restore)
        try:
            trainer = Trainer(setup.cfg, setup=setup, stop=stop)
            closing.callback(trainer.close)
            starting.set()  # from now on the run itself checks after each step that its launcher is alive
            code = trainer.train()
            trainer.close()
            if dist.is_initialized():
                _leave_process_group()
            return code
        except FolderLost as error:
            log.error(str(error))
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(exit_status.CODES["failed"]) from error
        except BaseException as error:
            stop.restore()
            if setup.world > 1 and not isinstance(error, ConfigError):
                why = report_failure(error, stop, setup.run_dir)
                raise SystemExit(exit_status.of_failed_rank(why)) from error
            with record_failure(setup.run_dir):
                raise


def _alone_at_start() -> str:
    """Return the line for a host whose torchrun was killed before the first step. Its first rank prints it."""
    return "error: torchrun was killed before the first step: nothing was saved" if world_from_env()[1] == 0 else ""


def _leave_process_group() -> None:
    """Destroy the process group. If that hangs, print the stack of every thread to stderr and exit.

    About one rank in several hundred hung here. faulthandler's C thread works even if the hanging thread holds the GIL.
    """
    faulthandler.dump_traceback_later(PART_S, exit=True, file=sys.__stderr__)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


main = partial(cli.main, train, usage=usage.train)


if __name__ == "__main__":
    cli.run_and_exit(train, usage.train)
