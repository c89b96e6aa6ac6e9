"""Generators: a schedule is, for each rank, a few labelled phases."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import NamedTuple

from ndtrain.schedule.table import Action, Table

Phases = list[tuple[int, str]]
"""(how often, pattern) in order. A pattern is words: `F0` the next forward of the rank's chunk 0, `B1` the next
backward of chunk 1, `I1` the same backward but only its input gradient, `W` the oldest weight gradient that is still
owed; `F` and `B` without a chunk take chunks in turn, one group of microbatches after another."""


class Shape(NamedTuple):
    """What the counts of a phase depend on. `microbatches` is at least what the generator asks for."""

    pp: int
    microbatches: int
    chunks: int
    rank: int

    @property
    def after(self) -> int:
        """Ranks behind this one."""
        return self.pp - 1 - self.rank


def gpipe(s: Shape) -> Phases:
    """All forwards, chunk by chunk, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""
    chunks = range(s.chunks)
    return [(s.microbatches, f"F{c}") for c in chunks] + [(s.microbatches, f"B{c}") for c in reversed(chunks)]


def one_f_one_b(s: Shape) -> Phases:
    """As few forwards as fill the pipeline, then one backward for each forward (PipeDream-flush, Narayanan et al.,
    2021, arXiv:2006.09503): at most pp - rank microbatches are alive on a rank."""
    return [(s.after, "F0"), (s.microbatches - s.after, "F0 B0"), (s.after, "B0")]


def interleaved(s: Shape) -> Phases:
    """1F1B over several chunks a rank (Narayanan et al., 2021, arXiv:2104.04473): the bubble falls as 1 / chunks.

    The paper wants microbatches to be a multiple of pp; here any number is dealt into groups of pp or more that differ
    by one at most, and the warm-up is long enough for the largest of them. The bubble stays at its least; groups larger
    than pp keep more alive, up to all microbatches where there are fewer than 2 pp. With one chunk it is 1F1B."""
    total = s.microbatches * s.chunks
    ahead = (s.chunks - 1) * max(groups(s.microbatches, s.pp)) + min(s.chunks, 2) * s.after
    ahead = min(ahead, total)
    return [(ahead, "F"), (total - ahead, "F B"), (ahead, "B")]


def zb_h1(s: Shape) -> Phases:
    """1F1B with its backward split: the gradient for the rank before leaves first, and rank r owes r weight gradients,
    which fill its bubble at the end (Qi et al., 2023, arXiv:2401.10241). It keeps the memory of 1F1B's first rank."""
    steady = s.microbatches - s.pp + 1
    return [(s.after, "F0"), (s.rank, "F0 I0"), (steady, "F0 I0 W"), (s.after, "I0 W"), (s.rank, "W")]


def zb_v(s: Shape) -> Phases:
    """Zero bubble on a V of stages, the first and the last on rank 0 (Qi et al., 2024, arXiv:2405.15362, "V-ZB"): with
    F, I and W equally long no rank waits between its first action and its last, in the memory of 1F1B."""
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
    """DualPipe (DeepSeek-V3, 2024, arXiv:2412.19437) cut in half: a V of stages in which the two chunks of a rank run
    forward and backward side by side. Backwards are whole but where an early gradient fills a bubble."""
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
    """A rank's stages where chunk after chunk starts again on rank 0."""
    return [chunk * pp + rank for chunk in range(chunks)]


def vee(pp: int, rank: int, chunks: int) -> list[int]:
    """A rank's two stages where the second half comes back from the last rank to the first."""
    return [rank, 2 * pp - 1 - rank]


class Generator(NamedTuple):
    """`phases` of a rank, `least` microbatches they need, the default number of chunks and whether others will do."""

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
    """The table of a generator. Where its phases need more microbatches than there are, those that are not there are
    left out of the longer table: what a microbatch needs is its own, so the rest still runs."""
    generator = GENERATORS[name]
    count = max(microbatches, generator.least(pp))
    rows = (
        play(generator.phases(Shape(pp, count, chunks, rank)), generator.stages(pp, rank, chunks), count, pp)
        for rank in range(pp)
    )
    return [[a for a in row if a.microbatch < microbatches] for row in rows]


def play(phases: Phases, stages: list[int], microbatches: int, pp: int) -> Iterator[Action]:
    """The actions that a rank's phases stand for; `stages` are its chunks in the order of the forward."""
    numbered = {f"{kind}{c}": zip(range(microbatches), repeat(s)) for kind in "FB" for c, s in enumerate(stages)}
    sources = {"F": dealt(stages, microbatches, pp), "B": dealt(stages[::-1], microbatches, pp), **numbered}
    owed: deque[tuple[int, int]] = deque()
    for times, pattern in phases:
        for word in pattern.split() * times:
            place = owed.popleft() if word == "W" else next(sources[word.replace("I", "B")])
            if word[0] == "I":
                owed.append(place)
            yield Action(word[0], *place)


def dealt(stages: list[int], microbatches: int, pp: int) -> Iterator[tuple[int, int]]:
    """(microbatch, stage) with the stages in turn, each time for a whole group of microbatches."""
    first = 0
    for size in groups(microbatches, pp):
        for stage in stages:
            yield from zip(range(first, first + size), repeat(stage))
        first += size


def groups(microbatches: int, pp: int) -> list[int]:
    """Sizes of the groups, pp or more microbatches each (all in one where there are fewer), that differ by one at
    most."""
    count = max(1, microbatches // pp)
    return [(microbatches + g) // count for g in range(count)]
