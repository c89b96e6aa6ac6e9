"""Peak FLOP/s of the device. MFU and HFU are fractions of it."""

import logging
import re
from collections.abc import Callable

import torch

from ndtrain.config import HardwareConfig
from ndtrain.device.measured_peak import best_flops

log = logging.getLogger("ndtrain")

# Dense peaks in TFLOP/s with fp32 accumulation, from the vendors' data sheets: (bf16, tf32, fp32). A device uses the
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


def peak_flops(
    hardware: HardwareConfig, device_type: str, dtype: torch.dtype, note: Callable[[str], None] = log.info
) -> float:
    """Return the peak FLOP/s of one device for matmuls in `dtype`.

    It is `hardware.peak_tflops` if set. For a known GPU it is the figure of the data sheet; for fp32 it is TF32's
    figure if `torch.set_float32_matmul_precision` allows TF32.

    Otherwise it is the best matmul rate that a run has measured on this machine (`measured_peak`), somewhat below a
    data sheet's figure. It is cached in `peak_flops.json` of the cache folder ($NDTRAIN_CACHE, else ~/.cache/ndtrain).
    Call this function on one rank while the others wait.

    Args:
        hardware: the run's `hardware` group.
        device_type: "cpu" or "cuda" (the current device).
        dtype: compute precision. precision.compute=fp8 uses bf16's peak, so that a speed-up shows as a higher MFU and
            both figures are comparable (then an MFU above 1 is possible in principle).
        note: called with a line if a measured peak looks wrong or was raised.
    """
    if hardware.peak_tflops is not None:
        return hardware.peak_tflops * 1e12
    listed = _listed(torch.cuda.get_device_name(), dtype) if device_type == "cuda" else None
    return listed or best_flops(device_type, dtype, note)


def _listed(name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of the GPU called `name` from the table, or None if the GPU is not listed."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _OTHER_CHIPS or dtype not in (torch.bfloat16, torch.float32):
        return None
    for key, bf16, tf32, fp32 in _GPUS:
        if words >= set(key.upper().split()):
            full = tf32 if torch.get_float32_matmul_precision() != "highest" else fp32
            return (bf16 if dtype == torch.bfloat16 else full) * 1e12
    return None
