"""Measures the matmul rate of a device that no data sheet lists. The best rate of all runs is cached."""

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ndtrain.config.json_file import JsonError, read_object
from ndtrain.device.cores import cpu_cores

WHOLE_S = 0.9  # duration of a full measurement over all sizes, including its warm-up
BRIEF_S = 0.15  # duration of a brief check of the cached rate
_WARM_UP_S = 0.1  # until clocks have ramped up and memory is allocated
_SIZES = (256, 8192)
_REACHED = 3  # matmuls that have to reach the rate, since a single fast one may be a jump of the clock
_ENOUGH = 3  # full measurements, after which brief checks suffice even on a machine that is never idle
_MIN_CORE_SHARE = 0.9  # below this share of the CPU time, other programs used the cores
# Median over best matmul time: at most _EVEN if nothing interrupted a single thread; above _MAX_SPREAD it is doubtful
_EVEN, _MAX_SPREAD = 1.1, 1.3
_RAISED, _SLOW = 1.05, 0.7  # ratios to the cached rate beyond which the user is informed

Note = Callable[[str], None]


@dataclass(frozen=True)
class Measurement:
    """The best rate that square matmuls have reached.

    Attributes:
        flops: FLOP/s.
        size: rows and columns of the matrices that reached this rate.
        share: CPU time over wall time of all threads. It is low if other programs use the cores. 1 on a GPU.
        spread: median time of a matmul over the best time, at that size.
        threads: threads that share a matmul. If one is interrupted, the others wait, so every matmul may be slow.
    """

    flops: float
    size: int
    share: float = 1.0
    spread: float = 1.0
    threads: int = 1

    @property
    def doubt(self) -> str:
        """The reason why the rate may be too low, in words. Empty if nothing disturbed the measurement."""
        if self.share < _MIN_CORE_SHARE and (self.spread > _EVEN or self.threads > 1):
            remedy = "stop them"
            if self.threads > 1:
                remedy += " or set hardware.threads=1, because all threads of a rank wait for one without a core"
            return f"other programs used {100 * (1 - self.share):.0f} % of its cores' time: {remedy}"
        if self.spread > _MAX_SPREAD:
            return f"the median matmul took {self.spread:.1f} times as long as the best"
        return ""


@dataclass(frozen=True)
class Kept:
    """The best rate so far, as stored in the cache.

    Attributes:
        flops, size: as in `Measurement`.
        measured: the number of full measurements.
        settled: True if one measurement was undisturbed, or if there were enough full measurements.
    """

    flops: float
    size: int
    measured: int
    settled: bool


def best_flops(device_type: str, dtype: torch.dtype, note: Note) -> float:
    """Return the best FLOP/s of square matmuls in `dtype` that any run on this machine has reached.

    The first run measures for about a second: a warm-up, then doubling sizes, each many times. The cached rate is one
    that three matmuls have reached. If a run finds a settled rate, it checks it in 0.15 s and raises it if the machine
    is faster now.

    Args:
        note: called with a line if the rate looks wrong or was raised.
    """
    path = Path(os.environ.get("NDTRAIN_CACHE") or "~/.cache/ndtrain").expanduser() / "peak_flops.json"
    key = _key(device_type, dtype)
    kept = _read_cache(path).get(key)
    size = kept.size if kept and kept.settled else None
    made = measure(device_type, dtype, size)
    message = _message(kept, made)
    if message:
        note(message)
    best = updated(kept, made, whole=size is None)
    if best != kept:
        _write_cache(path, key, best)
    return best.flops


def updated(kept: Kept | None, made: Measurement, whole: bool) -> Kept:
    """Return the cache entry after a measurement, with the better of the two rates."""
    measured = (kept.measured if kept else 0) + whole
    settled = bool(kept and kept.settled) or not made.doubt or measured >= _ENOUGH
    if kept and kept.flops >= made.flops:
        return Kept(kept.flops, kept.size, measured, settled)
    return Kept(made.flops, made.size, measured, settled)


