"""A snapshot of the tensors in memory at the peak of a recording."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import profile

_EVENTS = 200_000  # most allocations in the history of a GPU's snapshot


def begin(device: torch.device) -> None:
    """Start recording allocations on a GPU. Call it before the profiler's recording.

    On CPU it does nothing: the profiler records all allocations.
    """
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=_EVENTS)  # there is no public function for it


def write(recorded: profile, folder: Path, rank: int, device: torch.device) -> Path:
    """Write the snapshot of a recording made with profile_memory and return its path.

    On CPU the file is memory-rank-0.json, see `peak_bytes`. On a GPU it is memory-rank-0.pickle, for
    https://pytorch.org/memory_viz. On a GPU this also ends the allocator's history.

    Raises:
        OSError: the file cannot be written.
    """
    if device.type == "cpu":
        path = folder / f"memory-rank-{rank}.json"
        path.write_text(json.dumps(peak_bytes(recorded)))
        return path
    path = folder / f"memory-rank-{rank}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return path


class _Change(NamedTuple):
    """An allocation, or a deallocation (with negative `nbytes`), at a time in nanoseconds."""

    ns: int
    address: int
    nbytes: int
    by: str


def peak_bytes(recorded: profile) -> dict[str, Any]:
    """Return the memory of the tensors allocated during a recording on CPU. Older tensors are not included.

    Returns:
        `peak_bytes`; `peak_ms`, the time of the peak since the first allocation; `timeline`, [ms, live bytes] at every
        change; `live`, the tensors at the peak, grouped by the operator that allocated them: `by` (the call stack,
        outermost first), `bytes` and `tensors` (their number).
    """
    changes = sorted(_changes(recorded))
    total, timeline = 0, [[0.0, 0]]
    for change in changes:
        total += change.nbytes
        timeline.append([(change.ns - changes[0].ns) / 1e6, total])
    at = max(range(len(timeline)), key=lambda i: timeline[i][1])
    peak_ms, peak = timeline[at]
    return {"peak_bytes": peak, "peak_ms": peak_ms, "live": _live(changes[:at]), "timeline": timeline}


def _live(changes: list[_Change]) -> list[dict[str, Any]]:
    """Group the tensors still allocated after these changes by operator, the largest group first."""
    living: dict[int, _Change] = {}
    for change in changes:
        if change.nbytes > 0:
            living[change.address] = change
        else:
            living.pop(change.address, None)
    nbytes, tensors = Counter[str](), Counter[str]()
    for change in living.values():
        nbytes[change.by] += change.nbytes
        tensors[change.by] += 1
    return [{"by": by, "bytes": n, "tensors": tensors[by]} for by, n in nbytes.most_common()]


def _changes(recorded: profile) -> Iterator[_Change]:
    """Yield all changes. They come from the profiler's event tree, because only there allocations have addresses."""
    stack = [(event, ()) for event in recorded.profiler.kineto_results.experimental_event_tree()]
    while stack:
        event, above = stack.pop()
        if event.name == "[memory]":
            fields = event.extra_fields
            yield _Change(event.start_time_ns, fields.ptr, fields.alloc_size, " > ".join(above))
        within = (*above, event.name)
        stack += [(child, within) for child in event.children]
