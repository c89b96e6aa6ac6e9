"""The results of `bench collectives`, as a table and as curves."""

from collections.abc import Mapping
from typing import Any

from ndtrain.measure.collectives.operations import FACTORS, OPERATIONS, TWO_STEPS
from ndtrain.measure.plot import Panel, Point, Points
from ndtrain.measure.results import size_name
from ndtrain.measure.rounds import quartiles
from ndtrain.mesh.mesh import MeshSpec

_FORM_NAMES = {"torch": "", "ours": " (ours)"}


def show(spec: MeshSpec, backend: str, rounds: int, by_axis: Mapping[str, Any]) -> list[str]:
    """Print the results of `run.measure`. Return the wrong ones, each with its ranks."""
    wrong = []
    for axis, of in by_axis.items():
        wrong += _show_axis(spec, axis, backend, rounds, of["rows"]) + _show_equal(axis, of)
    _show_accounting(sorted({spec.size(axis) for axis in by_axis}))
    return wrong


def _show_axis(spec: MeshSpec, axis: str, backend: str, rounds: int, rows: list[dict[str, Any]]) -> list[str]:
    groups = len(spec.groups(axis))
    at_once = f", {groups} groups at once" if groups > 1 else ""
    print(
        f"collectives over {axis}={spec.size(axis)}{at_once}: {backend}, fp32, median of {rounds} rounds, slowest rank"
    )
    form = "{:>10} {:>9} {:>9}".format
    print(f"{'':41}{'PyTorch: ms, GB/s, GB/s':30}{'ours: ms, GB/s, GB/s':32}PyTorch")
    print(
        f"{'operation':28} {'size':>9}{form('ms', 'algbw', 'busbw')} {form('ms', 'algbw', 'busbw')}   / ours  correct"
    )
    wrong, last = [], ""
    for row in rows:
        name, last = row["operation"] if row["operation"] != last else "", row["operation"]
        cells = [row["forms"].get(f) for f in _FORM_NAMES]
        numbers = " ".join(
            form(*(f"{c[k]:.3g}" for k in ("ms", "algbw", "busbw"))) if c else form(*"---") for c in cells
        )
        ratio = f"{row['ratio']['median']:.2f}" if "ratio" in row else "-"
        bad = {f: ranks for f, ranks in row["wrong"].items() if ranks}
        print(f"{name:28} {size_name(row['bytes']):>9}{numbers} {ratio:>8}  {'WRONG' if bad else 'yes'}")
        wrong += [_wrong(row["operation"] + _FORM_NAMES[f], row["bytes"], axis, ranks) for f, ranks in bad.items()]
    return wrong


def _show_equal(axis: str, results: Mapping[str, Any]) -> list[str]:
    """Print one line for each size: an all_reduce compared with a reduce_scatter and an all_gather."""
    print(f"\nall_reduce against {TWO_STEPS} over {axis}")
    wrong = []
    by_key = {(row["operation"], row["bytes"]): row["forms"] for row in results["rows"]}
    for equal in results["equal"]:
        size = equal["bytes"]
        one, two = by_key["all_reduce", size]["torch"]["ms"], by_key[TWO_STEPS, size]
        steps = ", ".join(f"{_number(two[f]['ms'])} ms{_FORM_NAMES[f]}" for f in two)
        unlike = {f: ranks for f, ranks in equal["unlike"].items() if ranks}
        said = "WRONG: bits differ" if unlike else "bitwise equal on every rank"
        print(f"  {size_name(size):>9}   {_number(one)} ms against {steps}: {said}")
        wrong += [_wrong(f"{TWO_STEPS}{_FORM_NAMES[f]} as all_reduce", size, axis, r) for f, r in unlike.items()]
    print()
    return wrong


def _number(x: float) -> str:
    """Format x with three digits, or with all digits before the decimal point."""
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def _wrong(what: str, size: int, axis: str, ranks: list[int]) -> str:
    return f"{what} of {size_name(size)} over {axis} on rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"


def _show_accounting(widths: list[int]) -> None:
    """Explain the bandwidths."""
    print(
        "How bytes are counted, as in NCCL-tests (its doc/PERFORMANCE.md); GB is 1e9 bytes. With S bytes and n ranks\n"
        "algbw = S / time and busbw = algbw x factor. The factor makes busbw the rate at which the busiest rank's\n"
        "link works one way if no byte goes twice: it compares operations, numbers of ranks and the hardware."
    )
    values = ", ".join(f"n={n}" for n in widths)
    print(f"  {'operation':28} {'S':20} {'factor':10} {values:14} because")
    for op in OPERATIONS.values():
        factors = ", ".join(f"{FACTORS[op.formula](n):.3g}" for n in widths)
        print(f"  {op.name:28} {op.counted:20} {op.formula:10} {factors:14} {op.why}")


def panels(spec: MeshSpec, by_axis: Mapping[str, Any]) -> list[Panel]:
    """Return one panel per axis and operation: time over message size, ours and PyTorch's."""
    return [
        Panel(f"{name}, {axis}={spec.size(axis)}", "message size S", "time (ms)", _points(of["rows"], name), size_name)
        for axis, of in by_axis.items()
        for name in OPERATIONS
    ]


def _points(rows: list[dict[str, Any]], operation: str) -> Points:
    """Return the times of one operation with their quartiles."""
    points: Points = {"ours": {}, "PyTorch": {}}
    for row in rows:
        if row["operation"] != operation:
            continue
        for form, of in row["forms"].items():
            spread = quartiles(of["block_ms"])
            name = "ours" if form == "ours" else "PyTorch"
            points[name].setdefault("", []).append(Point(row["bytes"], of["ms"], spread["q1"], spread["q3"]))
    return points
