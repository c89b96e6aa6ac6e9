"""Units of work: a piece of a corpus becomes two token files and a record, in a worker process.

The record is published last, with the digests of both files: a unit whose record fits its files is never made again.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b, file_digest
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from ndtrain.config import ConfigError
from ndtrain.data.documents import SPLITS, Corpus
from ndtrain.data.manifest import read_json, write_json
from ndtrain.data.store import Written, write_splits
from ndtrain.data.tokenizer import Tokenizer

content_hash = partial(blake2b, digest_size=16)  # the hash of `Written.digest`


@dataclass(frozen=True)
class Job:
    """What all units of a preparation share: the folder of parts, the digest of the plan, the tokenizer."""

    parts: Path
    plan: str
    tokenizer: Tokenizer

    def files(self, number: int) -> dict[str, Path]:
        """Where the splits of a unit are."""
        return {split: self.parts / f"{number:06}.{split}.bin" for split in SPLITS}

    def record(self, number: int) -> Path:
        """Where it is written what they hold."""
        return self.parts / f"{number:06}.json"


@dataclass(frozen=True)
class Unit:
    """One that is whole: its files and what they hold. `kept`: an earlier run has made it."""

    number: int
    files: dict[str, Path]
    splits: dict[str, Written]
    kept: bool


def make_unit(job: Job, number: int, corpus: Corpus) -> Unit:
    """Tokenises one piece of the corpus, or finds that done.

    Raises:
        ConfigError: a document that cannot be read.
        OSError: the files cannot be written.
    """
    files = job.files(number)
    if splits := _found(job, number):
        return Unit(number, files, splits, kept=True)
    splits = write_splits(corpus, job.tokenizer, files)
    write_json(job.record(number), {"plan": job.plan, **{split: asdict(w) for split, w in splits.items()}})
    return Unit(number, files, splits, kept=False)


def _found(job: Job, number: int) -> dict[str, Written] | None:
    """What an earlier run has left of a unit, if it is whole and of the same plan."""
    try:
        record = read_json(job.record(number))
        if record is None or record["plan"] != job.plan:
            return None
        splits = {split: Written(**record[split]) for split in SPLITS}
        for split, path in job.files(number).items():
            with path.open("rb") as file:
                if file_digest(file, content_hash).hexdigest() != splits[split].digest:
                    return None
        return splits
    except (FileNotFoundError, ValueError):  # a damaged record
        return None


# ---------------------------------------------------------------------------------------------------------- workers


class WorkerDied(RuntimeError):
    """A worker process ended by itself. The message is one line."""


class Workers:
    """Processes that make units, one each at a time. They end with the block, and with this process however it ends."""

    def __init__(self, number: int, job: Job):
        self._number, self._job = number, job
        self._processes: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> "Workers":
        try:
            with _interrupts_held():
                for _ in range(self._number):
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
        theirs.close()  # so that the end of the process is the end of the file
        self._processes[ours] = process

    def results(self, pieces: Iterable[tuple[Corpus, int]]) -> Iterator[Unit]:
        """The units of all pieces, numbered in their order, as they get whole.

        Raises:
            ConfigError, OSError: as `make_unit`.
            WorkerDied: one is no more.
        """
        waiting = enumerate(corpus for corpus, _ in pieces)
        busy = [pipe for pipe in self._processes if self._give(pipe, waiting)]
        while busy:
            for pipe in wait(busy):
                answer = self._take(pipe)
                if not self._give(pipe, waiting):
                    busy.remove(pipe)
                yield answer

    def _give(self, pipe: Connection, waiting: Iterator[tuple[int, Corpus]]) -> bool:
        """Whether there was another unit to give."""
        item = next(waiting, None)
        if item is not None:
            with self._alive(pipe):
                pipe.send(item)
        return item is not None

    def _take(self, pipe: Connection) -> Unit:
        with self._alive(pipe):
            answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @contextmanager
    def _alive(self, pipe: Connection) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            process = self._processes[pipe]
            process.join()
            code = process.exitcode or 0
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            raise WorkerDied(f"a worker process ended {how}; if memory is short, give fewer workers") from error


def _serve(pipe: Connection, job: Job) -> None:
    """What a worker does: answers each (number, piece) with a `Unit`, or with what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")  # the workers are the parallelism
    with suppress(EOFError):
        while True:
            number, corpus = pipe.recv()
            try:
                answer = make_unit(job, number, corpus)
            except (ConfigError, OSError) as error:
                answer = error
            pipe.send(answer)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def start_forkserver() -> None:
    """Starts the process that workers are forked from, which goes on importing what they need when this returns.

    A program does so early, if nothing else in it uses the server; without this, the first `Workers` start it.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # it would release the signals that are held below
    with _interrupts_held():
        forkserver.ensure_running()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A Ctrl-C within the block comes after it. Processes that begin there never get one: the mask is inherited."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
