"""The parity contract: every mesh gives the losses, gradients, norms, weights and moments of the one-process run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ndtrain.config import Config, load_config, resolve, world_from_env
from ndtrain.data import Batch, Tokens, microbatches, rows_of
from ndtrain.data.token_array import Packing
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.mesh.sharding import BATCH_AXES
from ndtrain.model.init import standard_normal
from ndtrain.model.objective import column_names
from ndtrain.model.vocabulary import IGNORE
from ndtrain.parallel.build import build_stages, initialise
from tests.lib.program_launches import compared
from tests.lib.ranks import run_ranks

STATE = ("gradient", "weight", "exp_avg", "exp_avg_sq")
KINDS = (("weight", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))  # kind -> buffer of a unit
# 3 K/V and 6 query heads, vocabulary 101, hidden 36: flat sizes that 2, 4 and 8 do not divide
SHAPE = [
    "model.vocab_size=101", "model.hidden_size=36", "model.intermediate_size=52", "model.num_hidden_layers=3",
    "model.num_attention_heads=6", "model.num_key_value_heads=3", "train.seq_len=12", "train.loss_chunk=10",
    "train.steps=3", "optim.lr=1e-2", "optim.clip=0.5", "model.initializer_range=0.3",
]  # fmt: skip
FP64 = ["precision.params=fp64", "precision.compute=fp64"]


@dataclass
class Run:
    """The result of a run on the whole model.

    Attributes:
        losses, norms, balance: per step.
        tensors: kind -> name -> tensor: the gradient of the first step; weights, moments and the selection biases of
            experts of the last.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    balance: list[dict[str, float]] = field(default_factory=list)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def mask_none(row: int, step: int, seq_len: int) -> int:
    return 0


def mask_uneven(row: int, step: int, seq_len: int) -> int:
    """Number of leading labels that are ignored. It differs widely between rows. The first four rows have no valid
    token; with 8 ranks these are all rows of a rank."""
    return seq_len if row < 4 else mask_ragged(row, step, seq_len)


def mask_ragged(row: int, step: int, seq_len: int) -> int:
    """As `mask_uneven`, with valid tokens in every row: for batches of four rows and fewer."""
    return int(np.random.default_rng((step, row, 1)).integers(0, seq_len))


MASKS = {"none": mask_none, "uneven": mask_uneven, "ragged": mask_ragged}


EOS = 7  # ends a document with data.pack


@dataclass
class RandomRows(Tokens):
    """Replaces a corpus. The content of a row depends only on (step, row)."""

    cfg: Config

    def columns(self, step: int, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Random columns, as many as the objective reads."""
        length, vocab = self.cfg.train.seq_len + 1, self.cfg.model.vocab_size
        draws = [np.random.default_rng((step, row, 1)) for row in rows]
        made = {
            "weights": np.stack([d.choice([0, 0.3, 1, 2], length).astype(np.float32) for d in draws]),
            "teacher_ids": np.stack([d.integers(0, vocab, (length, 3)) for d in draws]),
            "teacher_probs": np.stack([d.dirichlet(np.ones(3), length).astype(np.float32) for d in draws]),
        }
        return {name: made[name] for name in column_names(self.cfg.objective)}

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        return np.stack([self._row(step, row) for row in rows])

    def _row(self, step: int, row: int) -> np.ndarray:
        draw = np.random.default_rng((step, row))
        tokens = draw.integers(0, self.cfg.model.vocab_size, self.cfg.train.seq_len + 1)
        if self.cfg.data.pack:
            tokens[draw.random(tokens.size) < draw.choice([0.05, 0.3])] = EOS
        return tokens


def make_batches(cfg: Config, mesh: Mesh, step: int, mask: str) -> list[Batch]:
    """This rank's microbatches of random tokens, sharded over cp."""
    t, sharding, part = cfg.train, SequenceSharding.of(cfg), mesh.index("cp")
    rows = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), t.global_batch)
    packing = Packing(EOS) if cfg.data.pack else None
    batches = microbatches(
        RandomRows(cfg), step, rows, t.micro_batch, sharding, part, packing, column_names(cfg.objective)
    )
    places = torch.from_numpy(sharding.index(part))
    leading = torch.tensor([MASKS[mask](row, step, t.seq_len) for row in rows]).split(t.micro_batch)
    ignored = [places < first[:, None] for first in leading]
    return [replace(b, labels=b.labels.masked_fill(i, IGNORE)) for b, i in zip(batches, ignored, strict=True)]


