"""moe.capacity: no layer makes the host wait, a step whose rows do not fit is run again, and the run is the one without
a capacity."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from threading import Barrier, Thread
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.engine.train_step import Evaluation, TrainingStep
from ndtrain.mesh.collectives import Pending
from ndtrain.model.moe.exchange import Exchange
from ndtrain.model.moe.permutation import Permutation
from ndtrain.parallel import ep, ep_capacity
from ndtrain.parallel.build import initialise
from ndtrain.parallel.recompute import SavedOps
from tests.engine.test_gpu_path import INDEXED, WAITS
from tests.lib.helpers import arguments, config_refusal, rank_main, rows, write_corpus
from tests.lib.parity import Run, assemble, compare, make_batches, rank_run
from tests.lib.ranks import run_ranks
from tests.lib.stages import RankStages
from tests.parallel.test_parity_ep import EIGHT
from tests.parallel.test_parity_moe import FULL, MODEL, MODELS, SCHEDULES

ALL_FITS = 4  # the capacity of 8 experts, of which a token goes to 2
TWO = ("mesh.dp=2", "mesh.ep=2", "train.micro_batch=2")


def rank_reruns(overrides: list[str]) -> tuple[tuple[Run, list[tuple]], list[tuple[int, float | None]]]:
    """On one rank: its run, and of each step how often it was run again and with which capacity it fitted."""
    seen = []

    def noted(*args, update: Callable = TrainingStep.update):
        report = update(*args)
        seen.append((report.reruns, report.capacity))
        return report

    with mock.patch.object(TrainingStep, "update", noted):
        return rank_run(overrides, "uneven"), seen


@cache
def trained(name: str, ranks: int, *overrides: str) -> tuple[Run, list[tuple[int, float | None]]]:
    results = run_ranks(rank_reruns, ranks, [*MODEL, *MODELS[name], EIGHT, *overrides], timeout=600)
    assert all(reruns == results[0][1] for _, reruns in results), "ranks do not run the same steps again"
    return assemble([run for run, _ in results]), results[0][1]


def check_capacity(name: str, ranks: int, capacity: float, *overrides: str) -> list[int]:
    """Returns how often each step was run again."""
    (run, seen), (without, none) = (trained(name, ranks, *overrides, *c) for c in ((f"moe.capacity={capacity}",), ()))
    assert none == [(0, None)] * len(none)
    compare(run, without, loss=1e-12, state=1e-11)
    factors = [capacity, *(factor for _, factor in seen)]
    assert all(after == min(before * 2**n, ALL_FITS) for before, (n, after) in zip(factors, seen, strict=False))
    return [reruns for reruns, _ in seen]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen2-moe", ("recompute=full",)),
        *(pytest.param(name, (), marks=FULL) for name in MODELS),
        *(pytest.param("qwen2-moe", ("moe.overlap=true", f"moe.parts={n}"), marks=FULL) for n in (2, 3, 4)),
        pytest.param("qwen2-moe", ("recompute=full", "moe.overlap=true"), marks=FULL),
        pytest.param("qwen2-moe", ("recompute=selective", "recompute.keep=[router,experts]"), marks=FULL),
        pytest.param("qwen2-moe", ("recompute=every", "recompute.every=2"), marks=FULL),
        pytest.param("qwen2-moe", ("recompute=budget", "recompute.budget=1MB"), marks=FULL),
        pytest.param("qwen2-moe", ("train.compile=true",), marks=FULL),
        pytest.param("qwen2-moe", ("optim.offload=true",), marks=FULL),
        pytest.param("qwen2-moe", ("moe.balance=hf",), marks=FULL),
    ],
)
def test_step_beyond_capacity_is_rerun_with_same_result(name, more):
    """With buffers of the mean some expert gets too many rows. Nothing of the first try is left."""
    reruns = check_capacity(name, 2, 1, *TWO, *more)
    assert 1 <= sum(reruns) <= 2 and reruns[0] > 0


@FULL
@pytest.mark.parametrize("capacity", [ALL_FITS, 100])
def test_largest_capacity_needs_no_rerun(capacity):
    run, seen = trained("qwen2-moe", 2, *TWO, f"moe.capacity={capacity}")
    compare(run, trained("qwen2-moe", 2, *TWO)[0], loss=1e-12, state=1e-11)
    assert seen == [(0, ALL_FITS)] * 3


@FULL
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("parts", [(), ("moe.overlap=true",)])
def test_capacity_with_all_axes_has_same_result(zero, parts):
    mesh = ("mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.ep=4", f"mesh.zero={zero}", "train.micro_batch=1")
    assert sum(check_capacity("qwen2-moe", 8, 1, *mesh, *parts))


@FULL
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_capacity_with_schedules_has_same_result(schedule):
    layers = f"model.num_hidden_layers={SCHEDULES[schedule]}"
    mesh = ("mesh.pp=2", "mesh.fsdp=2", "mesh.ep=2", "train.micro_batch=1")
    assert sum(check_capacity("qwen2-moe", 4, 1, layers, f"schedule={schedule}", *mesh))


# -------------------------------------------------------------------------------------------------------- the exchange


class ThreadGroup:
    """Ranks that are threads of this process, and exchange tensors."""

    def __init__(self, ranks: int):
        self.ranks, self.sent, self.barrier = ranks, {}, Barrier(ranks, timeout=60)

    def run(self, of_rank: Callable) -> list:
        results: list = [None] * self.ranks

        def run(rank: int) -> None:
            results[rank] = of_rank(SimpleNamespace(size=lambda: self.ranks, rank=lambda: rank, all=self))

        threads = [Thread(target=run, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def all_to_all_of_threads(sends, receives, group, nbytes) -> Pending:
    group.all.sent[group.rank()] = list(sends)
    group.all.barrier.wait()
    for rank, received in enumerate(receives):
        received.copy_(group.all.sent[rank][group.rank()])
    group.all.barrier.wait()
    return Pending(())


def there_and_back(exchange: Exchange, x_ME: torch.Tensor, factors: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows times the factor of their expert, and the gradient of rows."""
    x_ME, returned = x_ME.clone().requires_grad_(), []
    for part, sent in zip(exchange.parts, exchange.send(x_ME), strict=True):
        x_RE, rows = exchange.receive(part, sent), part.expert_rows
        assert rows.ends.tolist() == list(accumulate(rows.sizes)) and sum(rows.sizes) == len(x_RE)
        of_experts = zip(factors[part.experts], x_RE.split(rows.sizes), strict=True)
        y_RE = torch.cat([x_of_expert * factor for factor, x_of_expert in of_experts])
        returned.append(exchange.send_back(part, y_RE))
    y_ME = exchange.to_tokens(returned)
    y_ME.backward(torch.arange(y_ME.numel(), dtype=y_ME.dtype).view_as(y_ME))
    return y_ME.detach(), x_ME.grad


