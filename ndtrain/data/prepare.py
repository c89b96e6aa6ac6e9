"""Text to token files, in parallel and restartable: `python -m ndtrain.data prepare`.

The corpus is partitioned. Worker processes tokenise the parts, each part into its own files. Meanwhile this process
appends these files, in order, to the token files of the whole corpus. It then writes the manifest, and only after that
removes the files of the parts.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.cache import atomic_write, sampled_digest
from ndtrain.data.corpora import open_corpus
from ndtrain.data.documents import SPLITS, Corpus, require_training_text
from ndtrain.data.manifest import (
    PARTS,
    Manifest,
    Plan,
    lock_folder,
    remove_work_files,
    split_path,
    start_preparation,
)
from ndtrain.data.progress import TextProgress
from ndtrain.data.store import SplitStats, SplitWriter, corpus_fingerprint, corpus_tokenizer, token_dtype
from ndtrain.data.tokenizer import Tokenizer
from ndtrain.data.workers import TokenisedPart, TokeniseJob, WorkerPool

T = TypeVar("T")
log = logging.getLogger(__name__)

PART_BYTES = 8 << 20  # of text that a worker takes at a time; less if that would make few parts
_PARTS, _LEAST_PART_BYTES = 64, 1 << 18
_COPY_BYTES = 1 << 20  # copied at a time
_SOURCE_KEYS = ("name", "path", "tokenizer", "vocab_size", "text_key", "subset", "split", "eval_split", "validation")


def prepare(
    data: DataConfig,
    out: Path,
    workers: int,
    part_bytes: int | None = None,
    note: Callable[[str], None] = log.info,
    on_progress: Callable[[TextProgress], None] = lambda progress: None,
) -> Manifest:
    """Prepare the corpus that `data` names in the folder `out`, or resume an earlier call.

    After an error or a kill, the same call resumes where this one stopped.

    Args:
        workers: the number of processes that tokenise.
        part_bytes: bytes of text that a worker takes at a time; None: by the size of the corpus.
        note: called with a line of text when there is something to report.
        on_progress: called at the start and after each part.

    Raises:
        ConfigError: the corpus, the tokenizer or the folder is unusable, or a document cannot be read.
        OSError: the disk is full or fails.
        WorkerDied: a worker process was killed, perhaps for lack of memory.
    """
    corpus = open_corpus(data)
    with lock_folder(out):
        tokenizer = _interruptible(partial(corpus_tokenizer, data, corpus, Path(data.cache).expanduser()))
        part_bytes = part_bytes or min(PART_BYTES, max(_LEAST_PART_BYTES, corpus.size() // _PARTS))
        plan = Plan(corpus.key(), tokenizer.digest(), part_bytes)
        manifest = start_preparation(out, plan, note)
        if manifest is None:
            partition = list(corpus.partition(part_bytes))
            workers = min(workers, len(partition))
            note(f"{corpus.describe()}: {_count_of(len(partition), 'unit')} for {_count_of(workers, 'worker')}")
            sizes = [size for _, size in partition]
            with WorkerPool(workers, TokeniseJob(out / PARTS, plan.digest(), tokenizer)) as pool:
                parts = _report(pool.results(part for part, _ in partition), sizes, on_progress)
                splits = _join(out, _in_order(parts), partial(_check_corpus, corpus, plan))
            manifest = _write_manifest(out, plan, tokenizer, data, splits)
        remove_work_files(out)
    return manifest


def _interruptible(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result.

    Ctrl-C then need not wait for the library that trains a tokenizer in this thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()


def _count_of(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _report(
    parts: Iterable[TokenisedPart], sizes: Sequence[int], on_progress: Callable[[TextProgress], None]
) -> Iterator[TokenisedPart]:
    """Yield the parts and report the progress. `sizes` are the bytes of each part, by its number."""
    progress = TextProgress(sum(sizes))
    on_progress(progress)
    for part in parts:
        size = sizes[part.number]
        progress.done += size
        if part.reused:
            progress.reused += size
        else:
            progress.tokens += sum(split.tokens for split in part.splits.values())
        on_progress(progress)
        yield part


def _check_corpus(corpus: Corpus, plan: Plan, splits: dict[str, SplitStats]) -> None:
    """Check that the corpus has not changed since it was partitioned, and that it has training tokens.

    Raises:
        ConfigError: the corpus has changed, or it has no training tokens.
    """
    if corpus.key() != plan.corpus:
        raise ConfigError(f"{corpus.setting}: the corpus changed while it was read: run the same command again")
    require_training_text(corpus.setting, splits["train"].tokens, splits["validation"].tokens)


def _write_manifest(
    out: Path, plan: Plan, tokenizer: Tokenizer, data: DataConfig, splits: dict[str, SplitStats]
) -> Manifest:
    """Write the files of the tokenizer, then the manifest."""
    tokenizer.save(out)
    manifest = Manifest(
        folder=out,
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        largest=max(stats.largest for stats in splits.values()),
        tokenizer=tokenizer.digest(),
        tokens={split: stats.tokens for split, stats in splits.items()},
        documents={split: stats.documents for split, stats in splits.items()},
        files={s: {"blake2b": t.digest, "spot": sampled_digest(split_path(out, s))} for s, t in splits.items()},
        fingerprint=corpus_fingerprint(*(splits[split].digest for split in SPLITS)),
        plan=plan,
        source={key: getattr(data, key) for key in (*_SOURCE_KEYS, *_own_keys(data))},
    )
    manifest.write()
    return manifest


def _own_keys(data: DataConfig) -> list[str]:
    """Return the keys that only the config of a plugin's source has."""
    return [f.name for f in fields(data) if f.name not in DataConfig.__dataclass_fields__]


# ---------------------------------------------------------------------------------------------------------- joining


def _in_order(parts: Iterable[TokenisedPart]) -> Iterator[TokenisedPart]:
    """Yield the parts by number, each as soon as all earlier parts have arrived."""
    waiting: dict[int, TokenisedPart] = {}
    following = 0
    for part in parts:
        waiting[part.number] = part
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def _join(
    out: Path, parts: Iterable[TokenisedPart], check: Callable[[dict[str, SplitStats]], None]
) -> dict[str, SplitStats]:
    """Append the token files of all parts to the files of the whole corpus, and return the statistics of these.

    The files of the whole corpus appear in `out` at the end, unless `check` raises.
    """
    with ExitStack() as stack:
        writers = {s: SplitWriter(stack.enter_context(atomic_write(split_path(out, s)))) for s in SPLITS}
        for part in parts:
            for split, writer in writers.items():
                _append(writer, part.files[split], part.splits[split])
        splits = {split: writer.stats() for split, writer in writers.items()}
        check(splits)
    return splits


def _append(writer: SplitWriter, path: Path, stats: SplitStats) -> None:
    with path.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            writer.write(block)
    writer.count(stats.tokens, stats.documents, stats.largest)
