"""Messages of data parallelism that other trainers do not overlap."""

import pytest

from lab.published.run import run_of
from ndtrain.program.ops import Await, Close, Collect, CountTokens, Gather, Open, Reduce, Run, Sum
from tests.plan.published.test_run import ROW

RUN = {"model": "llama", "tp": "1", "dp": "2", "pp": "2", "gpus": "", "zero_stage": "1"}


def ops(**cells: str):
    """What a pipeline rank does in a step, in order: the types of the operations."""
    made = run_of(ROW | RUN | cells).plan()
    return [type(op) for _, op in made.program.ranks[0].program if not isinstance(op, Open | Close | CountTokens)]


def passes_between(made: list, first: type, last: type) -> int:
    """Passes from the first operation of a type to the last one of another."""
    end = len(made) - 1 - made[::-1].index(last)
    return made[made.index(first) : end].count(Run)


@pytest.mark.parametrize("source", ["nanotron", "Megatron-LM, arXiv:2104.04473", "Megatron-DeepSpeed"])
def test_trainers_without_overlap_gather_weights_first(source):
    made = ops(source=source)
    assert made[0] is Gather and passes_between(made, Gather, Await) == 0
    assert made.count(Gather) == made.count(Await) > 1 and passes_between(ops(), Gather, Await) > 0


@pytest.mark.parametrize(("source", "times"), [("Megatron-LM, arXiv:2104.04473", 1), ("Megatron-DeepSpeed", 2)])
def test_trainers_without_overlap_reduce_after_last_backward(source, times):
    made, ours = ops(source=source), ops()
    assert Run not in made[made.index(Reduce) :] and passes_between(ours, Reduce, Reduce) > 0
    assert made.count(Reduce) == times * ours.count(Reduce)


def test_overlapping_trainer_program_is_unchanged():
    assert ops(source="Megatron-LM, arXiv:2410.00001") == ops()
    sharded = {"zero_stage": "3", "dp": "1", "fsdp": "2"}
    assert ops(source="Megatron-DeepSpeed", **sharded) == ops(**sharded)


def test_serial_program_collects_and_sums_each_unit_once():
    sharded = ROW | RUN | {"source": "Megatron-DeepSpeed", "fsdp": "2", "dp": "2"}
    rank = run_of(sharded).plan().program.ranks[0]
    ops = [op for _, op in rank.program]
    assert sorted(op.unit for op in ops if isinstance(op, Collect)) == sorted(rank.units)
    assert sorted(name for op in ops if isinstance(op, Sum) for name in op.units) == sorted(rank.units)
