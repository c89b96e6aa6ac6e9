"""A step that launches something else than its program lists is found (tests/lib/program_launches.py)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndtrain.config import load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.program.ops import CountTokens, Gather, Op, RankProgram, Report
from tests.lib.parity import SHAPE, make_batches
from tests.lib.program_launches import compared

RUN = [*SHAPE, "mesh.fsdp=2", "mesh.zero=3", "train.global_batch=4", "train.micro_batch=1", "train.compile=false"]


@contextmanager
def fake_step() -> Iterator[tuple[TrainingStep, Callable[[], None]]]:
    """Yield the training step of one of two ranks whose collectives send nothing, and a function that runs it."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        cfg = resolve(load_config(RUN), 2)
        mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
        stages = build_stages(cfg, mesh)
        initialise(stages, cfg)
        step = TrainingStep(cfg, mesh, stages)
        yield step, lambda: step.run(1, make_batches(cfg, mesh, 1, "none"))
    finally:
        dist.destroy_process_group()


def without(program: RankProgram, kind: type[Op]) -> RankProgram:
    """The program without its first op of this kind."""
    fault = next(op for _, op in program if isinstance(op, kind))
    keep = lambda made: tuple(op for op in made if op is not fault)
    first = next((i for i, turn in enumerate(program.turns) if fault in turn.ops), None)
    turns = tuple(t._replace(ops=keep(t.ops)) if i == first else t for i, t in enumerate(program.turns))
    return replace(program, begin=keep(program.begin), turns=turns, update=keep(program.update))


def test_compared_right_program_passes():
    with fake_step() as (step, run), compared(step):
        run()


@pytest.mark.parametrize("kind", [Gather, CountTokens, Report])
def test_compared_launch_missing_in_the_program_is_found(kind):
    found = pytest.raises(AssertionError, match=r"op \d+|outside of the program")
    with fake_step() as (step, run), found, compared(step):
        run()
        step.executor.ran = without(step.executor.ran, kind)


def test_compared_launch_missing_in_the_run_is_found():
    found = pytest.raises(AssertionError, match=r"Gather\(unit='model.layers.0'\)")
    with fake_step() as (step, run), found, compared(step):
        run()
        program = step.executor.ran
        more = program.turns[0]._replace(ops=(Gather("model.layers.0"), *program.turns[0].ops))
        step.executor.ran = replace(program, turns=(more, *program.turns[1:]))


def test_compared_second_launch_is_found():
    with fake_step() as (step, run), pytest.raises(AssertionError, match=r"op \d+, Gather"):
        gather = step.executor.units.gather

        def twice(name: str) -> None:
            gather(name)
            gather(name)

        step.executor.units.gather = twice
        with compared(step):
            run()
