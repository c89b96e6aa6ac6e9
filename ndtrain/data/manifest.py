"""Prepared folders, which `python -m ndtrain.data prepare` writes: the manifest, and how to open or start a folder.

A prepared folder holds the shards of both splits (`train-00000.bin`, flat little-endian token ids), the tokenizer's
files and `manifest.json`. The manifest is written last and describes the other files. Until then the folder holds
`plan.json`, and in `work` the records of the finished shards and the claims of the processes that make the others.

Folders of format 1 have one file for each split, `train.bin` and `validation.bin`. They are still read.
"""

import errno
import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ndtrain.config import ConfigError, DataConfig, world_from_env
from ndtrain.config.json_file import parse_object
from ndtrain.config.store import folder_at, in_store
from ndtrain.data.cache import SAMPLES, atomic_write, digest, sampled_digest
from ndtrain.data.claims import living_member, members
from ndtrain.data.documents import SPLITS

FORMAT = 2
MANIFEST, PLAN, WORK, LOCK = "manifest.json", "plan.json", "work", ".lock"
_REMOVED = ".removed"
_SHARD_FILE = re.compile(r"(train|validation)(-[0-9]{5,9})?\.bin")
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # file systems without locks


@dataclass(frozen=True)
class Plan:
    """The inputs that determine every byte of a preparation. Shards of equal plans belong together.

    Attributes:
        corpus, tokenizer: digests.
        unit: the bytes of text that a worker takes at a time.
        shard: the bytes of text in a shard, at least.
        format: the version of the files.
    """

    corpus: str
    tokenizer: str
    unit: int
    shard: int = 0
    format: int = FORMAT

    def digest(self) -> str:
        return digest(asdict(self))

    def changes(self, old: "Plan") -> str:
        """Return in words the differences from the plan `old`; "" if there are none."""
        words = {"format": "the format of its files", "corpus": "the corpus", "tokenizer": "the tokenizer"}
        words["shard"] = "the size of its shards"
        return " and ".join(what for name, what in words.items() if getattr(self, name) != getattr(old, name))

    def is_fulfilled_by(self, done: "Plan") -> bool:
        """Return True if a folder that was prepared by the plan `done` needs no work.

        Files of an earlier format need none if they have the same tokens.
        """
        same = (self.corpus, self.tokenizer) == (done.corpus, done.tokenizer)
        return self == done or (same and done.format < FORMAT)


@dataclass(frozen=True)
class TokenShard:
    """A token file of a prepared folder.

    Attributes:
        name: of the file.
        tokens: their number, at least 1 (0 only in format 1).
        blake2b: of the whole file.
        spot: a digest that is cheap to check.
    """

    name: str
    tokens: int
    blake2b: str
    spot: str


