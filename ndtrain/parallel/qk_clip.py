"""QK-Clip: a limit on attention logits. After an update, the heads whose logits exceed it get smaller query and key
weights (Kimi Team, 2025, arXiv:2507.20534, section 2.1).

The forward passes of a step measure each head: the log-sum-exp of a query's scores, of which the largest in the global
batch counts. It is at least the largest score, and at most the logarithm of the number of keys larger. All attention
kernels return it, so no score is computed twice.

Query heads that share a key/value head are scaled together, by the largest of their measures.

Shape legend: L layers, H query heads, K key/value heads.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.mesh.collectives import all_reduce_max
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.sharding import Layouts
from ndtrain.model import Transformer
from ndtrain.model.block import HeadRows
from ndtrain.model.transformer import head_rows, layer
from ndtrain.optim import TensorSlice, Update
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.unit import Unit, tensor_slices

_CHUNK = 1 << 22  # elements that are scaled at a time


class _Part(NamedTuple):
    """The elements of a projection that this rank updates.

    Attributes:
        weight: the shard of the projection's unit.
        elements: the part of it that belongs to the projection.
        layer: the index of the projection's layer.
        rows: how logits depend on its rows.
    """

    weight: Tensor
    elements: TensorSlice
    layer: int
    rows: HeadRows


class QKClip:
    """The limit on the attention logits of all layers of the model. Every rank has the measures of all heads.

    Attributes:
        largest_LH: the measure of each head in this step, fp64; 0 if it is negative. Before `gather` it is of the
            queries and heads that this rank has computed.
        names: the names of the `numbers`.
    """

    names = ("qk_clip/largest_logit", "qk_clip/heads")

    def __init__(self, limit: float, models: list[Transformer], units: ShardedUnits, layouts: Layouts, mesh: Mesh):
        self.limit, self.mesh, m = limit, mesh, models[0].m
        heads = m.num_hidden_layers, m.num_attention_heads
        self.largest_LH = torch.zeros(heads, dtype=torch.float64, device=mesh.device)
        table = head_rows(m)
        self._kv_heads = min(layouts[name].dims[0].units for name in table)
        self._parts = {name: list(_parts(unit, table)) for name, unit in units.units.items()}
        for model in models:
            self._measure(model, layouts)

    def _measure(self, model: Transformer, layouts: Layouts) -> None:
        """Let the blocks of a stage write their measures into `largest_LH`."""
        for i, block in model.model.layers.items():
            queries, _ = block.head_rows(model.m)
            tensor = layouts[f"{layer(int(i))}.{queries.projection}.weight"]
            first, number = (n // tensor.dims[0].width for n in tensor.shard[0])
            block.largest_H = self.largest_LH[int(i), first : first + number]

    def begin_step(self) -> None:
        """Start the measures of a step from zero."""
        self.largest_LH.zero_()

    def gather(self) -> None:
        """Take the largest measure over all ranks."""
        all_reduce_max(self.largest_LH, self.mesh.world).wait()

    def factors(self, update: Update) -> Tensor:
        """Return the factors of the logits, limit / measure above the limit, [L, K] on the device of the state. They
        are 1 if `update.found_inf` is."""
        largest_LK = self.largest_LH.unflatten(1, (self._kv_heads, -1)).amax(-1).to(update.found_inf.device)
        return torch.where(update.found_inf.bool(), 1.0, self.limit / largest_LK.clamp(min=self.limit))

    def scale(self, unit: str, factor_LK: Tensor) -> None:
        """Scale the weights of a unit, so that the logits are multiplied by these factors."""
        for part in self._parts[unit]:
            _scale(part, factor_LK[part.layer])

    def numbers(self) -> Tensor:
        """Return the numbers of the step that are logged, fp64 [len(names)], the same on every rank."""
        return torch.stack([self.largest_LH.amax(), (self.largest_LH > self.limit).sum()])


def _parts(unit: Unit, table: dict[str, tuple[int, HeadRows]]) -> Iterator[_Part]:
    for elements in tensor_slices(unit, *unit.layout.own):
        if elements.tensor.name in table:
            yield _Part(unit.master, elements, *table[elements.tensor.name])


def _scale(part: _Part, factor_K: Tensor) -> None:
    """Multiply the rows of each head by its factor to the rows' power. The heads are in K groups of the same factor."""
    weight, tensor = part.weight, part.elements.tensor
    powers = torch.cat([factor_K.new_full((number,), power) for number, power in part.rows.powers])
    of_head = factor_K.repeat_interleave(tensor.dims[0].units // len(factor_K))
    first, number = tensor.shard[0]
    factors = (of_head[:, None] ** powers).flatten()[first : first + number].to(weight.dtype)
    columns = math.prod(tensor.local_shape[1:])
    for piece in part.elements.chunks(_CHUNK):
        at = torch.arange(piece.start, piece.start + piece.at.stop - piece.at.start, device=weight.device)
        weight[piece.at] *= factors[at // columns]
