"""The distribution of a run's model over its mesh. It follows from the configuration alone: all ranks have the same
one, and it needs no processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ndtrain import schedule as schedules
from ndtrain.config import DATA_AXES, Config, LocalShapes, ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.mesh.sharding import Dim, Layouts
from ndtrain.model import dim_sizes, params
from ndtrain.model.spec import Param, Role
from ndtrain.model.transformer import names_of
from ndtrain.parallel.pp import Placement, split_layers


@dataclass(frozen=True)
class Distribution:
    """Describes which rank holds which parameter of a model.

    Attributes:
        rules: dim -> the mesh axis that shards it, or None. A dim that the model does not have is ignored.
        residual_axes: the mesh axes over which the tokens of the residual stream are sharded.
    """

    model: ModelConfig
    mesh: MeshSpec
    placement: Placement
    rules: Mapping[str, str | None]
    residual_axes: tuple[str, ...]

    @classmethod
    def of(cls, cfg: Config) -> "Distribution":
        """Return the distribution of a resolved configuration."""
        m, s = cfg.model, cfg.schedule
        schedule = schedules.build(s.name, cfg.mesh.pp, cfg.microbatches, s.chunks, s.path)
        placement = Placement(schedule, tuple(split_layers(m, cfg.train.seq_len, schedule.rank_of, s.split)))
        residual_axes = (*DATA_AXES, "tp") if LocalShapes.of(cfg).shards_stream else DATA_AXES
        return cls(m, MeshSpec.of(cfg.mesh), placement, cfg.layout.rules, residual_axes)

    @cached_property
    def params(self) -> dict[str, Param]:
        """The model's parameters by name, in order."""
        return params(self.model)

    def layouts(self, rank: int) -> Layouts:
        """Return the layout of every tensor of the model, as `rank` holds it."""
        table, sizes = self.params, dim_sizes(self.model)
        tensors = {name: tuple(Dim(d, *sizes[d]) for d in p.dims) for name, p in table.items()}
        used = {d.name for dims in tensors.values() for d in dims}  # if all blocks have experts, no dim is `mlp`
        rules = {dim: axis for dim, axis in self.rules.items() if dim in used}
        coords_of_unit = self.placement.pp_coords(self.model)
        units = {name: p.unit for name, p in table.items()}
        pp_coords = {name: coords_of_unit[unit] for name, unit in units.items()}
        ep_coords = {name: p.expert // self._experts_each for name, p in table.items() if p.expert is not None}
        return Layouts(
            tensors, rules, self.mesh, rank, self.residual_axes, pp_coords, ep_coords, units, *self._matrices
        )

    def experts(self, coord: int) -> range:
        """Return the experts of each layer that the ranks at a coord on ep hold. The ranks hold them in order."""
        return range(coord * self._experts_each, (coord + 1) * self._experts_each)

    @cached_property
    def _matrices(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of the hidden matrices, and of those that read the features out."""
        return names_of(self.params, Role.HIDDEN), names_of(self.params, Role.READOUT)

    @property
    def _experts_each(self) -> int:
        return resolved(self.model.num_experts) // self.mesh.ep
