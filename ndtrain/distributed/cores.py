"""How many cores a process has. Nothing here imports PyTorch, which some commands start without."""

import os


def cpu_cores() -> int:
    """How many cores this process may use: where a batch system gives a job some of a host's, only those."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
