"""Peak memory of this process on its device."""

import ctypes
import os
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


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: on CUDA what the device says; on CPU what the kernel calls available, or what
    programs leave of the container's limit where that is less. The processes of a host share it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        free = _number(Path("/proc/meminfo"), r"^MemAvailable:\s*(\d+) kB") * 1024
    except (OSError, TypeError):  # no /proc: all that the machine has
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, statistics in _CONTAINER:
        try:
            used = _number(_CGROUP / statistics, r"^(?:anon|total_rss) (\d+)$")
            free = min(free, _number(_CGROUP / limit, r"^(\d+)$") - used)
        except (OSError, TypeError):  # not this version of control groups, or no limit
            continue
    return free


def _number(path: Path, pattern: str) -> int:
    return int(re.search(pattern, path.read_text(), re.MULTILINE)[1])


_CGROUP = Path("/sys/fs/cgroup")
_CONTAINER = (("memory.max", "memory.stat"), ("memory/memory.limit_in_bytes", "memory/memory.stat"))


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
