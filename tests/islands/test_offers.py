"""Each unit's gradient is offered to the other islands once, as soon as it is final, and they are read meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.data import microbatches
from ndtrain.engine.island_step import IslandStep, LocalRun
from ndtrain.engine.island_tasks import Task
from ndtrain.engine.train_step import TrainingStep, total_weight
from ndtrain.islands.encoding import Plain
from ndtrain.islands.exchange import NUMBERS, Exchange
from ndtrain.islands.own import OwnGradients
from ndtrain.islands.reading import AHEAD, Gone
from ndtrain.islands.shelf import Shelf, Tag
from ndtrain.islands.wire import Place
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.plan.__main__ import main
from ndtrain.program import ops
from ndtrain.program import step as step_module
from ndtrain.program.ops import RankProgram
from ndtrain.program.step import StepProgram
from tests.lib.helpers import wait_for
from tests.lib.islands import TOKEN
from tests.lib.parity import FP64, SHAPE, RandomRows, make_batches
from tests.lib.program_launches import compared
from tests.lib.ranks import run_ranks

RUN = [*SHAPE, "train.global_batch=8", "train.micro_batch=1", "train.compile=false", "islands.count=2"]
EXPERTS = ["model=moe_debug", "model.vocab_size=101"]
MESHES = {
    "one rank": ([], 1),
    "tp": (["mesh.tp=2", "model.num_key_value_heads=2"], 2),
    "dp": (["mesh.dp=2"], 2),
    "dp and tp": (["mesh.dp=2", "mesh.tp=2", "mesh.zero=1", "model.num_key_value_heads=2"], 4),
    "zero 1": (["mesh.fsdp=2", "mesh.zero=1"], 2),
    "zero 3": (["mesh.fsdp=2", "mesh.dp=2", "mesh.zero=3", "recompute=full"], 4),
    "stages with tied embeddings": (["mesh.pp=2", "mesh.fsdp=2", "mesh.zero=2", "model.tie_word_embeddings=true"], 4),
    "interleaved": (["mesh.pp=2", "schedule=interleaved", "model.num_hidden_layers=4"], 2),
    "experts": ([*EXPERTS, "mesh.dp=2", "mesh.ep=2"], 2),
    "experts with a capacity": ([*EXPERTS, "mesh.dp=2", "mesh.ep=2", "moe.capacity=1"], 2),
}
_CHANGES = ops.Open | ops.Close | ops.Reduce | ops.Collect | ops.Sum | ops.SumTPReplicas | ops.SumTied


def config(overrides, ranks=1):
    return resolve(load_config([*RUN, *overrides]), ranks)


@cache
def programs(mesh: str) -> list[tuple[tuple[str, ...], RankProgram]]:
    """For each stage the units that its first rank holds, and its program. Each unit has a sum of its own over dp."""
    overrides, ranks = MESHES[mesh]
    with mock.patch("ndtrain.program.build.BUCKET_BYTES", 1):
        step_module._shared.cache_clear()
        step = StepProgram.of(config(overrides, ranks), device="cpu")
        step.prove()
        made = [(own.units, own.program) for own in step.ranks]
    step_module._shared.cache_clear()  # otherwise other tests get programs with small sums
    return made


def early(program: RankProgram) -> list[str]:
    """The units that are offered before their gradient is final."""
    offered, found = set(), []
    summing: dict[str, set[str]] = {}
    for _, op in program:
        match op:
            case ops.Offer(unit):
                offered.add(unit)
                found += [unit for units in summing.values() if unit in units]
            case ops.AwaitSums(axes):
                summing.pop(axes)
            case ops.CheckCapacity():
                found += offered
            case _ if isinstance(op, _CHANGES):
                found += offered & set(getattr(op, "units", None) or [op.unit])
                if isinstance(op, ops.Sum):
                    summing.setdefault(op.axes, set()).update(op.units)
    return found


def offers(program: RankProgram) -> list[str]:
    return [op.unit for _, op in program if isinstance(op, ops.Offer)]


# ------------------------------------------------------------------------------------------------------------- program


@pytest.mark.parametrize("mesh", MESHES)
def test_program_offers_each_unit_once_after_its_last_sum(mesh):
    for units, program in programs(mesh):
        assert sorted(offers(program)) == sorted(units)
        assert not early(program)


@pytest.mark.parametrize("mesh", MESHES)
def test_early_finds_each_offer_before_the_last_sum(mesh):
    """Otherwise the test above could not fail."""
    _, program = programs(mesh)[0]
    made = [op for _, op in program]
    for at in (i for i, op in enumerate(made) if isinstance(op, ops.Offer)):
        moved = [*made[:at], *made[at + 1 :]]
        names = lambda op, unit=made[at].unit: unit in (getattr(op, "units", None) or [getattr(op, "unit", None)])
        last = max(i for i, op in enumerate(moved) if isinstance(op, _CHANGES | ops.CheckCapacity) and names(op))
        moved.insert(last, made[at])
        assert set(early(RankProgram(tuple(moved), (), (), (), frozenset()))) == {made[at].unit}


@pytest.mark.parametrize("mesh", ["one rank", "tp", "dp", "zero 1", "interleaved"])
def test_program_offers_most_units_during_the_backward(mesh):
    _, program = programs(mesh)[-1]
    assert sum(isinstance(op, ops.Offer) for op in program.end) <= 2 < len(offers(program))


@pytest.mark.parametrize("alone", ["islands.count=0", "islands.sync=diloco"])
def test_program_without_sums_over_islands_offers_nothing(alone):
    step = StepProgram.of(config([alone]), device="cpu")
    assert not offers(step.ranks[0].program)


def test_program_command_prints_offers(capsys):
    assert main(["program", "recipe=llama_debug", "hardware=cpu", "mesh.tp=2", "islands.count=2"]) == 0
    out = capsys.readouterr().out
    assert "offer    the gradient of model.layers.0 to the other islands" in out
    assert "sum      gradients replicated across tp ranks, of model.layers.0" in out


# ----------------------------------------------------------------------------------------------------------- real ranks


def check_offered(overrides: list[str]) -> int:
    """Run steps on one rank, and compare what is offered with the gradient at the end. Return the number of reruns."""
    rank, _, world = world_from_env()
    cfg, reruns = config([*FP64, *overrides], world), 0
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, units, seen = TrainingStep(cfg, mesh, stages), stages.units, []
    units.offer_unit = lambda unit: seen.append((unit, unit.grad.clone()))
    for number in (1, 2):
        seen.clear()
        batches = make_batches(cfg, mesh, number, "uneven")
        with compared(step):
            loss = step.forward_backward(number, batches)
            assert sorted(unit.name for unit, _ in seen) == sorted(units.units)
            assert all(unit.grad.abs().sum() > 0 and torch.equal(unit.grad, x) for unit, x in seen)
            pending = step.update(number, loss)
        reruns += pending.wait().reruns
    return reruns


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh == "one rank" else pytest.mark.full) for mesh in MESHES]
)
def test_step_offers_the_gradients_of_its_end(mesh, monkeypatch):
    overrides, ranks = MESHES[mesh]
    if ranks == 1:
        check_offered(overrides)
        return
    reruns = run_ranks(check_offered_in_small_sums, ranks, overrides, timeout=300)
    assert min(reruns) > 0 or "moe.capacity=1" not in overrides, "no step was repeated"


def check_offered_in_small_sums(overrides: list[str]) -> int:
    """Sum each unit's gradient over the replicas in a message of its own."""
    with mock.patch("ndtrain.program.build.BUCKET_BYTES", 1):
        return check_offered(overrides)