def exchanged(seed: int) -> tuple[bool, bool, bool]:
    """Of a random exchange: whether all must fit, whether all fitted, and whether every rank got the same as without a
    capacity."""
    draw = random.Random(seed)
    ranks, each = draw.choice([2, 3, 4]), draw.randint(1, 4)
    experts, parts = ranks * each, draw.randint(1, each)
    choices, tokens = draw.randint(1, experts), draw.randint(1, 20)
    factor = draw.choice([1, 1.3, 2, 4, experts / choices])
    model = SimpleNamespace(num_experts=experts, num_experts_per_tok=choices)

    def of_rank(group) -> tuple[bool, bool]:
        generator = torch.Generator().manual_seed(100 * seed + group.rank())
        chosen_NK = torch.rand(tokens, experts, generator=generator).topk(choices).indices
        counts_X, rows = Permutation.of(chosen_NK, experts).counts, tokens * choices
        x_ME = torch.randn(rows, 3, dtype=torch.float64, generator=generator)
        capacity = ep_capacity.Capacity(model, factor, SimpleNamespace(device=torch.device("cpu")))
        factors = [float(1 + group.rank() * each + x) for x in range(each)]
        exchange = partial(ep.ExpertExchange, ep.ExpertRanks(group, parts, SavedOps()))
        uneven = there_and_back(exchange(ep.plan_rows, counts_X, rows), x_ME, factors)
        with capacity.in_use():
            fixed = exchange(capacity.plan, counts_X, rows)
        same = all(map(torch.equal, uneven, there_and_back(fixed, x_ME, factors)))
        of_rows = torch.arange(1.0, experts + 1).repeat_interleave(counts_X)[:, None]
        assert torch.equal(uneven[0], x_ME * of_rows)
        return capacity._overflow.item() == 0, same

    fitted, same = zip(*ThreadGroup(ranks).run(of_rank), strict=True)
    return factor >= experts / choices, all(fitted), all(same)


def test_random_exchange_is_same_or_reports_overflow():
    patched = {"all_to_all_rows": all_to_all_of_threads}
    with mock.patch.multiple(ep, **patched):
        seen = [exchanged(seed) for seed in range(60)]
    assert all(same for _, fitted, same in seen if fitted)
    assert all(fitted for must_fit, fitted, _ in seen if must_fit)
    assert 5 < sum(fitted for _, fitted, _ in seen) < 55
    assert sum(not same for _, _, same in seen) > 5, "the flag is raised where nothing is lost"


# ------------------------------------------------------------------------------------------------------- no host waits


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a GPU: ops that read a value or whose shape depends on one, and copies
    to the host, which on a CPU are no ops."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in WAITS or (name in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])):
            self.seen[name] += 1
        return func(*args, **kwargs or {})


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    with Waits() as waits:

        def noted(name: str) -> Callable:
            method = getattr(torch.Tensor, name)

            def call(*args, **kwargs):
                waits.seen[name] += 1
                return method(*args, **kwargs)

            return call

        with mock.patch.multiple(torch.Tensor, **{name: noted(name) for name in ("cpu", "tolist", "numpy")}):
            yield waits.seen


