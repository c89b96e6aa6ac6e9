"""Extrapolates the record of a step with many microbatches from the records of two steps with a few.

A schedule has a beginning, an end, and a steady state between them that repeats. With enough microbatches,
every further period adds the same FLOPs, the same collectives, and the same memory to the peak of each action. Two
records that differ by one period give these amounts. The peak of the step is the largest of its actions' peaks. Which
action has it may depend on the number of microbatches, as with `gpipe`.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ndtrain.config import Config
from ndtrain.plan.recording import Peak
from ndtrain.plan.step import RankRecord, RecordedStep, Traffic
from ndtrain.schedule import Action

Key = TypeVar("Key")


class Sample(NamedTuple):
    """The numbers of microbatches to run in order to extrapolate to a step of `count`.

    Attributes:
        fewer, more: the numbers of the two steps. They differ by one period of the steady state.
        head: number of microbatches that are compared from the beginning. The rest are compared from the end.
    """

    count: int
    fewer: int
    more: int
    head: int

    @property
    def periods(self) -> int:
        """The number of periods of the steady state that `count` has more than `fewer`."""
        return (self.count - self.fewer) // (self.more - self.fewer)


def sample_of(cfg: Config) -> Sample | None:
    """Return the sample for a resolved run.

    Return None if running all microbatches is no slower, or if their number changes more than the length of the steady
    state.
    """
    count, pp, name = cfg.microbatches, cfg.mesh.pp, cfg.schedule.name
    if name == "csv" or cfg.recompute.name == "budget":
        return None
    if name == "interleaved":  # it runs groups of pp microbatches; the last groups may have one more
        period, rest = pp, count % pp
        fewer = max(4, rest + 3) * pp + rest
    else:
        period, fewer = 1, 4 * pp - 1
    # filling and draining a pipeline takes less than two microbatches for each rank
    sample = Sample(count, fewer, fewer + period, head=2 * pp - 1)
    return sample if sample.fewer + sample.more < count else None


def with_microbatches(cfg: Config, count: int) -> Config:
    """Return a run with another number of microbatches per step."""
    return cfg.with_batch(cfg.train.global_batch // cfg.microbatches * count)


def extended(fewer: RecordedStep, more: RecordedStep, sample: Sample) -> RankRecord:
    """Return the record of the whole step."""
    a, b, n = fewer.record, more.record, sample.periods
    first, second = _by_place(fewer, sample.fewer, sample.head), _by_place(more, sample.more, sample.head)
    peaks = [_extended_peak(peak, second[place], n) for place, peak in first.items()]
    peak = max(peaks, key=lambda p: p.nbytes)
    return replace(
        b,
        peak_bytes=peak.nbytes,
        at_peak=peak.kinds,
        flops=_extended(a.flops, b.flops, n),
        traffic=_extended_traffic(a, b, n),
        seconds=a.seconds + b.seconds,
    )


def _by_place(step: RecordedStep, count: int, head: int) -> dict[Hashable, Peak]:
    """Return the peaks by place. Microbatches after the first `head` are counted from the end."""

    def place(window: Hashable) -> Hashable:
        if not isinstance(window, Action) or window.microbatch < head:
            return window
        return window._replace(microbatch=window.microbatch - count)

    return {place(window): peak for window, peak in step.windows.items()}


def _extended_peak(a: Peak, b: Peak, periods: int) -> Peak:
    kinds = _extended(a.kinds, b.kinds, periods)
    return Peak(a.nbytes + periods * (b.nbytes - a.nbytes), {kind: n for kind, n in kinds.items() if n})


def _extended_traffic(a: RankRecord, b: RankRecord, periods: int) -> tuple[Traffic, ...]:
    counts, sizes = ([{(t.axis, t.op): getattr(t, of) for t in r.traffic} for r in (a, b)] for of in ("count", "bytes"))
    count, size = _extended(*counts, periods), _extended(*sizes, periods)
    return tuple(Traffic(axis, op, count[axis, op], size[axis, op]) for axis, op in sorted(count))


def _extended(a: Mapping[Key, int], b: Mapping[Key, int], periods: int) -> dict[Key, int]:
    return {key: a.get(key, 0) + periods * (n - a.get(key, 0)) for key, n in b.items()}
