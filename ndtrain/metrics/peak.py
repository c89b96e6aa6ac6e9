"""Peak FLOP/s of the device. MFU and HFU are fractions of it."""

import json
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ndtrain.config import HardwareConfig

# Dense peaks in TFLOP/s with fp32 accumulation, from the vendors' data sheets: (bf16, tf32, fp32). A device has the
# first row whose words all occur in its name, so variants come before the plain name.
_GPUS: list[tuple[str, float, float, float]] = [
    ("B300", 2250, 1125, 75),
    ("GB300", 2500, 1250, 80),
    ("GB200", 2500, 1250, 80),
    ("B200", 2250, 1125, 75),
    ("GH200", 989, 494, 67),
    ("H200 NVL", 836, 418, 60),
    ("H200", 989, 494, 67),
    ("H100 PCIe", 756, 378, 51),
    ("H100 NVL", 836, 418, 60),
    ("H100", 989, 494, 67),
    ("H800 PCIe", 756, 378, 51),
    ("H800", 989, 494, 67),
    ("H20", 148, 74, 44),
    ("A100", 312, 156, 19.5),
    ("A800", 312, 156, 19.5),
    ("A30", 165, 82, 10.3),
    ("A40", 150, 75, 37.4),
    ("A10", 125, 62.5, 31.2),
    ("A10G", 70, 35, 31.5),
    ("L40S", 362, 183, 91.6),
    ("L40", 181, 90.5, 90.5),
    ("L4", 121, 60, 30.3),
    ("RTX 5090", 209.5, 104.8, 104.8),
    ("RTX 4090", 165.2, 82.6, 82.6),
    ("RTX 3090", 71, 35.6, 35.6),
    ("RTX 6000 Ada", 364, 182, 91.1),
    ("RTX A6000", 155, 77.4, 38.7),
    ("V100 PCIE", 112, 14, 14),  # no bf16 units: the fp16 figure; no TF32 either
    ("V100", 125, 15.7, 15.7),
    ("T4", 65, 8.1, 8.1),
    ("MI300X", 1307, 654, 163),
]
_OTHER_CHIPS = {"MIG", "LAPTOP", "MOBILE", "TI", "D", "MAX"}  # slices and variants slower than the plain name
_BUDGET_S = 1.0  # duration of a measurement
_MIN_CORE_SHARE = 0.9  # a measurement with a smaller share of the cores is not cached


def peak_flops(hardware: HardwareConfig, device_type: str, dtype: torch.dtype) -> float:
    """Peak FLOP/s of one device for matmuls in `dtype`.

    It is `hardware.peak_tflops` if set. For a known GPU it is the figure of the data sheet; fp32 uses TF32's figure
    where `torch.set_float32_matmul_precision` allows TF32. Otherwise it is the best matmul rate measured on this
    machine in about a second, which is somewhat below a data sheet's figure. Measurements are cached in
    `peak_flops.json` of the cache folder ($NDTRAIN_CACHE, else ~/.cache/ndtrain), unless other programs used the cores
    meanwhile. So call it on one rank while the others wait.

    Args:
        hardware: the run's `hardware` group.
        device_type: "cpu" or "cuda" (the current device).
        dtype: compute precision. precision.compute=fp8 uses bf16's peak, so that a speed-up shows as a higher MFU and
            the figures of both are comparable (then an MFU above 1 is possible in principle).
    """
    if hardware.peak_tflops is not None:
        return hardware.peak_tflops * 1e12
    if device_type == "cuda":
        listed = _listed(torch.cuda.get_device_name(), dtype)
        if listed is not None:
            return listed
    return _cached(_key(device_type, dtype), lambda: _measure(device_type, dtype))


def _listed(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of the GPU called `name`, from the table; None if it is not in the table."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _OTHER_CHIPS or dtype not in (torch.bfloat16, torch.float32):
        return None
    for key, bf16, tf32, fp32 in _GPUS:
        if words >= set(key.upper().split()):
            full = tf32 if torch.get_float32_matmul_precision() != "highest" else fp32
            return (bf16 if dtype == torch.bfloat16 else full) * 1e12
    return None


def _measure(device_type: str, dtype: torch.dtype) -> tuple[float, float]:
    """(best FLOP/s, its share of the cores) over square matmuls. The size doubles while the next one fits the
    budget."""
    best, size, start = (0.0, 0.0), 256, time.perf_counter()
    left = _BUDGET_S
    while size <= 8192:
        rate, share = _matmul_rate(device_type, dtype, size, until=time.perf_counter() + left / 4)
        best = max(best, (rate, share))
        size *= 2
        left = _BUDGET_S - (time.perf_counter() - start)
        if 2 * (2 * size**3 / rate) > left:  # each size runs at least twice
            break
    return best


def _matmul_rate(device_type: str, dtype: torch.dtype, size: int, until: float) -> tuple[float, float]:
    """(best FLOP/s, share of the cores) of a [size, size] matmul, repeated until the time `until`, at least once after
    a warm-up. The share is the CPU time over the wall time of all threads. It is low if other programs use the
    cores."""
    a, b = (torch.randn(size, device=device_type).to(dtype).expand(size, size).contiguous() for _ in range(2))
    out = torch.empty_like(a)
    wait = torch.cuda.synchronize if device_type == "cuda" else lambda: None
    torch.mm(a, b, out=out)
    wait()
    shortest, began, cpu = float("inf"), time.perf_counter(), time.process_time()
    while True:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        wait()
        now = time.perf_counter()
        shortest = min(shortest, now - start)
        if now >= until:
            break
    share = (time.process_time() - cpu) / (now - began) / torch.get_num_threads() if device_type == "cpu" else 1.0
    return 2 * size**3 / shortest, share


# ----------------------------------------------------------------------------------------------------------- cache


def _key(device_type: str, dtype: torch.dtype) -> str:
    """The cache key of a measurement: everything it depends on."""
    if device_type == "cuda":
        device = f"{torch.cuda.get_device_name()}, {torch.get_float32_matmul_precision()}"
    else:
        device = f"{cpu_model()}, {torch.get_num_threads()} threads"
    return f"{device}, {dtype}, torch {torch.__version__}"


def cpu_model() -> str:
    """The name of the CPU."""
    try:
        line = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        line = None
    return line[1] if line else platform.processor() or platform.machine()


def _cached(key: str, measure: Callable[[], tuple[float, float]]) -> float:
    """The cached rate of `key`; else the measured one, which is cached if it had enough of the cores."""
    path = Path(os.environ.get("NDTRAIN_CACHE") or "~/.cache/ndtrain").expanduser() / "peak_flops.json"
    known = _read_cache(path)
    if key in known:
        return known[key]
    rate, share = measure()
    if share >= _MIN_CORE_SHARE:  # a figure from a busy machine would make every later MFU too high
        _write_cache(path, known | {key: rate})
    return rate


def _read_cache(path: Path) -> dict[str, float]:
    """The cached measurements; none if the file is missing or damaged."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, float) and v > 0} if isinstance(known, dict) else {}


def _write_cache(path: Path, known: dict[str, float]) -> None:
    """Replaces the cache by a rename, since other runs may read it. An OSError is ignored: a run can measure again."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
