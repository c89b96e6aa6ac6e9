"""Where a step's time goes, by operator."""

import time
from collections.abc import Callable

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

ROWS = 15


def profile(step: Callable[[], None], steps: int) -> list[str]:
    """Lines of a table: the operators that take the most time themselves, per step. What no operator accounts for is
    Python and waiting for other ranks."""
    with torch_profile(activities=[ProfilerActivity.CPU]) as record:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        total = (time.perf_counter() - began) * 1e3 / steps
    rows = [(e.self_cpu_time_total / 1e3 / steps, e.count / steps, e.key) for e in record.key_averages()]
    rows.sort(reverse=True)
    rest = total - sum(ms for ms, _, _ in rows)
    line = lambda ms, calls, name: f"{ms:9.2f} ms {ms / total:6.1%} {calls:8.1f} x  {name}"
    return [line(total, 1, "step, with the profiler's own cost"), line(rest, 1, "outside operators")] + [
        line(*row) for row in rows[:ROWS]
    ]
