"""`bench matmul`: the share of the device's peak that square matmuls reach (HFU), by size, precision and content.

Content matters where power limits the clock. A GPU multiplies zeros faster than noise: fewer bits flip, and its clock
drops less. Matmuls of zeros, of `rand` (uniform, all positive) and of `randn` (normal, as in training) therefore
alternate. A few rows of each product are compared with fp64.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ndtrain.arguments import one_of, option
from ndtrain.config import ConfigError, HardwareConfig
from ndtrain.device.measured_peak import cpu_model
from ndtrain.measure import plot
from ndtrain.measure.plot import Panel, Point, Points
from ndtrain.measure.ranks import DEVICE_HELP, Device, WrongResult, choose_device
from ndtrain.measure.results import require_folder, save, size_name
from ndtrain.measure.rounds import calls_in_block, in_round
from ndtrain.observe import free_memory_bytes, peak_flops


class Kind(NamedTuple):
    """A precision.

    Attributes:
        dtype: of the operands.
        product: dtype of the product.
        peak: (dtype, factor): the peak is `factor` times the peak of `dtype`.
        bound: largest error of an element against fp64, relative to its magnitude plus the rms of the checked rows.
    """

    dtype: torch.dtype
    product: torch.dtype
    peak: tuple[torch.dtype, float]
    bound: float


KINDS = {  # fp8: its dense peak is twice bf16's, by the data sheet of every GPU that has it
    "fp32": Kind(torch.float32, torch.float32, (torch.float32, 1), 1e-4),
    "bf16": Kind(torch.bfloat16, torch.bfloat16, (torch.bfloat16, 1), 1e-2),
    "fp16": Kind(torch.float16, torch.float16, (torch.bfloat16, 1), 5e-3),
    "fp8": Kind(torch.float8_e4m3fn, torch.bfloat16, (torch.bfloat16, 2), 2e-2),
}
ON_CPU = ("fp32", "bf16")  # fp16 has no fast kernels on a CPU
FP8_SINCE = (8, 9)  # compute capability
CONTENTS: dict[str, Callable[..., Tensor]] = {"zeros": torch.zeros, "rand": torch.rand, "randn": torch.randn}
LARGEST = {"cpu": 4096, "cuda": 32768}
MOST_CALLS = 100  # per block
ROWS_CHECKED = 4
COLUMNS = 2048  # checked at a time, so that little of b has to be in fp64


@dataclass(frozen=True)
class Options:
    """Options of `bench matmul`. Sizes that do not fit into memory are named and left out."""

    min: int = option("smallest size; sizes double up to the largest", 512)
    max: int = option("largest size; default: 4096 on a CPU, 32768 on a GPU", 0)
    dtypes: str = option(
        'fp32, bf16 and, on a GPU, fp16 and fp8, e.g. "fp32,bf16"; default: fp32, bf16 and fp8 if the device has it',
        "",
    )
    contents: Literal["all", "zeros", "rand", "randn"] = option("contents of the operands", "all")
    device: Device = option(DEVICE_HELP, "auto")
    rounds: int = option("timed blocks per size", 5)
    out: str = option("JSON file for all results", "")
    plot: str = option(plot.HELP, "")

    @property
    def torch_device(self) -> torch.device:
        return torch.device(choose_device(self.device))

    @property
    def kinds(self) -> list[str]:
        known = list(ON_CPU) if self.torch_device.type == "cpu" else list(KINDS)
        if self.dtypes:
            return [one_of("dtype of this device", word, known) for word in self.dtypes.replace(",", " ").split()]
        has_fp8 = "fp8" in known and torch.cuda.get_device_capability() >= FP8_SINCE
        return [*ON_CPU, "fp8"] if has_fp8 else list(ON_CPU)

    @property
    def names(self) -> list[str]:
        """Names of the contents."""
        return list(CONTENTS) if self.contents == "all" else [self.contents]

    @property
    def sizes(self) -> list[int]:
        largest = self.max or LARGEST[self.torch_device.type]
        return [self.min << i for i in range(64) if self.min << i <= largest]

    def need(self, kind: str, size: int) -> int:
        """Return the bytes needed: two operands for each content, the product, one operand in fp32 before it is
        rounded, and the check in fp64."""
        width, product = KINDS[kind].dtype.itemsize, KINDS[kind].product.itemsize
        return size**2 * (2 * width * len(self.names) + product + 4) + 8 * size * (
            min(COLUMNS, size) + 4 * ROWS_CHECKED
        )

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: options that do not go together, or that this machine does not support.
        """
        if not self.sizes:
            raise ConfigError(f"min={self.min} is more than max={self.max or LARGEST[self.torch_device.type]}")
        smallest, free = self.need(self.kinds[0], self.min), free_memory_bytes(self.torch_device)
        if smallest > free:
            raise ConfigError(f"min={self.min} needs {size_name(smallest)}, but {size_name(free)} are free: lower min")
        require_folder("out", self.out)
        plot.check(self.plot)


def run(options: Options) -> None:
    """Measure, print line by line, and write `options.out` and `options.plot`.

    Raises:
        ConfigError: options that do not go together.
        WrongResult: a product is wrong; raised after everything is printed.
    """
    options.check()
    device = options.torch_device
    torch.manual_seed(0)
    name = _device_name(device)
    peaks = {kind: _peak(kind, device) for kind in options.kinds}
    _show_head(options, name, peaks)
    rows = []
    for kind in options.kinds:
        free = free_memory_bytes(device)
        for size in options.sizes:
            if options.need(kind, size) > free:
                print(
                    f"{kind:6} {size:6}  skipped: needs {size_name(options.need(kind, size))}, {size_name(free)} free"
                )
                continue
            rows.append(_row(options, kind, size, peaks[kind], device))
            _show_row(rows[-1])
    _save(options, name, peaks, rows)
    wrong = [f"{r['dtype']} {c} of {r['size']}" for r in rows for c, of in r["contents"].items() if not of["right"]]
    if wrong:
        raise WrongResult(f"WRONG products: {', '.join(wrong)}")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{cpu_model()}, {threads} thread{'s' * (threads > 1)}"


