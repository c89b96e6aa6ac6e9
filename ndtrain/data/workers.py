"""Worker processes that tokenise a corpus unit by unit, and send the tokens back in pieces."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import numpy as np

from ndtrain.config import ConfigError, registry
from ndtrain.data.documents import SPLITS, Corpus, TextChunk
from ndtrain.data.store import SplitTokens, encode_chunks, stored_dtype
from ndtrain.data.tokenizer import Tokenizer

K = TypeVar("K")

_PIECE_TOKENS = 1 << 19
_MOST_WAITING = 1 << 30  # bytes of tokens held for later units; a worker beyond that waits until its unit's turn


@dataclass(frozen=True)
class TokenisedPiece:
    """The tokens of consecutive documents of a unit, or of a part of one document.

    Attributes:
        splits: split -> tokens; splits without tokens are left out.
        last: True if the unit ends with this piece.
    """

    splits: dict[str, SplitTokens]
    last: bool

    @property
    def nbytes(self) -> int:
        return sum(tokens.ids.nbytes for tokens in self.splits.values())


def tokenise_unit(tokenizer: Tokenizer, unit: Corpus) -> Iterator[TokenisedPiece]:
    """Tokenise a unit of the corpus.

    Raises:
        ConfigError: a document cannot be read.
    """
    dtype = stored_dtype(tokenizer)
    waiting: list[tuple[TextChunk, np.ndarray]] = []
    tokens = 0
    for chunk, ids in encode_chunks(unit.chunks(), tokenizer):
        waiting.append((chunk, np.asarray(ids, dtype)))
        tokens += len(ids)
        if tokens >= _PIECE_TOKENS:
            yield TokenisedPiece(_by_split(waiting), last=False)
            waiting, tokens = [], 0
    yield TokenisedPiece(_by_split(waiting), last=True)


def _by_split(chunks: list[tuple[TextChunk, np.ndarray]]) -> dict[str, SplitTokens]:
    of_split = [[(chunk, ids) for chunk, ids in chunks if chunk.held_out == held] for held in (False, True)]
    return {
        split: SplitTokens(np.concatenate([ids for _, ids in own]), sum(chunk.last for chunk, _ in own))
        for split, own in zip(SPLITS, of_split, strict=True)
        if own
    }


# ---------------------------------------------------------------------------------------------------------- processes


class WorkerDied(RuntimeError):
    """A worker process ended unexpectedly. The message is one line."""


@dataclass
class _Unit:
    """A unit that a worker has, or whose pieces wait for their turn.

    Attributes:
        key: what the caller knows it by.
    """

    key: Any
    pieces: deque[TokenisedPiece] = field(default_factory=deque)


class WorkerPool:
    """Processes that tokenise units, each one unit at a time.

    They end when the block ends, and when this process ends for any reason.
    """

    def __init__(self, workers: int, tokenizer: Tokenizer):
        self._workers, self._tokenizer = workers, tokenizer
        self._processes: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> "WorkerPool":
        try:
            with interrupts_held():
                for _ in range(self._workers):
                    self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes.values():
            process.terminate()
        for pipe, process in self._processes.items():
            process.join()
            pipe.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._tokenizer), daemon=True)
        process.start()
        theirs.close()  # so that the pipe reaches its end of file when the process ends
        self._processes[ours] = process

    def pieces(self, units: Iterable[tuple[K, Corpus]]) -> Iterator[tuple[K, TokenisedPiece]]:
        """Yield the pieces of all units, in the order of the units, each with the key of its unit.

        The next unit is drawn from `units` when a worker is free.

        Raises:
            ConfigError: a unit cannot be sent to a process, or a document cannot be read.
            OSError: a document cannot be read.
            WorkerDied: a worker has ended.
        """
        following = iter(units)
        order: deque[_Unit] = deque()  # those that are not yielded to their end
        busy: dict[Connection, _Unit] = {}
        while True:
            idle = [pipe for pipe in self._processes if pipe not in busy]
            for pipe, (key, corpus) in zip(idle, following, strict=False):
                with self._alive(pipe):
                    pipe.send_bytes(pickled(corpus))
                busy[pipe] = _Unit(key)
                order.append(busy[pipe])
            if not order:
                return
            if not order[0].pieces:
                self._receive(busy, order)
                continue
            piece = order[0].pieces.popleft()
            yield order[0].key, piece
            if piece.last:
                order.popleft()

    def _receive(self, busy: dict[Connection, _Unit], order: deque[_Unit]) -> None:
        """Wait for pieces, and keep them with their units. The unit whose turn it is may always send."""
        held = sum(piece.nbytes for unit in order for piece in unit.pieces)
        for pipe in wait([pipe for pipe, unit in busy.items() if unit is order[0] or held < _MOST_WAITING]):
            with self._alive(pipe):
                answer = pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            busy[pipe].pieces.append(answer)
            if answer.last:
                del busy[pipe]

    @contextmanager
    def _alive(self, pipe: Connection) -> Iterator[None]:
        """Raise WorkerDied if a broken pipe shows that the worker has ended."""
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            process = self._processes[pipe]
            process.join()
            code = process.exitcode or 0
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            raise WorkerDied(f"a worker process ended {how}; if memory is short, give fewer workers") from error


def pickled(unit: Corpus) -> bytes:
    """Return the message that a worker receives: a unit of the corpus, pickled.

    Raises:
        ConfigError: the corpus of a plugin's source cannot be pickled.
    """
    try:
        return bytes(ForkingPickler.dumps(unit))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{unit.setting}: cannot be sent to a worker process ({error}): its source must use functions from the "
            "top level of a module"
        ) from error


def _serve(pipe: Connection, tokenizer: Tokenizer) -> None:
    """Run in a worker: answer each unit with its pieces, or with the error after those before it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    end_with_parent()
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")  # parallelism is across the workers
    with suppress(EOFError):
        while True:
            unit = pipe.recv()
            try:
                for piece in tokenise_unit(tokenizer, unit):
                    pipe.send(piece)
            except Exception as error:
                pipe.send(_answer(error))


def _answer(error: Exception) -> Exception:
    """Return the answer of a worker to an error in its unit.

    Raises:
        Exception: neither a document, nor the disk, nor a plugin caused the error.
    """
    if not isinstance(error, ConfigError) and (line := registry.plugin_failure(error)):
        return ConfigError(line)
    if isinstance(error, (ConfigError, OSError)):
        return error
    raise error


def end_with_parent() -> None:
    """End this worker process as soon as its parent process has ended, for any reason."""
    threading.Thread(target=_wait_for_parent_and_end, daemon=True).start()


def _wait_for_parent_and_end() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def start_forkserver() -> None:
    """Start the process that workers are forked from. It continues to import their modules after this returns.

    Call this early if nothing else in the program uses the server. Otherwise the first `WorkerPool` starts it.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # started later, it would unblock the signals that are held below
    with interrupts_held():
        forkserver.ensure_running()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay a Ctrl-C within the block until its end.

    Processes that start in the block never get one, because they inherit the signal mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
