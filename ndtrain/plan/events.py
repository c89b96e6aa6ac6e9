"""What one instruction of the executor asks of a device, as data: kernels, collectives, and waits for them, in launch
order. `pieces` records them, `price` gives them seconds, `simulate` lays them on streams."""

from typing import NamedTuple


class Kernel(NamedTuple):
    """Work on the compute stream.

    Attributes:
        kind: "matmul", "attention" or "memory" (elementwise operators, norms, copies, reductions: bound by memory).
        flops: a multiply-add counts as 2; of causal attention only the visible pairs.
        bytes: read from and written to memory. Where blocks are compiled, neighbouring elementwise operators are one
            kernel, whose intermediate results count nothing.
        dtype: of the operands: "fp64", "fp32", "bf16" or "fp8".
        shape: matmul: (batch, M, N, K); attention: (B, heads, T of queries, T of keys, head_dim); memory: ().
        op: the operator's name; "" for several in one kernel.
    """

    kind: str
    flops: int
    bytes: int
    dtype: str
    shape: tuple[int, ...] = ()
    op: str = ""


class Collective(NamedTuple):
    """A collective or a message that is launched on the communicator of an axis.

    Attributes:
        axis: of the mesh, or several as in "fsdp+cp".
        op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv" (both of a neighbour), "broadcast".
        bytes: of the whole buffer (all_gather: the result; reduce_scatter: the input; send_recv: what is sent).
        work: its number, by which a `Wait` names it.
    """

    axis: str
    op: str
    bytes: int
    work: int


class Wait(NamedTuple):
    """The compute stream goes on when the collective has ended."""

    work: int


Event = Kernel | Collective | Wait


class Piece(NamedTuple):
    """What an instruction does with a layer of one kind, without the units' gathers and reductions.

    Attributes:
        events: in launch order.
        kept_bytes: of activations that are alive after the instruction and were not before it; negative: freed.
        peak_bytes: the most that is alive during the instruction beyond what was before it.
    """

    events: tuple[Event, ...]
    kept_bytes: int
    peak_bytes: int