# -------------------------------------------------------------------------------------------------------- island's step


class Script:
    """The tasks of an island of one rank, given in advance."""

    leader, name = None, "me"

    def __init__(self, exchange, tasks):
        self.exchange, self._tasks, self.agreed = exchange, list(tasks), []
        self._threads = ThreadPoolExecutor(1)

    def next(self) -> Task:
        return self._tasks.pop(0)

    def begin(self, task, read) -> None:
        def run() -> bool:
            try:
                self.exchange.connect(task.connect)
                read()
            except Gone:
                return False
            return True

        self._reading = self._threads.submit(run)

    def finish(self, task) -> bool:
        self.agreed.append(self._reading.result(20))
        return self.agreed[-1]

    def numbers(self) -> dict[str, float]:
        return {}

    def offers(self, step) -> None:
        assert not self.exchange._own.missing(step, self.exchange._units)

    def measured(self, rows_per_s) -> None:
        assert rows_per_s > 0


class Island:
    """An island of one process, whose tasks are given, and its exchange."""

    def __init__(self):
        self.cfg = config(FP64)
        self.mesh = Mesh(MeshSpec.of(self.cfg.mesh), 0, torch.device("cpu"))
        self.stages = build_stages(self.cfg, self.mesh)
        initialise(self.stages, self.cfg.run.seed)
        self.step = TrainingStep(self.cfg, self.mesh, self.stages)
        self.units = self.stages.units.units
        self.exchange = Exchange(self.stages, 0, 1, Place("127.0.0.1", TOKEN, ()), Plain(torch.float64))
        self.weight = total_weight(self.stages.objective, self.batches(0, range(8)))
        self.run = LocalRun(self.batches, lambda step: self.weight, lambda: torch.zeros(1), lambda numbers: None)

    def batches(self, step, rows):
        t, sharding = self.cfg.train, SequenceSharding.of(self.cfg)
        return microbatches(RandomRows(self.cfg), step, list(rows), t.micro_batch, sharding, 0, None, ())

    def steps(self, *tasks: Task) -> IslandStep:
        return IslandStep(self.cfg, self.mesh, self.step, self.run, Script(self.exchange, tasks))

    def gradient(self, rows) -> dict[str, torch.Tensor]:
        """The gradient of rows of the first step, without other islands."""
        with mock.patch.object(self.stages.units, "offer_unit", lambda unit: None):
            self.step.forward_backward(1, self.batches(0, rows), self.weight)
        return {name: unit.grad.clone() for name, unit in self.units.items()}


