"""Generators of schedules. A generator describes each rank's actions as a few phases."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import NamedTuple

from ndtrain.schedule.table import Action, Table

Phases = list[tuple[int, str]]
"""(number of repeats, pattern) in order. A pattern is a list of words: `F0` is the next forward of the rank's chunk 0,
`B1` the next backward of chunk 1, `I1` only the input gradient of that backward, `W` the oldest deferred weight
gradient. `F` and `B` without a chunk go through the chunks in turn, one group of microbatches after another."""


class Shape(NamedTuple):
    """The sizes that the phases of a rank depend on. `microbatches` is at least the minimum of the generator."""

    pp: int
    microbatches: int
    chunks: int
    rank: int

    @property
    def after(self) -> int:
        """Number of ranks after this one."""
        return self.pp - 1 - self.rank


def gpipe(s: Shape) -> Phases:
    """Return the phases of GPipe (Huang et al., 2019, arXiv:1811.06965).

    All forwards run first, chunk by chunk, then all backwards.
    """
    chunks = range(s.chunks)
    return [(s.microbatches, f"F{c}") for c in chunks] + [(s.microbatches, f"B{c}") for c in reversed(chunks)]


def one_f_one_b(s: Shape) -> Phases:
    """Return the phases of 1F1B (PipeDream-flush, Narayanan et al., 2021, arXiv:2006.09503).

    Warm-up forwards fill the pipeline, then one backward follows each forward. At most pp - rank microbatches are alive
    on a rank.
    """
    return [(s.after, "F0"), (s.microbatches - s.after, "F0 B0"), (s.after, "B0")]


def interleaved(s: Shape) -> Phases:
    """Return the phases of 1F1B with several chunks per rank (Narayanan et al., 2021, arXiv:2104.04473).

    The bubble falls as 1 / chunks. With one chunk this is 1F1B.

    The paper requires the number of microbatches to be a multiple of pp. Here any number is split into groups of at
    least pp microbatches, whose sizes differ by at most one. The warm-up is long enough for the largest group, so the
    bubble stays minimal. Groups larger than pp have more live activations: up to all microbatches if there are fewer
    than 2 pp.
    """
    total = s.microbatches * s.chunks
    ahead = (s.chunks - 1) * max(groups(s.microbatches, s.pp)) + min(s.chunks, 2) * s.after
    ahead = min(ahead, total)
    return [(ahead, "F"), (total - ahead, "F B"), (ahead, "B")]


def zb_h1(s: Shape) -> Phases:
    """Return the phases of ZB-H1: 1F1B with a split backward (Qi et al., 2023, arXiv:2401.10241).

    The input gradient is sent first. Rank r defers r weight gradients, which fill its bubble at the end. Every rank has
    the same peak memory as the first rank of 1F1B.
    """
    steady = s.microbatches - s.pp + 1
    return [(s.after, "F0"), (s.rank, "F0 I0"), (steady, "F0 I0 W"), (s.after, "I0 W"), (s.rank, "W")]


def zb_v(s: Shape) -> Phases:
    """Return the phases of zero bubble with a V placement (Qi et al., 2024, arXiv:2405.15362, "V-ZB").

    The first and the last stage are on rank 0. If F, I and W take equal times, no rank waits between its first action
    and its last. The peak memory is the same as with 1F1B.
    """
    steady = s.microbatches - s.pp - s.after
    return [
        (2 * s.after + 1, "F0"),
        (s.rank, "F1 F0"),
        (s.after + 1, "F1 I1 W"),
        (steady, "F0 I0 W F1 I1 W"),
        (s.after, "I0 W F1 I1 W"),
        (s.rank, "I0 I1"),
        (s.after + 1, "I0 W"),
        (2 * s.rank, "W"),
    ]


def dualpipe_v(s: Shape) -> Phases:
    """Return the phases of DualPipe (DeepSeek-V3, 2024, arXiv:2412.19437) with a V placement.

    A forward of one of the rank's chunks is next to a backward of its other chunk, so the two can overlap. A backward
    is split only if an early input gradient fills a bubble.
    """
    whole, odd = divmod(s.rank + 1, 2)
    return [
        (2 * s.after, "F0"),
        (s.rank + 1, "F0 F1"),
        (s.after, "I1 W F1"),
        (s.microbatches - s.pp - s.after, "F0 B1 F1 B0"),
        (s.after, "B1 F1 B0"),
        (whole, "B1 B0"),
        (odd, "B1 I0"),
        (whole, "I1 I0"),
        (s.after, "W I0"),
        (s.rank + 1, "W"),
    ]


def loop(pp: int, rank: int, chunks: int) -> list[int]:
    """Return the stages of a rank if each chunk begins on rank 0."""
    return [chunk * pp + rank for chunk in range(chunks)]


def vee(pp: int, rank: int, chunks: int) -> list[int]:
    """Return the two stages of a rank if the second half runs from the last rank back to the first."""
    return [rank, 2 * pp - 1 - rank]


class Generator(NamedTuple):
    """A generator of schedules.

    Attributes:
        phases: returns the phases of a rank.
        least: returns the number of microbatches that the phases need, given the number of pp ranks.
        chunks: the default number of chunks per rank.
        any_chunks: True if other numbers of chunks are supported.
        stages: returns the stages of a rank, given (pp, rank, chunks), in the order of the forward.
    """

    phases: Callable[[Shape], Phases]
    least: Callable[[int], int] = lambda pp: 1
    chunks: int = 1
    any_chunks: bool = False
    stages: Callable[[int, int, int], list[int]] = loop


GENERATORS = {
    "gpipe": Generator(gpipe, any_chunks=True),
    "1f1b": Generator(one_f_one_b, least=lambda pp: pp),
    "interleaved": Generator(interleaved, chunks=2, any_chunks=True),
    "zb_h1": Generator(zb_h1, least=lambda pp: pp),
    "zb_v": Generator(zb_v, least=lambda pp: 2 * pp - 1, chunks=2, stages=vee),
    "dualpipe_v": Generator(dualpipe_v, least=lambda pp: 2 * pp - 1, chunks=2, stages=vee),
}


def generate(name: str, pp: int, microbatches: int, chunks: int) -> Table:
    """Generate the table of a schedule.

    If its phases need more microbatches than there are, make the longer table and remove the surplus microbatches. A
    microbatch depends only on itself, so the remaining table runs.
    """
    generator = GENERATORS[name]
    count = max(microbatches, generator.least(pp))
    rows = (
        play(generator.phases(Shape(pp, count, chunks, rank)), generator.stages(pp, rank, chunks), count, pp)
        for rank in range(pp)
    )
    return [[a for a in row if a.microbatch < microbatches] for row in rows]


def play(phases: Phases, stages: list[int], microbatches: int, pp: int) -> Iterator[Action]:
    """Yield the actions of a rank's phases. `stages` are the rank's chunks in the order of the forward."""
    by_chunk = {f"{kind}{c}": zip(range(microbatches), repeat(s)) for kind in "FB" for c, s in enumerate(stages)}
    sources = {"F": in_turn(stages, microbatches, pp), "B": in_turn(stages[::-1], microbatches, pp), **by_chunk}
    deferred: deque[tuple[int, int]] = deque()
    for times, pattern in phases:
        for word in pattern.split() * times:
            place = deferred.popleft() if word == "W" else next(sources[word.replace("I", "B")])
            if word[0] == "I":
                deferred.append(place)
            yield Action(word[0], *place)


def in_turn(stages: list[int], microbatches: int, pp: int) -> Iterator[tuple[int, int]]:
    """Yield (microbatch, stage). Each group of microbatches passes through all stages before the next group begins."""
    first = 0
    for size in groups(microbatches, pp):
        for stage in stages:
            yield from zip(range(first, first + size), repeat(stage))
        first += size


def groups(microbatches: int, pp: int) -> list[int]:
    """Return the sizes of the groups of microbatches. Each size is at least pp, and sizes differ by at most one.

    With fewer than pp microbatches there is one group.
    """
    count = max(1, microbatches // pp)
    return [(microbatches + g) // count for g in range(count)]
