"""A rank's stages of the model: what it computes, what it holds, and where the other stages are."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ndtrain.config import ModelConfig
from ndtrain.distributed.sharding import Layouts
from ndtrain.model import Context, Segment, Transformer
from ndtrain.model.objective import Objective
from ndtrain.parallel.balance import Balance
from ndtrain.parallel.ep_capacity import Capacity
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.pp import Placement
from ndtrain.parallel.recompute import RecomputePlan, SavedOps


@dataclass
class Stages:
    """What this rank computes and holds: one stage of the model, or several.

    Attributes:
        models: stage -> its part of the model.
        segments: stage -> the segments of its part, in order.
        saved_ops: the results that recomputed blocks save in their forward.
        balance: that of the model's experts.
        objective: what training minimizes.
        notes: lines for the user on what was chosen at start, such as the attention kernel.
        recompute: which blocks are recomputed.
        capacity: the size of the experts' buffers; None: they are as large as the rows need.
    """

    models: dict[int, Transformer]
    segments: dict[int, list[Segment]]
    units: ShardedUnits
    layouts: Layouts
    placement: Placement
    saved_ops: SavedOps
    balance: Balance
    objective: Objective
    notes: list[str] = field(default_factory=list)
    recompute: RecomputePlan = field(default_factory=RecomputePlan)
    capacity: Capacity | None = None

    @property
    def model(self) -> ModelConfig:
        """The whole model that these are stages of."""
        return next(iter(self.models.values())).m

    @property
    def context(self) -> Callable[..., Context]:
        """`Transformer.context`: the same for every stage."""
        return next(iter(self.models.values())).context

    @property
    def in_order(self) -> list[tuple[int, Segment]]:
        """(stage, segment) of all segments, stage after stage."""
        return [(stage, segment) for stage, of_stage in sorted(self.segments.items()) for segment in of_stage]
