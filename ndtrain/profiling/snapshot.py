"""What lies in memory at the height of a recording."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import profile

_EVENTS = 200_000  # allocations of which a GPU's snapshot keeps the history


def begin(device: torch.device) -> None:
    """Before the recording: on a GPU its allocator starts to keep a history (on CPU the profiler sees all)."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=_EVENTS)  # PyTorch has no public name for it


def write(recorded: profile, folder: Path, rank: int, device: torch.device) -> Path:
    """The snapshot of a recording made with profile_memory, and on a GPU the end of its history.

    On CPU memory-rank-0.json, see `peak_bytes`; on a GPU memory-rank-0.pickle for https://pytorch.org/memory_viz.

    Raises:
        OSError: it cannot be written.
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
    """An allocation, or with negative bytes what was freed."""

    ns: int
    address: int
    nbytes: int
    by: str


def peak_bytes(recorded: profile) -> dict[str, Any]:
    """Of the tensors made in a recording on CPU: `timeline`, [ms since the first of them, bytes of them that live] at
    every change; `peak_bytes` and `peak_ms`; and `live`, what lived at the peak, by the operators that allocated it:
    `by`, from the outermost in, `bytes` and `tensors`. What was there before is not seen, also as it goes."""
    changes = sorted(_changes(recorded))
    total, timeline = 0, [[0.0, 0]]
    for change in changes:
        total += change.nbytes
        timeline.append([(change.ns - changes[0].ns) / 1e6, total])
    at = max(range(len(timeline)), key=lambda i: timeline[i][1])
    peak_ms, peak = timeline[at]
    return {"peak_bytes": peak, "peak_ms": peak_ms, "live": _live(changes[:at]), "timeline": timeline}


def _live(changes: list[_Change]) -> list[dict[str, Any]]:
    """What is left after these, most bytes first."""
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
    """From the profiler's tree of events, the only place where an allocation has its address."""
    open_ = [(event, ()) for event in recorded.profiler.kineto_results.experimental_event_tree()]
    while open_:
        event, above = open_.pop()
        if event.name == "[memory]":
            fields = event.extra_fields
            yield _Change(event.start_time_ns, fields.ptr, fields.alloc_size, " > ".join(above))
        within = (*above, event.name)
        open_ += [(child, within) for child in event.children]
