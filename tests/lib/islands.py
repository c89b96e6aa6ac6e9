"""Islands in one process: the ranks of a mesh, with the elements that each serves and needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from ndtrain.config import AXES
from ndtrain.islands.shelf import Shelf, Tag
from ndtrain.islands.table import Table, UnitTable
from ndtrain.islands.wire import Listener
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.mesh.sharding import Dim, Layouts

TOKEN = "a token of the tests"
TENSORS = {
    "table": (Dim("vocab", 11), Dim("embed", 5)),
    "q": (Dim("heads", 4, 3), Dim("embed", 5)), "k": (Dim("kv_heads", 2, 3), Dim("embed", 5)),
    "down": (Dim("embed", 5), Dim("mlp", 8)), "norm": (Dim("embed", 5),), "last_norm": (Dim("embed", 5),),
}  # fmt: skip
UNITS = {"table": "embed", "q": "block", "k": "block", "down": "block", "norm": "block", "last_norm": "last"}
RULES = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
STATE = {"master": torch.float32, "exp_avg": torch.bfloat16}
BUFFERS = {"grad": {"grad": torch.float32}, "sum": {"grad": torch.float32}, "state": STATE}


def mesh_of(pp=1, dp=1, fsdp=1, cp=1, tp=1) -> MeshSpec:
    return MeshSpec(AXES, (pp, dp, fsdp, cp, tp))


def tables(mesh: MeshSpec, owned_only: bool, tensors=TENSORS, units=UNITS, buffers=BUFFERS) -> list[Table]:
    """The table of each rank. With two stages the embeddings are tied: both stages hold them."""
    coords = {"table": (0, 1), "last_norm": (1,)} if mesh.size("pp") == 2 else None
    made = []
    for rank in range(mesh.world_size):
        flat = Layouts(tensors, RULES, mesh, rank, pp_coords=coords, units=units).flat()
        of_rank = {name: SimpleNamespace(name=name, layout=layout) for name, layout in flat.items()}
        made.append(Table.of(SimpleNamespace(units=SimpleNamespace(units=of_rank)), owned_only, buffers))
    return made


def wholes(tensors=TENSORS, seed: float = 0.0) -> dict[str, torch.Tensor]:
    """Every element of the model has its own value, for each seed."""
    out, at = {}, 1.0 + 1000 * seed
    for name, dims in tensors.items():
        numel = int(torch.tensor([d.size for d in dims]).prod())
        out[name] = torch.arange(numel, dtype=torch.float32) + at
        at += numel
    return out


def shard(unit: UnitTable, whole: Mapping[str, torch.Tensor], dtype=torch.float32, rest=0.0) -> torch.Tensor:
    """A rank's shard with the elements of its table; the others are `rest`."""
    out = torch.full((unit.numel,), rest, dtype=dtype)
    for name, held in unit.tensors.items():
        for at, rows in held:
            pieces = whole[name].as_strided((rows.number, rows.length), (rows.stride, 1), rows.start)
            out[at : at + rows.numel] = pieces.flatten().to(dtype)
    return out


@dataclass
class ServedIsland:
    """The shelves and listeners of all ranks of an island."""

    shelves: list[Shelf]
    listeners: list[Listener]

    @classmethod
    def of(cls, mesh: MeshSpec, **kinds) -> "ServedIsland":
        return cls.of_tables(tables(mesh, owned_only=True, **kinds))

    @classmethod
    def of_tables(cls, served: list[Table]) -> "ServedIsland":
        shelves = [Shelf(table) for table in served]
        return cls(shelves, [Listener("127.0.0.1", TOKEN, shelf.handlers()) for shelf in shelves])

    @property
    def endpoints(self) -> list[str]:
        return [listener.address for listener in self.listeners]

    def offer(self, tag: Tag, whole: Mapping[str, torch.Tensor], units=None) -> None:
        """Offer the elements that each rank owns. All others are NaN, so that nobody may read them."""
        for shelf in self.shelves:
            for name in shelf.table.units.keys() & set(units or shelf.table.units):
                unit, named = shelf.table.units[name], shelf.table.buffers[tag.what]
                shelf.offer(tag, name, {b: shard(unit, whole, d, float("nan")) for b, d in named.items()})

    def close(self) -> None:
        for one in (*self.shelves, *self.listeners):
            one.close()
