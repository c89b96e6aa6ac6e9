"""The curves of a model over the number of GPUs, as `scaling` computes and `drawings` draws them."""

from dataclasses import dataclass

REGIMES = ("compute bound", "communication hidden", "communication bound", "batch exhausted")  # of the family "fsdp"
FAMILIES = ("fsdp", "+tp", "+cp", "+pp")  # "fsdp": dp and fsdp only; each further family may use one more axis


@dataclass(frozen=True)
class Point:
    """The fastest mesh of a family on a number of GPUs.

    Attributes:
        global_batch: sequences of a step.
        overrides: the run's overrides. None if no legal mesh of the family fits; the figures are then 0.
        regime: one of `REGIMES` in the family "fsdp". "" in the other families, and if no mesh fits although the batch
            is not exhausted.
    """

    gpus: int
    global_batch: int
    family: str
    overrides: tuple[str, ...] | None
    step_time_s: float
    tokens_per_s: float
    mfu: float
    regime: str


Points = dict[str, list[Point]]  # kind of a curve -> its points


@dataclass(frozen=True)
class Beginning:
    """The point at which a regime begins, or at which an axis begins to pay.

    Attributes:
        what: one of `REGIMES`, or an axis: "tp", "cp", "pp".
    """

    what: str
    gpus: int
    global_batch: int


@dataclass(frozen=True)
class Curve:
    """The points of a curve at ascending GPU counts.

    Attributes:
        kind: "strong" (fixed global batch) or "weak" (the batch grows with the GPUs).
        regimes: where each regime that occurs in the family "fsdp" begins.
        pays: where each axis begins to pay: its family is more than a percent faster than the family before it, or
            fits where that family does not.
    """

    kind: str
    points: tuple[Point, ...]
    regimes: tuple[Beginning, ...]
    pays: tuple[Beginning, ...]


@dataclass(frozen=True)
class Scaling:
    """The curves of one model on one kind of hardware.

    Attributes:
        model, hardware: their names.
    """

    model: str
    hardware: str
    curves: tuple[Curve, ...]
