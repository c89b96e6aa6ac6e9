"""What a rank tells its launcher: torchrun why it failed, in the line that it shows at the end of its summary, and
`ndtrain torchrun` which run folder is the run's."""

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from ndtrain.config import world_from_env
from ndtrain.runtime.stop_signals import REPEAT_S

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun names a file for each rank here
RUN_FOLDER_FILE = "NDTRAIN_RUN_FOLDER_FILE"  # `ndtrain torchrun` names a file for the run folder here
PRINTED = "printed"  # in the file: whether local rank 0 prints the same line


def record_error(error: BaseException | str) -> None:
    """Writes the line into the file that torchrun has named for this rank, unless it holds one already. Does nothing
    without torchrun.

    Args:
        error: an exception, of which the line names type, text and place; or the line itself.
    """
    file = os.environ.get(ERROR_FILE)
    if not file:
        return
    line = error if isinstance(error, str) else describe(error)
    # torchrun prints `py_callstack`. It takes the rank with the smallest timestamp, in whole seconds, for the one at
    # fault; of several the first, which may be one that it has itself ended within the same second
    more = {"py_callstack": line, "timestamp": str(int(time.time()) - 1), PRINTED: isinstance(error, str)}
    content = {"message": line, "extraInfo": more}
    try:
        with Path(file).open("x") as out:
            json.dump({"message": content}, out)
    except OSError:  # the first error is there, or torchrun has gone and its folder with it
        pass


def print_error(line: str) -> None:
    """Tell torchrun the line and print it, in general once per host.

    The ranks of a host mostly have the same error, and torchrun ends all of them when the first one exits. Local rank 0
    prints at once; the others wait, and print if they still run.
    """
    rank, local_rank, _ = world_from_env()
    record_error(line)
    if local_rank > 0:
        time.sleep(REPEAT_S * 3)
    print(f"error: {line}" if rank == 0 else f"error (rank {rank}): {line}", file=sys.stderr, flush=True)


def tell_run_folder(run_dir: Path) -> None:
    """Writes the run folder, whose exit.json is this run's by now, into the file that `ndtrain torchrun` has named."""
    if file := os.environ.get(RUN_FOLDER_FILE):
        with suppress(OSError):  # the launcher has gone, and its folder with it
            Path(file).write_text(str(run_dir.absolute()))


def told_run_folder() -> Path | None:
    """What a rank has told this launcher; None: no rank has."""
    try:
        return Path(Path(os.environ[RUN_FOLDER_FILE]).read_text())
    except OSError:
        return None


def describe(error: BaseException) -> str:
    """The exception in one line: `RuntimeError: text (file.py:12, in function)`."""
    text = (str(error).strip().splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}{': ' * bool(text)}{text}{place}"
