"""Saves the checkpoints of a run, synchronously or in the background from a copy in host memory."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ndtrain.checkpoint.elements import CheckpointError, State
from ndtrain.checkpoint.safetensors_io import bytes_of
from ndtrain.checkpoint.saving import Extras, Writer
from ndtrain.config import Config
from ndtrain.device.gpu import use_gpu
from ndtrain.mesh.host_device import page_locked
from ndtrain.mesh.mesh import Mesh
from ndtrain.parallel.build import Stages


@dataclass(frozen=True)
class Saved:
    """The result of a save.

    Attributes:
        path: the checkpoint, or None if the save failed.
        error: why the save failed, in one line that is the same on every rank. None: it did not fail.
        seconds_blocked: how long training waited: in `Saver.save` (including for the previous save), and before its
            next update.
        seconds: from the call until the checkpoint was published, or until the save failed.
    """

    step: int
    path: Path | None
    error: str | None
    seconds_blocked: float
    seconds: float


class Saver:
    """Saves a run's state as `folder/step-<step>`. Every rank creates one and makes the same calls.

    With `checkpoint.async_save`, a thread copies the state into host memory, which is allocated once. The thread writes
    it from there while training continues. The forward and backward of the next step only read the state. Training
    therefore waits no earlier than at its next update, and only if the copy is not finished by then (as in CheckFreq:
    Mohan et al., 2021, FAST '21). At most one save is in progress.

    Args:
        extras: writes further small files (the tokenizer) into the folder. Called on one rank, possibly in a thread.
    """

    def __init__(self, folder: Path, stages: Stages, mesh: Mesh, cfg: Config, extras: Extras = lambda folder: None):
        self._writer = Writer(folder, stages, mesh, cfg.checkpoint, asdict(cfg), extras)
        self._snapshot = _Snapshot(self._writer.live) if cfg.checkpoint.async_save else None
        self._pending: Future[Saved] | None = None
        self._device = mesh.device
        self._blocked = 0.0  # seconds that training has waited for the current save
        self._before_update = stages.units.before_update
        self._copying = False

    def save(self, state: State) -> list[Saved]:
        """Save the weights and the optimizer state as they are now.

        Returns:
            The saves that have ended: the previous save, if it was still in progress. Without `async_save` also this
            save.
        """
        began = time.perf_counter()
        ended = self.wait()
        if self._snapshot is None:
            path, error = self._write(state, self._writer.live)
            seconds = time.perf_counter() - began
            return [*ended, Saved(state.step, path, error, seconds, seconds)]
        state, copied = copy.deepcopy(state), self._snapshot.begin()

        def finish() -> Saved:
            path, error = self._write(state, copied())
            return Saved(state.step, path, error, self._blocked, time.perf_counter() - began)

        self._copying = True
        self._before_update.append(self.settle)
        self._blocked = time.perf_counter() - began
        self._pending = _in_background(finish, self._device)
        return ended

    def settle(self) -> None:
        """Wait until the copy is made. The sharded optimizer calls it before each update. Any other code that changes
        weights or state must call it too."""
        if self._copying:
            began = time.perf_counter()
            self._snapshot.made.wait()
            self._blocked += time.perf_counter() - began
            self._before_update.remove(self.settle)
            self._copying = False

    def poll(self) -> list[Saved]:
        """Return the background save that has ended since the last call, if there is one. Does not wait."""
        return self.wait() if self._pending is not None and self._pending.done() else []

    def wait(self) -> list[Saved]:
        """Wait for the save in progress, and return it if there is one.

        Raises:
            Exception: an error of the thread other than a failed write, such as a lost peer.
        """
        pending, self._pending = self._pending, None
        self.settle()
        return [] if pending is None else [pending.result()]

    def _write(self, state: State, values: Sequence[Tensor]) -> tuple[Path | None, str | None]:
        """Write a checkpoint and return (path, error). One of them is None."""
        try:
            return self._writer.write(state, values), None
        except CheckpointError as error:
            return None, str(error)


def _in_background(work: Callable[[], Saved], device: torch.device) -> "Future[Saved]":
    """Run `work` in a daemon thread whose CUDA calls are for `device`."""
    future: Future[Saved] = Future()

    def run() -> None:
        try:
            use_gpu(device)
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


class _Snapshot:
    """A copy of this rank's part of a checkpoint in host memory. The next copy overwrites it.

    Attributes:
        made: set as soon as training may change the state again.
    """

    def __init__(self, live: Sequence[Tensor]):
        self._cuda = any(x.is_cuda for x in live)  # offloaded state is in host memory already
        self._live, self._spans, self._host = [], [], []
        self.made = threading.Event()
        for dtype, group in groupby(live, key=lambda x: x.dtype):
            same = list(group)
            joined = _joined(same)
            # zeroed, so that the kernel allocates the pages now and not during the first copy
            numel = sum(x.numel() for x in same)
            buffer = page_locked(numel, dtype, self) if self._cuda else torch.empty(numel, dtype=dtype).zero_()
            self._live += joined
            self._spans += buffer.split([x.numel() for x in joined])
            self._host += buffer.split([x.numel() for x in same])

    def begin(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that returns the copy. On a CPU, that function makes the copy.

        On CUDA, the copy is queued here, between the previous step and the next one. The function waits for it."""
        self.made.clear()
        if not self._cuda:
            return self._copied
        self._copy()
        event = torch.cuda.Event()
        event.record()
        self.made.set()  # the next step is queued behind it
        return lambda: (event.synchronize(), self._host)[1]

    def _copied(self) -> Sequence[Tensor]:
        try:
            self._copy()
        finally:
            self.made.set()
        return self._host

    def _copy(self) -> None:
        for span, live in zip(self._spans, self._live, strict=True):
            if self._cuda:
                span.copy_(live, non_blocking=True)
            else:
                np.copyto(bytes_of(span), bytes_of(live))  # memcpy: twice as fast as PyTorch's copy for large spans


def _joined(live: Sequence[Tensor]) -> list[Tensor]:
    """Return the same elements in fewer tensors: tensors that are adjacent in memory become one."""
    spans: list[Tensor] = []
    for x in live:
        last = spans[-1] if spans else None
        same = last is not None and last.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if same and last.storage_offset() + last.numel() == x.storage_offset():
            spans[-1] = last.as_strided((last.numel() + x.numel(),), (1,))
        else:
            spans.append(x)
    return spans
