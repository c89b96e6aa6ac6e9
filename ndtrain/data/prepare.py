"""Text to token files, in parallel and restartable: `python -m ndtrain.data prepare`.

The corpus is partitioned into units, and consecutive units into shards. A process claims a shard, its workers tokenise
the units, and the process writes the shard's token files. Processes on several hosts may share one folder: each runs
the same command. When all shards are made, one process reads them once for the fingerprint and writes the manifest.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.claims import POLL_S, Claims, members
from ndtrain.data.corpora import open_corpus
from ndtrain.data.documents import SPLITS, Corpus, require_training_text
from ndtrain.data.manifest import (
    WORK,
    Manifest,
    Plan,
    TokenShard,
    finish_preparation,
    lock_folder,
    make_folder,
    read_manifest,
    start_preparation,
)
from ndtrain.data.progress import TextProgress
from ndtrain.data.shards import SharedPreparation, partition
from ndtrain.data.store import SplitStats, corpus_fingerprint, corpus_tokenizer, token_dtype
from ndtrain.data.tokenizer import Tokenizer
from ndtrain.data.workers import WorkerPool

T = TypeVar("T")
log = logging.getLogger(__name__)

UNIT_BYTES = 8 << 20  # of text that a worker takes at a time; less if the shards are smaller
_SHARDS, _MOST_SHARDS = 64, 1024  # of a small and of a large corpus
_SHARD_BYTES = (1 << 18, 1 << 28, 1 << 32)  # of text: the least, the most up to 64 shards, the most
_SOURCE_KEYS = ("name", "path", "tokenizer", "vocab_size", "text_key", "subset", "split", "eval_split", "validation")


def prepare(
    data: DataConfig,
    out: Path,
    workers: int,
    shard_bytes: int | None = None,
    note: Callable[[str], None] = log.info,
    on_progress: Callable[[TextProgress], None] = lambda progress: None,
) -> Manifest:
    """Prepare the corpus that `data` names in the folder `out`, or go on with an earlier call.

    After an error or a kill, the same call goes on after the last finished shard. Processes on several hosts that make
    the same call share the work, and all return when it is done.

    Args:
        workers: the number of processes that tokenise on this host.
        shard_bytes: bytes of text in a shard; None: `shard_size` of the corpus.
        note: called with a line of text when there is something to report.
        on_progress: called at the start and after each unit.

    Raises:
        ConfigError: the corpus, the tokenizer or the folder is unusable, a document cannot be read, or another process
            has started the folder over.
        OSError: the disk is full or fails.
        WorkerDied: a worker process was killed, perhaps for lack of memory.
    """
    corpus = open_corpus(data)
    make_folder(out)
    tokenizer = _interruptible(partial(corpus_tokenizer, data, corpus, Path(data.cache).expanduser()))
    shard_bytes = shard_bytes or shard_size(corpus.size())
    plan = Plan(corpus.key(), tokenizer.digest(), min(UNIT_BYTES, shard_bytes), shard_bytes)
    with lock_folder(out):
        if manifest := start_preparation(out, plan, note):
            return manifest
        others = len(members(out / WORK))
        claims = Claims(out / WORK)
    with claims:
        shards = partition(corpus, plan)
        units = sum(len(shard.units) for shard in shards)
        workers = min(workers, units)
        note(
            f"{corpus.describe()}: {_count_of(units, 'unit')} in {_count_of(len(shards), 'shard')} for "
            f"{_count_of(workers, 'worker')}"
            + (f", shared with {_count_of(others, 'other process')}" if others else "")
        )
        work = SharedPreparation(out, plan, shards, claims, on_progress)
        with WorkerPool(workers, tokenizer) as pool:
            while True:
                try:
                    work.make_shards(pool)
                    manifest = _finish(work, corpus, tokenizer, data)
                except FileNotFoundError:  # of the folder `work`: another process has finished
                    manifest = read_manifest(out, f"out={out}")
                    if manifest is None or manifest.plan != plan:
                        raise
                if manifest:
                    return manifest
                time.sleep(POLL_S)


def shard_size(corpus: int) -> int:
    """Return the bytes of text in a shard for a corpus of `corpus` bytes.

    Up to 16 GiB that makes 64 shards, then shards of 256 MiB, from 256 GiB on 1,024 shards, and then shards of 4 GiB.
    """
    least, usual, most = _SHARD_BYTES
    return max(least, min(corpus // _SHARDS, max(usual, min(corpus // _MOST_SHARDS, most))))


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
    plural = what + ("es" if what.endswith("s") else "s")
    return f"{number} {what if number == 1 else plural}"


# ------------------------------------------------------------------------------------------------------------- the end


def _finish(work: SharedPreparation, corpus: Corpus, tokenizer: Tokenizer, data: DataConfig) -> Manifest | None:
    """Write the manifest and return it; None if shards are missing or damaged, or another process does this.

    Raises:
        ConfigError: the corpus has changed since it was partitioned, or it has no training tokens.
        FileNotFoundError: another process has finished, and removed the claims and records.
    """
    if work.unmade() or not work.claims.take("manifest"):
        return None
    whole = work.read_all()
    if whole is None:
        work.claims.release("manifest")
        return None
    _check_corpus(corpus, work.plan, {split: stats for split, (stats, _) in whole.items()})
    with lock_folder(work.out):
        tokenizer.save(work.out)
        manifest = _manifest(work, tokenizer, data, whole)
        finish_preparation(manifest)
    return manifest


def _check_corpus(corpus: Corpus, plan: Plan, splits: dict[str, SplitStats]) -> None:
    """Check that the corpus has not changed since it was partitioned, and that it has training tokens.

    Raises:
        ConfigError: the corpus has changed, or it has no training tokens.
    """
    if corpus.key() != plan.corpus:
        raise ConfigError(f"{corpus.setting}: the corpus changed while it was read: run the same command again")
    require_training_text(corpus.setting, splits["train"].tokens, splits["validation"].tokens)


def _manifest(
    work: SharedPreparation,
    tokenizer: Tokenizer,
    data: DataConfig,
    whole: dict[str, tuple[SplitStats, list[TokenShard]]],
) -> Manifest:
    splits = {split: stats for split, (stats, _) in whole.items()}
    return Manifest(
        folder=work.out,
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        largest=max(stats.largest for stats in splits.values()),
        tokenizer=tokenizer.digest(),
        tokens={split: stats.tokens for split, stats in splits.items()},
        documents={split: stats.documents for split, stats in splits.items()},
        files={split: tuple(files) for split, (_, files) in whole.items()},
        samples=work.samples,
        fingerprint=corpus_fingerprint(*(splits[split].digest for split in SPLITS)),
        plan=work.plan,
        source={key: getattr(data, key) for key in (*_SOURCE_KEYS, *_own_keys(data))},
    )


def _own_keys(data: DataConfig) -> list[str]:
    """Return the keys that only the config of a plugin's source has."""
    return [f.name for f in fields(data) if f.name not in DataConfig.__dataclass_fields__]
