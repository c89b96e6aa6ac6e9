"""Prepared folders, which `python -m ndtrain.data prepare` makes: their manifest, how a run opens one, how one begins.

A prepared folder holds `train.bin` and `validation.bin` (flat little-endian token ids), the tokenizer's files and
`manifest.json`, which is written last and vouches for the others. Until then `plan.json` stands for it, and `parts`
holds what is done.
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.cache import digest, publish, spot_digest
from ndtrain.data.documents import SPLITS

FORMAT = 1
MANIFEST, PLAN, PARTS, LOCK = "manifest.json", "plan.json", "parts", ".lock"


@dataclass(frozen=True)
class Plan:
    """What decides every byte of the parts that a preparation makes: parts of equal plans may be joined.

    `corpus` and `tokenizer` are digests; `unit` is the size in bytes that the corpus is cut into.
    """

    corpus: str
    tokenizer: str
    unit: int
    format: int = FORMAT

    def digest(self) -> str:
        return digest(asdict(self))

    def changes(self, old: "Plan") -> str:
        """What differs from `old`, in words; empty if nothing does."""
        words = {"format": "the format of its parts", "corpus": "the corpus", "tokenizer": "the tokenizer"}
        words["unit"] = "the size of its units"
        return " and ".join(what for name, what in words.items() if getattr(self, name) != getattr(old, name))


@dataclass(frozen=True)
class Manifest:
    """A prepared corpus.

    Attributes:
        folder: where it lies; not written.
        dtype: of the ids, uint16 or uint32, little-endian.
        vocab_size: of the tokenizer; every id lies below it.
        eos_id: the token that ends each document.
        largest: the largest id that occurs.
        tokenizer: digest of the tokenizer, whose files lie beside the manifest.
        tokens, documents: how many each split has.
        files: for each split `blake2b` of the whole file and `spot`, a digest that is cheap to check.
        fingerprint: digest of all ids, the same that the corpus itself gives when it is trained on directly.
        plan: what made it.
        source: the keys of `data` it was made with.
    """

    folder: Path
    dtype: str
    vocab_size: int
    eos_id: int
    largest: int
    tokenizer: str
    tokens: dict[str, int]
    documents: dict[str, int]
    files: dict[str, dict[str, str]]
    fingerprint: str
    plan: Plan
    source: dict[str, Any]

    def path(self, split: str) -> Path:
        return split_path(self.folder, split)

    def write(self) -> None:
        """Publishes it as `manifest.json`."""
        record = {"format": FORMAT, **asdict(self)}
        del record["folder"]
        write_json(self.folder / MANIFEST, record)

    def trouble(self) -> str:
        """The first of its files that is not what was prepared, in words; empty if all are."""
        for split in SPLITS:
            path = self.path(split)
            if not path.is_file():
                return f"{path.name} is missing"
            size, needed = path.stat().st_size, self.tokens[split] * np.dtype(self.dtype).itemsize
            if size != needed:
                return f"{path.name} has {size} bytes, not {needed}"
            if spot_digest(path) != self.files[split]["spot"]:
                return f"{path.name} is not what was prepared"
        return ""


def split_path(folder: Path, split: str) -> Path:
    """The token file of a split in a prepared folder."""
    return folder / f"{split}.bin"


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Publishes `record` as the file `path`, with a digest of itself that `read_json` checks."""
    with publish(path) as file:
        file.write((json.dumps({**record, "digest": digest(record)}, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None if there is no such file.

    Raises:
        ValueError: the file is damaged, or another program's.
    """
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(record, dict) or record.pop("digest", None) != digest(record):
        raise ValueError("not what was written")
    return record


def open_manifest(data: DataConfig) -> Manifest | None:
    """The manifest of the prepared folder that `data.path` names, its files checked; None where it names another thing.

    Raises:
        ConfigError: a preparation that is not finished, a manifest or a file that is damaged, or a key of `data` that
            says something else than the manifest.
    """
    folder = Path(data.path).expanduser()
    setting = f"data.path={data.path}"
    manifest = read_manifest(folder, setting)
    if manifest is None:
        if read_plan(folder, setting) is not None:
            raise ConfigError(f"{setting}: its preparation is not finished: run the same `prepare` again to finish it")
        return None
    if trouble := manifest.trouble():
        raise ConfigError(f"{setting}: {trouble}: the folder is damaged, prepare the corpus again")
    _check_agreement(data, manifest)
    return manifest


def _check_agreement(data: DataConfig, manifest: Manifest) -> None:
    """The manifest decides; a key that is set must not say otherwise. (A `data.dtype` of uint16 may be the default.)"""
    if data.eos_id not in (None, manifest.eos_id):
        _contradicts(data, f"data.eos_id={data.eos_id}", f"documents of {data.path} end with {manifest.eos_id}", "null")
    if data.dtype not in (DataConfig.dtype, manifest.dtype):
        _contradicts(
            data, f"data.dtype={data.dtype}", f"the tokens of {data.path} are {manifest.dtype}", manifest.dtype
        )
    if data.validation_path is not None and manifest.tokens["validation"]:
        setting = f"data.validation_path={data.validation_path}"
        _contradicts(data, setting, f"{data.path} has a validation split of its own", "null")


def _contradicts(data: DataConfig, setting: str, fact: str, value: str) -> None:
    raise ConfigError(f"{setting}: {fact}, says its {MANIFEST}: set the key to {value}")


def read_manifest(folder: Path, setting: str) -> Manifest | None:
    """The manifest in `folder`, its files unchecked; None if there is none. `setting` opens the message of an error.

    Raises:
        ConfigError: a file of that name which is damaged, of another version or of another program.
    """
    record = _read(folder / MANIFEST, setting)
    if record is None:
        return None
    record |= {"folder": folder, "plan": Plan(**record["plan"])}
    return Manifest(**{f.name: record[f.name] for f in fields(Manifest)})


def read_plan(folder: Path, setting: str) -> Plan | None:
    """The plan of a preparation that is not finished; None if there is none.

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
            f"{setting}: {path.name} there is damaged or another program's ({error}): name another place"
        ) from error
    if record is not None and record.get("format") != FORMAT:
        raise ConfigError(f"{setting}: {path.name} has format {record.get('format')}, not {FORMAT}: prepare it again")
    return record


# -------------------------------------------------------------------------------------------------- preparing one


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Within the block `out` is a folder to prepare that no other process works on.

    Raises:
        ConfigError: it cannot be made, holds something else, or another process is at work.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        _refuse_others(out)
        lock = (out / LOCK).open("a")
    except OSError as error:
        reason = "it is a file" if out.is_file() else error.strerror
        raise ConfigError(f"out={out}: cannot write there ({reason}): name a folder that can be written") from error
    with lock:  # the kernel's lock: a killed process does not leave it behind
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"out={out}: another process is preparing this folder: wait for it") from error
        yield


def _refuse_others(out: Path) -> None:
    names = {p.name for p in out.iterdir()}
    others = sorted(names - {LOCK, PLAN + ".tmp"})
    if others and not names & {MANIFEST, PLAN}:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            f"out={out}: this folder holds something else ({', '.join(others[:3])}{more}): name a new or an empty one"
        )


def begin(out: Path, plan: Plan, note: Callable[[str], None]) -> Manifest | None:
    """Makes the folder ready for parts of `plan` and says through `note` what becomes of what is there. Returns the
    manifest where all is done already.

    Raises:
        ConfigError: a manifest or plan there is damaged or another program's.
    """
    done, old = read_manifest(out, f"out={out}"), read_plan(out, f"out={out}")
    if done and done.plan == plan:
        if not (trouble := done.trouble()):
            note(f"out={out}: prepared already")
            return done
        note(f"out={out}: {trouble}: making it anew")
    elif earlier := old or (done and done.plan):
        changes = plan.changes(earlier)
        note(f"out={out}: {changes} changed: starting anew" if changes else f"out={out}: going on where it stopped")
    if old != plan:
        write_json(out / PLAN, asdict(plan))  # first: a folder without it and without a manifest is not ours
        shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / MANIFEST).unlink(missing_ok=True)  # before the files it vouches for
    for split in SPLITS:
        split_path(out, split).unlink(missing_ok=True)
    (out / PARTS).mkdir(exist_ok=True)
    return None


def clear(out: Path) -> None:
    """Removes what a finished folder does not need."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / PLAN).unlink(missing_ok=True)
