"""The measurements of `plan calibrate` on a machine: seconds of kernels and of collectives, and how to interpolate them
between the measured sizes.

The plain form is the section `measured` of a hardware description:

    cores: 2
    kernels:
      1:
        matmul: {fp32: [[1, 1024, 256, 256, 7.9e-4]]}
        attention: {"_scaled_dot_product_flash_attention fp32": [[8, 8, 128, 128, 32, 17039360, 1.2e-3]]}
        memory: {"mul fp32": [[4096, 2.0e-6], [1048576, 7.3e-5]]}
    collectives:
      all_gather: {"2 of 2": [[4096, 9.0e-5]]}

A key under `kernels` is the number of ranks that computed at the same time. The last number of a point is its seconds.
The numbers before it are a matmul's batch, M, N and K, an attention's shape and FLOPs, or bytes for everything else.
"2 of 4" is a group of 2 ranks on a mesh of 4, whose groups all communicated at the same time.
"""

import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from ndtrain.config import ConfigError
from ndtrain.plan.events import Kernel

Point = Sequence[float]  # the sizes that a time depends on, then the seconds
Tables = dict[str, list[list[float]]]
NEAREST = 4  # number of measured shapes to interpolate from
BEYOND = 4  # up to this multiple of its largest measured bytes, an operator's time is extrapolated
_KINDS = {"matmul": 5, "attention": 7, "memory": 2}  # kind -> length of a point


@dataclass(frozen=True, eq=False)
class Measured:
    """Times on a machine.

    Attributes:
        cores: number of ranks that can compute at full speed at the same time: CPU cores, or GPUs.
        kernels: number of ranks computing at once -> kind -> "operator dtype" (matmuls: "dtype") -> points.
        collectives: operation -> "RANKS OF A GROUP of RANKS OF THE MESH" -> points.
    """

    cores: int
    kernels: dict[int, dict[str, Tables]]
    collectives: dict[str, Tables]

    @classmethod
    def of(cls, read: Any) -> "Measured":
        """Read measurements from the plain form.

        Raises:
            ConfigError: it is not valid. The message names the problem.
        """
        if problem := _problem(read):
            raise ConfigError(f"measured{problem}: run `ndtrain plan calibrate` again")
        return cls(**read)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    # ------------------------------------------------------------------------------------------------------- kernels

    def kernel(self, k: Kernel, ranks: int) -> float:
        """Return the seconds of a kernel while `ranks` ranks of this machine compute. If these are more than the cores,
        they share the cores.

        Raises:
            ConfigError: no kernel of this kind is measured in this precision.
        """
        return max(1.0, ranks / self.cores) * self._alone(k, min(ranks, self.cores))

    @lru_cache(maxsize=100_000)  # noqa: B019 - a description lives as long as its program
    def _alone(self, k: Kernel, busy: int) -> float:
        for tables in self._by_busy(busy):
            if (seconds := _READERS[k.kind](tables[k.kind], k)) is not None:
                return seconds
        raise ConfigError(
            f"measured.kernels: no {k.kind} in {k.dtype} is measured: add {k.dtype} to dtypes= of `ndtrain plan "
            "calibrate`"
        )

    def _by_busy(self, busy: int) -> list[dict[str, Tables]]:
        """Return all tables, sorted by the distance of their number of ranks from `busy`."""
        return [self.kernels[n] for n in sorted(self.kernels, key=lambda n: abs(n - busy))]

    # --------------------------------------------------------------------------------------------------- collectives

    def collective(self, op: str, nbytes: int, group: int, ranks: int) -> float:
        """Return the seconds of a collective that all groups of a mesh run at once.

        Args:
            nbytes: size of the buffer, as in `events.Collective`.
            group: number of ranks of a group.
            ranks: number of ranks of the mesh.

        Raises:
            ConfigError: the operation is not measured.
        """
        if op not in self.collectives:
            raise ConfigError(f"measured.collectives: {op} is not measured: run `ndtrain plan calibrate` again")
        sizes = {tuple(int(n) for n in key.split(" of ")): key for key in self.collectives[op]}
        near = min(sizes, key=lambda s: (abs(math.log(s[1] / ranks)), abs(math.log(s[0] / group))))
        seconds = along(self.collectives[op][sizes[near]], nbytes)
        return seconds * max(1.0, ranks / near[1]) * _share(op, group) / _share(op, near[0])


def _share(op: str, group: int) -> float:
    """Return the share of a collective's bytes that passes through a rank."""
    return 1.0 if op == "send_recv" else (group - 1) / group


# ------------------------------------------------------------------------------------------------- between the points


