"""The CPU cores that a process may use, and who has set its number of threads.

Nothing here imports PyTorch, because some commands start without it.
"""

import os

# environment variable that is set if `ndtrain torchrun`, and not the user, has set OMP_NUM_THREADS
THREADS_ARE_A_DEFAULT = "NDTRAIN_DEFAULT_THREADS"


def cpu_cores() -> int:
    """Return the number of cores that this process may use. If a batch system gives a job only some of a host's cores,
    only these count."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
