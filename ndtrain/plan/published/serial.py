"""Messages of data parallelism that other trainers do not overlap with compute, as ndtrain does.

| trainer | gradients | weights of zero 1 and 2 |
|---|---|---|
| DeepSpeed's pipeline engine | summed after the last backward, by all-reduces of fp32 | gathered after the update |
| Megatron before `--overlap-grad-reduce` (mid-2023) | summed after the last backward | gathered after the update |
| nanotron | beside the last backward, as here | gathered after the update |

As read in their sources: `PipelineEngine._exec_reduce_grads` and `BF16_Optimizer` of DeepSpeed, `reduce_model_grads`
and `gather_model_params` of Megatron, `ZeroDistributedOptimizer._all_gather_params` of nanotron.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from ndtrain.plan.predict import StepPlan
from ndtrain.plan.program import RankProgram
from ndtrain.plan.published.cells import Row, text
from ndtrain.plan.walk import Await, Gather, Op, Reduce

_PIPELINE_OF_DEEPSPEED = re.compile(r"deepspeed|bigscience|gpt-neox", re.IGNORECASE)
_MEGATRON = re.compile(r"megatron", re.IGNORECASE)
_BEFORE_OVERLAP = re.compile(r"arxiv:(0\d|1\d|20|21|22|230[1-6])\d*\.|\b(2019|202[0-2])\b", re.IGNORECASE)
_NANOTRON = re.compile(r"nanotron", re.IGNORECASE)


def with_serial_messages(plan: StepPlan, row: Row) -> StepPlan:
    """The plan with the messages of the row's trainer that stand alone in its step."""
    source, says = text(row, "source"), text(row, "source") + " " + text(row, "notes")
    engine = _PIPELINE_OF_DEEPSPEED.search(says) is not None and plan.cfg.mesh.pp > 1
    megatron = _MEGATRON.search(says) is not None and _BEFORE_OVERLAP.search(source) is not None
    if plan.cfg.mesh.zero == 3 or not (engine or megatron or _NANOTRON.search(says)):
        return plan
    times = 2 if engine else 1 if megatron else 0
    ranks = [_serial(rank, times) for rank in plan.program.ranks]
    return replace(plan, program=replace(plan.program, ranks=ranks))


def _serial(rank: RankProgram, reductions: int) -> RankProgram:
    """The program with all gathers in front of the first action, where the end of the update of the step before is.

    Args:
        reductions: how often each final reduction is made behind the last action, an all-reduce being twice a
            reduce-scatter; 0: they stay where they are.
    """
    every = [op for turn in rank.turns for op in turn.ops]
    gathers = [op for op in every if isinstance(op, Gather)]
    last = [op for op in every if isinstance(op, Reduce) and op.final] if reductions else []
    moved = {*map(id, gathers), *map(id, last)}
    kept = [tuple(op for op in turn.ops if id(op) not in moved and not isinstance(op, Await)) for turn in rank.turns]
    kept[0] = (*gathers, *(Await(op.unit) for op in gathers), *kept[0])
    kept[-1] = (*kept[-1], *_repeated(last, reductions))
    turns = [turn._replace(ops=ops) for turn, ops in zip(rank.turns, kept, strict=True)]
    return replace(rank, turns=turns)


def _repeated(final: Sequence[Reduce], times: int) -> list[Op]:
    return [op._replace(final=i == times - 1) for op in final for i in range(times)]
