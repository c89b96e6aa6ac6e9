"""Worker processes that tokenise a corpus part by part.

A part of the corpus becomes a token file for each split, and a record with the digests of these files. The record is
written last. A part whose record matches its files is never made again.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import file_digest
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from ndtrain.config import ConfigError, registry
from ndtrain.data.documents import SPLITS, Corpus
from ndtrain.data.manifest import read_json, write_json
from ndtrain.data.store import SplitStats, content_hash, write_splits
from ndtrain.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokeniseJob:
    """The inputs that all parts of a preparation share.

    Attributes:
        folder: holds the files of the parts.
        plan: the digest of the plan.
    """

    folder: Path
    plan: str
    tokenizer: Tokenizer

    def files(self, number: int) -> dict[str, Path]:
        """Return split -> the token file of a part."""
        return {split: self.folder / f"{number:06}.{split}.bin" for split in SPLITS}

    def record(self, number: int) -> Path:
        """Return the file with the statistics of a part's token files."""
        return self.folder / f"{number:06}.json"


@dataclass(frozen=True)
class TokenisedPart:
    """A part whose files are complete.

    Attributes:
        number: its position in the corpus.
        files, splits: for each split the token file and its statistics.
        reused: True if an earlier run made the part.
    """

    number: int
    files: dict[str, Path]
    splits: dict[str, SplitStats]
    reused: bool


def tokenise_part(job: TokeniseJob, number: int, corpus: Corpus) -> TokenisedPart:
    """Tokenise one part of the corpus, unless an earlier run has done so.

    Raises:
        ConfigError: a document cannot be read.
        OSError: the files cannot be written.
    """
    files = job.files(number)
    if splits := _finished_splits(job, number):
        return TokenisedPart(number, files, splits, reused=True)
    splits = write_splits(corpus, job.tokenizer, files)
    write_json(job.record(number), {"plan": job.plan, **{split: asdict(stats) for split, stats in splits.items()}})
    return TokenisedPart(number, files, splits, reused=False)


def _finished_splits(job: TokeniseJob, number: int) -> dict[str, SplitStats] | None:
    """Return the statistics of a part's files; None if the part is incomplete or another plan made it."""
    try:
        record = read_json(job.record(number))
        if record is None or record["plan"] != job.plan:
            return None
        splits = {split: SplitStats(**record[split]) for split in SPLITS}
        for split, path in job.files(number).items():
            with path.open("rb") as file:
                if file_digest(file, content_hash).hexdigest() != splits[split].digest:
                    return None
        return splits
    except (FileNotFoundError, ValueError):  # a damaged record
        return None


# ---------------------------------------------------------------------------------------------------------- processes


class WorkerDied(RuntimeError):
    """A worker process ended unexpectedly. The message is one line."""


class WorkerPool:
    """Processes that tokenise parts, each one part at a time.

    They end when the block ends, and when this process ends for any reason.
    """

    def __init__(self, workers: int, job: TokeniseJob):
        self._workers, self._job = workers, job
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
        process = context.Process(target=_serve, args=(theirs, self._job), daemon=True)
        process.start()
        theirs.close()  # so that the pipe reaches its end of file when the process ends
        self._processes[ours] = process

    def results(self, parts: Iterable[Corpus]) -> Iterator[TokenisedPart]:
        """Yield every part as soon as it is tokenised. Parts are numbered in the order of `parts`.

        Raises:
            ConfigError: a part cannot be sent to a process, or as `tokenise_part`.
            OSError: as `tokenise_part`.
            WorkerDied: a worker has ended.
        """
        waiting = enumerate(parts)
        busy = [pipe for pipe in self._processes if self._send_next(pipe, waiting)]
        while busy:
            for pipe in wait(busy):
                part = self._receive(pipe)
                if not self._send_next(pipe, waiting):
                    busy.remove(pipe)
                yield part

    def _send_next(self, pipe: Connection, waiting: Iterator[tuple[int, Corpus]]) -> bool:
        """Send a worker the next part. Return True if there was one."""
        item = next(waiting, None)
        if item is not None:
            with self._alive(pipe):
                pipe.send_bytes(pickled(*item))
        return item is not None

    def _receive(self, pipe: Connection) -> TokenisedPart:
        with self._alive(pipe):
            answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

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


def pickled(number: int, corpus: Corpus) -> bytes:
    """Return the message that a worker receives: the number of a part and the part of the corpus, pickled.

    Raises:
        ConfigError: the corpus of a plugin's source cannot be pickled.
    """
    try:
        return bytes(ForkingPickler.dumps((number, corpus)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{corpus.setting}: cannot be sent to a worker process ({error}): its source must use functions from the "
            "top level of a module"
        ) from error


def _serve(pipe: Connection, job: TokeniseJob) -> None:
    """Run in a worker: answer each (number, part) with a `TokenisedPart` or with the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    end_with_parent()
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")  # parallelism is across the workers
    with suppress(EOFError):
        while True:
            number, corpus = pipe.recv()
            try:
                answer = tokenise_part(job, number, corpus)
            except Exception as error:
                answer = _answer(error)
            pipe.send(answer)


def _answer(error: Exception) -> Exception:
    """Return the answer of a worker to an error in its part.

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
