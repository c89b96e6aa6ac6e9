"""Reports from a rank to its launcher.

torchrun gets the cause of a failure, as the line at the end of its summary. `ndtrain torchrun` gets the path of the run
folder.
"""

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from ndtrain.config import world_from_env
from ndtrain.run.stop_signals import REPEAT_S

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # variable with the path of a rank's error file, set by torchrun
RUN_FOLDER_FILE = "NDTRAIN_RUN_FOLDER_FILE"  # variable with the path of a file that gets the path of the run folder
PRINTED = "printed"  # key in the error file: True if local rank 0 prints the same line


def record_error(error: BaseException | str) -> None:
    """Write the error as a line into torchrun's error file of this rank, unless the file exists already.

    Do nothing without torchrun.

    Args:
        error: the line, or an exception to describe by type, text and place.
    """
    file = os.environ.get(ERROR_FILE)
    if not file:
        return
    line = error if isinstance(error, str) else describe(error)
    # torchrun prints `py_callstack`. It reports the rank with the smallest timestamp, in whole seconds, as the cause.
    # Among equal timestamps it takes the first, which may be a rank that torchrun itself ended in the same second.
    more = {"py_callstack": line, "timestamp": str(int(time.time()) - 1), PRINTED: isinstance(error, str)}
    content = {"message": line, "extraInfo": more}
    try:
        with Path(file).open("x") as out:
            json.dump({"message": content}, out)
    except OSError:  # the file already holds the first error, or torchrun has ended and removed its folder
        pass


def print_error(line: str) -> None:
    """Report the line to torchrun and print it, usually once per host.

    The ranks of a host usually have the same error, and torchrun ends all of them when the first one exits. Local rank
    0 prints at once. The others wait first, and print if they are still running.
    """
    rank, local_rank, _ = world_from_env()
    record_error(line)
    if local_rank > 0:
        time.sleep(REPEAT_S * 3)
    print(f"error: {line}" if rank == 0 else f"error (rank {rank}): {line}", file=sys.stderr, flush=True)


def tell_run_folder(run_dir: Path) -> None:
    """Report the path of the run folder to `ndtrain torchrun`. Its exit.json must already be from this run."""
    if file := os.environ.get(RUN_FOLDER_FILE):
        with suppress(OSError):  # the launcher has ended and removed its folder
            Path(file).write_text(str(run_dir.absolute()))


def told_run_folder() -> Path | None:
    """Return the run folder that a rank has reported to this launcher; None if no rank has."""
    try:
        return Path(Path(os.environ[RUN_FOLDER_FILE]).read_text())
    except OSError:
        return None


def describe(error: BaseException) -> str:
    """Return the exception as one line: `RuntimeError: text (file.py:12, in function)`."""
    text = (str(error).strip().splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}{': ' * bool(text)}{text}{place}"
