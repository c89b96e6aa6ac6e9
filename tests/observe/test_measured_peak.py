"""The measured peak of a CPU: the cached value, when it is measured again, and the messages to the user."""

import json
import time
from collections.abc import Callable

import pytest
import torch

from ndtrain.config import HardwareConfig
from ndtrain.device import measured_peak
from ndtrain.device.measured_peak import Measurement
from ndtrain.observe import peak_flops

BUSY, UNEVEN = {"share": 0.5, "spread": 1.2}, {"spread": 3.0}


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Callable:
    """runs(flops, **how): one run whose measurement is as given. Returns (peak, lines for the user, whether the
    measurement was a whole one)."""
    monkeypatch.setenv("NDTRAIN_CACHE", str(tmp_path / "new"))

    def run(flops: float, dtype: torch.dtype = torch.float32, **how: float) -> tuple[float, list[str], bool]:
        sizes, lines = [], []

        def measure(device, dtype, size):
            sizes.append(size)
            return Measurement(flops * 1e12, 512, **how)

        monkeypatch.setattr(measured_peak, "measure", measure)
        best = peak_flops(HardwareConfig(), "cpu", dtype, lines.append) / 1e12
        assert sizes in ([None], [512]), "a check measures the size of the best rate"
        return best, lines, sizes == [None]

    return run


def test_an_undisturbed_rate_is_kept_and_checked_briefly(runs):
    assert runs(2.0) == (2.0, [], True)
    assert runs(1.9) == (2.0, [], False)
    assert runs(2.05) == (2.05, [], False)  # a little better: kept without a word
    assert runs(2.0)[0] == 2.05


def test_higher_rate_replaces_cached_one_with_warning(runs):
    runs(1.0)
    best, (line,), _ = runs(3.0)
    assert best == 3.0
    assert "is now 3 TFLOP/s, earlier runs used 1 TFLOP/s: their MFU is 3 times too high" in line
    assert runs(2.9) == (3.0, [], False)


@pytest.mark.parametrize(
    ("how", "why"),
    [(BUSY, "other programs used 50 % of its cores' time"), (UNEVEN, "took 3.0 times as long")],
)
def test_a_disturbed_rate_is_measured_again_at_most_twice(runs, how, why):
    best, (line,), whole = runs(1.0, **how)
    assert (best, whole) == (1.0, True) and why in line and "Set hardware.peak_tflops to fix it now" in line
    assert runs(0.9, **how)[0] == 1.0, "the best of all runs counts"
    assert runs(1.02, **how)[2], "the third whole measurement"
    assert runs(1.0, **how) == (1.02, [], False)


def test_undisturbed_rate_ends_repeated_measuring(runs):
    runs(1.0, **BUSY)
    assert runs(1.01) == (1.01, [], True)
    assert runs(1.0, **BUSY) == (1.01, [], False)


def test_even_timings_on_busy_machine_are_trusted(runs):
    assert runs(1.0, share=0.5, spread=1.05) == (1.0, [], True)
    assert runs(1.0) == (1.0, [], False)


def test_even_timings_of_several_threads_are_not_trusted(runs):
    """Observed: while other programs ran, two threads evenly reached a fifth of one thread's rate."""
    _, (line,), _ = runs(1.0, share=0.5, spread=1.05, threads=2)
    said = "other programs used 50 % of its cores' time: stop them or set hardware.threads=1"
    assert said in line
    assert runs(5.0, threads=2)[::2] == (5.0, True), "measured whole again"


def test_rate_far_below_best_gives_warning(runs):
    runs(2.0)
    best, (line,), _ = runs(1.0, **BUSY)
    assert best == 2.0 and "now reaches 1 TFLOP/s in matmuls (other programs" in line
    assert "50 % of its best measured peak 2 TFLOP/s" in line


def test_cache_has_one_rate_per_dtype_and_threads(runs, monkeypatch, tmp_path):
    runs(2.0)
    assert runs(1.0, torch.bfloat16) == (1.0, [], True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert runs(3.0) == (3.0, [], True)
    keys = list(json.loads((tmp_path / "new/peak_flops.json").read_text()))
    assert len(keys) == 3 and all(f"torch {torch.__version__}" in key and " cores, " in key for key in keys)


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"x"', b'{"x": 3.0, "y": {"flops": -1}}'])
def test_damaged_cache_is_replaced(runs, tmp_path, damage):
    (tmp_path / "new").mkdir()
    (tmp_path / "new/peak_flops.json").write_bytes(damage)
    assert runs(5.0) == (5.0, [], True)
    assert runs(5.0) == (5.0, [], False)


def test_unwritable_cache_is_ignored(runs, monkeypatch):
    monkeypatch.setenv("NDTRAIN_CACHE", "/proc/no-such-folder")
    assert runs(5.0) == runs(5.0) == (5.0, [], True)


def test_measure_ends_in_time_and_agrees_with_itself():
    began = time.process_time()  # of this process alone: whatever else the machine does
    whole = measured_peak.measure("cpu", torch.float32)
    assert whole.flops > 1e9 and time.process_time() - began < 3 * measured_peak.WHOLE_S
    brief = measured_peak.measure("cpu", torch.float32, whole.size)
    assert brief.size == whole.size and whole.flops / 4 < brief.flops < whole.flops * 4


def test_measure_ignores_one_fast_outlier(monkeypatch):
    """A clock that jumps once does not set the peak for good."""
    times = iter([0.0, *[t for i in range(60) for t in (i * 1.0, i * 1.0 + (0.001 if i == 5 else 0.5))]])
    monkeypatch.setattr(measured_peak.time, "perf_counter", lambda: next(times))
    made = measured_peak._measure_size("cpu", torch.float32, 8, until=20.0)
    assert made.flops == pytest.approx(2 * 8**3 / 0.5)