def built(overrides: list[str]) -> tuple[RankStages, TrainingStep]:
    """This rank's part of a model with experts, and its training step."""
    run = RankStages.build([*MODEL, *MODELS["qwen2-moe"], EIGHT, *TWO, *overrides])
    initialise(run.stages, run.cfg.run.seed)
    return run, TrainingStep(run.cfg, run.mesh, run.stages)


def waits_of_a_step(several: list[list[str]]) -> list[Counter[str]]:
    """On one rank: of each run the waits of its third step, before its report is asked for."""
    waits_of_each = []
    for overrides in several:
        run, step = built(overrides)
        for number in (1, 2):
            step.run(number, make_batches(run.cfg, run.mesh, number, "uneven")).wait()
        batches = make_batches(run.cfg, run.mesh, 3, "uneven")
        with counted_waits() as waits:
            report = step.run(3, batches)
        assert report.wait().reruns == 0
        waits_of_each.append(waits)
    return waits_of_each


@pytest.mark.full
def test_capacity_waits_once_per_step():
    """Without a capacity each layer of a microbatch waits for its counts (their copy to the host, whose list is then
    read). With one the step waits once."""
    fits = "moe.capacity=3.9"  # below the largest, with which the flag is not even read
    several = [[], ["moe.overlap=true"], [fits], [fits, "moe.overlap=true", "recompute=full"]]
    for without, in_parts, fixed, fixed_in_parts in run_ranks(waits_of_a_step, 2, several, timeout=600):
        layers, microbatches = 2, 2
        assert without == in_parts == {"cpu": layers * microbatches, "tolist": layers * microbatches}
        assert fixed == fixed_in_parts == {"_local_scalar_dense": 1}


# --------------------------------------------------------------------------------------------------------- evaluations


def evaluated(several: list[list[str]]) -> list[float]:
    """On one rank: of each run the loss of an evaluation after a step."""
    losses = []
    for overrides in several:
        run, step = built(overrides)
        if run.stages.capacity:
            run.stages.capacity.factor = 0.5  # now no buffer is large enough
        batches = make_batches(run.cfg, run.mesh, 1, "none")
        losses.append(Evaluation(run.cfg, run.mesh, run.stages).run([batches]).loss)
        losses.append(step.run(1, make_batches(run.cfg, run.mesh, 1, "none")).wait().loss)
    return losses


@pytest.mark.full
def test_evaluation_with_capacity_drops_no_rows():
    for before, loss, with_capacity, loss_with_capacity in run_ranks(
        evaluated, 2, [[], ["moe.capacity=1"]], timeout=600
    ):
        assert before == with_capacity
        assert loss == pytest.approx(before, rel=1e-12) and loss_with_capacity == pytest.approx(before, rel=1e-12)


# --------------------------------------------------------------------------------------------------------- the program


def test_run_logs_its_reruns(tmp_path):
    """In metrics.jsonl, and in one line for each step that was run again."""
    corpus, found = write_corpus(tmp_path / "corpus.txt"), {}
    for name, more in {"with": ["moe.capacity=1"], "without": []}.items():
        overrides = ["recipe=moe_debug", "mesh.dp=2", "mesh.ep=2", "train.steps=3", "optim.warmup=1", *more]
        args = [a for a in arguments(tmp_path / name, corpus, *overrides) if a != "recipe=llama_debug"]
        assert run_ranks(rank_main, 2, args, timeout=600) == [0, 0]
        found[name] = rows(tmp_path / name)
    reruns = [row["moe/reruns"] for row in found["with"]]
    assert len(reruns) == 3 and reruns[0] > 0
    assert not any("moe/reruns" in row for row in found["without"])
    losses = [[row["loss"] for row in found[name]] for name in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    logged = "".join(path.read_text() for path in tmp_path.glob("with/**/*.log"))
    assert logged.count("expert capacity exceeded; step repeated with capacity factor") >= sum(n > 0 for n in reruns)


# ------------------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "too little": (["mesh.dp=2", "mesh.ep=2", "moe.capacity=0.9"], 2, ["moe.capacity=0.9", "at least 1"]),
    "no exchange": (["moe.capacity=2"], 1, ["moe.capacity=2", "mesh.ep=1", "remove it"]),
    "a dense model": (["recipe=llama_debug", "moe.capacity=2"], 1, ["moe.capacity=2", "llama has no experts"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_capacity_is_refused(name):
    overrides, world, said = REFUSED[name]
    line = config_refusal(["recipe=moe_debug", *overrides], world)
    assert all(words in line for words in said), line