def along(points: Sequence[Point], size: float) -> float:
    """Interpolate the seconds at a size from sorted points (size, seconds), linearly in logarithms. Below the first
    point the time is constant; beyond the last point it is proportional to the size."""
    sizes = [p[0] for p in points]
    if size <= sizes[0]:
        return points[0][1]
    if size >= sizes[-1]:
        return points[-1][1] * size / sizes[-1]
    i = bisect_left(sizes, size)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    share = math.log(size / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(y0) + share * math.log(y1))


def near_rate(points: Sequence[tuple[Sequence[float], float]], shape: Sequence[float]) -> float:
    """Interpolate a rate at a shape by Shepard's method: the geometric mean of the nearest shapes' rates, weighted by
    the inverse square of their distance. The distance is between the logarithms of the dims.

    Args:
        points: (shape, rate).
    """
    logs = [math.log2(n) for n in shape]
    away = sorted((sum((math.log2(n) - x) ** 2 for n, x in zip(p, logs, strict=True)), rate) for p, rate in points)
    if away[0][0] == 0:
        return away[0][1]
    weights = [(1 / d, rate) for d, rate in away[:NEAREST]]
    return math.exp(sum(w * math.log(r) for w, r in weights) / sum(w for w, _ in weights))


def _matmul(tables: Tables, k: Kernel) -> float | None:
    if k.dtype not in tables:
        return None
    points = [(p[:4], 2 * math.prod(p[:4]) / p[4]) for p in tables[k.dtype]]
    return k.flops / near_rate(points, [max(1, n) for n in k.shape]) if k.flops else 0.0


def _attention(tables: Tables, k: Kernel) -> float | None:
    points = [(p[:5], p[5] / p[6]) for p in tables.get(f"{k.op} {k.dtype}", ())]
    return k.flops / near_rate(points, k.shape) if points else None


def _memory(tables: Tables, k: Kernel) -> float | None:
    """Return the seconds of a memory-bound operator. If it has no measurement near `k.bytes`, use the median of the
    operators that do. Do not extrapolate from small sizes: their time is launch overhead."""
    points = tables.get(f"{k.op} {k.dtype}")
    if points is None:
        alike = [key for key in tables if key.partition(" ")[0] == k.op]
        points = tables[alike[0]] if alike else None
    if points and k.bytes <= BEYOND * points[-1][0]:
        return along(points, k.bytes)
    largest = max(p[-1][0] for p in tables.values())
    near = [p for p in tables.values() if min(k.bytes, largest) <= BEYOND * p[-1][0]]
    usual = statistics.median(along(p, k.bytes) for p in near)
    return max(usual, points[-1][1]) if points else usual


_READERS = {"matmul": _matmul, "attention": _attention, "memory": _memory}


# ----------------------------------------------------------------------------------------------------------- the checks


def _problem(read: Any) -> str:
    """Return what is wrong with the plain form, or "" if it is valid."""
    keys = ["cores", "kernels", "collectives"]
    if not isinstance(read, dict) or sorted(read) != sorted(keys):
        return f": must be a mapping with the keys {', '.join(keys)}"
    if type(read["cores"]) is not int or read["cores"] < 1:
        return f".cores={read['cores']}: must be a whole number, at least 1"
    kernels, collectives = read["kernels"], read["collectives"]
    if not isinstance(kernels, dict) or not kernels or not isinstance(collectives, dict):
        return ": kernels and collectives must be mappings, and some kernels measured"
    for busy, tables in kernels.items():
        if type(busy) is not int or not isinstance(tables, dict) or sorted(tables) != sorted(_KINDS):
            return f".kernels.{busy}: must have the keys {', '.join(_KINDS)}"
        for kind, width in _KINDS.items():
            if bad := _bad_table(tables[kind], width):
                return f".kernels.{busy}.{kind}{bad}"
        if not tables["memory"]:
            return f".kernels.{busy}.memory: nothing is measured"
    for op, tables in collectives.items():
        if bad := _bad_table(tables, 2) or _bad_sizes(tables):
            return f".collectives.{op}{bad}"
    return ""


def _bad_table(tables: Any, width: int) -> str:
    if not isinstance(tables, dict):
        return ": must be a mapping"
    for key, points in tables.items():
        if not isinstance(points, list) or not points:
            return f".{key}: must be a list of points"
        for p in points:
            if not isinstance(p, list) or len(p) != width or not all(_positive(x) for x in p):
                return f".{key}: {p}: a point has {width} positive numbers"
        if width == 2 and [p[0] for p in points] != sorted({p[0] for p in points}):
            return f".{key}: sizes must increase"
    return ""


def _bad_sizes(tables: Mapping[str, Any]) -> str:
    bad = [key for key in tables if not re.fullmatch(r"[1-9]\d* of [1-9]\d*", str(key))]
    return f".{bad[0]}: must be the ranks of a group and of the mesh, e.g. 2 of 4" if bad else ""


def _positive(x: Any) -> bool:
    return type(x) in (int, float) and 0 < x < math.inf
