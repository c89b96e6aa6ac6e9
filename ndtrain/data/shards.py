"""The shards of a prepared folder: which process makes which, how one is written, and how all are read at the end."""

import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ndtrain.config import ConfigError
from ndtrain.data.cache import SAMPLES, atomic_write, sampled_digest
from ndtrain.data.claims import Claims
from ndtrain.data.documents import SPLITS, Corpus
from ndtrain.data.manifest import PLAN, WORK, Plan, TokenShard, read_json, read_plan, shard_path, write_json
from ndtrain.data.progress import TextProgress
from ndtrain.data.store import SplitStats, SplitWriter, content_hash
from ndtrain.data.workers import TokenisedPiece, WorkerPool

_READ_BYTES = 8 << 20  # read at a time


@dataclass(frozen=True)
class Shard:
    """A shard to make. `units` are (a part of the corpus, its bytes)."""

    number: int
    units: tuple[tuple[Corpus, int], ...]

    @property
    def name(self) -> str:
        return f"{self.number:05}"

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.units)


@dataclass(frozen=True)
class ShardRecord:
    """A shard that is made: the statistics and the spot digest of each split. A split without tokens has no file."""

    splits: dict[str, SplitStats]
    spots: dict[str, str]


def partition(corpus: Corpus, plan: Plan) -> list[Shard]:
    """Partition the corpus: every process that follows the plan gets the same shards."""
    groups: list[list[tuple[Corpus, int]]] = []
    size = plan.shard
    for unit in corpus.partition(plan.unit):
        if size >= plan.shard:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit[1]
    return [Shard(number, tuple(units)) for number, units in enumerate(groups)]


