"""Peak memory of this process on its device."""

import ctypes
import re
import resource
import sys
from pathlib import Path

import torch

_PROC = Path("/proc/self")


def peak_memory_bytes(device: torch.device) -> int:
    """Bytes at the highest point since the last reset: of PyTorch's allocator on CUDA, of the resident process on
    CPU (its high-water mark, code and libraries included)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(re.search(r"^VmHWM:\s*(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)[1]) * 1024
    except (OSError, TypeError):  # no /proc, or one without the line
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new high-water mark. Where the kernel does not allow it on CPU, the mark stays that of the process's
    whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        (_PROC / "clear_refs").write_text("5")  # 5: the peak resident set only (proc(5))
    except OSError:
        return


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed for the next allocation instead of giving it back to the kernel, which would
    hand the same pages out again one fault at a time: about 3 % of a step on CPU. Does nothing elsewhere."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20)):
        mallopt(option, value)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h; 32 MiB is the largest mmap threshold
