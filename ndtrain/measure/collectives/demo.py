"""`bench collectives demo=true` shows the effect of each collective, on tensors with one number per piece."""

from typing import Any

import torch
import torch.distributed as dist

from ndtrain.measure.collectives.cases import Pattern, Setting
from ndtrain.measure.collectives.operations import OPERATIONS, Operation
from ndtrain.measure.ranks import device_under, from_all_ranks
from ndtrain.mesh.mesh import Mesh, MeshSpec

NOTHING = "-"


def demonstrate(rank: int, spec: MeshSpec, axes: list[str], backend: str) -> dict[str, Any]:
    """Run every operation on this rank. Return {axis: {operation: (tensors before, tensors after, right) of each
    rank}}.

    Rank r begins with r0, r1, r2 ...: the tens show the rank that a number comes from, the ones show which piece it
    was.
    """
    mesh = Mesh(spec, rank, device_under(backend))
    examples: dict[str, Any] = {}
    for axis in axes:
        n, group = spec.size(axis), mesh.group(axis)
        numbers = lambda r, n=n: Pattern(torch.arange(n).float() + r * 10 ** len(str(n - 1)))
        setting = Setting(group, n, mesh.device, [numbers(r) for r in dist.get_process_group_ranks(group)])
        examples[axis] = {name: _gathered(operation, setting) for name, operation in OPERATIONS.items()}
    return examples


def _example(operation: Operation, setting: Setting) -> tuple[list[float] | None, list[float] | None, bool]:
    """Return (before, after, right) on this rank. A tensor that this rank does not have is None."""
    case = operation.prepare(setting)
    case.reset()
    before = case.given[0][0].tolist() if case.given else None
    right = case.right("torch")
    return before, case.forms["torch"].result.tolist() if case.expected else None, right


def _gathered(operation: Operation, setting: Setting) -> list[tuple]:
    """Collect the examples of all ranks.

    Raises:
        ValueError: a rank has sent something else.
    """
    return [_checked(example) for example in from_all_ranks(_example(operation, setting))]


def _checked(example: Any) -> tuple[list[float] | None, list[float] | None, bool]:
    match example:
        case [list() | None as before, list() | None as after, bool(right)]:
            if all(isinstance(x, float) for x in (before or []) + (after or [])):
                return before, after, right
    raise ValueError("a rank has sent something other than an example")


def show_demo(by_axis: dict[str, Any], spec: MeshSpec) -> list[str]:
    """Print the result of `demonstrate`. Return the names of the wrong results."""
    wrong = []
    for axis, examples in by_axis.items():
        groups = spec.groups(axis)
        several = f" in {len(groups)} groups {' '.join(str(g) for g in groups)}, each by itself" * (len(groups) > 1)
        print(f"=== over {axis}={spec.size(axis)}{several}; the root is the first rank of a group")
        for name, ranks in examples.items():
            print(f"\n{name}: {OPERATIONS[name].does}")
            _show_ranks(ranks, spec)
            wrong += [f"{name} over {axis} on rank {r}" for r, (_, _, right) in enumerate(ranks) if not right]
        print()
    return wrong


def _show_ranks(ranks: list[tuple], spec: MeshSpec) -> None:
    labels = [f"rank {r} ({spec.where(r)})" for r in range(len(ranks))]
    digits = max(len(f"{x:.0f}") for before, after, _ in ranks for x in (before or []) + (after or []))
    words = lambda x: NOTHING if x is None else "[" + " ".join(f"{v:{digits}.0f}" for v in x) + "]"
    left, wide = max(map(len, labels)), max(len(words(before)) for before, _, _ in ranks)
    for label, (before, after, right) in zip(labels, ranks, strict=True):
        print(f"  {label:{left}}   {words(before):{wide}}  ->  {words(after)}{'' if right else '  WRONG'}")
