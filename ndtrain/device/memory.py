"""Peak and free memory of this process on its device."""

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

import torch

_PROC = Path("/proc/self")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes since the last reset. On CUDA it is the peak of PyTorch's allocator. On CPU it is
    the peak resident set size of the process, including code and libraries."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(re.search(r"^VmHWM:\s*(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)[1]) * 1024
    except (OSError, TypeError):  # no /proc, or one without the line
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak. On CPU this does nothing if the kernel does not allow it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        (_PROC / "clear_refs").write_text("5")  # 5: the peak resident set only (proc(5))
    except OSError:
        return


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated. On CUDA it is the free memory of the device.

    On CPU it is the available memory of the host or what is left of the container's limit, whichever is less. The
    processes of a host share it.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        free = _number(Path("/proc/meminfo"), r"^MemAvailable:\s*(\d+) kB") * 1024
    except (OSError, TypeError):  # no /proc: the memory of the machine
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, statistics in _CONTAINER:
        try:
            used = _number(_CGROUP / statistics, r"^(?:anon|total_rss) (\d+)$")
            free = min(free, _number(_CGROUP / limit, r"^(\d+)$") - used)
        except (OSError, TypeError):  # not this version of control groups, or no limit
            continue
    return free


def memory_limit_bytes() -> int:
    """Return the most bytes that all processes of this host or container can hold together. It is the host's memory
    plus swap, or the limit of a control group if that is lower."""
    try:
        sizes = (_number(Path("/proc/meminfo"), rf"^{key}:\s*(\d+) kB") * 1024 for key in ("MemTotal", "SwapTotal"))
        memory, swap = sizes
    except (OSError, TypeError):  # no /proc: the memory of the machine, and any swap
        return 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [memory + swap]
    for folder in _control_groups():
        for limit, of_swap in _LIMITS:
            try:
                limits.append(_number(folder / limit, r"^(\d+)$") + _limit_of_swap(folder / of_swap, swap))
            except (OSError, TypeError):  # not this version of control groups, or no limit
                continue
    return min(limits)


def _limit_of_swap(path: Path, swap: int) -> int:
    """Return the bytes of swap that a control group may use: all of it if the group sets no limit."""
    try:
        return min(swap, _number(path, r"^(\d+)$"))
    except (OSError, TypeError):
        return swap


def _control_groups() -> list[Path]:
    """Return the folders of this process's control group and of its parent groups."""
    try:
        paths = re.findall(r"^\d+:(|[^:\n]*\bmemory\b[^:\n]*):/(.*)$", (_PROC / "cgroup").read_text(), re.MULTILINE)
    except OSError:
        paths = []
    folders = [_CGROUP]
    for controller, path in paths:
        group = (_CGROUP / "memory" if controller else _CGROUP) / path
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(_CGROUP))]
    return list(dict.fromkeys([*folders, _CGROUP / "memory"]))


def _number(path: Path, pattern: str) -> int:
    """Return the number that the pattern's group matches in a file.

    Raises:
        OSError: the file cannot be read.
        TypeError: the pattern has no match.
    """
    return int(re.search(pattern, path.read_text(), re.MULTILINE)[1])


_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.swap.max"), ("memory.limit_in_bytes", "no such file"))  # control groups 2 and 1
_CONTAINER = (("memory.max", "memory.stat"), ("memory/memory.limit_in_bytes", "memory/memory.stat"))


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations. By default it returns the memory to the kernel. Each later
    use then causes page faults, which cost about 3 % of a step on CPU. Does nothing on other C libraries."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20)):
        mallopt(option, value)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h; 32 MiB is the largest mmap threshold


def grow_segments() -> None:
    """Make PyTorch's GPU allocator grow its segments instead of adding new ones. This wastes less memory in fragments
    that fit no tensor. Affects later allocations only. Does nothing if the user has configured the allocator."""
    if not os.environ.keys() & _ALLOCATOR_SETTINGS:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # torch has already read the environment


# PyTorch's variable, and the older name, which takes precedence on CUDA
_ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
