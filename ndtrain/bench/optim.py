"""`bench optim`: the update of an optimizer on a mesh, without the training step before it.

With an optimizer of whole tensors, its owners are compared with other ways to do the same work. All alternate:

- `duplicated`: every rank updates the whole model alone, as data-parallel replicas do elsewhere.
- `gathered` (fsdp): every rank gathers the whole matrices and computes all of them.
- `alone`: the owners' computations without any message. What `owners` takes longer is exposed communication.
- `torch` (muon with `optim.ns_dtype=bf16`): `torch.optim.Muon` and AdamW on the whole model, on every rank.
- `adamw`: AdamW on the same mesh.

duplicated / owners above 1 means that owners are faster.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ndtrain.arguments import option
from ndtrain.config import Config, load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.measure.ranks import run_ranks
from ndtrain.measure.results import require_folder, save
from ndtrain.measure.rounds import BlockTimer, quartiles, ratio, run_rounds
from ndtrain.mesh.collectives import all_gather
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.flops import parameter_count
from ndtrain.optim import Update, WholeTensorOptimizer, WholeTensors
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.grad_stats import GradStats
from ndtrain.program import ops
from ndtrain.program.build import whole_tensors

# matrices so large that computing them takes much longer than sending them
COMPUTE = ["model.hidden_size=384", "model.intermediate_size=1024", "model.num_hidden_layers=4", "model.vocab_size=512"]
MUON = ["optim=muon", "optim.ns_dtype=fp32"]  # many CPUs have no fast products in bf16


@dataclass(frozen=True)
class Options:
    """Options of `bench optim`."""

    ranks: int = option("processes", 2)
    axis: Literal["fsdp", "dp", "tp"] = option("axis along which the ranks hold the model", "fsdp")
    overrides: str = option(
        "optimizer and model, as overrides of a training run; the default is Muon in fp32 and a model of 8 M", ""
    )
    rounds: int = option("timed blocks of each way", 10)
    steps: int = option("updates per block", 1)
    warmup: int = option("untimed updates before the timed ones", 1)
    out: str = option("JSON file for all results", "")


def run(options: Options) -> None:
    """Measure, print and write `options.out`.

    Raises:
        ConfigError: wrong overrides.
    """
    require_folder("out", options.out)
    config_of(options, options.ranks)
    result = run_ranks(measure, options.ranks, options)
    show(options, result)
    save("optim", options, **result)


def config_of(options: Options, ranks: int, optimizer: Sequence[str] | None = None) -> Config:
    """Return the configuration of the update.

    Args:
        optimizer: the overrides of the optimizer; None: those in `options`.
    """
    given = options.overrides.split()
    named = [] if any(word.startswith(("model", "recipe")) for word in given) else COMPUTE
    own = [word for word in given if word.startswith("optim")] or MUON
    others = [word for word in given if not word.startswith("optim")]
    batch = [f"train.global_batch={ranks}", "train.micro_batch=1", f"mesh.{options.axis}={ranks}"]
    return resolve(load_config([*named, *others, *(own if optimizer is None else optimizer), *batch]), ranks)


def measure(rank: int, options: Options) -> dict[str, Any]:
    """Measure on one rank. Return milliseconds by way, and ratios to `owners`."""
    cfg = config_of(options, options.ranks)
    ours = Updates(cfg, rank)
    alone = Updates(config_of(options, 1), 0)
    ways: dict[str, Callable[[], None]] = {"owners": ours.run}
    if ours.owners is not None:
        ways |= {"duplicated": alone.run, "alone": ours.compute}
        if options.axis == "fsdp" and options.ranks > 1:
            ways["gathered"] = ours.gather_and_run
    if cfg.optim.name == "muon" and cfg.optim.ns_dtype == "bf16":
        ways["torch"] = torch_muon(alone)
    ways["adamw"] = Updates(config_of(options, options.ranks, ["optim=adamw"]), rank).run
    timers = {name: BlockTimer(way) for name, way in ways.items()}
    run_rounds(timers, options)
    return {
        "parameters": parameter_count(cfg.model),
        "ms": {name: quartiles(timer.block_ms) for name, timer in timers.items()},
        "ratios": {name: ratio(timer, timers["owners"]) for name, timer in timers.items() if name != "owners"},
        **ours.facts(),
    }


class Updates:
    """A rank's stages, with gradients that are drawn once."""

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.mesh = cfg, Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
        self.stages = build_stages(cfg, self.mesh)
        initialise(self.stages, cfg.run.seed)
        self.step = TrainingStep(cfg, self.mesh, self.stages)
        self.owners, self.optimizer = self.stages.units.owners, self.step.optimizer
        for unit in self.stages.units.units.values():
            unit.grad.normal_(generator=torch.Generator().manual_seed(rank))
        one = torch.ones((), dtype=torch.float64)
        self._stats = GradStats(one, one, torch.tensor(True))

    def run(self) -> None:
        """Update the weights."""
        self._around(lambda: [self._run(op) for op in whole_tensors(len(self.owners.rounds) if self.owners else 0)])

    def compute(self) -> None:
        """Compute directions of other matrices of the same shapes, without messages."""
        self._around(lambda: [self.direction(whole, self._update) for whole in self._drawn()])

    def gather_and_run(self) -> None:
        """Gather the matrices of a unit on all ranks, and compute each of them on all ranks."""
        self._around(self._gather)

    def _around(self, whole: Callable[[], object]) -> None:
        self.optimizer.begin(1, self.cfg.optim.lr, self._stats)
        whole()
        self.optimizer.finish()

    def _run(self, op: ops.Op) -> None:
        if isinstance(op, ops.ComputeWhole):
            self.optimizer.compute(op.round)
        else:
            self.step.executor.run_op(op)

    def _drawn(self) -> Iterator[WholeTensors]:
        sent = self.stages.units.plan.sent
        for batch in (each.batches.get(self.mesh.rank) for each in self.owners.rounds):
            if batch is not None:
                grads = torch.rand(len(batch.names), *batch.shape, dtype=sent)
                yield WholeTensors(batch.names, grads, batch.rows, {})

    def _gather(self) -> None:
        sent, update = self.stages.units.plan.sent, self._update
        for unit in self.stages.units.units.values():
            if not unit.layout.hidden_numel:
                continue
            full = torch.empty(unit.layout.numel, dtype=sent)
            all_gather(full, unit.grad.to(sent), unit.group).wait()
            for t in (t for t in unit.layout.tensors if t.hidden):
                at = unit.layout.offsets[t.name]
                part = full[at : at + t.numel].view(1, *t.shape)
                part.copy_(self.direction(WholeTensors((t.name,), part.clone(), t.dims[0].width, {}), update))
            unit.grad.copy_(full[slice(*unit.layout.own)])

    @property
    def _update(self) -> Update:
        zero = torch.zeros(())
        return Update(1, zero, self.cfg.optim.lr, zero, None)

    @property
    def direction(self) -> Callable[[WholeTensors, Update], Tensor]:
        owner = self.optimizer.owner
        assert isinstance(owner, WholeTensorOptimizer)
        return owner.direction

    def facts(self) -> dict[str, Any]:
        """Return the number of exchanges, their bytes over all ranks, and the costs of the owners."""
        rounds = self.owners.rounds if self.owners is not None else []
        costs = [0.0] * self.mesh.spec.world_size
        for each in rounds:
            for position, batch in each.batches.items():
                costs[position] += batch.cost
        return {
            "exchanges": 2 * len(rounds),
            "bytes": 2 * sum(each.numel for each in rounds) * self.stages.units.plan.sent.itemsize,
            "busiest": max(costs) / (sum(costs) / len(costs)) if any(costs) else 1.0,
        }


