"""How each logical tensor is cut over the mesh, derived from two tables: the model's dims and the user's rules.

A **dim** is a named tensor dimension (`heads`), a rule sends it to a mesh axis (`tp`). A tensor's *local* part is what
the axes of its dims leave on this rank; local tensors of one unit (embedding, a block, norm, head) stand one behind
the other in a **flat** buffer, which is cut evenly over fsdp x cp. `runs` expresses any such part as pieces of the
global row-major tensor. Initialising, saving, loading and resharding copy runs and know nothing else.

Neighbouring tp ranks may hold **copies** of one part: of a tensor that no rule cuts, or of a K/V head where tp exceeds
their number. Two pipeline stages may both be **holders** of a tensor: of tied embeddings. The first of them owns it: it
alone counts the part in a norm and writes it to a checkpoint.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ndtrain.config import ConfigError
from ndtrain.distributed.mesh import MeshSpec

SHARD_AXES = ("fsdp", "cp")  # hold the same parameters and cut the flat buffers between them
REPLICA_AXES = ("dp",)  # hold the same shards
DATA_AXES = (*REPLICA_AXES, *SHARD_AXES)  # see different tokens, so every gradient is partial over them
BATCH_AXES = ("dp", "fsdp")  # see different sequences
MODEL_AXES = ("pp", "fsdp", "cp", "tp")  # hold different elements of the model
CUT_AXIS = "tp"  # the axis that rules may send dims to

UNEVEN = ("vocab",)  # dims whose parts may differ by one unit
COPIED = ("kv_heads",)  # dims that may have fewer units than the axis has ranks: neighbours then hold the same one
FOLLOWS = {"head_dim": "heads"}  # a tensor of the first dim is applied to activations that the second's rule cuts


class Run(NamedTuple):
    """`length` elements that are contiguous both in the global row-major tensor and in the local part."""

    global_start: int
    local_start: int
    length: int


class Dim(NamedTuple):
    """One tensor dimension: its name, how many units may be cut apart, and elements per unit (head_dim for heads)."""

    name: str
    units: int
    width: int = 1

    @property
    def size(self) -> int:
        return self.units * self.width


@dataclass(frozen=True)
class TensorLayout:
    """One logical tensor as this rank holds it.

    Attributes:
        dims: the global dims.
        cut: per dim (first element, elements) of the local part.
        partial: mesh axes over which this tensor's local gradient must be summed; over tp it is the sum of the copies'.
        cut_dim: which dim a rule cuts.
        copies, copy: how many neighbouring tp ranks hold this part, and which of them this rank is.
        holders, holder: how many pp coords hold the tensor, and which of them this rank's is.
    """

    name: str
    dims: tuple[Dim, ...]
    cut: tuple[tuple[int, int], ...]
    partial: frozenset[str]
    shard_dim: int | None = None
    tp_replicas: int = 1
    tp_replica: int = 0
    holders: int = 1
    holder: int = 0

    @property
    def owned(self) -> bool:
        """Whether this rank is the first of those that hold this part along tp and pp."""
        return self.tp_replica == 0 and self.holder == 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.cut)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    def runs(self, start: int = 0, stop: int | None = None) -> list[Run]:
        """The elements [start, stop) of the local row-major tensor as runs; `local_start` counts from `start`."""
        stop = self.local_numel if stop is None else stop
        inner = self._contiguous()
        found: list[Run] = []
        at = start
        while at < stop:
            length = min(inner - at % inner, stop - at)
            begin = self._to_global(at)
            if found and found[-1].global_start + found[-1].length == begin:
                found[-1] = found[-1]._replace(length=found[-1].length + length)
            else:
                found.append(Run(begin, at - start, length))
            at += length
        return found

    def _contiguous(self) -> int:
        """Elements of the local tensor that are certainly contiguous in the global one: the dims after the last cut
        dim, times what the cut leaves of that dim."""
        inner = 1
        for dim, (_, n) in zip(reversed(self.dims), reversed(self.cut), strict=True):
            inner *= n
            if n != dim.size:
                break
        return inner

    def _to_global(self, local: int) -> int:
        """Global row-major offset of the local row-major offset `local`."""
        offset, stride = 0, 1
        for dim, (first, n) in zip(reversed(self.dims), reversed(self.cut), strict=True):
            local, i = divmod(local, n)
            offset += (first + i) * stride
            stride *= dim.size
        return offset


def even_cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of part `index` when `size` is cut into `parts` of ceil(size / parts), the last ones short."""
    each = -(-size // parts)
    return min(size, each * index), min(size, each * (index + 1))


def fair_cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of part `index` when `size` is cut into `parts` that differ by one at most."""
    return size * index // parts, size * (index + 1) // parts


class Layouts:
    """The layout of every tensor of a model on one rank of a mesh.

    Args:
        tensors: name -> dims, the model's table applied to its sizes.
        rules: dim -> mesh axis or None, the user's table.
        stream: mesh axes over which the tokens of the residual stream are cut.
        holders: name -> the pp coords that hold the tensor, its owner first; the others are on one each.

    Raises:
        ConfigError: a rule names a dim that no tensor has or an axis that cuts none, or an axis does not divide a dim.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[Dim, ...]],
        rules: Mapping[str, str | None],
        mesh: MeshSpec,
        rank: int,
        stream: Iterable[str] = DATA_AXES,
        holders: Mapping[str, Sequence[int]] | None = None,
    ):
        self.mesh, self.rank, self.rules, self.stream = mesh, rank, rules, frozenset(stream)
        self.holders = holders or {}
        known = {d.name for dims in tensors.values() for d in dims}
        for name, axis in rules.items():
            if name not in known:
                raise ConfigError(
                    f"layout.rules.{name}: no parameter has such a dim; known: {', '.join(sorted(known))}"
                )
            if axis not in (None, CUT_AXIS):
                raise ConfigError(
                    f"layout.rules.{name}={axis}: only {CUT_AXIS} cuts dims: set it to {CUT_AXIS} or null"
                )
        self._by_name = {name: self._layout(name, dims) for name, dims in tensors.items()}

    def __getitem__(self, name: str) -> TensorLayout:
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"parameter {name!r} has no row in the model's dim table") from None

    def names(self) -> list[str]:
        return list(self._by_name)

    def replica_axes(self, names: Iterable[str]) -> frozenset[str]:
        """The axes of the gradients' all-reduce: the partial axes of these tensors minus fsdp, cp, tp and pp. The
        tensors of a rank share one buffer, so they must agree."""
        (axes,) = {self[name].partial - {*SHARD_AXES, CUT_AXIS, "pp"} for name in names}
        return axes

    def tp_replica_counts(self, names: Iterable[str]) -> list[int]:
        """Over how many tp replicas the gradients of some of these tensors are summed; the same list on every rank."""
        counts = {self[n].tp_replicas for n in names if CUT_AXIS in self[n].partial}
        return sorted(counts - {1})

    def other_stage(self, names: Iterable[str]) -> int | None:
        """The other pp coord that holds one of these tensors; None: there is none."""
        here = self.mesh.coords(self.rank)["pp"]
        return next((c for name in names for c in self.holders[name] if c != here), None)

    def _layout(self, name: str, dims: tuple[Dim, ...]) -> TensorLayout:
        n, index = self.mesh.size(CUT_AXIS), self.mesh.coords(self.rank)[CUT_AXIS]
        shard_dim = next((i for i, d in enumerate(dims) if self.rules.get(d.name)), None) if n > 1 else None
        tp_replicas = n if shard_dim is None else 1
        cut = [(0, d.size) for d in dims]
        if shard_dim is not None:
            dim = dims[shard_dim]
            tp_replicas = max(1, n // dim.units) if dim.name in COPIED else 1
            cut[shard_dim] = self._cut(name, dim, n // tp_replicas, index // tp_replicas)
        partial = self._partial(dims, tp_replicas, shard_dim is not None)
        here, at = self.mesh.coords(self.rank)["pp"], self.holders.get(name, (0,))
        if len(at) > 1:  # each stage has the gradient of its own use
            partial |= {"pp"}
        holder = at.index(here) if here in at else 0
        return TensorLayout(
            name, dims, tuple(cut), partial, shard_dim, tp_replicas, index % tp_replicas, len(at), holder
        )

    def _partial(self, dims: tuple[Dim, ...], tp_replicas: int, ruled: bool) -> frozenset[str]:
        """A gradient is partial over the axes that cut the activations its tensor is applied to: those of the stream,
        or of the dim it follows. An axis that cuts the tensor along with them leaves nothing to sum but over copies."""
        axes = self.stream | {self.rules.get(FOLLOWS[d.name]) for d in dims if d.name in FOLLOWS} - {None}
        if ruled:
            axes = axes - {CUT_AXIS} if tp_replicas == 1 else axes | {CUT_AXIS}
        return frozenset(axes)

    def _cut(self, name: str, dim: Dim, parts: int, index: int) -> tuple[int, int]:
        """(first element, elements) of part `index`."""
        if dim.units % parts and not (dim.name in UNEVEN and dim.units > parts):
            raise ConfigError(
                f"{name}: mesh.{CUT_AXIS}={self.mesh.size(CUT_AXIS)} does not divide its {dim.units} {dim.name}"
            )
        start, stop = fair_cut(dim.units, parts, index)
        return start * dim.width, (stop - start) * dim.width


@dataclass(frozen=True)
class FlatLayout:
    """The flat buffer of one unit: its local tensors one behind the other, matrices before vectors (so that a
    weight-decay group is one slice) and within either the cut before the copied, padded to a multiple of `parts`.

    Attributes:
        offsets: name -> start in the flat buffer.
        decayed: elements that belong to matrices; they come first.
        parts: over how many ranks it is cut; part `i` is `bounds(i)`.
    """

    tensors: tuple[TensorLayout, ...]
    offsets: dict[str, int]
    decayed: int
    numel: int  # padded
    parts: int

    @classmethod
    def of(cls, tensors: Iterable[TensorLayout], parts: int) -> "FlatLayout":
        # stable: model order within each kind
        ordered = tuple(sorted(tensors, key=lambda t: (len(t.dims) < 2, t.tp_replicas)))
        offsets, at = {}, 0
        for t in ordered:
            offsets[t.name] = at
            at += t.local_numel
        decayed = sum(t.local_numel for t in ordered if len(t.dims) >= 2)
        return cls(ordered, offsets, decayed, -(-at // parts) * parts, parts)

    def bounds(self, part: int) -> tuple[int, int]:
        """[start, stop) of a part in the flat buffer."""
        return even_cut(self.numel, self.parts, part)

    def can_fuse(self, names: Sequence[str]) -> bool:
        """Whether the local matrices stand row behind row as one matrix, cut alike over the same ranks."""
        order = [t.name for t in self.tensors]
        first = order.index(names[0])
        found = self.tensors[first : first + len(names)]
        alike = {(t.local_shape[1:], t.tp_replicas, t.shard_dim) for t in found}
        return [t.name for t in found] == list(names) and len(alike) == 1

    def decayed_in(self, start: int, stop: int) -> int:
        """How many elements of [start, stop), counted from its front, belong to matrices."""
        return max(0, min(stop, self.decayed) - start)

    def tensors_in(self, start: int, stop: int) -> list[tuple[TensorLayout, int, int]]:
        """(tensor, first, last) for each tensor with elements in [start, stop): where in the flat buffer they stand."""
        spans = (
            (t, max(start, self.offsets[t.name]), min(stop, self.offsets[t.name] + t.local_numel)) for t in self.tensors
        )
        return [(t, a, b) for t, a, b in spans if a < b]

    def runs(self, start: int, stop: int) -> list[tuple[TensorLayout, list[Run]]]:
        """The elements [start, stop) of the flat buffer as runs of each tensor; `local_start` counts from `start`."""
        found = []
        for t, a, b in self.tensors_in(start, stop):
            at = self.offsets[t.name]
            found.append((t, [r._replace(local_start=r.local_start + a - start) for r in t.runs(a - at, b - at)]))
        return found

    def slices(self, start: int, stop: int, wanted: Callable[[TensorLayout], bool]) -> list[slice]:
        """The elements of [start, stop) that belong to `wanted` tensors as few slices, which count from `start`."""
        found: list[slice] = []
        for t, a, b in self.tensors_in(start, stop):
            if not wanted(t):
                continue
            if found and found[-1].stop == a - start:
                a = found.pop().start + start
            found.append(slice(a - start, b - start))
        return found
