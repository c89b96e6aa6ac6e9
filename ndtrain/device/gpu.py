"""The GPU of a rank, and the GPU that a thread's CUDA calls use."""

import torch


def own_gpu(local_rank: int) -> int | None:
    """Return the index of this rank's GPU among the GPUs that its process sees, or None if it has none. If the process
    sees one GPU, that GPU is the rank's: Slurm shows each task only its own, and on each of them it has index 0."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        return 0
    return local_rank if local_rank < gpus else None


def use_gpu(device: torch.device | None) -> None:
    """Make a GPU the current device of the calling thread. Other devices and None change nothing.

    Every thread that makes CUDA calls, or uses page-locked memory, calls this first. A thread starts on GPU 0, where
    its first CUDA call would create a context: half a gigabyte for each rank of the host.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
