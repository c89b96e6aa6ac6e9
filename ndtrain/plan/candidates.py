"""The candidates of a search: all ways to run a model on a given number of ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from ndtrain import schedule as schedules
from ndtrain.config import AXES, SAVABLE_OPS, Config, ConfigError, resolve
from ndtrain.config.schema import resolved
from ndtrain.parallel.pp import balanced_sizes, head_in_layers
from ndtrain.parallel.recompute import RecomputeOps
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.options import unresolved_config
from ndtrain.plan.price import Rates

SPLIT = "schedule.split"
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v")
INTERLEAVED_CHUNKS = (2, 3, 4, 5, 6, 7, 8)
# ops that recompute=selective may keep: all; without the first one; also without the last ones, which are the largest
KEPT_OPS = (SAVABLE_OPS, SAVABLE_OPS[1:], SAVABLE_OPS[1:3], SAVABLE_OPS[1:2])
MOST_MICRO_BATCH = 16
LEAST_TOKENS = 1024  # of a sequence on a rank; fewer are too little work for a GPU
MOST_FORWARDS = 8192  # pipeline ranks times microbatches; longer schedule tables take seconds to build


class Stages(NamedTuple):
    """A way to split the model over pp.

    Attributes:
        schedule, chunks: the schedule's name, and the stages per rank if the schedule allows any number of them.
        split: layers of each stage; (): as in the run without an override.
    """

    schedule: str
    chunks: int | None = None
    split: tuple[int, ...] = ()

    def count(self, pp: int) -> int:
        """Return the number of stages, or 0 if a file defines the schedule."""
        return len(schedules.stage_ranks(self.schedule, pp, self.chunks) or ())


class Candidate(NamedTuple):
    """The settings that a search chooses.

    Attributes:
        mesh: sizes of pp, dp, fsdp, cp and tp.
        recompute: the mode's name and the ops that it keeps.
        ep: size of the ep axis, which folds over the data axes.
    """

    mesh: tuple[int, ...]
    micro_batch: int
    cp_kind: str
    zero: int
    stages: Stages
    recompute: tuple[str, tuple[str, ...]]
    ep: int = 1

    def size(self, axis: str) -> int:
        return self.mesh[AXES.index(axis)]

    def overrides(self) -> tuple[str, ...]:
        """Return the overrides that turn a run into this candidate."""
        (schedule, chunks, split), (recompute, kept) = self.stages, self.recompute
        return (
            *(f"mesh.{axis}={size}" for axis, size in zip(AXES, self.mesh, strict=True)),
            *((f"mesh.ep={self.ep}",) if self.ep > 1 else ()),
            f"mesh.zero={self.zero}",
            f"train.micro_batch={self.micro_batch}",
            f"schedule={schedule}",
            *((f"schedule.chunks={chunks}",) if schedule == "interleaved" else ()),
            *((f"schedule.split=[{','.join(map(str, split))}]",) if split else ()),
            f"recompute={recompute}",
            *((f"recompute.keep=[{','.join(kept)}]",) if recompute == "selective" else ()),
            *((f"cp.kind={self.cp_kind}",) if self.size("cp") > 1 else ()),
        )

    def is_next_to(self, other: "Candidate") -> bool:
        """Return True if the candidates differ in exactly one choice. Moving a factor from one mesh axis to another
        counts as one."""
        axes = sum(a != b for a, b in zip(self.mesh, other.mesh, strict=True))
        return axes in (0, 2) and axes // 2 + sum(a != b for a, b in zip(self[1:], other[1:], strict=True)) == 1


def searched_run(overrides: Sequence[str], hardware: Hardware) -> tuple[Config, list[str]]:
    """Return the run to search for, not resolved, and its overrides. A recipe's `schedule.split` fits only the recipe's
    own mesh and schedule, so it is searched unless an override sets it.

    Raises:
        ConfigError: there is no such run, or the hardware cannot compute it.
    """
    cfg = unresolved_config(overrides, hardware)
    if cfg.schedule.split is None or SPLIT in cfg.given:
        return cfg, list(overrides)
    cfg = cfg.unfrozen()
    cfg.schedule.split = None
    return cfg, [*overrides, f"{SPLIT}=null"]


def candidate_of(cfg: Config) -> Candidate:
    """Return the candidate with the settings of a resolved run."""
    return Candidate(
        mesh=tuple(getattr(cfg.mesh, axis) for axis in AXES),
        micro_batch=resolved(cfg.train.micro_batch),
        cp_kind=cfg.cp.kind,
        zero=resolved(cfg.mesh.zero),
        stages=Stages(cfg.schedule.name, cfg.schedule.chunks, tuple(cfg.schedule.split or ())),
        recompute=(cfg.recompute.name, tuple(cfg.recompute.keep)),
        ep=cfg.mesh.ep,
    )


@dataclass(frozen=True)
class Space:
    """The space of all candidates.

    Attributes:
        cfg: the run, not resolved. Keys that its command line sets are not searched.
        rates: None: the defaults.
        free_gb: memory of a device that a candidate has to leave free.
    """

    cfg: Config
    ranks: int
    hardware: Hardware
    rates: Rates | None = None
    free_gb: float = 0.0

    @property
    def memory_gb(self) -> float:
        """The memory of a device that a candidate may use, in 10^9 bytes."""
        return math.inf if self.hardware.memory_gb is None else self.hardware.memory_gb - self.free_gb

    def meshes(self) -> list[tuple[int, ...]]:
        """Return the sizes of pp, dp, fsdp, cp and tp to try, legal or not. Sizes that the user leaves open have
        bounds: pp is at most the number of blocks. On GPUs tp stays within a host, where the links are fast, and cp
        leaves `LEAST_TOKENS` of a sequence on each rank."""
        most = {"pp": self.cfg.model.num_hidden_layers}
        if self.hardware.device == "cuda":
            most |= {"tp": self.hardware.gpus_per_node, "cp": max(1, self.cfg.train.seq_len // LEAST_TOKENS)}
        fixed = {a: getattr(self.cfg.mesh, a) for a in AXES if f"mesh.{a}" in self.cfg.given}
        fixed = {axis: size for axis, size in fixed.items() if size > 0}  # -1: what the other axes leave
        return [
            sizes
            for sizes in _factorings(self.ranks, len(AXES))
            if all(
                sizes[i] == fixed.get(a, sizes[i]) and (a in fixed or sizes[i] <= most.get(a, self.ranks))
                for i, a in enumerate(AXES)
            )
        ]

    def places(self, mesh: tuple[int, ...]) -> Iterator[tuple[Candidate, Config]]:
        """Yield the legal candidates of `unchecked`, with their resolved configurations."""
        for place in self.unchecked(mesh):
            try:
                yield place, self.resolved(place)
            except ConfigError:
                continue

    def unchecked(self, mesh: tuple[int, ...]) -> Iterator[Candidate]:
        """Yield a candidate for each microbatch, kind of cp and size of ep on a mesh. Every other setting has the first
        of its choices."""
        pp, dp, fsdp, cp, _ = mesh
        sizes_of_steps = self.cfg.train.batch_sizes.all
        share, common = (max(1, n // (dp * fsdp)) for n in (sizes_of_steps[-1], math.gcd(*sizes_of_steps)))
        sizes = [n for n in _divisors(common) if n <= MOST_MICRO_BATCH and pp * share // n <= MOST_FORWARDS]
        kinds = ["ring", "ulysses"] if cp > 1 else [self.cfg.cp.kind]
        first = self.zeros(mesh)[0], self.stages(pp)[0], self.recomputes()[0]
        sizes, kinds = (
            self._choices("train.micro_batch", self.cfg.train.micro_batch, sizes),
            self._choices("cp.kind", self.cfg.cp.kind, kinds),
        )
        for size, kind, ep in product(sizes, kinds, self.eps(dp * fsdp * cp)):
            yield Candidate(mesh, size, kind, *first, ep)

    def on(self, place: Candidate, cfg: Config, head: float | None = None) -> Iterator[Candidate]:
        """Yield all candidates with the mesh, microbatch, kind of cp and ep of `place`. If several recompute modes save
        the same ops on this mesh, use only the first of them.

        Args:
            cfg: the resolved configuration of one of these candidates.
            head: cost of the head, in layers; None: computed here.
        """
        always = RecomputeOps.of(cfg.model, cfg.mesh).always
        by_saved: dict[Any, tuple[str, tuple[str, ...]]] = {}
        for name, kept in self.recomputes():
            by_saved.setdefault(always | set(kept) if name in ("full", "selective") else name, (name, kept))
        pp, layers = cfg.mesh.pp, cfg.model.num_hidden_layers
        head = head_in_layers(cfg.model, cfg.train.seq_len) if head is None else head
        stages = [s for s in self.stages(pp) if not s.split or s.split != balanced(s, pp, layers, head)]
        choices = product(self.zeros(place.mesh), stages, by_saved.values())
        return (place._replace(zero=z, stages=s, recompute=r) for z, s, r in choices)

    def zeros(self, mesh: tuple[int, ...]) -> list[int]:
        """Return the ZeRO stages to try: only stage 1 if nothing is sharded."""
        _, _, fsdp, cp, _ = mesh
        return self._choices("mesh.zero", self.cfg.mesh.zero, [1, 2, 3] if fsdp * cp > 1 else [1])

    def eps(self, ranks: int) -> list[int]:
        """Return the sizes of ep to try, given the number of ranks that ep may fold over. On GPUs ep stays within four
        hosts, since each layer waits for its exchanges."""
        experts = self.cfg.model.num_experts
        if experts is None:
            return [1]
        most = 4 * self.hardware.gpus_per_node if self.hardware.device == "cuda" else ranks
        sizes = [n for n in _divisors(math.gcd(ranks, experts)) if n <= most]
        return self._choices("mesh.ep", self.cfg.mesh.ep, sizes)

    def stages(self, pp: int) -> list[Stages]:
        """Return the schedules, chunks and splits to try; without a pipeline, only 1f1b. Leave out schedules with more
        stages than layers, unless there are no others."""
        layers, split_given = self.cfg.model.num_hidden_layers, SPLIT in self.cfg.given
        every = self._schedules(pp)
        made = [one for one in every if split_given or one.count(pp) <= layers]
        if not split_given:
            made += [one._replace(split=split) for one in every if (split := lighter_ends(layers, one.count(pp)))]
        return made or every

    def _schedules(self, pp: int) -> list[Stages]:
        s = self.cfg.schedule
        every = [*(Stages(name) for name in SCHEDULES), *(Stages("interleaved", n) for n in INTERLEAVED_CHUNKS)]
        if self.cfg.given & {"schedule", "schedule.name"}:
            chunks = "schedule.chunks" in self.cfg.given or s.name != "interleaved"
            return [Stages(s.name, s.chunks)] if chunks else [one for one in every if one.schedule == s.name]
        if "schedule.chunks" in self.cfg.given:
            return [Stages("interleaved", s.chunks)] if pp > 1 else [Stages("1f1b")]
        return every if pp > 1 else [Stages("1f1b")]

    def recomputes(self) -> list[tuple[str, tuple[str, ...]]]:
        r = self.cfg.recompute
        if any(key.partition(".")[0] == "recompute" for key in self.cfg.given):
            return [(r.name, tuple(r.keep))]
        return [("none", ()), ("full", ()), *(("selective", kept) for kept in KEPT_OPS)]

    def resolved(self, candidate: Candidate) -> Config:
        """Return the candidate's resolved configuration.

        Raises:
            ConfigError: it is not legal.
        """
        cfg = self.cfg.unfrozen()
        for axis, size in zip(AXES, candidate.mesh, strict=True):
            setattr(cfg.mesh, axis, size)
        cfg.mesh.zero, cfg.mesh.ep, cfg.train.micro_batch = candidate.zero, candidate.ep, candidate.micro_batch
        cfg.schedule.name, cfg.schedule.chunks, split = candidate.stages
        cfg.schedule.split = list(split) or cfg.schedule.split
        cfg.recompute.name, cfg.recompute.keep = candidate.recompute[0], list(candidate.recompute[1])
        cfg.cp.kind = candidate.cp_kind
        return resolve(cfg, self.ranks)

    def _choices(self, key: str, given: object, choices: Sequence) -> list:
        """Return only the value that the user sets, if any, or else all choices."""
        return [given] if key in self.cfg.given and given is not None else list(choices)


def lighter_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of equal stages, with one layer less in the first stage (embedding) and in the last one (head).
    Return () if the layers do not divide evenly."""
    if stages < 2 or (layers + 2) % stages:
        return ()
    each = (layers + 2) // stages
    return each - 1, *[each] * (stages - 2), each - 1


@lru_cache(maxsize=4096)
def balanced(stages: Stages, pp: int, layers: int, head: float) -> tuple[int, ...]:
    """Return the default layers of each stage, or () if a file defines the schedule or a stage would have no layer.

    Args:
        head: cost of the head, in layers.
    """
    rank_of = schedules.stage_ranks(stages.schedule, pp, stages.chunks)
    return balanced_sizes(layers, head, rank_of) if rank_of and len(rank_of) <= layers else ()


def _factorings(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write n as a product of `parts` factors."""
    if parts == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for others in _factorings(n // first, parts - 1):
            yield first, *others


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]
