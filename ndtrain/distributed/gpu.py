"""Whose a GPU is: which one a rank has, and which one a thread's CUDA calls are for."""

import torch


def own_gpu(local_rank: int) -> int | None:
    """The index of a rank's GPU among those that its process sees; None: there is none for it. A process that sees one
    GPU has that one: Slurm shows each task its own, and there all have index 0."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        return 0
    return local_rank if local_rank < gpus else None


def use_gpu(device: torch.device | None) -> None:
    """Makes a GPU that of the calling thread; other devices and None change nothing.

    Every thread with CUDA calls, or with page-locked memory, begins with this. A thread starts on GPU 0, where its
    first call would create a context: half a gigabyte for each rank of the host.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
