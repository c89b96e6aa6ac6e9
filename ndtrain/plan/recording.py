"""Records the FLOPs and the memory by kind of a step as it runs. Its tensors may be on the meta device."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtrain.engine.train_step import TrainingStep
from ndtrain.parallel.allocations import Allocations, storage_id
from ndtrain.parallel.build import Stages
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.plan.operators import flops_of

ACTIVATIONS, BACKWARD = "activations", "gradients of activations"
STATE = ("parameters", "gradients", "master weights", "optimizer state", "average", "outer weights")
HOST = "host: "  # prefix of a kind in host memory


class Peak(NamedTuple):
    """The largest number of bytes alive at one time.

    Attributes:
        kinds: kind -> bytes alive at that time.
    """

    nbytes: int
    kinds: dict[str, int]


class Recording(Allocations):
    """Follows memory by kind, and counts FLOPs.

    Args:
        separate_host: True if host memory is separate from the device's memory. It then does not count in `now`.

    Attributes:
        bytes: kind -> bytes alive.
        at_peak: `bytes` at the peak.
        flops: "matmul" and "attention" -> FLOPs.
        windows: part of the step -> its peak, for the closed windows (`open_window`). `peak_bytes` and `at_peak` belong
            to the open window.
    """

    def __init__(self, separate_host: bool) -> None:
        super().__init__()
        self.separate_host = separate_host
        self.bytes: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        self.flops: Counter[str] = Counter()
        self.windows: dict[Hashable, Peak] = {}
        self._window: Hashable = None
        self._kinds: dict[int, str] = {}
        self._label: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind, flops = flops_of(func, args, kwargs or {})
        if flops:
            self.flops[kind] += flops
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def labelled(self, kind: str) -> Iterator[None]:
        """Count allocations within the block as this kind."""
        before, self._label = self._label, kind
        try:
            yield
        finally:
            self._label = before

    def label_calls(self, owner: Any, method: str, kind: str) -> None:
        """Count allocations within a method of an object as this kind."""
        call = getattr(owner, method)

        def labelled(*args, **kwargs):
            with self.labelled(kind):
                return call(*args, **kwargs)

        setattr(owner, method, labelled)

    def classify(self, kind: str, *tensors: Tensor | None) -> None:
        """Count the storages of these tensors as this kind, unless an earlier call has classified them."""
        for at in {storage_id(x) for x in tensors if x is not None} & self._sizes.keys():
            before, size = self._kinds[at], self._sizes[at]
            if before in (ACTIVATIONS, BACKWARD):
                self._kinds[at] = kind
                self._count(before, -size)
                self._count(kind, size)

    def restart(self) -> None:
        """Count the peak and the FLOPs from now on. Forget the windows."""
        self._read_sizes()
        self.peak_bytes, self.at_peak = self.now, +self.bytes
        self.flops.clear()
        self.windows.clear()

    def open_window(self, name: Hashable) -> None:
        """Close the open window of the step, and open the next one."""
        self._read_sizes()
        self.windows[self._window] = Peak(self.peak_bytes, dict(self.at_peak))
        self._window, self.peak_bytes, self.at_peak = name, self.now, +self.bytes

    def open_window_at(self, owner: Any, method: str, name: Callable[..., Hashable]) -> None:
        """Make each call of an object's method open a window. `name` returns its name, given the call's arguments."""
        call = getattr(owner, method)

        def opening(*args, **kwargs):
            self.open_window(name(*args, **kwargs))
            return call(*args, **kwargs)

        setattr(owner, method, opening)

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of each kind of state."""
        return {kind: n for kind, n in self.bytes.items() if n and kind.removeprefix(HOST) in STATE}

    # -------------------------------------------------------------------------------------------------- bookkeeping

    def _add(self, storage: torch.UntypedStorage) -> None:
        by_autograd = torch._C._current_autograd_node() is not None
        self._kinds[storage._cdata] = self._label or (BACKWARD if by_autograd else ACTIVATIONS)
        super()._add(storage)

    def _set_size(self, at: int, size: int) -> None:
        self._count(self._kinds[at], size - self._sizes[at])
        self._sizes[at] = size
        if self.now > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.now, +self.bytes

    def _freed(self, at: int) -> None:
        self._count(self._kinds.pop(at), -self._sizes.pop(at))
        self._resized.pop(at, None)

    def _count(self, kind: str, size: int) -> None:
        self.bytes[kind] += size
        if not (self.separate_host and kind.startswith(HOST)):
            self.now += size


def classify_state(recording: Recording, units: ShardedUnits) -> None:
    """Classify the buffers of the units in the recording."""
    host = HOST if units.offload else ""
    each = list(units.units.values())
    recording.classify(f"{host}optimizer state", *(x for u in each for x in u.state.values()))
    recording.classify("parameters", *(u.full for u in each if not u.residency.reshard_after_forward))
    recording.classify("gathered parameters", *(u.full for u in each if u.residency.reshard_after_forward))
    recording.classify(f"{host}master weights", *(u.master for u in each))
    recording.classify("parameters", *(u.gather_source for u in each))
    recording.classify("gradients", *(u.grad for u in each), *(u.full_grad for u in each))
    recording.classify(f"{host}average", *(u.ema for u in each))
    recording.classify(f"{HOST}outer weights", *(x for u in each for x in (u.outer, u.outer_momentum)))
    if units.owners is not None:
        recording.classify("optimizer state", *(x for t in units.owners.owned for x in t.state.values()))
    recording.resizes(u.full for u in each if u.residency.reshard_after_forward)


def label_step(recording: Recording, stages: Stages, step: TrainingStep) -> None:
    """Label the allocations of the parts of a step in the recording."""
    recording.label_calls(stages.units, "open", "gradients")
    recording.label_calls(stages.units, "reduce", "messages")
    recording.label_calls(stages.units, "collect", "messages")
    recording.label_calls(step.executor.pipeline, "post", "messages")
    for method in ("begin", "compute", "finish"):
        recording.label_calls(step.optimizer, method, "update")
