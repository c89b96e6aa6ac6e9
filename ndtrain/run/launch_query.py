"""Commands for the scripts in `launch/`: print the path of the run folder, and report how the run ended.

python -m ndtrain.run.launch_query folder recipe=llama_small run.name=first      # prints run.dir
python -m ndtrain.run.launch_query ended runs/first 1                            # the status of a launch script
"""

import os
import signal
import sys
import time
from pathlib import Path

from ndtrain.config import ConfigError
from ndtrain.device.process_owner import LAUNCH
from ndtrain.run import exit_status, folder_lock
from ndtrain.run.cli import plain_config

POLL_S = 0.2  # interval of the checks for the process of rank 0
_KILLED = (exit_status.CODES["died"], 128 + signal.SIGKILL)  # statuses if a rank or the launcher itself was killed
_USAGE = "usage: python -m ndtrain.run.launch_query folder [OVERRIDES ...] | ended RUN_DIR STATUS"


def folder(overrides: list[str]) -> Path:
    """Return the absolute path of the run folder for these overrides. Needs neither torch nor a process group.

    Raises:
        ConfigError: an override is wrong.
    """
    return Path(plain_config(overrides).run.dir).absolute()


def ended(run_dir: Path, status: int) -> int:
    """Return the exit status of a launch script (`exit_status.CODES`) whose launcher ended with `status`.

    Print the error of the failed rank, if any, as the last lines on the console. An exit.json from another start is
    ignored: the run was refused or killed before it owned its folder. Wait for ranks that outlive their launcher.
    """
    ending = exit_status.read(run_dir)
    if ending is None or ending.launch != os.environ.get(LAUNCH, ending.launch):
        if status in _KILLED:
            return exit_status.CODES["died"]
        return 2 if status else 0
    if ending.why == "running":
        ending = _after_running(run_dir) or ending
    if ending.why == "running":
        print(f"the run was killed: {run_dir}/exit.json still has the status running", file=sys.stderr, flush=True)
    if ending.error:
        error = ending.error.rstrip()
        gap = "\n" if "\n" in error else " "  # a traceback, or one line
        print(f"rank {ending.rank} ended this run:{gap}{error}", file=sys.stderr, flush=True)
    return ending.code


def _after_running(run_dir: Path) -> exit_status.Exit | None:
    """Wait until the process of rank 0 has ended, and return the content of exit.json.

    Do not wait if rank 0 runs on another machine, because its process cannot be checked from here.
    """
    told = False
    while _lives(run_dir):
        if not told:
            print("torchrun has ended before its ranks, which save and end now", file=sys.stderr, flush=True)
        told = True
        time.sleep(POLL_S)
    return exit_status.read(run_dir)


def _lives(run_dir: Path) -> bool:
    try:
        return folder_lock.owner_is_gone(run_dir) is False
    except OSError:
        return False


def main(args: list[str]) -> int:
    """Run one command and return the exit status, which is 2 for invalid arguments."""
    match args:
        case ["folder", *overrides]:
            try:
                if not overrides:
                    raise ConfigError("nothing to train: name a recipe, e.g. recipe=llama_small")
                print(folder(overrides))
            except ConfigError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            return 0
        case ["ended", run_dir, status] if status.lstrip("-").isdigit():
            return ended(Path(run_dir), int(status))
    print(_USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