class SharedPreparation:
    """The part of this process in the preparation of a folder.

    Args:
        out: the folder.
        claims: of this process.
        on_progress: as of `prepare`.
    """

    def __init__(
        self,
        out: Path,
        plan: Plan,
        shards: list[Shard],
        claims: Claims,
        on_progress: Callable[[TextProgress], None],
    ):
        self.out, self.plan, self.shards, self.claims = out, plan, shards, claims
        self.samples = max(1, SAMPLES // max(1, len(shards)))
        self._suffix = f".{claims.token}.tmp"
        self._on_progress = on_progress
        self._made: set[int] = set()  # by any process, as far as this one knows
        self._progress = TextProgress(sum(shard.bytes for shard in shards))
        self._found = {shard.number for shard in shards if self._see(shard)}
        self._progress.reused = self._progress.done
        on_progress(self._progress)

    def unmade(self) -> list[Shard]:
        """Return the shards without a record. Report the progress if other processes have made some."""
        done = self._progress.done
        left = [shard for shard in self.shards if not self._see(shard)]
        if self._progress.done > done:
            self._on_progress(self._progress)
        return left

    def _see(self, shard: Shard) -> bool:
        """Return True if the shard has a record. Count it if another process has made it."""
        if shard.number not in self._made and self._record_file(shard).exists():
            self._made.add(shard.number)
            self._progress.done += shard.bytes
        return shard.number in self._made

    def _record_file(self, shard: Shard) -> Path:
        return self.out / WORK / f"{shard.name}.json"

    def make_shards(self, pool: WorkerPool) -> None:
        """Make the shards that no other process has claimed or made.

        Raises:
            ConfigError: a document cannot be read, or another process has started the folder over.
            OSError, WorkerDied: as of `prepare`.
        """
        pieces = pool.pieces(((shard, size), unit) for shard in self._claimed() for unit, size in shard.units)
        for _, of_shard in itertools.groupby(pieces, key=lambda item: item[0][0].number):
            first = next(of_shard)
            shard = first[0][0]
            self._write(shard, ((size, piece) for (_, size), piece in itertools.chain([first], of_shard)))

    def _claimed(self) -> Iterator[Shard]:
        for shard in self.shards:
            if not self._see(shard) and self.claims.take(shard.name):
                if not self._see(shard):
                    yield shard
                else:
                    self.claims.release(shard.name)

    def _write(self, shard: Shard, pieces: Iterable[tuple[int, TokenisedPiece]]) -> None:
        """Write the files of a shard, then its record.

        Args:
            pieces: (bytes of the unit, its piece).
        """
        paths = {split: shard_path(self.out, split, shard.number) for split in SPLITS}
        with ExitStack() as stack:
            writers = {s: SplitWriter(stack.enter_context(atomic_write(paths[s], self._suffix))) for s in SPLITS}
            for size, piece in pieces:
                for split, tokens in piece.splits.items():
                    writers[split].write(tokens)
                    self._progress.tokens += len(tokens.ids)
                if piece.last:
                    self._progress.done += size
                    self._on_progress(self._progress)
            self._require_own_plan()
        stats = {split: writer.stats() for split, writer in writers.items()}
        for split in SPLITS:
            if not stats[split].tokens:
                paths[split].unlink()
        spots = {s: sampled_digest(paths[s], self.samples) for s in SPLITS if stats[s].tokens}
        record = asdict(ShardRecord(stats, spots))
        write_json(self._record_file(shard), {"plan": self.plan.digest(), **record}, self._suffix)
        self._made.add(shard.number)
        self.claims.release(shard.name)

    def _require_own_plan(self) -> None:
        """Check that the folder still follows the plan of this process.

        Raises:
            ConfigError: another process has started the folder over.
            FileNotFoundError: another process has finished.
        """
        plan = read_plan(self.out, f"out={self.out}")
        if plan is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.out / PLAN))
        if plan != self.plan:
            raise ConfigError(f"out={self.out}: another process has started this folder over: give it another folder")

    # ------------------------------------------------------------------------------------------------- the whole corpus

    def read_all(self) -> dict[str, tuple[SplitStats, list[TokenShard]]] | None:
        """Read all shards, and return for each split the statistics of the whole and its files.

        If a shard is damaged, make it undone and return None.
        """
        hashed = {split: content_hash() for split in SPLITS}
        records: list[ShardRecord] = []
        damaged = [shard for shard in self.shards if not self._read(shard, hashed, records)]
        for shard in damaged:
            self._record_file(shard).unlink(missing_ok=True)
            self._made.discard(shard.number)
            self._progress.done -= shard.bytes
            if shard.number in self._found:
                self._found.discard(shard.number)
                self._progress.reused -= shard.bytes
        if damaged:
            return None
        return {split: _whole(split, self.out, records, hashed[split].hexdigest()) for split in SPLITS}

    def _read(self, shard: Shard, hashed: dict[str, Any], records: list[ShardRecord]) -> bool:
        """Add the tokens of a shard to the digests. Return False if the shard is damaged."""
        try:
            content = read_json(self._record_file(shard))
            if content is None or content["plan"] != self.plan.digest():
                return False
            record = ShardRecord({s: SplitStats(**content["splits"][s]) for s in SPLITS}, content["spots"])
            for split in SPLITS:
                own = content_hash()
                if record.splits[split].tokens:
                    with shard_path(self.out, split, shard.number).open("rb") as file:
                        while block := file.read(_READ_BYTES):
                            own.update(block)
                            hashed[split].update(block)
                if own.hexdigest() != record.splits[split].digest:
                    return False
        except (FileNotFoundError, ValueError):  # a missing file, or a damaged record
            return False
        records.append(record)
        return True


def _whole(split: str, out: Path, records: list[ShardRecord], digest: str) -> tuple[SplitStats, list[TokenShard]]:
    """Return the statistics of a split and its files. `digest` covers all files, one after the other."""
    parts = [record.splits[split] for record in records]
    stats = SplitStats(
        sum(part.tokens for part in parts),
        sum(part.documents for part in parts),
        max((part.largest for part in parts), default=-1),
        digest,
    )
    files = [
        TokenShard(shard_path(out, split, n).name, part.tokens, part.digest, records[n].spots[split])
        for n, part in enumerate(parts)
        if part.tokens
    ]
    return stats, files
