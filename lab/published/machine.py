"""The hardware of a published run, from its `gpu` column and its notes about memory and network."""

import re
from dataclasses import replace
from typing import Any, NamedTuple

from lab.published.cells import Row, number, text
from ndtrain.config import ConfigError
from ndtrain.plan.hardware import Hardware, known_hardware, load_hardware


class _Like(NamedTuple):
    """A device that differs from a shipped description in some figures of its data sheet."""

    name: str  # a regular expression
    base: str
    changes: dict[str, Any]


# The first match counts. Bandwidths are of one device in one direction, peaks are dense.
GIB = 2**30
_DEVICES = (
    _Like(r"GB200", "b200", {"bf16": 2500, "memory_gb": 186, "gpus_per_node": 72}),
    _Like(r"B200", "b200", {}),
    _Like(r"GH200", "h100", {"memory_gb": 96, "memory_gb_s": 4000, "gpus_per_node": 4, "network_gb_s": 25}),
    _Like(r"H800", "h100", {"link_gb_s": 200}),
    _Like(r"H20\b", "h100", {"bf16": 148, "memory_gb": 96, "memory_gb_s": 4000}),
    _Like(r"H200", "h200", {}),
    _Like(r"H100.*PCIe", "h100", {"bf16": 756, "memory_gb_s": 2000, "link_gb_s": 64}),
    _Like(r"H100", "h100", {}),
    _Like(r"A800", "a100", {"link_gb_s": 200}),
    _Like(r"A100.*40 ?GB.*PCIe|A100.*PCIe.*40 ?GB", "a100", {"memory_gb": 40, "memory_gb_s": 1555, "link_gb_s": 32}),
    _Like(r"A100.*PCIe", "a100", {"memory_gb_s": 1935, "link_gb_s": 32}),
    _Like(r"A100.*40 ?GB", "a100", {"memory_gb": 40, "memory_gb_s": 1555}),
    _Like(r"A100", "a100", {}),
    _Like(
        r"V100",
        "a100",
        {"bf16": 125, "memory_gb": 32, "memory_gb_s": 900, "link_gb_s": 150, "network_gb_s": 6.25},
    ),  # fp16 counts as bf16; DGX-1V: four adapters of 100Gb/s
    _Like(r"MI300X", "h100", {"bf16": 1307, "memory_gb": 192, "memory_gb_s": 5300, "link_gb_s": 448}),
    _Like(
        r"MI250X?",
        "a100",
        {"bf16": 191.5, "memory_gb": 64, "memory_gb_s": 1600, "link_gb_s": 50, "network_gb_s": 12.5},
    ),  # one of its two dies, as programs see it; Frontier: four adapters of 200Gb/s for eight dies
)

# The first number in `AllReduce 160 intra 450 GB/s` is the bus bandwidth measured over the run's hosts. The devices of
# a host share it. Below a quarter of the listed bandwidth, messages were probably small: it counts as a quarter.
_MEASURED = re.compile(r"AllReduce ([\d.]+) intra [\d.]+ ?GB/s")


def hardware_of(row: Row) -> Hardware:
    """Return the hardware of a row.

    The `gpu` column names a device and may state its memory (96GB), the devices per host (4 per node) and PCIe in place
    of NVLink. `peak_tflops` is the peak of the device in 16 bits, or in fp8 if it is nearer to the fp8 peak. The notes
    may state the bandwidth of the memory (2.4TB/s) and of the network (`_network`).

    Raises:
        ConfigError: the device is unknown.
    """
    gpu, notes = text(row, "gpu"), text(row, "notes")
    device = next((d for d in _DEVICES if re.search(d.name, gpu, re.IGNORECASE)), None)
    if device is None:
        known = [name for name in known_hardware() if name != "cpu"]
        raise ConfigError(f"gpu={gpu}: no description of this device; known: {', '.join(known)} and their variants")
    hardware = load_hardware(device.base)
    changes = {key: value for key, value in device.changes.items() if key != "bf16"}
    if stated := re.search(r"(\d+) ?GB", gpu, re.IGNORECASE):
        changes["memory_gb"] = float(stated[1])
    if "memory_gb" in changes:
        changes["memory_gb"] *= GIB / 1e9  # a device sold with 80 GB has 80 GiB
    if stated := re.search(r"(\d+) per node", gpu, re.IGNORECASE):
        changes["gpus_per_node"] = int(stated[1])
    if stated := re.search(r"([\d.]+) ?TB/s", notes):
        changes["memory_gb_s"] = 1000 * float(stated[1])
    changes["peak_tflops"] = _peaks(hardware, device.changes.get("bf16"), number(row, "peak_tflops"))
    gpus, listed = changes.get("gpus_per_node", hardware.gpus_per_node), changes.get("network_gb_s")
    changes["network_gb_s"] = _network(notes, gpus, listed or hardware.network_gb_s or 0.0)
    if measured := _MEASURED.search(notes):
        share = float(measured[1]) / gpus / changes["network_gb_s"]
        changes["rates"] = {"network": min(1.0, max(0.25, share))}
    return replace(hardware, name=gpu.lower(), **changes)


def _peaks(hardware: Hardware, bf16: float | None, stated: float | None) -> dict[str, float]:
    """Return the peaks of a device, scaled to `bf16` (None: as described) or to the peak that the row states. All
    tensor peaks scale by the same factor."""
    peaks = dict(hardware.peak_tflops)
    usual = bf16 or peaks["bf16"]
    fp8 = "fp8" in peaks and stated is not None and stated > 1.5 * usual
    scale = (stated / (2 if fp8 else 1) if stated else usual) / peaks["bf16"]
    return {
        precision: peak * (scale if precision in ("bf16", "fp8", "tf32") else 1) for precision, peak in peaks.items()
    }


def _network(notes: str, gpus_per_node: int, listed: float) -> float:
    """Return GB/s of one device to other hosts as stated in the notes, or else as listed.

    `400Gb/s RDMA per GPU` is the rate of a device. A rate without "per GPU" is the rate of a host. `4x` before a rate
    means four adapters of this rate."""
    stated = re.search(r"(?:(\d+) ?x [\w -]*?)?([\d.]+) ?(?:Gb/s|Gbps|Gbit/s)([^;,.]*)", notes)
    if stated is None:
        return listed
    adapters, rate, of = int(stated[1] or 1), float(stated[2]), stated[3]
    devices = 1 if re.search(r"(per |/ ?)(GPU|device)", of, re.IGNORECASE) else gpus_per_node
    return adapters * rate / 8 / devices
