"""How each logical tensor is sharded over the mesh. Two tables decide: the model's dims and the user's rules.

A **dim** is a named tensor dimension (`heads`). A rule maps a dim to a mesh axis (`tp`). A tensor's *local shard* is
the part that tp leaves on this rank. The local shards of one unit (embedding, a block, norm, head) are concatenated in
a **flat** buffer. Each unit names the axes that split its buffer evenly, and the axes along which its shards are
replicated (`UnitGroups`). `runs` describes any range of a shard as contiguous runs of the global row-major tensor.
Initialising, saving, loading and resharding only copy runs.

Neighbouring tp ranks may hold **replicas** of one shard: of a tensor that no rule shards, or of a K/V head if tp
exceeds the number of K/V heads. Two pipeline stages may hold replicas of one tensor, the tied embeddings. The first
replica owns the shard: it alone counts the shard in a norm and writes it to a checkpoint.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from ndtrain.config import DATA_AXES, ConfigError
from ndtrain.mesh.mesh import EP, MeshSpec, beside_ep
from ndtrain.mesh.row_map import Held, RowMap, Run

Key = TypeVar("Key")

SHARD_AXES = ("fsdp", "cp")  # axes that split a flat buffer if its gradients are partial over them
BATCH_AXES = ("dp", "fsdp")  # axes whose ranks see different sequences
TENSOR_AXIS = "tp"  # the axis that rules may map dims to
STAGE_AXIS = "pp"  # the axis along which stages differ

UNEVEN = ("vocab",)  # dims whose shards may differ by one unit
ALIGNED = 8  # elements, 16 bytes of bf16: at multiples of this, kernels load several elements at once
REPLICATED = ("kv_heads",)  # dims that may have fewer units than tp has ranks: neighbouring ranks then hold replicas
APPLIED_TO = {"head_dim": "heads"}  # weights with the left dim are applied to activations sharded by the right dim
# dims with the same units and another width: the left dim follows the rule of the right dim
WITH = {"key_value_heads": "heads", "value_heads": "heads"}


class Dim(NamedTuple):
    """One tensor dimension.

    Attributes:
        name: the name that rules refer to.
        units: number of units; a shard boundary is always between two units.
        width: elements per unit (head_dim for heads).
    """

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
        shard: for each dim, (first element, number of elements) of the local shard.
        partial: mesh axes over which the local gradient must be summed; over tp, the sum is over the tp replicas.
        shard_dim: index of the dim that is sharded over tp; None: no dim is sharded.
        tp_replicas: number of neighbouring tp ranks that hold this shard.
        tp_replica: index of this rank among them.
        pp_replicas: number of pp coords that hold the tensor.
        pp_replica: index of this rank's coord among them.
        hidden: True for a hidden matrix: one that a block multiplies by, except a router.
        readout: True for the head, a router, or a matrix of one row.
    """

    name: str
    dims: tuple[Dim, ...]
    shard: tuple[tuple[int, int], ...]
    partial: frozenset[str]
    shard_dim: int | None = None
    tp_replicas: int = 1
    tp_replica: int = 0
    pp_replicas: int = 1
    pp_replica: int = 0
    hidden: bool = False
    readout: bool = False

    @property
    def owned(self) -> bool:
        """True if this rank holds the first replica along tp and pp."""
        return self.tp_replica == 0 and self.pp_replica == 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.shard)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def row_map(self) -> RowMap:
        """The positions of the local elements in the whole tensor. Initialising, checkpoints and rounding all read this
        map."""
        inner = 0 if self.shard_dim is None else self.shard_dim
        length, stride = math.prod(self.local_shape[inner:]), math.prod(self.shape[inner:])
        first = self.shard[inner][0] * math.prod(self.shape[inner + 1 :])
        return RowMap(first, length, stride)

    def runs(self, start: int = 0, stop: int | None = None) -> list[Run]:
        """Return the elements [start, stop) of the local row-major shard as runs. `local_start` counts from `start`."""
        runs: list[Run] = []
        at = 0
        for rows in self.row_map.rows(start, self.local_numel if stop is None else stop):
            for i in range(rows.number):
                runs.append(Run(rows.start + i * rows.stride, at, rows.length))
                at += rows.length
        return runs