def _peak(kind: str, device: torch.device) -> float:
    """Return the peak in FLOP/s."""
    dtype, factor = KINDS[kind].peak
    return factor * peak_flops(HardwareConfig(), device.type, dtype)


# ----------------------------------------------------------------------------------------------------------- measuring


def _row(options: Options, kind: str, size: int, peak: float, device: torch.device) -> dict[str, Any]:
    """Measure one precision at one size. For each content: seconds per matmul, FLOP/s, HFU, and whether it is right."""
    out = torch.empty(size, size, dtype=KINDS[kind].product, device=device)
    products = {name: Product(kind, name, size, out) for name in options.names}
    right = {name: product.right() for name, product in products.items()}
    calls = calls_in_block(max(product.seconds(1) for product in products.values()), MOST_CALLS)
    times: dict[str, list[float]] = {name: [] for name in products}
    for i in range(options.rounds):
        for name in in_round(products, i):
            times[name].append(products[name].seconds(calls))
    contents = {}
    for name, seconds in times.items():
        rate = 2 * size**3 / statistics.median(seconds)
        contents[name] = {"seconds": seconds, "tflops": rate / 1e12, "hfu": rate / peak, "right": right[name]}
    return {"dtype": kind, "size": size, "contents": contents}


class Product:
    """A [size, size] matmul of one content.

    Args:
        out: [size, size] in the product's dtype, shared by the products that alternate.
    """

    def __init__(self, kind: str, content: str, size: int, out: Tensor):
        self.kind, self.out = KINDS[kind], out
        make = lambda: CONTENTS[content](size, size, device=out.device).to(self.kind.dtype)
        self.a, self.b = make(), make()
        if kind == "fp8":
            self.b = self.b.t().contiguous().t()  # the only layout of b that fp8 units support
            self._one = torch.ones((), device=out.device)

    def multiply(self) -> None:
        """Compute out = a b."""
        if self.kind.dtype == torch.float8_e4m3fn:
            torch._scaled_mm(self.a, self.b, self._one, self._one, out_dtype=self.kind.product, out=self.out)
        else:
            torch.mm(self.a, self.b, out=self.out)

    def seconds(self, calls: int) -> float:
        """Return seconds per matmul, averaged over `calls`. Uses CUDA events on a GPU."""
        if self.out.device.type == "cpu":
            began = time.perf_counter()
            for _ in range(calls):
                self.multiply()
            return (time.perf_counter() - began) / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            self.multiply()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def right(self) -> bool:
        """Return True if a few evenly spaced rows of the product agree with fp64 on the same operands."""
        self.out.fill_(torch.nan)
        self.multiply()
        size = self.out.shape[0]
        rows = torch.linspace(0, size - 1, min(ROWS_CHECKED, size)).long().tolist()
        a = torch.stack([self.a[row].double() for row in rows])
        expected = torch.cat([a @ part.double() for part in self.b.split(COLUMNS, dim=1)], dim=1)
        off = (self.out[rows].double() - expected).abs()
        allowed = self.kind.bound * (expected.abs() + expected.square().mean().sqrt())  # zero if all are zeros
        return bool((off <= allowed).all())  # NaN never passes


# ------------------------------------------------------------------------------------------------------------- showing


def _show_head(options: Options, name: str, peaks: dict[str, float]) -> None:
    rates = ", ".join(f"{kind} {peak / 1e12:.4g}" for kind, peak in peaks.items())
    source = "measured with one second of matmuls" if options.torch_device.type == "cpu" else "data sheet, dense"
    print(f"matmul [size, size] x [size, size] on {name}; median of {options.rounds} rounds")
    print(f"peak in TFLOP/s: {rates} ({source}); HFU = 2 size^3 / time / peak")
    print(f"{'':13}" + "".join(f"  {content:^27}" for content in options.names))
    print(f"{'dtype':6} {'size':>6}" + f"  {'ms':>9} {'TFLOP/s':>9} {'HFU':>7}" * len(options.names) + "  correct")


def _show_row(row: dict[str, Any]) -> None:
    cells = [
        f"  {statistics.median(of['seconds']) * 1e3:9.4g} {of['tflops']:9.4g} {of['hfu']:7.1%}"
        for of in row["contents"].values()
    ]
    wrong = [name for name, of in row["contents"].items() if not of["right"]]
    said = f"WRONG: {' '.join(wrong)}" if wrong else "yes"
    print(f"{row['dtype']:6} {row['size']:6}{''.join(cells)}  {said}", flush=True)


def _save(options: Options, name: str, peaks: dict[str, float], rows: list[dict[str, Any]]) -> None:
    save("matmul", options, device_name=name, peak_flops=peaks, cores=os.cpu_count(), rows=rows)
    panels = [
        Panel(title, "size", label, _points(rows, key, scale), lambda x: f"{x:.0f}", y_scale="linear")
        for title, label, key, scale in (("Rate", "TFLOP/s", "tflops", 1), ("HFU", "% of peak", "hfu", 100))
    ]
    plot.draw(options.plot, f"Square matmuls on {name}", panels, across=2)


def _points(rows: list[dict[str, Any]], key: str, scale: float) -> Points:
    points: Points = {}
    for row in rows:
        for content, of in row["contents"].items():
            curves = points.setdefault(row["dtype"], {})
            curves.setdefault(f" {content}", []).append(Point(row["size"], scale * of[key]))
    return points