@contextmanager
def islands(number=1):
    with ExitStack() as stack:
        made = [Island() for _ in range(number)]
        for island in made:
            stack.callback(island.exchange.close)
        yield made


def work(epoch, rows, names=("me",), connect=None) -> Task:
    return Task("work", 1, epoch, tuple(rows), tuple(names), connect or {})


def test_island_step_rows_taken_over_in_the_same_step_are_added():
    with islands() as (island,):
        whole = island.gradient(range(8))
        steps = island.steps(work(1, range(3), ("me", "lost")), work(2, range(8)))
        steps.run(0)
        assert steps._tasks.agreed == [False, True]
        for name, unit in island.units.items():
            assert torch.allclose(unit.grad, whole[name], rtol=1e-12, atol=1e-14)
            assert torch.equal(island.exchange.shelf.wait(Tag("grad", 1, 2), name, 0.0)["grad"], unit.grad)
        assert island.exchange.shelf.wait(Tag("grad", 1, 1), "lm_head", 0.0) is None, "it is withdrawn"


def test_island_step_gradient_read_in_vain_is_offered_again_without_computing():
    with islands() as (island,):
        steps = island.steps(work(1, range(8), ("me", "lost")), work(2, range(8)))
        with mock.patch.object(island.step, "forward_backward", wraps=island.step.forward_backward) as computed:
            steps.run(0)
        assert computed.call_count == 1 and steps._tasks.agreed == [False, True]
        offered = island.exchange.shelf.wait(Tag("grad", 1, 2), "lm_head", 0.0)["grad"]
        assert offered.abs().sum() > 0 and torch.equal(offered, island.units["lm_head"].grad)


def test_island_step_missing_offer_is_an_error():
    with islands() as (island,):
        program = island.step.executor.program
        drop = lambda made: tuple(op for op in made if op != ops.Offer("model.norm"))
        faulty = replace(program, turns=tuple(turn._replace(ops=drop(turn.ops)) for turn in program.turns))
        many = island.step
        many._use_executors(8)
        many.executor._programs[frozenset(island.stages.units.unsharded)] = faulty
        with pytest.raises(AssertionError, match=r"has not offered \['model.norm'\]"):
            island.steps(work(1, range(8))).run(0)


