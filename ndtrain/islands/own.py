"""An island's own gradients, as a rank offers them to other islands."""

import threading
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ndtrain.islands.reading import Gone
from ndtrain.islands.shelf import Shelf, Tag

_STEPS = 2  # an island that is a step behind may still read the older one


class OwnGradients:
    """A rank's gradients of the last two steps, in host memory. Units become readable one after another.

    One thread offers. Any thread may wait for a unit.

    Args:
        shelf: serves the units that are in its table.
        numel: unit -> the number of elements of the rank's shard.
        dtype: in which they are sent.
    """

    def __init__(self, shelf: Shelf, numel: Mapping[str, int], dtype: torch.dtype):
        self._shelf = shelf
        empty = lambda: {name: torch.zeros(n, dtype=dtype) for name, n in numel.items()}
        self._bits = [empty() for _ in range(_STEPS)]
        self._tags: list[Tag | None] = [None] * _STEPS
        self._ready: list[set[str]] = [set() for _ in range(_STEPS)]
        self._changed, self._closed = threading.Condition(), False

    def of_step(self, step: int) -> dict[str, Tensor]:
        """Return unit -> the gradient of a step that was offered before, for the thread that offers."""
        return self._bits[step % _STEPS]

    def has_begun(self, tag: Tag) -> bool:
        """Return True if this gradient is offered, or some of its units are."""
        return self._tags[tag.step % _STEPS] == tag

    def begin(self, tag: Tag) -> None:
        """Begin to offer a gradient, instead of what is in its memory. The memory keeps its contents."""
        slot = tag.step % _STEPS
        if old := self._tags[slot]:
            self._shelf.withdraw(old)
        with self._changed:
            self._tags[slot] = tag
            self._ready[slot].clear()
            self._changed.notify_all()

    def put(self, step: int, unit: str, write: Callable[[Tensor], object]) -> None:
        """Offer a unit.

        Args:
            write: fills the memory that other islands read.
        """
        write(self._bits[step % _STEPS][unit])
        self._offer(step, unit)

    def offer_again(self, tag: Tag, units: Iterable[str]) -> None:
        """Offer units of the same step that were offered before, in another epoch."""
        if not self.has_begun(tag):
            self.begin(tag)
            for unit in units:
                self._offer(tag.step, unit)

    def _offer(self, step: int, unit: str) -> None:
        slot = step % _STEPS
        with self._changed:
            tag = self._tags[slot]
            self._ready[slot].add(unit)
            self._changed.notify_all()
        assert tag is not None and tag.step == step, "it was begun"
        if unit in self._shelf.table.units:
            self._shelf.offer(tag, unit, {"grad": self._bits[slot][unit]})

    def wait(self, tag: Tag, unit: str) -> Tensor:
        """Wait until a unit is offered, and return what is sent of it.

        Raises:
            Gone: a later gradient has taken its place, or `close` was called.
        """
        slot = tag.step % _STEPS
        is_ready = lambda: self._tags[slot] == tag and unit in self._ready[slot]
        with self._changed:
            self._changed.wait_for(lambda: is_ready() or self._is_over(tag))
            if not is_ready():
                raise Gone("", f"this island no longer offers step {tag.step} in epoch {tag.epoch}")
        return self._bits[slot][unit]

    def _is_over(self, tag: Tag) -> bool:
        now = self._tags[tag.step % _STEPS]
        return self._closed or (now is not None and (now.step, now.epoch) > (tag.step, tag.epoch))

    def missing(self, step: int, units: Iterable[str]) -> list[str]:
        """Return the units of a step that are not offered yet."""
        return [unit for unit in units if unit not in self._ready[step % _STEPS]]

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
