"""`ndtrain torchrun ...`: torchrun, with the run's own exit status, the error of the rank that failed in one line, and
nothing that listens beyond this machine where it is the only one.

usage: ndtrain torchrun [torchrun's options] -m ndtrain.train [KEY=VALUE ...]

  ndtrain torchrun --nproc-per-node 2 -m ndtrain.train recipe=llama_small mesh.fsdp=2
  ndtrain torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 --nproc-per-node 8 -m ndtrain.train ...

It starts, restarts and ends the ranks as torchrun does, whose options it takes. It differs in this:

- Its exit status is that of the run (docs/launch.md): 0, 1, 2, 75 or 85; of another program that of the rank that
  failed first.
- After a failure it prints the host's first failed rank and its error in one line, after Ctrl-C no traceback.
- On one host everything listens on loopback, whatever --rdzv-endpoint and --master-port say. On several hosts what
  comes over the network is not unpickled unless it is known to run no code. NDTRAIN_TOKEN, the same secret text on all
  hosts, makes the ranks ignore what others write into their store; NDTRAIN_INTERFACE says where to listen.
- It sets OMP_NUM_THREADS, unless it is set, to this host's cores divided by its ranks.

`torchrun --help` lists torchrun's options.
"""

import logging
import os
import secrets
import signal
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ndtrain.runtime import launcher  # first: it notes the parent, which may end while torch is imported

# isort: split
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ndtrain.arguments import wants_help
from ndtrain.config import ConfigError
from ndtrain.distributed.cores import THREADS_ARE_A_DEFAULT, cpu_cores
from ndtrain.runtime import agent_rendezvous, exit_status
from ndtrain.runtime.descriptors import raise_limit
from ndtrain.runtime.launcher_report import PRINTED, RUN_FOLDER_FILE, told_run_folder
from ndtrain.runtime.listeners import INTERFACE, choose_interface, interface_address
from ndtrain.runtime.run_owner import LAUNCH
from ndtrain.runtime.signed_store import TOKEN

_NO_ENDPOINT = "localhost:0"  # an empty one makes torchrun say that --master-addr is not used
_LOGGERS = (  # what they say of a failure is in the last line too
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)


def main(args: Sequence[str]) -> int:
    """Runs torchrun in this process. Returns the run's exit status; under a launch script, which looks up the status
    itself, torchrun's: 1 if a rank has failed, 128 + the signal after one."""
    if not args or wants_help(args[:1]):
        print((__doc__ or "").partition("\n\n")[2].strip(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = run.parse_args(list(args))
    set_threads(run.determine_local_world_size(options.nproc_per_node))
    by_script = LAUNCH in os.environ
    try:
        choose_rendezvous(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    with tempfile.TemporaryDirectory(prefix="ndtrain-launch-") as folder:
        os.environ[RUN_FOLDER_FILE] = str(Path(folder, "run-folder"))
        status = _run(options)
        return status if by_script else status_of_run(status, options.rdzv_id)


def choose_rendezvous(options: Namespace) -> None:
    """Replaces PyTorch's rendezvous by ours (`agent_rendezvous`), and sets what the ranks need to know of it in the
    environment: the launch's name, a token, interfaces. Other kinds of rendezvous stay.

    Args:
        options: torchrun's, which are changed.

    Raises:
        ConfigError: the chosen interface has no address.
    """
    agent_rendezvous.register()
    os.environ.setdefault(LAUNCH, f"{os.uname().nodename}-{os.getpid()}-{time.time():.6f}")
    one_host = run.parse_min_max_nnodes(options.nnodes)[1] == 1
    if not one_host and options.rdzv_backend == "c10d":
        options.rdzv_backend = agent_rendezvous.SEVERAL_HOSTS
        # else torchrun serves the ranks' store, on all interfaces
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        choose_interface(one_host=False)
        if not os.environ.get(TOKEN):
            note = (
                f"{TOKEN} is not set, so ranks believe whoever reaches their store: give all hosts the same secret text"
            )
            print(f"warning: {note} (docs/launch.md)", file=sys.stderr, flush=True)
        if name := os.environ.get(INTERFACE):
            options.local_addr = options.local_addr or interface_address(name)
    elif one_host and options.rdzv_backend in ("c10d", "static"):
        if options.standalone or options.rdzv_id == "none":
            options.rdzv_id = str(uuid.uuid4())
        options.standalone, options.rdzv_backend, options.rdzv_endpoint = False, agent_rendezvous.ONE_HOST, _NO_ENDPOINT
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
        choose_interface(one_host=True)


def _run(options: Namespace) -> int:
    """Runs torchrun. Returns 0, the status of the first rank that failed, or 128 + a signal that ended it."""
    launcher.name_torchrun()
    raise_limit()  # of torchrun itself, which has connections to all ranks, and of the ranks
    script = launcher.script_of_torchrun(os.environ.get(LAUNCH))
    try:
        with launcher.ends_with(script, "the launch script was killed: torchrun ends, and its ranks save and end"):
            run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if line := last_line(rank, failure):
            print(line, file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else exit_status.CODES["died"]
    except SignalException as stop:
        print(f"{stop.sigval.name}: every rank has ended", file=sys.stderr, flush=True)
        return 128 + stop.sigval
    return 0


def status_of_run(status: int, job: str) -> int:
    """The exit status of the run that this launcher has started, from its exit.json.

    Args:
        status: what the ranks have ended with. It stands where no rank came to own a run folder, where the run could
            not write how it ended, and after a signal that ended the run before it was saved.
        job: torchrun's id of the run.
    """
    folder = told_run_folder()
    ending = folder and exit_status.read(folder)
    if not ending or (ending.launch != os.environ[LAUNCH] and ending.job != job):
        return status
    unsaid = ending.why == "running"
    by_signal = status > 128 and ending.why not in ("stopped", "finished")
    return status if unsaid or by_signal else ending.code


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
