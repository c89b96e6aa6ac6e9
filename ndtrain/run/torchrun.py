"""`ndtrain torchrun ...`: torchrun with the run's exit status and one-line errors, on loopback only on a single host.

usage: ndtrain torchrun [torchrun's options] -m ndtrain.train [KEY=VALUE ...]

  ndtrain torchrun --nproc-per-node 2 -m ndtrain.train recipe=llama_small mesh.fsdp=2
  ndtrain torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 --nproc-per-node 8 -m ndtrain.train ...

It starts, restarts and ends the ranks like torchrun, and accepts the same options. The differences are:

- Its exit status is the exit status of the run (docs/launch.md): 0, 1, 2, 75 or 85. For other programs it is the status
  of the rank that failed first.
- After a failure it prints one line with the host's first failed rank and its error. After Ctrl-C it prints no
  traceback.
- On one host all sockets listen on loopback, and --rdzv-endpoint and --master-port have no effect. On several hosts,
  data from the network is unpickled only if it cannot run code. NDTRAIN_TOKEN, the same secret text on all hosts, makes
  the ranks ignore messages from strangers in their store. NDTRAIN_INTERFACE selects the network interface.
- It sets OMP_NUM_THREADS to the number of this host's cores divided by its ranks, unless the variable is already set.

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

from ndtrain.run import launcher  # first: it records the parent process, which may end while torch is imported

# isort: split
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ndtrain.arguments import wants_help
from ndtrain.config import ConfigError
from ndtrain.device.cores import THREADS_ARE_A_DEFAULT, cpu_cores
from ndtrain.device.process_owner import LAUNCH
from ndtrain.run import agent_rendezvous, exit_status
from ndtrain.run.descriptors import raise_limit
from ndtrain.run.launcher_report import PRINTED, RUN_FOLDER_FILE, told_run_folder
from ndtrain.run.listeners import INTERFACE, choose_interface, interface_address
from ndtrain.run.signed_store import TOKEN

_NO_ENDPOINT = "localhost:0"  # with an empty endpoint, torchrun prints that --master-addr is not used
_LOGGERS = (  # silenced, because the last line already reports the failure
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)


def main(args: Sequence[str]) -> int:
    """Run torchrun in this process, and return the run's exit status.

    Under a launch script, return the result of `_run` instead, because the script looks up the run's status itself.
    """
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
    """Replace PyTorch's rendezvous by ndtrain's (`agent_rendezvous`), and set the environment that the ranks need.

    The variables are the launch id, the token and the network interfaces. Other rendezvous backends are not replaced.

    Args:
        options: torchrun's options, which are changed in place.

    Raises:
        ConfigError: the chosen interface has no address.
    """
    agent_rendezvous.register()
    os.environ.setdefault(LAUNCH, f"{os.uname().nodename}-{os.getpid()}-{time.time():.6f}")
    one_host = run.parse_min_max_nnodes(options.nnodes)[1] == 1
    if not one_host and options.rdzv_backend == "c10d":
        options.rdzv_backend = agent_rendezvous.SEVERAL_HOSTS
        # otherwise torchrun would serve the ranks' store on all interfaces
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        choose_interface(one_host=False)
        if not os.environ.get(TOKEN):
            note = f"{TOKEN} is not set, so ranks trust all processes that reach their store: set it on all hosts"
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
    """Run torchrun. Return 0, the status of the first failed rank, or 128 + the signal that ended torchrun.

    If a signal has killed the first failed rank, return the status of "died".
    """
    launcher.name_torchrun()
    raise_limit()  # for torchrun itself, which has connections to all ranks, and for the ranks
    script = launcher.script_of_torchrun(os.environ.get(LAUNCH))
    try:
        with launcher.ends_with(script, "the launch script was killed: torchrun ends, and its ranks save and end"):
            run.run(options)
    except ChildFailedError as error:
        rank, failure = first_to_end(error)
        if line := last_line(rank, failure):
            print(line, file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else exit_status.CODES["died"]
    except SignalException as stop:
        print(f"{stop.sigval.name}: every rank has ended", file=sys.stderr, flush=True)
        return 128 + stop.sigval
    return 0


def first_to_end(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the rank with the first error, and its failure.

    torchrun sends SIGTERM to the other ranks when one has failed. It may end a rank that has reported its error, even
    the first one, and is exiting. Such a rank counts only if all were ended so.
    """
    ended = {rank: f for rank, f in error.failures.items() if f.exitcode != -signal.SIGTERM}
    return ChildFailedError(error.name, ended or error.failures).get_first_failure()


def status_of_run(status: int, job: str) -> int:
    """Return the exit status of the run that this launcher has started, from its exit.json.

    Args:
        status: the result of `_run`. It is returned if no rank owned a run folder, or if exit.json does not describe
            the end of the run. It is also returned if a signal ended the run before it was saved.
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
    """Set OMP_NUM_THREADS for the ranks of this host, unless it is already set."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cpu_cores() // ranks))
        os.environ[THREADS_ARE_A_DEFAULT] = "1"  # tells the ranks that they may use fewer threads for a small model


def last_line(rank: int, failure: ProcessFailure) -> str:
    """Return a line with the first failed rank of this host and the reason; "" if the rank has printed it already."""
    message = failure.message
    if isinstance(message, dict):
        if failure.local_rank == 0 and message.get("extraInfo", {}).get(PRINTED):
            return ""
        message = str(message.get("message", "no message"))
    elif failure.exitcode < 0:
        message = f"ended by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            message += ", possibly because the host ran out of memory"
    else:
        message = f"ended with exit status {failure.exitcode}"
    return f"rank {rank} failed: {message}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
