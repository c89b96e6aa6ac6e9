"""The runs that a search chooses among: the ways to lay a model on a number of ranks."""

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
# of recompute=selective: all ops, without the first one, and then without the last ones too, which are the largest
KEPT_OPS = (SAVABLE_OPS, SAVABLE_OPS[1:], SAVABLE_OPS[1:3], SAVABLE_OPS[1:2])
MOST_MICRO_BATCH = 16
LEAST_TOKENS = 1024  # of a sequence on a rank: less is too little work for a GPU
MOST_FORWARDS = 8192  # of all pipeline ranks in a step, of one stage each: longer tables take seconds each


class Stages(NamedTuple):
    """How the model is cut over pp.

    Attributes:
        schedule, chunks: its name, and stages a rank where it has any number of them.
        split: layers of each stage; (): what the run has without an override.
    """

    schedule: str
    chunks: int | None = None
    split: tuple[int, ...] = ()

    def count(self, pp: int) -> int:
        """The number of stages; 0: a file says."""
        return len(schedules.stage_ranks(self.schedule, pp, self.chunks) or ())


class Candidate(NamedTuple):
    """What a search chooses.

    Attributes:
        mesh: sizes of pp, dp, fsdp, cp and tp.
        recompute: name and kept ops.
        ep: size of the axis, which folds over others.
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
        """Those that make a run this one."""
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
        """Whether they differ in one choice; in the mesh, by what one axis gives another one."""
        axes = sum(a != b for a, b in zip(self.mesh, other.mesh, strict=True))
        return axes in (0, 2) and axes // 2 + sum(a != b for a, b in zip(self[1:], other[1:], strict=True)) == 1


def searched_run(overrides: Sequence[str], hardware: Hardware) -> tuple[Config, list[str]]:
    """The run to search for, not resolved, and its overrides. A recipe's `schedule.split` belongs to the recipe's own
    mesh and schedule: where no override gives it, it is searched.

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
    """Return the candidate that a resolved run is."""
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
    """All candidates.

    Attributes:
        cfg: the run, not resolved. What its command line gives is not searched.
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
        """The memory of a device that a candidate may take."""
        return math.inf if self.hardware.memory_gb is None else self.hardware.memory_gb - self.free_gb

    def meshes(self) -> list[tuple[int, ...]]:
        """Sizes of pp, dp, fsdp, cp and tp. Not all are legal. A size that is not given has a bound: pp is at most the
        number of blocks, on GPUs tp stays within a host, where its links are, and cp leaves `LEAST_TOKENS`."""
        most = {"pp": self.cfg.model.num_hidden_layers}
        if self.hardware.device == "cuda":
            most |= {"tp": self.hardware.gpus_per_node, "cp": max(1, self.cfg.train.seq_len // LEAST_TOKENS)}
        fixed = {a: getattr(self.cfg.mesh, a) for a in AXES if f"mesh.{a}" in self.cfg.given}
        fixed = {axis: size for axis, size in fixed.items() if size > 0}  # -1 is the rest
        return [
            sizes
            for sizes in _factorings(self.ranks, len(AXES))
            if all(
                sizes[i] == fixed.get(a, sizes[i]) and (a in fixed or sizes[i] <= most.get(a, self.ranks))
                for i, a in enumerate(AXES)
            )
        ]

    def places(self, mesh: tuple[int, ...]) -> Iterator[tuple[Candidate, Config]]:
        """The legal ones of `unchecked`, with their resolved configurations."""
        for place in self.unchecked(mesh):
            try:
                yield place, self.resolved(place)
            except ConfigError:
                continue

    def unchecked(self, mesh: tuple[int, ...]) -> Iterator[Candidate]:
        """The sizes of a microbatch and kinds of cp on a mesh, with the first one of every other choice."""
        pp, dp, fsdp, cp, _ = mesh
        share = max(1, self.cfg.train.global_batch // (dp * fsdp))
        sizes = [n for n in _divisors(share) if n <= MOST_MICRO_BATCH and pp * share // n <= MOST_FORWARDS]
        kinds = ["ring", "ulysses"] if cp > 1 else [self.cfg.cp.kind]
        first = self.zeros(mesh)[0], self.stages(pp)[0], self.recomputes()[0]
        sizes, kinds = (
            self._choices("train.micro_batch", self.cfg.train.micro_batch, sizes),
            self._choices("cp.kind", self.cfg.cp.kind, kinds),
        )
        for size, kind, ep in product(sizes, kinds, self.eps(dp * fsdp * cp)):
            yield Candidate(mesh, size, kind, *first, ep)

    def on(self, place: Candidate, cfg: Config, head: float | None = None) -> Iterator[Candidate]:
        """All candidates with the mesh, the microbatch and the kind of cp of one. Of modes of recompute that save the
        same on this mesh, only the first one.

        Args:
            cfg: resolved, of one of them.
            head: cost of the head, in layers; None: counted here.
        """
        always = RecomputeOps.of(cfg).always
        by_saved: dict[Any, tuple[str, tuple[str, ...]]] = {}
        for name, kept in self.recomputes():
            by_saved.setdefault(always | set(kept) if name in ("full", "selective") else name, (name, kept))
        pp, layers = cfg.mesh.pp, cfg.model.num_hidden_layers
        head = head_in_layers(cfg.model, cfg.train.seq_len) if head is None else head
        stages = [s for s in self.stages(pp) if not s.split or s.split != balanced(s, pp, layers, head)]
        choices = product(self.zeros(place.mesh), stages, by_saved.values())
        return (place._replace(zero=z, stages=s, recompute=r) for z, s, r in choices)

    def zeros(self, mesh: tuple[int, ...]) -> list[int]:
        """Stages of ZeRO; where nothing is sharded, only the first one."""
        _, _, fsdp, cp, _ = mesh
        return self._choices("mesh.zero", self.cfg.mesh.zero, [1, 2, 3] if fsdp * cp > 1 else [1])

    def eps(self, ranks: int) -> list[int]:
        """Sizes of ep over the ranks that it may fold over: on GPUs within four hosts, since each layer waits for its
        exchanges."""
        experts = self.cfg.model.num_experts
        if experts is None:
            return [1]
        most = 4 * self.hardware.gpus_per_node if self.hardware.device == "cuda" else ranks
        sizes = [n for n in _divisors(math.gcd(ranks, experts)) if n <= most]
        return self._choices("mesh.ep", self.cfg.mesh.ep, sizes)

    def stages(self, pp: int) -> list[Stages]:
        """Schedules, chunks and splits; without a pipeline, only 1f1b. Those with more stages than layers are left out,
        unless there are no others."""
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
        """The candidate's configuration.

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
        """Only what the user gives, where they give something."""
        return [given] if key in self.cfg.given and given is not None else list(choices)


def lighter_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages, but for a layer less in the first one, which has the embedding, and in the last one, which has the
    head; (): the layers do not come out even."""
    if stages < 2 or (layers + 2) % stages:
        return ()
    each = (layers + 2) // stages
    return each - 1, *[each] * (stages - 2), each - 1


@lru_cache(maxsize=4096)
def balanced(stages: Stages, pp: int, layers: int, head: float) -> tuple[int, ...]:
    """The layers of each stage where nobody says which; (): a file has the schedule, or there are too many stages.

    Args:
        head: cost of the head, in layers.
    """
    rank_of = schedules.stage_ranks(stages.schedule, pp, stages.chunks)
    return balanced_sizes(layers, head, rank_of) if rank_of and len(rank_of) <= layers else ()


def _factorings(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """The ways to write n as a product of so many numbers, in order."""
    if parts == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for others in _factorings(n // first, parts - 1):
            yield first, *others


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]