def rank_run(
    overrides: list[str], mask: str = "none", kinds: Sequence[tuple[str, str]] = KINDS
) -> tuple[Run, list[tuple]]:
    """Runs train.steps steps on one rank, and compares the launches of each step with its program.

    Returns the run's losses and norms, and the runs of state that this rank holds as (kind, name, shape, global start,
    values).
    """
    rank, _, world = world_from_env()
    cfg = resolve(load_config(overrides), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step = TrainingStep(cfg, mesh, stages)
    run, pieces = Run(), []
    begin = step.optimizer.begin

    def keep_first_gradient(number, lr, norm):
        if number == 1:
            pieces.extend(owned(stages, "gradient", lambda u: u.grad))
        begin(number, lr, norm)

    step.optimizer.begin = keep_first_gradient
    for number in range(1, cfg.train.steps + 1):
        batches = make_batches(cfg, mesh, number, mask)
        with compared(step):
            pending = step.run(number, batches)
        report = pending.wait()
        run.losses.append(report.loss)
        run.norms.append(report.grad_norm)
        run.balance.append(report.numbers)
    return run, pieces + rank_state(stages, kinds)


def rank_state(stages, kinds: Sequence[tuple[str, str]] = KINDS) -> list[tuple]:
    """The runs of weights and moments that this rank holds, as in `rank_run`."""
    state = [p for kind, buffer in kinds for p in owned_buffer(stages, kind, buffer)]
    biases = zip(stages.balance.layers, stages.balance.bias_LX.clone(), strict=True)
    return state + [("bias", f"layer {i}", b.shape, 0, b) for i, b in biases]


def draw_gradients(stages, step: int) -> None:
    """Sets the gradients of this rank's shards. They depend on the step and the element alone."""
    for unit in stages.units.units.values():
        for tensor, runs in unit.layout.runs(*unit.layout.own):
            for run in runs:
                drawn = standard_normal(step, tensor.name, run.global_start, run.length)
                unit.grad[run.local_start : run.local_start + run.length] = drawn


def owned(stages, kind, part):
    for unit in stages.units.units.values():
        for tensor, runs in unit.layout.runs(*unit.layout.own):
            for run in runs:
                values = part(unit)[run.local_start : run.local_start + run.length].clone()
                yield kind, tensor.name, tensor.shape, run.global_start, values


def owned_buffer(stages, kind: str, buffer: str):
    """As `owned`, of the tensors that have this buffer."""
    for unit in stages.units.units.values():
        held = unit.held.get(buffer, slice(0, unit.master.numel()))
        for tensor, runs in unit.layout.runs(*unit.layout.own):
            for run in runs:
                if held.start <= run.local_start and run.local_start + run.length <= held.stop:
                    values = unit.part(buffer, run.local_start, run.length).clone()
                    yield kind, tensor.name, tensor.shape, run.global_start, values


def train(n: int, overrides: list[str], mask: str = "none") -> Run:
    """Runs on n ranks and assembles the result."""
    patience_s = 600 if "train.compile=true" in overrides else 120  # compilation takes minutes on a busy machine
    run = assemble(run_ranks(rank_run, n, overrides, mask, timeout=patience_s))
    assert set(run.tensors) - {"bias"} == set(STATE)
    return run


def assemble(results: list[tuple[Run, list[tuple]]]) -> Run:
    """The run of the whole model from the results of its ranks. Asserts that losses, norms and the numbers of the
    experts' balance are equal on all ranks, and that replicas are equal to the bit."""
    run = results[0][0]
    for other, _ in results[1:]:
        assert other.losses == run.losses and other.norms == run.norms, "ranks report different losses or norms"
        assert other.balance == run.balance, "ranks report different balances"
    for _, pieces in results:
        for kind, name, shape, start, values in pieces:
            whole = run.tensors.setdefault(kind, {}).setdefault(
                name, torch.full(shape, float("nan"), dtype=values.dtype)
            )
            place = whole.view(-1)[start : start + values.numel()]
            assert torch.equal(place, values) or place.isnan().all(), f"{kind} of {name} differs between replicas"
            place.copy_(values)
    for kind, tensors in run.tensors.items():
        for name, whole in tensors.items():
            assert not whole.isnan().any(), f"{kind} of {name} is not whole (or not a number)"
    return run


def compare(run: Run, reference: Run, loss: float, state: float) -> None:
    """Compares a run with its reference.

    Args:
        loss: relative tolerance of losses.
        state: tolerance of norms, gradients, weights and moments, relative to each tensor's norm.

    Raises:
        AssertionError: a difference exceeds its tolerance; the message names the worst tensor. Or the reference has no
            gradient of a tensor, which compares nothing: of an expert alone that may be so, where no token goes to it.
    """
    zero = [n for n, t in reference.tensors.get("gradient", {}).items() if not t.any() and ".experts." not in n]
    assert not zero, f"the reference's gradient of {zero[0]} is zero"
    for got, want in zip(run.losses, reference.losses, strict=True):
        assert abs(got - want) <= loss * max(1, abs(want)), f"loss {got!r}, reference {want!r}"
    for got, want in zip(run.norms, reference.norms, strict=True):
        assert abs(got - want) <= state * want, f"grad norm {got!r}, reference {want!r}"
    for got, want in zip(run.balance, reference.balance, strict=True):
        assert got.keys() == want.keys()
        assert all(abs(got[n] - want[n]) <= loss * max(1, abs(want[n])) for n in want), f"{got}, reference {want}"
    for kind in run.tensors:
        assert run.tensors[kind].keys() == reference.tensors[kind].keys()
        off = {n: distance(run.tensors[kind][n], reference.tensors[kind][n]) for n in reference.tensors[kind]}
        worst = max(off, key=off.get)
        assert off[worst] <= state, f"{kind} of {worst} is off by {off[worst]:.2e} (bound {state:.0e})"


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