@dataclass(frozen=True)
class Manifest:
    """The description of a prepared corpus.

    Attributes:
        folder: the prepared folder; not written to the file.
        dtype: of the ids, uint16 or uint32, little-endian.
        vocab_size: of the tokenizer; every id is smaller.
        eos_id: the token that ends each document.
        largest: the largest id that occurs.
        tokenizer: digest of the tokenizer, whose files are in the same folder.
        tokens, documents: their number in each split.
        files: split -> its files, in order.
        samples: the blocks of a file that its spot digest reads.
        fingerprint: digest of all ids, equal to the fingerprint of the corpus if it is trained on directly.
        plan: the plan that the folder was made with.
        source: the keys of `data` that the folder was made with.
    """

    folder: Path
    dtype: str
    vocab_size: int
    eos_id: int
    largest: int
    tokenizer: str
    tokens: dict[str, int]
    documents: dict[str, int]
    files: dict[str, tuple[TokenShard, ...]]
    fingerprint: str
    plan: Plan
    source: dict[str, Any]
    samples: int = SAMPLES

    def paths(self, split: str) -> list[Path]:
        return [self.folder / shard.name for shard in self.files[split]]

    def write(self) -> None:
        """Write the manifest to `manifest.json`."""
        record = {"format": FORMAT, **asdict(self)}
        del record["folder"]
        write_json(self.folder / MANIFEST, record)

    def damage(self) -> str:
        """Return in words what is wrong with the first missing or damaged file; "" if all files are intact.

        Only the names of files in an object store are checked.
        """
        if in_store(self.folder):
            present = {path.name for path in self.folder.iterdir()}
            names = (shard.name for split in SPLITS for shard in self.files[split])
            return next((f"{name} is missing" for name in names if name not in present), "")
        for shard in (shard for split in SPLITS for shard in self.files[split]):
            path = self.folder / shard.name
            if not path.is_file():
                return f"{path.name} is missing"
            size, needed = path.stat().st_size, shard.tokens * np.dtype(self.dtype).itemsize
            if size != needed:
                return f"{path.name} has {size} bytes, not {needed}"
            if sampled_digest(path, self.samples) != shard.spot:
                return f"{path.name} has changed since it was prepared"
        return ""


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Return the token file of a shard and split in a prepared folder."""
    return folder / f"{split}-{number:05}.bin"


def write_json(path: Path, record: dict[str, Any], suffix: str = ".tmp") -> None:
    """Write `record` to the file `path`, with a digest of the record that `read_json` checks.

    Args:
        suffix: as of `atomic_write`.
    """
    with atomic_write(path, suffix) as file:
        file.write((json.dumps({**record, "digest": digest(record)}, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the record that `write_json` wrote; None if there is no such file.

    Raises:
        ValueError: the file is damaged, or another program wrote it.
    """
    try:
        record = parse_object(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if record.pop("digest", None) != digest(record):
        raise ValueError("its digest does not match its content")
    return record


def open_manifest(data: DataConfig) -> Manifest | None:
    """Check the prepared folder `data.path` and return its manifest; None if `data.path` is not a prepared folder.

    Raises:
        ConfigError: the preparation is not finished, the manifest or a file is damaged, or a key of `data` contradicts
            the manifest.
    """
    setting = f"data.path={data.path}"
    folder = folder_at(data.path)
    manifest = read_manifest(folder, setting)
    if manifest is None:
        if read_plan(folder, setting) is not None:
            raise ConfigError(f"{setting}: its preparation is not finished: run the same `prepare` again to finish it")
        return None
    rank, local_rank, _ = world_from_env()
    looks = rank == 0 if in_store(folder) else local_rank == 0  # of the ranks that see the same files
    if looks and (damage := manifest.damage()):
        raise ConfigError(f"{setting}: {damage}: the folder is damaged, prepare the corpus again")
    _check_agreement(data, manifest)
    return manifest


def _check_agreement(data: DataConfig, manifest: Manifest) -> None:
    """Check that no key of `data` contradicts the manifest. The default of `data.dtype` never does: it may be unset."""
    if data.eos_id not in (None, manifest.eos_id):
        _refuse(f"data.eos_id={data.eos_id}", f"documents of {data.path} end with {manifest.eos_id}", "null")
    if data.dtype not in (DataConfig.dtype, manifest.dtype):
        _refuse(f"data.dtype={data.dtype}", f"the tokens of {data.path} are {manifest.dtype}", manifest.dtype)
    if data.validation_path is not None and manifest.tokens["validation"]:
        setting = f"data.validation_path={data.validation_path}"
        _refuse(setting, f"{data.path} has a validation split of its own", "null")


def _refuse(setting: str, fact: str, value: str) -> None:
    raise ConfigError(f"{setting}: {fact} according to its {MANIFEST}: set the key to {value}")


def read_manifest(folder: Path, setting: str) -> Manifest | None:
    """Return the manifest in `folder`; None if there is none. Do not check the files that it describes.

    Raises:
        ConfigError: the manifest is damaged, or another version or program wrote it. The message begins with `setting`.
    """
    record = _read(folder / MANIFEST, setting)
    if record is None:
        return None
    record |= {"folder": folder, "plan": Plan(**record["plan"]), "files": _shards(record)}
    for shard in (shard for split in SPLITS for shard in record["files"][split]):
        if not _SHARD_FILE.fullmatch(shard.name):
            raise ConfigError(f"{setting}: {MANIFEST} there names a file {shard.name!r}: prepare it again")
    return Manifest(**{f.name: record[f.name] for f in fields(Manifest) if f.name in record})


def _shards(record: dict[str, Any]) -> dict[str, tuple[TokenShard, ...]]:
    """Return the files of a manifest. One of format 1 has one file for each split."""
    files = record["files"]
    if record["format"] == 1:
        return {s: (TokenShard(f"{s}.bin", record["tokens"][s], **files[s]),) for s in SPLITS}
    return {split: tuple(TokenShard(**shard) for shard in files[split]) for split in SPLITS}


def read_plan(folder: Path, setting: str) -> Plan | None:
    """Return the plan of an unfinished preparation; None if there is none.

    Raises:
        ConfigError: as `read_manifest`.
    """
    record = _read(folder / PLAN, setting)
    return record and Plan(**record)


def _read(path: Path, setting: str) -> dict[str, Any] | None:
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: {path.name} there is damaged or from another program ({error}): give another folder"
        ) from error
    if record is not None and record.get("format") not in range(1, FORMAT + 1):
        raise ConfigError(
            f"{setting}: {path.name} has format {record.get('format')}, not one up to {FORMAT}: prepare it again, or "
            "with the version that made it"
        )
    return record


# -------------------------------------------------------------------------------------------------- preparing one


