"""The work of a layer's pass as data: kernels, collectives, and waits for them, in launch order. `pieces` records it,
`price` computes its seconds, `simulate` runs it on streams."""

from typing import NamedTuple


class Kernel(NamedTuple):
    """Work on the compute stream.

    Attributes:
        kind: "matmul", "attention" or "memory" (elementwise operators, norms, copies, reductions: bound by memory).
        flops: a multiply-add counts as 2; causal attention counts only visible pairs.
        bytes: read from and written to memory. In compiled blocks neighbouring elementwise operators are one kernel,
            and its intermediate results do not count.
        dtype: dtype of the operands: "fp64", "fp32", "bf16" or "fp8".
        shape: matmul: (batch, M, N, K); attention: (B, heads, T of queries, T of keys, head_dim); memory: ().
        op: the operator's name; "" if the kernel fuses several.
    """

    kind: str
    flops: int
    bytes: int
    dtype: str
    shape: tuple[int, ...] = ()
    op: str = ""


class Collective(NamedTuple):
    """A collective or a message, launched on the communicator of an axis.

    Attributes:
        axis: an axis of the mesh, or several as in "fsdp+cp".
        op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv" (with neighbours), "broadcast".
        bytes: size of the whole buffer (all_gather: the result; reduce_scatter: the input; send_recv: the message).
        work: its number, which a `Wait` refers to.
    """

    axis: str
    op: str
    bytes: int
    work: int


class Wait(NamedTuple):
    """The compute stream waits until the collective has ended."""

    work: int


Event = Kernel | Collective | Wait


class Piece(NamedTuple):
    """The work of an instruction on a layer of one kind, without the units' gathers and reductions.

    Attributes:
        events: in launch order.
        kept_bytes: activations alive after the instruction minus activations alive before it; negative: freed.
        peak_bytes: the most that is alive during the instruction, minus what was alive before it.
    """

    events: tuple[Event, ...]
    kept_bytes: int
    peak_bytes: int
