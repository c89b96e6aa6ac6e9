"""The recorded work of each kind of instruction on each kind of layer.

    pieces = record_pieces(cfg, "cuda")
    for run, piece in zip(runs, pieces.along(runs, layers)): ...   # the passes of a rank's program
    pieces.of("F", "block")                                     # a forward that keeps its graph
    pieces.of("F", "block", save=frozenset())                   # a forward of a block that is recomputed
    pieces.of("F", "block", save=frozenset(), recompute=True)   # its recompute

The executor runs a small model of a few layers on the meta device, as one rank of a mesh of tp and cp
(`piece_recording.py`). A caller has to know what the pieces leave out:

- Gathers, reductions and the optimizer are not part of a piece. `Layouts.flat` returns the number of
  elements of each unit on a rank, `update_bytes` the optimizer's memory traffic per element of its shard.
- `kept_bytes` includes a layer's output, because the next layer reads it. Two tensors are exceptions: the output of a
  stage's last layer is sent and freed, and the input of its first layer is received. Each has `boundary_bytes`, and so
  has its gradient.
- Weights and weight gradients are not counted. Of the memory that a microbatch holds over the whole step, only
  `context_bytes` is counted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ndtrain.config import Config, LocalShapes
from ndtrain.config.registry import get
from ndtrain.config.schema import require
from ndtrain.parallel.balance import looks_ahead
from ndtrain.parallel.build import DTYPES
from ndtrain.parallel.recompute import NOTHING, RecomputeOps, blocks_a_group
from ndtrain.plan.events import Piece
from ndtrain.plan.piece_recording import Fresh, compiles, record, reduced
from ndtrain.plan.variants import Save, Variant, variants
from ndtrain.program.ops import Run

__all__ = ["Pieces", "record_pieces", "update_bytes"]


@dataclass(frozen=True)
class Pieces:
    """The pieces of a rank.

    Attributes:
        recorded: variant -> its piece.
        boundary_bytes: size of a microbatch's residual stream, which each layer passes on to the next.
        context_bytes: bytes that a microbatch holds from the beginning of the step to its end.
        compiled: True if the blocks are compiled.
    """

    recorded: Mapping[Variant, Piece]
    boundary_bytes: int
    context_bytes: int
    compiled: bool

    def of(
        self,
        kind: str,
        layer: str,
        save: Save = None,
        shape_only: frozenset[str] = NOTHING,
        drop_input: bool = False,
        recompute: bool = False,
    ) -> Piece:
        """Return the piece of an instruction. The arguments are the same as in `Variant`.

        Raises:
            KeyError: the configuration has no such instruction.
        """
        return self.recorded[Variant(kind, layer, save, shape_only, drop_input, recompute)]

    def along(self, runs: Iterable[Run], layers: Sequence[str]) -> Iterator[Piece]:
        """Yield the piece of each pass.

        Args:
            layers: the kind of each of the rank's layers (`Segment.kind`).
        """
        return (self.recorded[v] for v in variants(runs, layers))


def record_pieces(cfg: Config, device: str, imbalance: float = 1.0) -> Pieces:
    """Record the pieces of a run on devices of this kind, for the rank that holds the last part of the sequence.

    Args:
        cfg: resolved.
        device: "cpu" or "cuda".
        imbalance: as in `Rates`.

    Raises:
        ConfigError: a rank cannot be built, or its work can only be determined on the machine itself.
    """
    _check(cfg, device)
    groups = _groups(cfg)
    small = reduced(cfg, sum(map(len, groups)), compiles(cfg, device))
    return _cached(_Key(small, repr(small), device, groups, Fresh.of(cfg), imbalance))


def _check(cfg: Config, device: str) -> None:
    m = cfg.model
    require(
        cfg.recompute.name != "budget",
        "recompute=budget: the blocks to recompute are chosen on the training machine: plan recompute=none, "
        "selective and full instead",
    )
    changed = m.alibi or m.attn_logit_softcapping is not None or m.attention is not None
    require(
        device == "cpu" or not changed or cfg.hardware.attention == "math",
        "model.alibi, model.attn_logit_softcapping and model.attention: they use a kernel generated on the GPU, "
        "which cannot be planned without one: set hardware.attention=math",
    )


def update_bytes(cfg: Config) -> int:
    """Return the bytes that the optimizer's update reads and writes per element of a rank's shard.

    The gradient counts once. The master weight, each state tensor and the average count twice.
    """
    master = DTYPES[cfg.precision.params]
    state = get("optimizer", cfg.optim.name).state_spec(cfg.optim)
    average = 2 * master.itemsize if cfg.optim.ema is not None else 0
    return 3 * master.itemsize + sum(2 * (s.dtype or master).itemsize for s in state) + average


def _groups(cfg: Config) -> tuple[tuple[Save, ...], ...]:
    """Return the recompute groups whose blocks a rank may have. A group lists what each of its blocks saves.

    Three blocks represent longer groups as well: a first block, a last block, and the others. In a forward before the
    step, a block keeps as little as a recomputed block that saves nothing.
    """
    r, ahead = cfg.recompute, [(NOTHING,)] if looks_ahead(cfg.model, cfg.moe) else []
    if r.name == "none":
        return ((None,), *ahead)
    save = RecomputeOps.of(cfg.model, cfg.mesh).always | frozenset(r.keep if r.name == "selective" else ())
    most = min(3, blocks_a_group(cfg.model.num_hidden_layers, r))
    return tuple(dict.fromkeys([*((save,) * n for n in range(1, most + 1)), *ahead]))


class _Key(NamedTuple):
    """The cache key of a recording. `text` represents `cfg` in comparisons."""

    cfg: Config
    text: str
    device: str
    groups: tuple[tuple[Save, ...], ...]
    fresh: Fresh
    imbalance: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self[1:] == other[1:]

    def __hash__(self) -> int:
        return hash(self[1:])


@lru_cache(maxsize=256)
def _cached(key: _Key) -> Pieces:
    cfg, recorded = key.cfg, record(key.cfg, key.device, key.groups, key.fresh, key.imbalance)
    tokens, hidden = LocalShapes.of(cfg).stream
    boundary = tokens * hidden * DTYPES[cfg.precision.compute].itemsize
    return Pieces(recorded.pieces, boundary, recorded.context_bytes, bool(cfg.train.compile))
