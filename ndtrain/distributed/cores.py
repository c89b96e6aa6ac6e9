"""How many cores a process has, and who has set its number of threads.

Nothing here imports PyTorch, which some commands start without.
"""

import os

# in the environment where `ndtrain torchrun`, and not the user, has set OMP_NUM_THREADS
THREADS_ARE_A_DEFAULT = "NDTRAIN_DEFAULT_THREADS"


def cpu_cores() -> int:
    """How many cores this process may use: where a batch system gives a job some of a host's, only those."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