def even_split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of part `index`, if `size` elements are split into parts of ceil(size / parts). The last
    parts may be shorter."""
    each = -(-size // parts)
    return min(size, each * index), min(size, each * (index + 1))


def balanced_split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of part `index`, if `size` elements are split into parts whose sizes differ by one at
    most."""
    return size * index // parts, size * (index + 1) // parts


@dataclass(frozen=True)
class UnitGroups:
    """The ranks that hold the tensors of one unit, seen from one of these ranks.

    Attributes:
        shard_axes: the mesh axes that split the unit's flat buffer.
        replica_axes: the axes along which the ranks hold the same shard; gradients are summed over them.
        shards, shard: number of parts of the flat buffer, and the index of this rank's part.
        replicas, replica: number of ranks that hold that part, and the index of this rank among them.
    """

    shard_axes: tuple[str, ...] = ()
    replica_axes: tuple[str, ...] = ()
    shards: int = 1
    shard: int = 0
    replicas: int = 1
    replica: int = 0

    @classmethod
    def of(cls, mesh: MeshSpec, rank: int, shard_axes: Iterable[str], replica_axes: Iterable[str]) -> "UnitGroups":
        shard_axes, replica_axes = tuple(shard_axes), tuple(replica_axes)
        return cls(
            shard_axes,
            replica_axes,
            mesh.size(*shard_axes),
            mesh.index(rank, *shard_axes),
            mesh.size(*replica_axes),
            mesh.index(rank, *replica_axes),
        )


