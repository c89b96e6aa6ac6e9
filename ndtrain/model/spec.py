"""The records in which a model declares its parameters and its ops. A block writes them once, in `Block.op_table` and
where it makes its weights. Counts, initial values, sharding, recompute, fp8 and the planner read them, and take no name
apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

Dims = tuple[str, ...]

# the ops that are more than a matmul: the code that computes one asks for its saved result by this name
CORE = "core"  # attention between the projections
DISPATCH, COMBINE = "dispatch", "combine"  # the rows of tokens to their experts, and back
OUTPUT = "down_proj"  # the last op of the blocks here


class Init(Enum):
    """How a parameter starts."""

    ONES = "ones"
    ZEROS = "zeros"
    NORMAL = "normal"
    TO_STREAM = "normal, and smaller in deeper models, since the output is added to the residual stream"


class Param(NamedTuple):
    """A parameter.

    Attributes:
        name: as in Hugging Face's files.
        dims: its named dims.
        unit: the unit (embedding, one block, a block's experts, final norm, head) whose buffer holds it.
        layer: the index of its block; None: it is in no block.
        expert: the index of its expert; None: it is in no expert.
        op: the name of the op that multiplies by it; None: it is a vector, the embedding or the head.
        init: its initial values.
    """

    name: str
    dims: Dims
    unit: str
    layer: int | None = None
    expert: int | None = None
    op: str | None = None
    init: Init = Init.NORMAL


class Joins(Enum):
    """What the result of an op is put together from. If parts of it are in several places, the result has to travel."""

    SLICES = "partial sums over heads or over the inner dim of an MLP"
    POSITIONS = "keys and values of a whole sequence"
    EXPERTS = "rows of tokens that the experts of a layer share"


@dataclass(frozen=True)
class OpSpec:
    """An op of a block. What a block computes between its ops is elementwise.

    Attributes:
        name: as `recompute.keep` has it.
        projections: the matrices that it multiplies by, as paths below the block, in groups. The rows of a group are
            neighbours in memory if they have the same size, and one matmul serves them.
        outputs: the named dims of which its result has a value each, for a token or, if `routed`, for a row. It follows
            from the projections if there are any.
        multiply_adds: for a token. It follows from the projections.
        multiply_adds_a_key: for a token and each key that attention compares it with.
        joins: what its result is put together from; None: it needs nothing but this token's input.
        to_stream: whether the output of its projections is added to the residual stream.
        routed: whether it computes rows: each token once for each of its experts. Its projections are a group for each
            matmul, of all experts in order.
        wide: whether it computes in fp32 or wider, whatever the compute precision is.
        last: whether it is a block's last op. The next layer saves its result as an input anyway.
        read_by: the only op that reads its result; None: others do. If that op's result is saved, this one's is not
            needed.
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
        """Whether a recompute has a use for its saved result."""
        return not self.last and self.read_by is None

    @property
    def weights(self) -> Iterator[str]:
        """The names of its weights below the block."""
        return (f"{projection}.weight" for neighbours in self.projections for projection in neighbours)

    def flops(self, seq_len: int) -> int:
        """Return the forward FLOPs a token, in a sequence of `seq_len` keys."""
        return 2 * (self.multiply_adds + seq_len * self.multiply_adds_a_key)
