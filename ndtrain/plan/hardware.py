"""Descriptions of hardware, shipped or written by the user: `hardware=h100`, `hardware=my_cluster.yaml`."""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ndtrain.arguments import near
from ndtrain.config import ConfigError
from ndtrain.plan.measured import Measured

_FOLDER = Path(__file__).parent / "hardware_specs"
_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp8")


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal hosts. A figure that is not listed is None.

    Attributes:
        name: name of the description.
        device: "cpu" or "cuda".
        memory_gb: memory of one device that a process can use, CUDA's context included, in 10^9 bytes.
        gpus_per_node: devices of one host.
        peak_tflops: precision -> dense matmul peak of one device.
        memory_gb_s: bandwidth of a device's memory.
        link_gb_s: bandwidth of one device to the other devices of its host, one direction.
        network_gb_s: bandwidth of one device to other hosts, one direction.
        island_gb_s: bandwidth from an island to the other islands, shared by all its ranks, one direction. None: the
            islands are in one cluster, and only `network_gb_s` limits each rank.
        island_latency_s: seconds until a byte of an island arrives at another one. None: the latency between hosts.
        rates: name in `price.Rates` -> value measured on these machines, which replaces the planner's. May be empty.
        measured: times measured on such a host (`plan calibrate`), used in place of the figures above.
    """

    name: str
    device: str
    memory_gb: float | None
    gpus_per_node: int
    peak_tflops: dict[str, float]
    memory_gb_s: float | None
    link_gb_s: float | None
    network_gb_s: float | None
    island_gb_s: float | None = None
    island_latency_s: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    measured: Measured | None = None


def known_hardware() -> list[str]:
    """Return the names of the shipped descriptions."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def description_path(name: str) -> Path:
    """Return the path of the shipped description with this name, or of this YAML file."""
    return Path(name).expanduser() if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"


def load_hardware(name: str) -> Hardware:
    """Load the shipped description with this name, or the description in this YAML file.

    Raises:
        ConfigError: there is none, or the file is no valid description. The message names the wrong key.
    """
    path = description_path(name)
    if path.parent == _FOLDER and name not in known_hardware():
        known = known_hardware()
        raise ConfigError(
            f"hardware={name}: no such description; {near(name, known)}known: {', '.join(known)}, or a file FILE.yaml"
        )
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it is not YAML"
        raise ConfigError(f"hardware={name}: cannot be read ({why}): give a description as YAML") from error
    if problem := _problem(read):
        raise ConfigError(f"hardware={name}: {problem}")
    measured = read.pop("measured", None)
    return Hardware(path.stem, **read, measured=_measured(name, measured) if measured is not None else None)


def _measured(name: str, read: Any) -> Measured:
    try:
        return Measured.of(read)
    except ConfigError as error:
        raise ConfigError(f"hardware={name}: {error}") from error


def _problem(read: Any) -> str:
    """Return what is wrong with a description, or "" if it is valid."""
    keys = [f.name for f in fields(Hardware) if f.name != "name"]
    optional = [f.name for f in fields(Hardware) if f.default is not MISSING or f.default_factory is not MISSING]
    if not isinstance(read, dict):
        return f"must be a mapping with the keys {', '.join(keys)}"
    for key in read:
        if key not in keys:
            return f"{key}: no such key; {near(str(key), keys)}known: {', '.join(keys)}"
    if missing := [key for key in keys if key not in read and key not in optional]:
        return f"{missing[0]} is missing; a description has {', '.join(keys)}"
    if read["device"] not in ("cpu", "cuda"):
        return f"device={read['device']}: must be cpu or cuda"
    if type(read["gpus_per_node"]) is not int or read["gpus_per_node"] < 1:
        return f"gpus_per_node={read['gpus_per_node']}: must be a whole number, at least 1"
    if not isinstance(read["peak_tflops"], dict):
        return "peak_tflops: must be a mapping from precision to TFLOP/s"
    if unknown := [p for p in read["peak_tflops"] if p not in _PRECISIONS]:
        return f"peak_tflops.{unknown[0]}: no such precision; known: {', '.join(_PRECISIONS)}"
    if not isinstance(read.get("rates", {}), dict):
        return "rates: must be a mapping from names of rates to numbers"
    rates = {key: read.get(key) for key in ("memory_gb", "memory_gb_s", "link_gb_s", "network_gb_s", "island_gb_s")}
    rates |= {f"peak_tflops.{p}": rate for p, rate in read["peak_tflops"].items()}
    for key, rate in rates.items():
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate < float("inf")):
            return f"{key}={rate}: must be a positive number, or null"
    added = {f"rates.{key}": rate for key, rate in read.get("rates", {}).items()}
    if (latency := read.get("island_latency_s")) is not None:
        added["island_latency_s"] = latency
    for key, rate in added.items():
        if type(rate) not in (int, float) or not 0 <= rate < float("inf"):
            return f"{key}={rate}: must be a number, at least 0"
    return ""