def make_folder(out: Path) -> None:
    """Make the folder `out`.

    Raises:
        ConfigError: the folder cannot be made, or holds something else.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        _refuse_others(out)
        (out / LOCK).open("a").close()
    except OSError as error:
        reason = "it is a file" if out.is_file() else error.strerror
        raise ConfigError(f"out={out}: cannot be written ({reason}): give a writable folder") from error


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Let other processes wait that begin or end their work on the folder `out`."""
    with (out / LOCK).open("a") as lock:  # the kernel's lock: a killed process does not leave it behind
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        yield


def _refuse_others(out: Path) -> None:
    names = {p.name for p in out.iterdir()}
    others = sorted(names - {LOCK, PLAN + ".tmp", _REMOVED})
    if others and not names & {MANIFEST, PLAN}:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            f"out={out}: this folder holds other files ({', '.join(others[:3])}{more}): give a new or empty folder"
        )


def start_preparation(out: Path, plan: Plan, note: Callable[[str], None]) -> Manifest | None:
    """Make the folder ready for shards of `plan`, and remove the results of other plans. The caller has locked it.

    Args:
        note: called with a line about what happens to the existing files.

    Returns:
        The manifest if everything is done already, else None.

    Raises:
        ConfigError: the folder's manifest or plan is damaged or another program's, the tokenizer has changed, or
            another process is preparing the folder by another plan.
    """
    done, old = read_manifest(out, f"out={out}"), read_plan(out, f"out={out}")
    _refuse_another_tokenizer(out, plan, done, old)
    if done and plan.is_fulfilled_by(done.plan):
        if not (damage := done.damage()):
            note(f"out={out}: already prepared")
            _remove_rest(out)
            return done
        note(f"out={out}: {damage}: preparing it again")
    elif earlier := old or (done and done.plan):
        changes = plan.changes(earlier)
        if changes and (member := living_member(out / WORK)):
            raise ConfigError(
                f"out={out}: {member} is preparing this folder from other inputs ({changes} changed): wait for it, or "
                "give another folder"
            )
        note(f"out={out}: {changes} changed: starting over" if changes else f"out={out}: resuming where it stopped")
    if old != plan:
        write_json(out / PLAN, asdict(plan))  # written first: a folder with neither a plan nor a manifest is refused
        (out / MANIFEST).unlink(missing_ok=True)  # removed before the files that it describes
        remove_work_files(out)
        for path in out.iterdir():
            if _SHARD_FILE.fullmatch(path.name):
                path.unlink()
    (out / MANIFEST).unlink(missing_ok=True)
    (out / WORK).mkdir(exist_ok=True)
    _remove_temporary(out, keep=[member.token for member in members(out / WORK)])
    return None


def _refuse_another_tokenizer(out: Path, plan: Plan, done: Manifest | None, old: Plan | None) -> None:
    """Refuse a folder that was made with another tokenizer.

    A mistyped `out` must not delete days of work, so the user has to remove the folder.

    Raises:
        ConfigError: the folder was made with another tokenizer and holds tokens.
    """
    earlier = old or (done.plan if done else None)
    if earlier is None or earlier.tokenizer == plan.tokenizer:
        return
    shards = sum(1 for _ in (out / WORK).glob("*.json"))
    if done is None and not shards:
        return
    if done:
        held = f"{sum(done.tokens.values()):,} tokens of data.tokenizer={done.source.get('tokenizer')}"
    else:
        held = f"{shards} shard{'s' * (shards > 1)} of an unfinished preparation"
    raise ConfigError(
        f"out={out}: this folder holds {held}, made with another tokenizer: give another folder, or delete this one "
        "to start over"
    )


def remove_work_files(out: Path) -> None:
    """Remove the files of an unfinished preparation, except for its plan and its shards."""
    shutil.rmtree(out / _REMOVED, ignore_errors=True)
    with suppress(FileNotFoundError):
        (out / WORK).rename(out / _REMOVED)  # first, so that other processes add nothing to it meanwhile
    for folder in (_REMOVED, "parts"):  # the latter is of format 1
        shutil.rmtree(out / folder, ignore_errors=True)
    _remove_temporary(out, keep=())


def _remove_temporary(out: Path, keep: Sequence[str]) -> None:
    """Remove the half-written shards of all processes but the ones with the tokens `keep`."""
    for path in out.glob("*.bin.*tmp"):
        if not any(token in path.name for token in keep):
            path.unlink(missing_ok=True)


def finish_preparation(manifest: Manifest) -> None:
    """Write the manifest, and remove the files that only an unfinished preparation needs. The caller has locked it."""
    manifest.write()
    _remove_rest(manifest.folder)


def _remove_rest(out: Path) -> None:
    remove_work_files(out)
    (out / PLAN).unlink(missing_ok=True)