def test_island_step_sends_and_reads_units_during_the_backward():
    """Before it offers its last unit, it has received the other island's first ones, and the other has received its."""
    with islands(2) as (mine, other):
        theirs = other.gradient(range(4, 8))
        other.exchange.offer_gradient(1, 1, theirs, torch.zeros(1, dtype=torch.float64))
        first = list(reversed(mine.units))
        read = first[: AHEAD + 1]
        arrived, tag = threading.Event(), Tag("grad", 1, 1)
        other.exchange.connect({"me": ("life", [mine.exchange.address])})

        def receive() -> None:
            for unit, got in other.exchange.reader.read_each({"me": tag}, [*first, NUMBERS]):
                if unit == first[0]:
                    head.append(got["me"]["grad"].clone())
                    arrived.set()

        head: list[torch.Tensor] = []
        receiving = threading.Thread(target=receive, daemon=True)
        receiving.start()
        steps = mine.steps(work(1, range(4), ("me", "them"), {"them": ("life", [other.exchange.address])}))
        offer, order, reader = steps._offer_unit, [], mine.exchange.reader

        def offer_unit(unit) -> None:
            order.append(unit.name)
            if unit.name == first[-1]:
                assert arrived.wait(10.0), "nothing was sent during the backward"
                expected = sum(8 * mine.units[name].grad.numel() for name in read)
                wait_for(lambda: reader.nbytes >= expected, "units read during the backward", timeout=10)
            offer(unit)

        mine.stages.units.offer_unit = offer_unit
        steps.run(0)
        receiving.join()
        assert order == first
        whole = mine.gradient(range(8))
        own = mine.exchange.offered(1)
        assert torch.equal(head[0], own[first[0]])
        total, _ = mine.exchange.take_sum(1, mine.units)
        for name in mine.units:
            assert torch.equal(total[name], own[name] + theirs[name])
            assert torch.allclose(total[name], whole[name], rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------------------------------------------------- own gradients


@pytest.fixture
def own(monkeypatch):
    shelf = mock.create_autospec(Shelf, instance=True)
    shelf.table = SimpleNamespace(units={"u": None})
    return OwnGradients(shelf, {"u": 4, "v": 2}, torch.float32)


def test_own_wait_returns_a_unit_only_when_it_is_offered(own):
    own.begin(tag := Tag("grad", 3, 1))
    got = []
    waiting = threading.Thread(target=lambda: got.append(own.wait(tag, "u").clone()), daemon=True)
    waiting.start()
    own.put(3, "v", lambda out: out.fill_(1))
    waiting.join(0.1)
    assert waiting.is_alive() and own.missing(3, ["u", "v"]) == ["u"]
    own.put(3, "u", lambda out: out.fill_(2))
    waiting.join(5.0)
    assert got[0].tolist() == [2.0] * 4 and own.missing(3, ["u", "v"]) == []
    (offered,) = own._shelf.offer.call_args_list
    assert offered.args[:2] == (tag, "u"), "v is not in the table"


def test_own_begin_withdraws_the_step_before_the_last(own):
    for step in (1, 2, 3):
        own.begin(Tag("grad", step, 1))
        own.put(step, "u", lambda out, step=step: out.fill_(step))
    own._shelf.withdraw.assert_called_once_with(Tag("grad", 1, 1))
    assert own.of_step(2)["u"].tolist() == [2.0] * 4 and own.of_step(3)["u"].tolist() == [3.0] * 4
    assert own.missing(3, ["u"]) == []


def test_own_close_ends_waits(own):
    own.begin(tag := Tag("grad", 1, 1))
    own.close()
    with pytest.raises(Gone, match="step 1 in epoch 1"):
        own.wait(tag, "u")


def test_own_wait_ends_when_the_step_is_offered_in_a_later_epoch(own):
    """Otherwise the thread that still reads the earlier epoch would never end."""
    own.begin(earlier := Tag("grad", 1, 1))
    own.put(1, "u", lambda out: out.fill_(1))
    own.offer_again(later := Tag("grad", 1, 2), ["u"])
    assert own.wait(later, "u").tolist() == [1.0] * 4
    with pytest.raises(Gone, match="step 1 in epoch 1"):
        own.wait(earlier, "u")
