"""Messages of data parallelism that ndtrain overlaps with compute, and other trainers do not.

| trainer | gradients | weights of zero 1 and 2 |
|---|---|---|
| DeepSpeed's pipeline engine | summed after the last backward, by all-reduces of fp32 | gathered after the update |
| Megatron before `--overlap-grad-reduce` (mid-2023) | summed after the last backward | gathered after the update |
| nanotron | during the last backward, as here | gathered after the update |

According to their sources: `PipelineEngine._exec_reduce_grads` and `BF16_Optimizer` of DeepSpeed, `reduce_model_grads`
and `gather_model_params` of Megatron, `ZeroDistributedOptimizer._all_gather_params` of nanotron.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from lab.published.cells import Row, text
from ndtrain.plan.predict import StepPlan
from ndtrain.program.ops import Await, Collect, Gather, Op, Reduce, Sum
from ndtrain.program.step import RankPlan

_PIPELINE_OF_DEEPSPEED = re.compile(r"deepspeed|bigscience|gpt-neox", re.IGNORECASE)
_MEGATRON = re.compile(r"megatron", re.IGNORECASE)
_BEFORE_OVERLAP = re.compile(r"arxiv:(0\d|1\d|20|21|22|230[1-6])\d*\.|\b(2019|202[0-2])\b", re.IGNORECASE)
_NANOTRON = re.compile(r"nanotron", re.IGNORECASE)


def with_serial_messages(plan: StepPlan, row: Row) -> StepPlan:
    """Return the plan with the messages that the row's trainer does not overlap with compute."""
    source, says = text(row, "source"), text(row, "source") + " " + text(row, "notes")
    engine = _PIPELINE_OF_DEEPSPEED.search(says) is not None and plan.cfg.mesh.pp > 1
    megatron = _MEGATRON.search(says) is not None and _BEFORE_OVERLAP.search(source) is not None
    if plan.cfg.mesh.zero == 3 or not (engine or megatron or _NANOTRON.search(says)):
        return plan
    times = 2 if engine else 1 if megatron else 0
    ranks = [_serial(rank, times) for rank in plan.program.ranks]
    return replace(plan, program=replace(plan.program, ranks=ranks))


def _serial(rank: RankPlan, reductions: int) -> RankPlan:
    """Return the plan with all gathers before the first action, right after the previous step's update.

    Args:
        reductions: number of times that each final reduction runs after the last action. An all-reduce is two
            reduce-scatters. 0: the reductions stay where they are.
    """
    program = rank.program
    gathers = [op for _, op in program if isinstance(op, Gather)]
    kept = [[op for op in turn.ops if not isinstance(op, Gather | Await)] for turn in program.turns]
    begin = [*gathers, *(Await(op.unit) for op in gathers)]
    end: Sequence[Op] = program.end
    if reductions:
        kept, late = _without_final_reductions([*kept, list(program.end)])
        *kept, rest = kept
        of = lambda kind: [op for op in late if isinstance(op, kind)]
        end = [*(op for op in of(Reduce) for _ in range(reductions)), *of(Collect), *of(Sum), *rest]
    turns = [turn._replace(ops=tuple(ops)) for turn, ops in zip(program.turns, kept, strict=True)]
    turns[0] = turns[0]._replace(ops=(*begin, *turns[0].ops))
    return replace(rank, program=replace(program, turns=tuple(turns), end=tuple(end)))


def _without_final_reductions(actions: Sequence[Sequence[Op]]) -> tuple[list[list[Op]], list[Op]]:
    """Separate each unit's last reduction, its `Collect` and all `Sum`s. Return the other ops by action, then these."""
    kept: list[list[Op]] = []
    late: list[Op] = []
    reduced: set[str] = set()
    for ops in reversed(actions):
        stays: list[Op] = []
        for op in reversed(ops):
            is_last = isinstance(op, Reduce | Collect) and op.unit not in reduced
            (late if is_last or isinstance(op, Sum) else stays).append(op)
            if isinstance(op, Reduce):
                reduced.add(op.unit)
        kept.append(stays[::-1])
    return kept[::-1], late[::-1]
