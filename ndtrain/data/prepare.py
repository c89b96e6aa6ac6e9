"""Text to token files, in parallel and restartable: `python -m ndtrain.data prepare`.

The corpus is cut into units, which worker processes tokenise, each into files of its own. Meanwhile this process
appends the units, in order, to the files of the whole. The manifest comes after them, and only then are the units'
files removed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.cache import publish, spot_digest
from ndtrain.data.corpora import open_corpus
from ndtrain.data.documents import SPLITS, Corpus
from ndtrain.data.manifest import PARTS, Manifest, Plan, begin, claim, clear, split_path
from ndtrain.data.store import Written, corpus_tokenizer, fingerprint, token_dtype
from ndtrain.data.tokenizer import Tokenizer
from ndtrain.data.units import Job, Unit, Workers, content_hash

T = TypeVar("T")
log = logging.getLogger(__name__)

UNIT = 8 << 20  # bytes of text that a worker takes at a time; less where that would make few units
_UNITS, _LEAST_UNIT = 64, 1 << 18
_BLOCK = 1 << 20  # bytes copied at a time
_SOURCE = ("name", "path", "tokenizer", "vocab_size", "text_key", "subset", "split", "eval_split", "validation")


@dataclass
class Tally:
    """How far a preparation is; `size`, `done` and `kept` are bytes of text."""

    size: int
    done: int = 0
    kept: int = 0  # of those done, what an earlier run has left
    tokens: int = 0  # made by this run
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def left(self) -> float | None:
        """Seconds to the end at the pace so far; None while there is no pace."""
        made = self.done - self.kept
        return self.seconds * (self.size - self.done) / made if made else None

    def add(self, size: int, unit: Unit) -> None:
        self.done += size
        if unit.kept:
            self.kept += size
        else:
            self.tokens += sum(written.tokens for written in unit.splits.values())


def prepare(
    data: DataConfig,
    out: Path,
    workers: int,
    unit: int | None = None,
    note: Callable[[str], None] = log.info,
    show: Callable[[Tally], None] = lambda tally: None,
) -> Manifest:
    """Makes `out` a prepared folder of the corpus that `data` names, or goes on with what an earlier call has left.

    Args:
        workers: processes that tokenise.
        unit: bytes of text in a unit of work; None: by the size of the corpus.
        note: called with a line of text where there is something to say.
        show: called at the start and after each unit.

    Raises:
        ConfigError: an unusable corpus, tokenizer or folder, or a document that cannot be read.
        OSError: the disk is full or fails.
        WorkerDied: a worker process was killed, for want of memory perhaps.
            After these, as after a kill, the same call goes on where this one stopped.
    """
    corpus = open_corpus(data)
    with claim(out):
        tokenizer = _interruptible(partial(corpus_tokenizer, data, corpus, Path(data.cache).expanduser()))
        unit = unit or min(UNIT, max(_LEAST_UNIT, corpus.size() // _UNITS))
        plan = Plan(corpus.key(), tokenizer.digest(), unit)
        manifest = begin(out, plan, note)
        if manifest is None:
            pieces = list(corpus.cut(unit))
            workers = min(workers, len(pieces))
            note(f"{corpus.describe()}: {_many(len(pieces), 'unit')} for {_many(workers, 'worker')}")
            tally = Tally(sum(size for _, size in pieces))
            with Workers(workers, Job(out / PARTS, plan.digest(), tokenizer)) as pool:
                units = _in_order(_shown(pool.results(pieces), pieces, tally, show))
                splits = _join(out, units, partial(_check_corpus, corpus, plan))
            manifest = _publish(out, plan, tokenizer, data, splits)
        clear(out)
    return manifest


def _interruptible(work: Callable[[], T]) -> T:
    """What `work` returns, from a thread: a Ctrl-C need not wait for the library that trains a tokenizer in there."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _shown(
    units: Iterable[Unit], pieces: list[tuple[Corpus, int]], tally: Tally, show: Callable[[Tally], None]
) -> Iterator[Unit]:
    show(tally)
    for unit in units:
        tally.add(pieces[unit.number][1], unit)
        show(tally)
        yield unit


def _check_corpus(corpus: Corpus, plan: Plan, splits: dict[str, Written]) -> None:
    """Whether the corpus still is what was cut into units, and has something to train on."""
    if corpus.key() != plan.corpus:
        raise ConfigError(f"{corpus.setting}: the corpus changed while it was read: run the same command again")
    if splits["train"].tokens == 0:
        held_out = splits["validation"].tokens
        cause = "every document is in the validation split" if held_out else "no document has any text"
        raise ConfigError(f"{corpus.setting}: nothing to train on, {cause}: give more data or set data.validation=0")


def _publish(out: Path, plan: Plan, tokenizer: Tokenizer, data: DataConfig, splits: dict[str, Written]) -> Manifest:
    """Puts beside the token files what belongs to them, the manifest last."""
    tokenizer.save(out)
    manifest = Manifest(
        folder=out,
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        largest=max(w.largest for w in splits.values()),
        tokenizer=tokenizer.digest(),
        tokens={split: w.tokens for split, w in splits.items()},
        documents={split: w.documents for split, w in splits.items()},
        files={s: {"blake2b": w.digest, "spot": spot_digest(split_path(out, s))} for s, w in splits.items()},
        fingerprint=fingerprint(*(splits[split].digest for split in SPLITS)),
        plan=plan,
        source={key: getattr(data, key) for key in _SOURCE},
    )
    manifest.write()
    return manifest


# ---------------------------------------------------------------------------------------------------------- joining


def _in_order(units: Iterable[Unit]) -> Iterator[Unit]:
    """The units by number, each as soon as those before it are there."""
    waiting: dict[int, Unit] = {}
    following = 0
    for unit in units:
        waiting[unit.number] = unit
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def _join(out: Path, units: Iterable[Unit], check: Callable[[dict[str, Written]], None]) -> dict[str, Written]:
    """Publishes the splits of all units, one after the other, as those of the whole, unless `check` raises."""
    with ExitStack() as stack:
        wholes = {s: _Whole(stack.enter_context(publish(split_path(out, s)))) for s in SPLITS}
        for unit in units:
            for split, whole in wholes.items():
                whole.append(unit.files[split], unit.splits[split])
        splits = {split: whole.written() for split, whole in wholes.items()}
        check(splits)
    return splits


class _Whole:
    """A file made of others, and the sum of what they hold."""

    def __init__(self, file: BinaryIO):
        self._file, self._hashed = file, content_hash()
        self._tokens, self._documents, self._largest = 0, 0, -1

    def append(self, path: Path, part: Written) -> None:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                self._file.write(block)
                self._hashed.update(block)
        self._tokens += part.tokens
        self._documents += part.documents
        self._largest = max(self._largest, part.largest)

    def written(self) -> Written:
        return Written(self._tokens, self._documents, self._largest, self._hashed.hexdigest())
