"""Sharding of a sequence over the ranks of cp.

A sequence of `length` tokens is sharded over `ring` positions of the ring. The tokens of one position are then split
into equal slices over `ulysses` ranks. In causal attention a late token attends to more keys than an early one, so the
choice of a position's tokens balances the work:

- `zigzag`: 2 * ring chunks; position i has chunk i from the front and chunk i from the end (Llama 3, arXiv:2407.21783,
  sec. 3.3.2);
- `striped`: token t is at position t % ring (Brandon et al., 2023, arXiv:2311.09431), which also balances short
  documents;
- `none`: one chunk for each position.
"""

from dataclasses import dataclass

import numpy as np

from ndtrain.config.schema import Config, resolved
from ndtrain.model.attention.tiles import SequenceSlice

BALANCES = ("zigzag", "striped", "none")


@dataclass(frozen=True)
class SequenceSharding:
    """A sequence of `length` tokens sharded over ring * ulysses ranks.

    Raises:
        ValueError: the balance is unknown, or the length is not a multiple of `unit`.
    """

    length: int
    ring: int = 1
    ulysses: int = 1
    balance: str = "zigzag"

    @classmethod
    def of(cls, cfg: Config) -> "SequenceSharding":
        """Return the sharding of a resolved configuration."""
        ulysses = resolved(cfg.cp.ulysses)
        return cls(cfg.train.seq_len, cfg.mesh.cp // ulysses, ulysses, cfg.cp.balance)

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            raise ValueError(f"balance {self.balance!r} is not one of {', '.join(BALANCES)}")
        if self.length % self.unit:
            raise ValueError(
                f"a sequence of {self.length} tokens cannot be sharded {self.balance} over ring {self.ring} x ulysses "
                f"{self.ulysses}: its length must be a multiple of {self.unit}"
            )

    @property
    def parts(self) -> int:
        """Number of ranks of cp."""
        return self.ring * self.ulysses

    @property
    def unit(self) -> int:
        """The number of which the length must be a multiple."""
        chunks_held = 2 if self.balance == "zigzag" and self.ring > 1 else 1
        return self.ring * int(np.lcm(chunks_held, self.ulysses))

    def pieces(self, ring_index: int) -> tuple[SequenceSlice, ...]:
        """Return the tokens of ring position `ring_index` as slices, in local order, which is also their order in the
        sequence."""
        held = self.length // self.ring
        if self.ring == 1 or self.balance == "none":
            return (SequenceSlice(0, held, ring_index * held, 1),)
        if self.balance == "striped":
            return (SequenceSlice(0, held, ring_index, self.ring),)
        chunk = held // 2
        return (
            SequenceSlice(0, chunk, ring_index * chunk, 1),
            SequenceSlice(chunk, chunk, (2 * self.ring - 1 - ring_index) * chunk, 1),
        )

    def index(self, part: int) -> np.ndarray:
        """Return the global index of each local token of `part` = ring_index * ulysses + ulysses_index, int64 [length /
        parts]."""
        ring_index, slice_index = divmod(part, self.ulysses)
        held = np.concatenate([p.first + p.stride * np.arange(p.count) for p in self.pieces(ring_index)])
        return held.reshape(self.ulysses, -1)[slice_index]