class Layouts:
    """The layout of every tensor of a model on one rank of a mesh.

    Args:
        tensors: name -> dims, the model's dim table with sizes.
        rules: dim -> mesh axis or None, the user's table.
        token_axes: mesh axes over which the tokens of the residual stream are sharded.
        pp_coords: name -> the pp coords that hold the tensor, its owner first. A name that is missing has one coord, 0.
        ep_coords: name -> the coord on ep that holds the tensor, for tensors of experts. The ranks along ep send their
            tokens to the experts. An expert's gradient is therefore partial only over the factors of the axes that ep
            leaves over.
        units: name -> the unit whose flat buffer holds the tensor.
        hidden, readouts: the names of the tensors that are `TensorLayout.hidden` and `readout`.

    Raises:
        ConfigError: a rule names a dim that no tensor has, or an axis other than tp; or tp does not divide a dim.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[Dim, ...]],
        rules: Mapping[str, str | None],
        mesh: MeshSpec,
        rank: int,
        token_axes: Iterable[str] = DATA_AXES,
        pp_coords: Mapping[str, Sequence[int]] | None = None,
        ep_coords: Mapping[str, int] | None = None,
        units: Mapping[str, str] | None = None,
        hidden: Collection[str] = (),
        readouts: Collection[str] = (),
    ):
        self.units, self._hidden, self._readouts = units or {}, frozenset(hidden), frozenset(readouts)
        self.mesh, self.rank, self.rules, self.token_axes = mesh, rank, rules, frozenset(token_axes)
        self.pp_coords, self.ep_coords = pp_coords or {}, ep_coords or {}
        # computed once: a model with experts has tens of thousands of tensors, and each one reads them
        self._coords, self._ep, self._tp = mesh.coords(rank), mesh.index(rank, EP), mesh.size(TENSOR_AXIS)
        self._beside_ep = {a: mesh.beside_ep(a) for a in DATA_AXES} if ep_coords else {}
        self._groups: dict[frozenset[str], UnitGroups] = {}
        known = {d.name for dims in tensors.values() for d in dims}
        for name, axis in rules.items():
            if name not in known:
                raise ConfigError(
                    f"layout.rules.{name}: no parameter has such a dim; known: {', '.join(sorted(known))}"
                )
            if axis not in (None, TENSOR_AXIS):
                raise ConfigError(
                    f"layout.rules.{name}={axis}: only {TENSOR_AXIS} shards dims: set it to {TENSOR_AXIS} or null"
                )
        self._by_name = {name: self._layout(name, dims) for name, dims in tensors.items()}

    def __getitem__(self, name: str) -> TensorLayout:
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"parameter {name!r} has no row in the model's dim table") from None

    def names(self) -> list[str]:
        return list(self._by_name)

    def holds(self, name: str) -> bool:
        """Return True if this rank holds a part of the tensor."""
        return self._coords[STAGE_AXIS] in self.pp_coords.get(name, (0,)) and self.is_along_ep(name)

    def is_along_ep(self, name: str) -> bool:
        """Return True if the ranks at this rank's coord on ep hold the tensor."""
        return self.ep_coords.get(name, self._ep) == self._ep

    def flat(self, names: Iterable[str] | None = None) -> "dict[str, FlatLayout]":
        """Return unit -> its flat buffer.

        Args:
            names: the tensors of one rank's stages; None: the tensors that this rank holds.

        Raises:
            ValueError: the tensors of a unit are not split and replicated over the same ranks.
        """
        by_unit: dict[str, list[str]] = {}
        for name in filter(self.holds, self.names()) if names is None else names:
            by_unit.setdefault(self.units[name], []).append(name)
        flat = {}
        for unit, own in by_unit.items():
            groups = {self.groups(name) for name in own}
            if len(groups) > 1:
                raise ValueError(
                    f"unit {unit}: its tensors belong to different groups of ranks: split it into two units"
                )
            flat[unit] = FlatLayout.of([self[name] for name in own], groups.pop())
        return flat

    def groups(self, name: str) -> UnitGroups:
        """Return the ranks that split a tensor's flat buffer, and the ranks that hold the same shards. Both follow from
        the axes over which the tensor's gradient is partial. The axes that are among SHARD_AXES split the buffer. Along
        the other axes each rank holds the same shard. (Replicas along tp and pp belong to single tensors, so their
        layouts describe them.)"""
        partial = self[name].partial - {TENSOR_AXIS, STAGE_AXIS}
        if partial not in self._groups:
            named = (a for axis in self.mesh.order for a in (axis, beside_ep(axis)))
            data_axes = [a for a in named if a in partial]
            split = [a for a in data_axes if a in SHARD_AXES or a in map(beside_ep, SHARD_AXES)]
            rest = [a for a in data_axes if a not in split]
            self._groups[partial] = UnitGroups.of(self.mesh, self.rank, split, rest)
        return self._groups[partial]

    def tp_replica_counts(self) -> list[int]:
        """Return the numbers of tp replicas over which gradients of the model are summed. The list is the same on every
        rank, whatever the rank holds, because all ranks create a process group for each number."""
        counts = {self[n].tp_replicas for n in self.names() if TENSOR_AXIS in self[n].partial}
        return sorted(counts - {1})

    def _layout(self, name: str, dims: tuple[Dim, ...]) -> TensorLayout:
        n, index = self._tp, self._coords[TENSOR_AXIS]
        shard_dim = next((i for i, d in enumerate(dims) if self._axis(d)), None) if n > 1 else None
        tp_replicas = n if shard_dim is None else 1
        shard = [(0, d.size) for d in dims]
        if shard_dim is not None:
            dim = dims[shard_dim]
            tp_replicas = max(1, n // dim.units) if dim.name in REPLICATED else 1
            shard[shard_dim] = self._shard(name, dim, n // tp_replicas, index // tp_replicas)
        partial = self._partial(dims, tp_replicas, shard_dim is not None)
        if name in self.ep_coords:
            partial = frozenset(self._beside_ep.get(a, a) for a in partial)
        here, pp_coords = self._coords[STAGE_AXIS], self.pp_coords.get(name, (0,))
        if len(pp_coords) > 1:  # each stage has the gradient of its own use of the tensor
            partial |= {STAGE_AXIS}
        pp_replica = pp_coords.index(here) if here in pp_coords else 0
        tp, pp = (tp_replicas, index % tp_replicas), (len(pp_coords), pp_replica)
        role = name in self._hidden, name in self._readouts
        return TensorLayout(name, dims, tuple(shard), partial, shard_dim, *tp, *pp, *role)

    def _axis(self, dim: Dim) -> str | None:
        """Return the mesh axis that shards a dim, or None."""
        return self.rules.get(WITH.get(dim.name, dim.name))

    def _partial(self, dims: tuple[Dim, ...], tp_replicas: int, sharded: bool) -> frozenset[str]:
        """Return the axes over which a gradient is summed: every axis that shards the activations but not this tensor.
        The activations are sharded over the token axes and, for a dim in `APPLIED_TO`, over tp. If the tensor is
        sharded over tp, its gradient is summed over tp only if it has tp replicas."""
        applied = [self.rules.get(APPLIED_TO[d.name]) for d in dims if d.name in APPLIED_TO]
        axes = self.token_axes | {axis for axis in applied if axis}
        if sharded:
            axes = axes - {TENSOR_AXIS} if tp_replicas == 1 else axes | {TENSOR_AXIS}
        return frozenset(axes)

    def _shard(self, name: str, dim: Dim, parts: int, index: int) -> tuple[int, int]:
        """Return (first element, number of elements) of part `index` of `parts`.

        Raises:
            ConfigError: the units of the dim cannot be split into `parts`.
        """
        if dim.units % parts and not (dim.name in UNEVEN and dim.units > parts):
            raise ConfigError(
                f"{name}: mesh.{TENSOR_AXIS}={self.mesh.size(TENSOR_AXIS)} does not divide its {dim.units} {dim.name}"
            )
        start, stop = balanced_split(dim.units, parts, index)
        return start * dim.width, (stop - start) * dim.width


class Tensors(Enum):
    """A set of tensors that an optimizer updates alike."""

    ALL = "all tensors"
    HIDDEN = "hidden matrices"
    OTHER = "all tensors but hidden matrices"

    def has(self, hidden: bool) -> bool:
        """Return True if a tensor that is a hidden matrix, or is none, belongs to the set."""
        return self is Tensors.ALL or hidden == (self is Tensors.HIDDEN)


@dataclass(frozen=True)
class FlatLayout:
    """The flat buffer of one unit: the concatenation of its local shards. It is padded so that the size of each of its
    `groups.shards` parts is a multiple of `ALIGNED`.

    Hidden matrices come first, then the other matrices, then vectors. Tensors with weight decay are therefore one
    slice, and so are tensors with the same kinds of optimizer state. Within each kind, sharded tensors come before
    replicated ones.

    Attributes:
        tensors: in the order of the buffer.
        groups: the ranks that the buffer is split over.
        offsets: name -> first element in the flat buffer.
        hidden_numel: number of elements that belong to hidden matrices; they come first.
        matrix_numel: number of elements that belong to matrices, which come before vectors.
        numel: number of elements, padding included.
    """

    tensors: tuple[TensorLayout, ...]
    groups: UnitGroups
    offsets: dict[str, int]
    hidden_numel: int
    matrix_numel: int
    numel: int

    @classmethod
    def of(cls, tensors: Iterable[TensorLayout], groups: UnitGroups) -> "FlatLayout":
        # sorted() is stable: model order among equals
        ordered = tuple(sorted(tensors, key=lambda t: (not t.hidden, len(t.dims) < 2, t.tp_replicas)))
        offsets, at = {}, 0
        for t in ordered:
            offsets[t.name] = at
            at += t.local_numel
        of_hidden = sum(t.local_numel for t in ordered if t.hidden)
        of_matrices = sum(t.local_numel for t in ordered if len(t.dims) >= 2)
        whole = groups.shards * ALIGNED
        return cls(ordered, groups, offsets, of_hidden, of_matrices, -(-at // whole) * whole)

    @property
    def own(self) -> tuple[int, int]:
        """The bounds [start, stop) of this rank's part of the flat buffer."""
        return self.bounds(self.groups.shard)

    def bounds(self, part: int) -> tuple[int, int]:
        """Return [start, stop) of part `part` of the flat buffer."""
        return even_split(self.numel, self.groups.shards, part)

    def own_of(self, tensors: Tensors) -> tuple[int, int]:
        """Return the bounds of the elements of this rank's part that belong to these tensors. Padding belongs to
        OTHER."""
        first = self.hidden_numel if tensors is Tensors.OTHER else 0
        last = self.hidden_numel if tensors is Tensors.HIDDEN else self.numel
        start, stop = self.own
        begin = min(max(start, first), stop)
        return begin, max(begin, min(stop, last))

    def can_fuse(self, names: Sequence[str]) -> bool:
        """Return True if these matrices are adjacent in the buffer, in this order, and sharded alike. They are then the
        rows of one matrix."""
        order = [t.name for t in self.tensors]
        first = order.index(names[0])
        adjacent = self.tensors[first : first + len(names)]
        alike = {(t.local_shape[1:], t.tp_replicas, t.shard_dim) for t in adjacent}
        return [t.name for t in adjacent] == list(names) and len(alike) == 1

    def tensors_in(self, start: int, stop: int) -> list[tuple[TensorLayout, int, int]]:
        """Return (tensor, first, end) for each tensor with elements in [start, stop). These elements are [first, end)
        of the flat buffer."""
        spans = (
            (t, max(start, self.offsets[t.name]), min(stop, self.offsets[t.name] + t.local_numel)) for t in self.tensors
        )
        return [(t, a, b) for t, a, b in spans if a < b]

    def held(self, start: int, stop: int) -> Iterator[tuple[TensorLayout, Held]]:
        """Yield the elements [start, stop) of the flat buffer by tensor. `Held.at` counts from `start`."""
        for t, a, b in self.tensors_in(start, stop):
            offset, at = self.offsets[t.name], a - start
            for rows in t.row_map.rows(a - offset, b - offset):
                yield t, Held(at, rows)
                at += rows.numel

    def runs(self, start: int, stop: int) -> list[tuple[TensorLayout, list[Run]]]:
        """Return the elements [start, stop) of the flat buffer as runs of each tensor. `local_start` counts from
        `start`."""
        runs = []
        for t, a, b in self.tensors_in(start, stop):
            at = self.offsets[t.name]
            runs.append((t, [r._replace(local_start=r.local_start + a - start) for r in t.runs(a - at, b - at)]))
        return runs

    def grouped(self, start: int, stop: int, key: Callable[[TensorLayout], Key]) -> list[tuple[Key, slice]]:
        """Group the elements of [start, stop) by a key of their tensors. Return (key, slice), with slices that count
        from `start`. Neighbours with the same key are one slice. Padding is in no slice."""
        grouped: list[tuple[Key, slice]] = []
        for t, a, b in self.tensors_in(start, stop):
            own, first = key(t), a - start
            if grouped and grouped[-1][0] == own:
                first = grouped.pop()[1].start
            grouped.append((own, slice(first, b - start)))
        return grouped

    def slices(self, start: int, stop: int, wanted: Callable[[TensorLayout], bool]) -> list[slice]:
        """Return the elements of [start, stop) that belong to tensors for which `wanted` is true, as slices that count
        from `start`."""
        return [at for is_wanted, at in self.grouped(start, stop, wanted) if is_wanted]