def _message(kept: Kept | None, made: Measurement) -> str:
    """Return a message for the user about a measurement, or "" if nothing is remarkable."""
    rate = lambda flops: f"{flops / 1e12:.3g} TFLOP/s"
    if kept and made.flops > _RAISED * kept.flops:
        return (
            f"the measured peak of this device is now {rate(made.flops)}, earlier runs used {rate(kept.flops)}: "
            f"their MFU is {made.flops / kept.flops:.2g} times too high"
        )
    if kept and made.flops < _SLOW * kept.flops:
        why = f" ({made.doubt})" if made.doubt else ""
        return (
            f"this device now reaches {rate(made.flops)} in matmuls{why}, {100 * made.flops / kept.flops:.0f} % of "
            f"its best measured peak {rate(kept.flops)}, which MFU is relative to: set hardware.peak_tflops to "
            "change it"
        )
    if made.doubt and not (kept and kept.settled):
        return (
            f"the peak of this device was measured as {rate(max(made.flops, kept.flops if kept else 0))}, but "
            f"{made.doubt}; MFU may be too high until a later run measures a better peak. Set hardware.peak_tflops "
            "to fix it now"
        )
    return ""


# ----------------------------------------------------------------------------------------------------- measurement


def measure(device_type: str, dtype: torch.dtype, size: int | None = None) -> Measurement:
    """Measure square matmuls after a warm-up.

    Args:
        size: None: the size doubles while the next one fits into `WHOLE_S`, and the best one counts. Otherwise only
            this size, for `BRIEF_S`.
    """
    end = time.perf_counter() + (WHOLE_S if size is None else BRIEF_S)
    if size is not None:
        return _measure_size(device_type, dtype, size, end)
    _measure_size(device_type, dtype, _SIZES[0], time.perf_counter() + _WARM_UP_S)
    best, size = Measurement(0.0, 0), _SIZES[0]
    while True:
        now = time.perf_counter()
        made = _measure_size(device_type, dtype, size, now + (end - now) / 3)
        best = max(best, made, key=lambda m: m.flops)
        size *= 2
        expected = (_REACHED + 1) * 2 * size**3 / made.flops  # including the warm-up of that size
        if size > _SIZES[1] or time.perf_counter() + expected > end:
            return best


def _measure_size(device_type: str, dtype: torch.dtype, size: int, until: float) -> Measurement:
    """Multiply [size, size] matrices until the time `until`, at least three times after a warm-up."""
    a, b = (torch.randn(size, device=device_type).to(dtype).expand(size, size).contiguous() for _ in range(2))
    out = torch.empty_like(a)
    wait = torch.cuda.synchronize if device_type == "cuda" else lambda: None
    torch.mm(a, b, out=out)
    wait()
    seconds: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    now = began
    while now < until or len(seconds) < _REACHED:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        wait()
        now = time.perf_counter()
        seconds.append(now - start)
    threads = torch.get_num_threads() if device_type == "cpu" else 1
    share = (time.process_time() - cpu) / (now - began) / threads if device_type == "cpu" else 1.0
    flops = 2 * size**3 / sorted(seconds)[_REACHED - 1]
    return Measurement(flops, size, min(share, 1.0), statistics.median(seconds) / min(seconds), threads)


# ----------------------------------------------------------------------------------------------------------- cache


def _key(device_type: str, dtype: torch.dtype) -> str:
    """Return the cache key of a rate, with everything that the rate depends on."""
    if device_type == "cuda":
        device = f"{torch.cuda.get_device_name()}, {torch.get_float32_matmul_precision()}"
    else:
        device = f"{cpu_model()}, {cpu_cores()} cores, {torch.get_num_threads()} threads"
    return f"{device}, {dtype}, torch {torch.__version__}"


def cpu_model() -> str:
    """Return the name of the CPU."""
    try:
        line = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        line = None
    return line[1] if line else platform.processor() or platform.machine()


def _read_cache(path: Path) -> dict[str, Kept]:
    """Return the cached rates, or none if the file is missing or damaged. Skips entries of another version."""
    try:
        known = read_object(path)
    except JsonError:
        return {}
    return {key: kept for key, value in known.items() if (kept := _read(value))}


def _read(value: Any) -> Kept | None:
    try:
        kept = Kept(**value)
        return kept if kept.flops > 0 and kept.size > 0 else None
    except TypeError:
        return None


def _write_cache(path: Path, key: str, best: Kept) -> None:
    """Replace the cache by a rename, since other runs may read it. Ignores an OSError: a run can measure again."""
    known = _read_cache(path)
    if key in known and known[key].flops > best.flops:  # another run measured it meanwhile
        best = known[key]
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({k: asdict(v) for k, v in (known | {key: best}).items()}, indent=1))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
