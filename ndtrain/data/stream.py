"""A stream as the source of batches: one rank reads it, and all see the same tokens on any mesh.

Shapes: T tokens of a sequence.
"""

from bisect import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.lib.stride_tricks import sliding_window_view

from ndtrain.config import ConfigError
from ndtrain.data.hf import one_line
from ndtrain.data.reader import Reader


class Stream:
    """Sequences of `seq_len` + 1 tokens one after the other from a stream, neighbours sharing one token.

    Rank 0 reads the tokens of a step and broadcasts them, so every rank must ask for the same steps, in order. Where
    reading fails, all of them raise.

    Args:
        reader: on rank 0; None on the others.
        group: a process group of all ranks that nothing else uses, for tensors in host memory; None: there is one rank.
        step: the first that will be asked for.
        keep: for how many steps back `where` and `state` can tell.
        key: what names the stream in its states.
    """

    def __init__(
        self,
        reader: Reader | None,
        group: dist.ProcessGroup | None,
        seq_len: int,
        global_batch: int,
        step: int,
        keep: int,
        key: str,
        name: str,
    ):
        self._reader, self._group, self._seq_len, self._global_batch = reader, group, seq_len, global_batch
        self._next, self._keep, self._key, self._name = step, keep, key, name
        self._states: dict[int, dict[str, Any] | None] = {}  # before a step's first token
        self._documents: dict[int, list[tuple[int, str]]] = {}  # of a step: first token and name
        self._remember(step)

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """int64 [len(rows), T + 1]: the tokens of those sequences of the step's global batch.

        Raises:
            ValueError: not the next step.
            ConfigError: the stream cannot be read.
        """
        if step != self._next:
            raise ValueError(f"step {step} of a stream was asked for, but {self._next} is next")
        rows = np.asarray(rows, np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < self._global_batch):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a global batch of {self._global_batch}")
        run = self._shared(step)
        self._next += 1
        return sliding_window_view(run, self._seq_len + 1)[:: self._seq_len][rows].astype(np.int64)

    def where(self, step: int, i: int) -> str:
        number = f"sequence {step * self._global_batch + i} of {self._name}"
        documents = self._documents.get(step)
        if documents is None:
            return number
        found = bisect(documents, i * self._seq_len, key=lambda document: document[0]) - 1
        return f"{number} (from {documents[found][1]} on)"

    def state(self, step: int) -> dict[str, Any] | None:
        """Where the tokens of `step` begin, on rank 0; None: at the beginning of the stream, or on another rank.

        Raises:
            ValueError: a step that has not been asked for nor is the next, or long ago.
        """
        if self._reader is None:
            return None
        if step not in self._states:
            raise ValueError(f"the place in the stream before step {step} is not known: {self._next} is next")
        state = self._states[step]
        return state and {**state, "stream": self._key}

    def close(self) -> None: ...

    def _shared(self, step: int) -> np.ndarray:
        """int32 [global_batch * T + 1]: the tokens of a step, the same on every rank."""
        count = self._global_batch * self._seq_len + 1
        found = torch.zeros(1 + count, dtype=torch.int32)  # the length of an error's message, and the tokens
        message, cause = b"", None
        if self._reader is not None:
            try:
                tokens, self._documents[step] = self._reader.take(count - 1)
                found[1:] = torch.from_numpy(tokens)
                self._remember(step + 1)
            except Exception as error:  # on every rank, as an error of the data's
                cause, message = error, self._say(error).encode()
                found[0] = len(message)
        self._send(found)
        if found[0]:
            text = torch.tensor(list(message or bytes(int(found[0]))), dtype=torch.uint8)
            self._send(text)
            raise ConfigError(text.numpy().tobytes().decode()) from cause
        return found[1:].numpy()

    def _send(self, tensor: torch.Tensor) -> None:
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)

    def _say(self, error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error)
        return f"{self._name} cannot be read in {self._reader.reading}: {one_line(error)}"

    def _remember(self, step: int) -> None:
        """The place before `step`, and no longer those of long ago."""
        if self._reader is not None:
            self._states[step] = self._reader.state()
            for known in (self._states, self._documents):
                known.pop(step - self._keep, None)
