"""A streaming dataset as the source of batches: one rank reads it, and all ranks see the same tokens, on any mesh.

Shapes: B sequences of a step, T tokens of a sequence.
"""

from bisect import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.lib.stride_tricks import sliding_window_view

from ndtrain.config import ConfigError
from ndtrain.config.batch_sizes import BatchSizes
from ndtrain.data.batches import Source
from ndtrain.data.hf import one_line
from ndtrain.data.order import rows_within
from ndtrain.data.token_reader import TokenReader


class StreamingSource(Source):
    """Consecutive sequences of `seq_len` + 1 tokens of a streaming dataset; neighbours share one token.

    Rank 0 reads the tokens of a step and broadcasts them. Every rank therefore has to request the same steps, in order.
    If reading fails, all ranks raise.

    Args:
        reader: on rank 0; None on other ranks.
        group: a process group of all ranks for tensors in host memory, used for nothing else; None: there is one rank.
        step: the first step that will be requested.
        history: the number of past steps that `where` and `state` can answer for.
        identity: identifies the dataset in its states.
        name: for messages.
    """

    def __init__(
        self,
        reader: TokenReader | None,
        group: dist.ProcessGroup | None,
        seq_len: int,
        batch_sizes: BatchSizes,
        step: int,
        history: int,
        identity: str,
        name: str,
    ):
        self._reader, self._group, self._seq_len, self._batch_sizes = reader, group, seq_len, batch_sizes
        self._next, self._history, self._identity, self._name = step, history, identity, name
        self._states: dict[int, dict[str, Any] | None] = {}  # of the reader before each step
        self._documents: dict[int, list[tuple[int, str]]] = {}  # of each step: (first token, name)
        self._remember(step)

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """Return the tokens of sequences `rows` of the step's global batch, int64 [len(rows), T + 1].

        Raises:
            ValueError: `step` is not the next step.
            IndexError: a row is outside the global batch.
            ConfigError: the dataset cannot be read.
        """
        if step != self._next:
            raise ValueError(f"step {step} of a streaming dataset was requested, but the next step is {self._next}")
        rows = rows_within(rows, self._batch_sizes.at(step))
        tokens = self._broadcast_step(step)
        self._next += 1
        return sliding_window_view(tokens, self._seq_len + 1)[:: self._seq_len][rows].astype(np.int64)

    def where(self, step: int, i: int) -> str:
        number = f"sequence {self._batch_sizes.before(step) + i} of {self._name}"
        documents = self._documents.get(step)
        if documents is None:
            return number
        first = bisect(documents, i * self._seq_len, key=lambda document: document[0]) - 1
        return f"{number} (from {documents[first][1]} on)"

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the state at the first token of `step`, on rank 0. None: at the very beginning, or on another rank.

        Raises:
            ValueError: the step is older than the history, or later than the next step.
        """
        if self._reader is None:
            return None
        if step not in self._states:
            raise ValueError(
                f"the state of the streaming dataset before step {step} is not known: the next step is {self._next}"
            )
        state = self._states[step]
        return state and {**state, "stream": self._identity}

    def close(self) -> None: ...

    def _broadcast_step(self, step: int) -> np.ndarray:
        """Return the tokens of a step, the same on every rank, int32 [B * T + 1]."""
        count = self._batch_sizes.at(step) * self._seq_len + 1
        buffer = torch.zeros(1 + count, dtype=torch.int32)  # length of an error message (0: no error), then the tokens
        message, cause = b"", None
        if self._reader is not None:
            try:
                tokens, self._documents[step] = self._reader.read(count - 1)
                buffer[1:] = torch.from_numpy(tokens)
                self._remember(step + 1)
            except Exception as error:  # every rank raises it as a ConfigError
                cause, message = error, self._error_message(error).encode()
                buffer[0] = len(message)
        self._broadcast(buffer)
        if buffer[0]:
            text = torch.tensor(list(message or bytes(int(buffer[0]))), dtype=torch.uint8)
            self._broadcast(text)
            raise ConfigError(text.numpy().tobytes().decode()) from cause
        return buffer[1:].numpy()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)

    def _error_message(self, error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error)
        return f"{self._name} cannot be read in {self._reader.location}: {one_line(error)}"

    def _remember(self, step: int) -> None:
        """Store the reader's state before `step`, and forget everything older than the history."""
        if self._reader is not None:
            self._states[step] = self._reader.state()
            for remembered in (self._states, self._documents):
                remembered.pop(step - self._history, None)
