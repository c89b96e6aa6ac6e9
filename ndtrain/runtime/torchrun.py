"""`ndtrain torchrun ...`: torchrun, with the error of the rank that failed in one line.

usage: ndtrain torchrun [torchrun's options] -m ndtrain.train [KEY=VALUE ...]

  ndtrain torchrun --nproc-per-node 2 -m ndtrain.train recipe=llama_small mesh.fsdp=2
  ndtrain torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 --nproc-per-node 8 -m ndtrain.train ...

It starts, restarts and ends the ranks as torchrun does, whose options it takes. It differs in what it prints: after a
failure the host's first failed rank and its error in one line, after Ctrl-C no traceback of torchrun's own, and no
banner about OMP_NUM_THREADS, which it sets, unless it is set, to this host's cores divided by its ranks.
`torchrun --help` lists torchrun's options.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ndtrain.arguments import wants_help
from ndtrain.distributed.cores import THREADS_ARE_A_DEFAULT, cpu_cores
from ndtrain.runtime.launcher_report import PRINTED

_LOGGERS = (  # what they say of a failure is in the last line too
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)


def main(args: Sequence[str]) -> int:
    """Runs torchrun in this process. Returns its exit status: 1 if a rank has failed, 128 + the signal after one."""
    if not args or wants_help(args[:1]):
        print((__doc__ or "").partition("\n\n")[2].strip(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = run.parse_args(list(args))
    set_threads(run.determine_local_world_size(options.nproc_per_node))
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if line := last_line(rank, failure):
            print(line, file=sys.stderr, flush=True)
        return 1
    except SignalException as stop:
        print(f"{stop.sigval.name}: every rank has ended", file=sys.stderr, flush=True)
        return 128 + stop.sigval
    return 0


def set_threads(ranks: int) -> None:
    """Sets OMP_NUM_THREADS for the ranks of this host, unless it is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cpu_cores() // ranks))
        os.environ[THREADS_ARE_A_DEFAULT] = "1"  # a rank with a small model may take fewer


def last_line(rank: int, failure: ProcessFailure) -> str:
    """Which rank failed first on this host, and why; nothing where the rank itself has printed that line last."""
    message = failure.message
    if isinstance(message, dict):
        if failure.local_rank == 0 and message.get("extraInfo", {}).get(PRINTED):
            return ""
        message = str(message.get("message", "no message"))
    elif failure.exitcode < 0:
        message = f"ended by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            message += ", as the kernel does where memory runs out"
    else:
        message = f"ended with exit status {failure.exitcode}"
    return f"rank {rank} failed: {message}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
