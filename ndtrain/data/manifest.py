"""Prepared folders, which `python -m ndtrain.data prepare` writes: the manifest, and how to open or start a folder.

A prepared folder holds `train.bin` and `validation.bin` (flat little-endian token ids), the tokenizer's files and
`manifest.json`. The manifest is written last and describes the other files. Until then the folder holds `plan.json`,
and the files of the finished parts in `parts`.
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
from ndtrain.config.json_file import parse_object
from ndtrain.data.cache import atomic_write, digest, sampled_digest
from ndtrain.data.documents import SPLITS

FORMAT = 1
MANIFEST, PLAN, PARTS, LOCK = "manifest.json", "plan.json", "parts", ".lock"


@dataclass(frozen=True)
class Plan:
    """The inputs that determine every byte of a preparation's parts. Parts of equal plans may be joined.

    Attributes:
        corpus, tokenizer: digests.
        unit: the bytes of text in a part.
        format: the version of the parts' files.
    """

    corpus: str
    tokenizer: str
    unit: int
    format: int = FORMAT

    def digest(self) -> str:
        return digest(asdict(self))

    def changes(self, old: "Plan") -> str:
        """Return in words the differences from the plan `old`; "" if there are none."""
        words = {"format": "the format of its parts", "corpus": "the corpus", "tokenizer": "the tokenizer"}
        words["unit"] = "the size of its units"
        return " and ".join(what for name, what in words.items() if getattr(self, name) != getattr(old, name))


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
        files: for each split `blake2b` of the whole file and `spot`, a digest that is cheap to check.
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
    files: dict[str, dict[str, str]]
    fingerprint: str
    plan: Plan
    source: dict[str, Any]

    def path(self, split: str) -> Path:
        return split_path(self.folder, split)

    def write(self) -> None:
        """Write the manifest to `manifest.json`."""
        record = {"format": FORMAT, **asdict(self)}
        del record["folder"]
        write_json(self.folder / MANIFEST, record)

    def damage(self) -> str:
        """Return in words what is wrong with the first missing or damaged file; "" if all files are intact."""
        for split in SPLITS:
            path = self.path(split)
            if not path.is_file():
                return f"{path.name} is missing"
            size, needed = path.stat().st_size, self.tokens[split] * np.dtype(self.dtype).itemsize
            if size != needed:
                return f"{path.name} has {size} bytes, not {needed}"
            if sampled_digest(path) != self.files[split]["spot"]:
                return f"{path.name} has changed since it was prepared"
        return ""


def split_path(folder: Path, split: str) -> Path:
    """Return the token file of a split in a prepared folder."""
    return folder / f"{split}.bin"


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write `record` to the file `path`, with a digest of the record that `read_json` checks."""
    with atomic_write(path) as file:
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
    folder = Path(data.path).expanduser()
    setting = f"data.path={data.path}"
    manifest = read_manifest(folder, setting)
    if manifest is None:
        if read_plan(folder, setting) is not None:
            raise ConfigError(f"{setting}: its preparation is not finished: run the same `prepare` again to finish it")
        return None
    if damage := manifest.damage():
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
    record |= {"folder": folder, "plan": Plan(**record["plan"])}
    return Manifest(**{f.name: record[f.name] for f in fields(Manifest)})


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
    if record is not None and record.get("format") != FORMAT:
        raise ConfigError(f"{setting}: {path.name} has format {record.get('format')}, not {FORMAT}: prepare it again")
    return record


# -------------------------------------------------------------------------------------------------- preparing one


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Make the folder `out` and lock it. Within the block no other process can prepare it.

    Raises:
        ConfigError: the folder cannot be made, holds something else, or another process is preparing it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        _refuse_others(out)
        lock = (out / LOCK).open("a")
    except OSError as error:
        reason = "it is a file" if out.is_file() else error.strerror
        raise ConfigError(f"out={out}: cannot be written ({reason}): give a writable folder") from error
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
            f"out={out}: this folder holds other files ({', '.join(others[:3])}{more}): give a new or empty folder"
        )


def start_preparation(out: Path, plan: Plan, note: Callable[[str], None]) -> Manifest | None:
    """Make the folder ready for parts of `plan`, and remove the results of other plans.

    Args:
        note: called with a line about what happens to the existing files.

    Returns:
        The manifest if everything is done already, else None.

    Raises:
        ConfigError: the folder's manifest or plan is damaged or another program's, or the tokenizer has changed.
    """
    done, old = read_manifest(out, f"out={out}"), read_plan(out, f"out={out}")
    _refuse_another_tokenizer(out, plan, done, old)
    if done and done.plan == plan:
        if not (damage := done.damage()):
            note(f"out={out}: already prepared")
            return done
        note(f"out={out}: {damage}: preparing it again")
    elif earlier := old or (done and done.plan):
        changes = plan.changes(earlier)
        note(f"out={out}: {changes} changed: starting over" if changes else f"out={out}: resuming where it stopped")
    if old != plan:
        write_json(out / PLAN, asdict(plan))  # written first: a folder with neither a plan nor a manifest is refused
        shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / MANIFEST).unlink(missing_ok=True)  # removed before the files that it describes
    for split in SPLITS:
        split_path(out, split).unlink(missing_ok=True)
    (out / PARTS).mkdir(exist_ok=True)
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
    parts = sum(1 for _ in (out / PARTS).glob("*.json"))
    if done is None and not parts:
        return
    if done:
        held = f"{sum(done.tokens.values()):,} tokens of data.tokenizer={done.source.get('tokenizer')}"
    else:
        held = f"{parts} unit{'s' * (parts > 1)} of an unfinished preparation"
    raise ConfigError(
        f"out={out}: this folder holds {held}, made with another tokenizer: give another folder, or delete this one "
        "to start over"
    )


def remove_work_files(out: Path) -> None:
    """Remove the files that only an unfinished preparation needs."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / PLAN).unlink(missing_ok=True)
