"""The records in which a model declares its parameters and its ops.

A block declares them once: ops in `Block.op_table`, parameters where it makes its weights. Counts, initial values,
sharding, recompute, fp8 and the planner read the records, so nothing has to parse parameter names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

Dims = tuple[str, ...]

# ops that are not just a matmul: the code that computes one looks up its saved result by this name
CORE = "core"  # attention between the projections
DISPATCH, COMBINE = "dispatch", "combine"  # sends the rows of tokens to their experts, returns the outputs
OUTPUT = "down_proj"  # the last op of every block in this package


class Init(Enum):
    """The initial values of a parameter."""

    ONES = "ones"
    ZEROS = "zeros"
    NORMAL = "normal"
    TO_STREAM = "normal, and smaller in deeper models, since the output is added to the residual stream"


class Role(Enum):
    """How a parameter's learning rate and initial values depend on the width of the model."""

    HIDDEN = "a matrix of a block, from features to features"
    READOUT = "a matrix from features to a number of outputs that does not grow with the width: the head, a router"
    OTHER = "a vector, or the embedding"


class Param(NamedTuple):
    """A parameter.

    Attributes:
        name: its name in Hugging Face's files.
        dims: its named dims.
        unit: the unit (embedding, one block, a block's experts, final norm, head) whose buffer holds it.
        layer: the index of its block. None: it is in no block.
        expert: the index of its expert. None: it is in no expert.
        op: the name of the op that multiplies by it. None: it is a vector, the embedding or the head.
        init: its initial values.
        role: its role. The weights of a block's ops are hidden matrices. Routers, which compute in fp32, and matrices
            of one row, which give one number per token, are readouts.
    """

    name: str
    dims: Dims
    unit: str
    layer: int | None = None
    expert: int | None = None
    op: str | None = None
    init: Init = Init.NORMAL
    role: Role = Role.OTHER


class Joins(Enum):
    """The parts that the result of an op combines. If they are on several ranks, the ranks have to communicate."""

    SLICES = "partial sums over heads or over the inner dim of an MLP"
    POSITIONS = "keys and values of a whole sequence"
    EXPERTS = "rows of tokens that the experts of a layer share"


@dataclass(frozen=True)
class OpSpec:
    """An op of a block. Everything that a block computes between its ops is elementwise.

    Attributes:
        name: its name in `recompute.keep`.
        projections: the matrices that it multiplies by, as paths relative to the block, in groups. If the matrices of a
            group have the same size, they are adjacent in memory, and one matmul computes them.
        outputs: the named dims of its result per token, or per row if `routed`. They follow from the projections, if
            there are any.
        multiply_adds: multiply-adds per token. They follow from the projections.
        multiply_adds_a_key: multiply-adds per token and per key that attention compares the token with.
        joins: the parts that its result combines. None: it needs only this token's input.
        to_stream: whether the output of its projections is added to the residual stream.
        routed: whether it computes rows. Each token has one row for each of its experts. A group of projections is then
            one matmul over all experts, in order.
        wide: whether it computes in fp32 or wider, whatever the compute precision is.
        last: whether it is a block's last op. The next layer saves its result anyway, as an input.
        read_by: the only op that reads its result. None: several do. If the result of that op is saved, the result of
            this op is not needed.
    """

    name: str
    projections: tuple[tuple[str, ...], ...] = ()
    outputs: Dims = ()
    multiply_adds: int = 0
    multiply_adds_a_key: int = 0
    joins: Joins | None = None
    to_stream: bool = False
    routed: bool = False
    wide: bool = False
    last: bool = False
    read_by: str | None = None

    @property
    def savable(self) -> bool:
        """True if it is useful to save its result for a recompute."""
        return not self.last and self.read_by is None

    @property
    def weights(self) -> Iterator[str]:
        """The names of its weights, relative to the block."""
        return (f"{projection}.weight" for neighbours in self.projections for projection in neighbours)

    def flops(self, seq_len: int) -> int:
        """Return the forward FLOPs per token, in a sequence of `seq_len` keys."""
        return 2 * (self.multiply_adds + seq_len * self.multiply_adds_a_key)
