"""Handles output to a pipe that may close early: `ndtrain checkpoint list runs | head -1`."""

import os
import sys
from collections.abc import Callable, Sequence

_SIGPIPE = 128 + 13  # the status that a shell reports for a program that wrote to a closed pipe


def status_of(main: Callable[[Sequence[str]], int]) -> int:
    """Run a command on this process's arguments. Return its exit status, or 141 if the reader of its output left."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python's flush at exit fails
        return _SIGPIPE
    return status
