"""The passes of layers that differ in their work, and that work as data: kernels, collectives, and waits for them, in
launch order. `pieces` records it, `price` computes its seconds, `simulate` runs it on streams."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ndtrain.program.ops import NOTHING, Run


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


Save = frozenset[str] | None


class Variant(NamedTuple):
    """Everything that the work of a pass depends on.

    Attributes:
        kind: F, B, I or W.
        layer: the kind of the layer, as `Segment.kind`.
        save, shape_only: (F) of the block's recompute group, for its forward and its recompute; None: not recomputed.
        drop_input, recompute: as in `Run`.
    """

    kind: str
    layer: str
    save: Save = None
    shape_only: frozenset[str] = NOTHING
    drop_input: bool = False
    recompute: bool = False

    @classmethod
    def of(cls, run: Run, layer: str) -> "Variant":
        """Return the variant of a pass of a layer of this kind."""
        return cls(run.kind, layer, run.save, run.shape_only, run.drop_input, run.recompute)


def variants(runs: Iterable[Run], layers: Sequence[str]) -> Iterator[Variant]:
    """Yield the variant of each pass.

    Args:
        layers: the kind of each of the rank's layers.
    """
    return (Variant.of(run, layers[run.layer]) for run in runs)
