"""A rank's stages of the model, with everything that is needed to compute them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ndtrain.config import ModelConfig
from ndtrain.mesh.sharding import Layouts
from ndtrain.model import Context, Segment, Transformer
from ndtrain.model.objective import Objective
from ndtrain.parallel.balance import Balance
from ndtrain.parallel.ep_capacity import Capacity
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.pp import Placement
from ndtrain.parallel.qk_clip import QKClip
from ndtrain.parallel.recompute import RecomputePlan, SavedOps


@dataclass(frozen=True, eq=False)
class Stages:
    """The part of the model that this rank computes and holds: one stage, or several.

    Attributes:
        models: stage -> its part of the model.
        saved_ops: the results that recomputed blocks save in their forward.
        balance: the balance of the model's experts.
        objective: the loss that training minimizes.
        notes: lines for the user about choices made at start, such as the attention kernel.
        recompute: the blocks that are recomputed.
        capacity: the size of the experts' buffers; None: they are as large as the rows need.
        qk_clip: the limit on attention logits; None: there is none.
    """

    models: dict[int, Transformer]
    units: ShardedUnits
    layouts: Layouts
    placement: Placement
    saved_ops: SavedOps
    balance: Balance
    objective: Objective
    notes: list[str] = field(default_factory=list)
    recompute: RecomputePlan = field(default_factory=RecomputePlan)
    capacity: Capacity | None = None
    qk_clip: QKClip | None = None

    @cached_property
    def segments(self) -> dict[int, list[Segment]]:
        """Stage -> the segments of its part, in order."""
        return {stage: model.segments() for stage, model in self.models.items()}

    @property
    def model(self) -> ModelConfig:
        """The configuration of the whole model, to which these stages belong."""
        return next(iter(self.models.values())).m

    @property
    def context(self) -> Callable[..., Context]:
        """`Transformer.context`, which is the same for every stage."""
        return next(iter(self.models.values())).context

    @property
    def in_order(self) -> list[tuple[int, Segment]]:
        """All segments as (stage, segment), stage after stage."""
        return [(stage, segment) for stage, of_stage in sorted(self.segments.items()) for segment in of_stage]