def torch_muon(model: Updates) -> Callable[[], None]:
    """Return the update of PyTorch's own optimizers on the whole model."""
    named = [
        (t, p) for u in model.stages.units.units.values() for t in u.layout.tensors for p in [u.parameters[t.name]]
    ]
    for t, p in named:
        p.grad = torch.randn(t.shape)
    o = model.cfg.optim
    muon = torch.optim.Muon([p for t, p in named if t.hidden], lr=o.lr, adjust_lr_fn=o.adjust, ns_steps=o.ns_steps)
    adamw = torch.optim.AdamW([p for t, p in named if not t.hidden], lr=o.lr, fused=True)

    def update() -> None:
        muon.step()
        adamw.step()

    return update


def show(options: Options, result: dict[str, Any]) -> None:
    print(f"update of {result['parameters']:,} parameters, {options.axis}={options.ranks}, {options.rounds} rounds")
    for name, ms in result["ms"].items():
        print(f"  {name:12} {ms['median']:9.2f} ms   quartiles {ms['q1']:.2f} .. {ms['q3']:.2f}")
    for name, r in result["ratios"].items():
        print(f"  {name + ' / owners':20} {r['median']:7.3f}   quartiles {r['q1']:.3f} .. {r['q3']:.3f}")
    if result["exchanges"]:
        exposed = result["ms"]["owners"]["median"] - result["ms"]["alone"]["median"]
        print(f"  {result['exchanges']} exchanges of {result['bytes'] / 1e6:.1f} MB in all, {exposed:.2f} ms exposed")
        print(f"  busiest owner / mean: {result['busiest']:.3f}")
