"""Answers two questions of the scripts in `launch/`: where the run folder is, and how the run ended.

python -m ndtrain.runtime.launch_query folder recipe=llama_small run.name=first      # prints run.dir
python -m ndtrain.runtime.launch_query ended runs/first 1                            # the status of a launch script
"""

import os
import signal
import sys
import time
from pathlib import Path

from ndtrain.config import ConfigError
from ndtrain.runtime import exit_status, folder_lock
from ndtrain.runtime.cli import plain_config
from ndtrain.runtime.run_owner import LAUNCH

POLL_S = 0.2  # interval at which the process of rank 0 is looked for
_KILLED = (exit_status.CODES["died"], 128 + signal.SIGKILL)  # a launcher whose rank, or which itself, was killed
_USAGE = "usage: python -m ndtrain.runtime.launch_query folder [OVERRIDES ...] | ended RUN_DIR STATUS"


def folder(overrides: list[str]) -> Path:
    """The run folder for these overrides, absolute. It needs neither torch nor a process group.

    Raises:
        ConfigError: an override is wrong.
    """
    return Path(plain_config(overrides).run.dir).absolute()


def ended(run_dir: Path, status: int) -> int:
    """The exit status of a launch script (`exit_status.CODES`) whose launcher ended with `status`. The error of the
    rank that failed, if any, is printed as the last lines on the console. An exit.json of another start says nothing:
    the run has not come to own its folder, since it was refused or killed. Ranks that have outlived their launcher are
    waited for."""
    ending = exit_status.read(run_dir)
    if ending is None or ending.launch != os.environ.get(LAUNCH, ending.launch):
        if status in _KILLED:
            return exit_status.CODES["died"]
        return 2 if status else 0
    if ending.why == "running":
        ending = _after_running(run_dir) or ending
    if ending.why == "running":
        print(f"the run was killed: {run_dir}/exit.json says that it is running", file=sys.stderr, flush=True)
    if ending.error:
        error = ending.error.rstrip()
        gap = "\n" if "\n" in error else " "  # a traceback, or one line
        print(f"rank {ending.rank} ended this run:{gap}{error}", file=sys.stderr, flush=True)
    return ending.code


def _after_running(run_dir: Path) -> exit_status.Exit | None:
    """Return exit.json once the process of rank 0 has ended. On another machine that cannot be known: then there is no
    wait."""
    told = False
    while _lives(run_dir):
        if not told:
            print("torchrun has ended without its ranks, which save and end now", file=sys.stderr, flush=True)
        told = True
        time.sleep(POLL_S)
    return exit_status.read(run_dir)


def _lives(run_dir: Path) -> bool:
    try:
        return folder_lock.owner_is_gone(run_dir) is False
    except OSError:
        return False


def main(args: list[str]) -> int:
    """Runs one command. Returns the exit status: 2 for bad arguments."""
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
