"""Saves a run again and again: at once, or from a copy in host memory while the training goes on."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ndtrain.checkpoint.elements import CheckpointError, State
from ndtrain.checkpoint.safetensors_io import bytes_of
from ndtrain.checkpoint.saving import Extras, Writer
from ndtrain.config import Config
from ndtrain.distributed.mesh import Mesh
from ndtrain.parallel.build import Stages


@dataclass(frozen=True)
class Saved:
    """What became of a save.

    Attributes:
        path: the checkpoint, or None where there is none.
        error: why, in one line; the same on every rank.
        seconds_blocked: how long training waited: in `Saver.save`, also for the save before, and at its next update.
        seconds: from the call until the checkpoint had its name, or was given up.
    """

    step: int
    path: Path | None
    error: str | None
    seconds_blocked: float
    seconds: float


class Saver:
    """Saves a run's state as `folder/step-<step>`. Every rank makes one and calls it alike.

    With `checkpoint.async_save` a thread copies the state into host memory, allocated here once, and writes it from
    there while the training goes on. The forward and backward of the next step only read what is copied, so training
    waits no sooner than at its next update, should the copy not be made by then (as in CheckFreq: Mohan et al., 2021,
    FAST '21). One save at most is under way.

    Args:
        extras: writes further small files (the tokenizer) into the folder; called on one rank, perhaps in a thread.
    """

    def __init__(self, folder: Path, stages: Stages, mesh: Mesh, cfg: Config, extras: Extras = lambda folder: None):
        self._writer = Writer(folder, stages, mesh, cfg, extras)
        self._snapshot = _Snapshot(self._writer.live) if cfg.checkpoint.async_save else None
        self._flight: Future[Saved] | None = None
        self._blocked = 0.0  # seconds that training has waited for the save under way
        self._before_update = stages.units.before_update
        self._copying = False

    def save(self, state: State) -> list[Saved]:
        """Saves the weights and moments as they are now. Returns what has ended: the save before this one, if it was
        still under way, and, without `async_save`, this one."""
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
        self._flight = _in_background(finish)
        return ended

    def settle(self) -> None:
        """Returns once the copy is made, and weights and state may change. The sharded optimizer calls it before each
        update; who changes them otherwise must."""
        if self._copying:
            began = time.perf_counter()
            self._snapshot.made.wait()
            self._blocked += time.perf_counter() - began
            self._before_update.remove(self.settle)
            self._copying = False

    def poll(self) -> list[Saved]:
        """The background save that has ended since this was last asked, if one has. Waits for nothing."""
        return self.wait() if self._flight is not None and self._flight.done() else []

    def wait(self) -> list[Saved]:
        """The same, once it has ended.

        Raises:
            Exception: what went wrong in the thread, where it was not the writing: a peer was lost.
        """
        flight, self._flight = self._flight, None
        self.settle()
        return [] if flight is None else [flight.result()]

    def _write(self, state: State, values: Sequence[Tensor]) -> tuple[Path | None, str | None]:
        """(path, error): one of them."""
        try:
            return self._writer.write(state, values), None
        except CheckpointError as error:
            return None, str(error)


def _in_background(work: Callable[[], Saved]) -> "Future[Saved]":
    """In a thread that does not keep the process alive."""
    future: Future[Saved] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


class _Snapshot:
    """A copy of this rank's part of a checkpoint in host memory, which the next one overwrites.

    Attributes:
        made: set when what was copied may change.
    """

    def __init__(self, live: Sequence[Tensor]):
        self._cuda = any(x.is_cuda for x in live)  # what is offloaded is in host memory already
        self._live, self._spans, self._host = [], [], []
        self.made = threading.Event()
        for dtype, group in groupby(live, key=lambda x: x.dtype):
            same = list(group)
            joined = _joined(same)
            # filled, so that the kernel hands the pages out now and not in the first copy
            buffer = torch.empty(sum(x.numel() for x in same), dtype=dtype, pin_memory=self._cuda).zero_()
            self._live += joined
            self._spans += buffer.split([x.numel() for x in joined])
            self._host += buffer.split([x.numel() for x in same])

    def begin(self) -> Callable[[], Sequence[Tensor]]:
        """Returns what makes the copy, or waits for it, and gives it: on a CPU that copies; on CUDA the copy is queued
        here, behind the step before and ahead of the next."""
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
                np.copyto(bytes_of(span), bytes_of(live))  # memcpy: of large spans twice as fast as PyTorch's


def _joined(live: Sequence[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors: neighbours in memory as one."""
    spans: list[Tensor] = []
    for x in live:
        last = spans[-1] if spans else None
        same = last is not None and last.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if same and last.storage_offset() + last.numel() == x.storage_offset():
            spans[-1] = last.as_strided((last.numel() + x.numel(),), (1,))
        else:
            spans.append(x)
    return spans
