"""How throughput and MFU change with the number of GPUs, at a fixed and at a growing global batch."""

from dataclasses import dataclass

REGIMES = ("compute bound", "communication hidden", "communication bound", "batch exhausted")  # of meshes of fsdp alone
FAMILIES = ("fsdp", "+tp", "+cp", "+pp")  # meshes of dp and fsdp alone; each further family may use one axis more


@dataclass(frozen=True)
class Point:
    """The fastest mesh of a family on a number of GPUs.

    Attributes:
        global_batch: sequences of a step.
        overrides: of the run; None: no legal mesh of the family fits, and the figures are 0.
        regime: one of `REGIMES` in the family "fsdp"; "" in the others, and where no mesh fits though the batch is not
            exhausted.
    """

    gpus: int
    global_batch: int
    family: str
    overrides: tuple[str, ...] | None
    step_time_s: float
    tokens_per_s: float
    mfu: float
    regime: str


@dataclass(frozen=True)
class Beginning:
    """Where a regime begins, or where an axis begins to pay.

    Attributes:
        what: one of `REGIMES`, or an axis: "tp", "cp", "pp".
    """

    what: str
    gpus: int
    global_batch: int


@dataclass(frozen=True)
class Curve:
    """Over GPU counts, ascending.

    Attributes:
        kind: "strong" (fixed global batch) or "weak" (one that grows with the GPUs).
        regimes: of the family "fsdp", those that occur.
        pays: the axes whose family is faster than the one before it by more than a percent, or which runs where that
            one cannot.
    """

    kind: str
    points: tuple[Point, ...]
    regimes: tuple[Beginning, ...]
    pays: tuple[Beginning, ...]


@dataclass(frozen=True)
class Scaling:
    """Curves of one model on one kind of hardware.

    Attributes:
        model, hardware: their names.
    """

    model: str
    hardware: str
    curves: tuple[Curve, ...]
