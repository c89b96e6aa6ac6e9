"""Prepared folders, which `python -m ndtrain.data prepare` makes: the manifest, and how a folder is opened or begun.

A prepared folder holds `train.bin` and `validation.bin` (flat little-endian token ids), the tokenizer's files and
`manifest.json`. The manifest is written last and describes the others. Until then the folder holds `plan.json`, and
`parts` with the files of the parts that are done.
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
    """What decides every byte of the parts that a preparation makes. Parts of equal plans may be joined.

    Attributes:
        corpus, tokenizer: digests.
        unit: the bytes of text of a part.
        format: the version of the parts' files.
    """

    corpus: str
    tokenizer: str
    unit: int
    format: int = FORMAT

    def digest(self) -> str:
        return digest(asdict(self))

    def changes(self, old: "Plan") -> str:
        """Says in words what differs from `old`; "" if nothing does."""
        words = {"format": "the format of its parts", "corpus": "the corpus", "tokenizer": "the tokenizer"}
        words["unit"] = "the size of its units"
        return " and ".join(what for name, what in words.items() if getattr(self, name) != getattr(old, name))


@dataclass(frozen=True)
class Manifest:
    """Describes a prepared corpus.

    Attributes:
        folder: where it is; not written.
        dtype: of the ids, uint16 or uint32, little-endian.
        vocab_size: of the tokenizer; every id lies below it.
        eos_id: the token that ends each document.
        largest: the largest id that occurs.
        tokenizer: digest of the tokenizer, whose files are beside the manifest.
        tokens, documents: how many each split has.
        files: for each split `blake2b` of the whole file and `spot`, a digest that is cheap to check.
        fingerprint: digest of all ids; training on the corpus itself gives the same.
        plan: the plan that made it.
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
        """Writes it as `manifest.json`."""
        record = {"format": FORMAT, **asdict(self)}
        del record["folder"]
        write_json(self.folder / MANIFEST, record)

    def damage(self) -> str:
        """Says in words which of its files is not what was prepared, the first of them; "" if all are."""
        for split in SPLITS:
            path = self.path(split)
            if not path.is_file():
                return f"{path.name} is missing"
            size, needed = path.stat().st_size, self.tokens[split] * np.dtype(self.dtype).itemsize
            if size != needed:
                return f"{path.name} has {size} bytes, not {needed}"
            if sampled_digest(path) != self.files[split]["spot"]:
                return f"{path.name} is not what was prepared"
        return ""


def split_path(folder: Path, split: str) -> Path:
    """Returns the token file of a split in a prepared folder."""
    return folder / f"{split}.bin"


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes `record` as the file `path`, with a digest of itself that `read_json` checks."""
    with atomic_write(path) as file:
        file.write((json.dumps({**record, "digest": digest(record)}, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns what `write_json` wrote; None if there is no such file.

    Raises:
        ValueError: the file is damaged, or another program's.
    """
    try:
        record = parse_object(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if record.pop("digest", None) != digest(record):
        raise ValueError("not what was written")
    return record


def open_manifest(data: DataConfig) -> Manifest | None:
    """Returns the manifest of the prepared folder that `data.path` names, and checks its files.

    None: `data.path` names something else.

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
    """Checks that no key that is set contradicts the manifest. (A `data.dtype` of uint16 may be the default.)"""
    if data.eos_id not in (None, manifest.eos_id):
        _refuse(f"data.eos_id={data.eos_id}", f"documents of {data.path} end with {manifest.eos_id}", "null")
    if data.dtype not in (DataConfig.dtype, manifest.dtype):
        _refuse(f"data.dtype={data.dtype}", f"the tokens of {data.path} are {manifest.dtype}", manifest.dtype)
    if data.validation_path is not None and manifest.tokens["validation"]:
        setting = f"data.validation_path={data.validation_path}"
        _refuse(setting, f"{data.path} has a validation split of its own", "null")


def _refuse(setting: str, fact: str, value: str) -> None:
    raise ConfigError(f"{setting}: {fact}, says its {MANIFEST}: set the key to {value}")


def read_manifest(folder: Path, setting: str) -> Manifest | None:
    """Returns the manifest in `folder`; None if there is none. Does not check the files that it describes.

    Raises:
        ConfigError: the manifest is damaged, of another version or of another program. The message begins with
            `setting`.
    """
    record = _read(folder / MANIFEST, setting)
    if record is None:
        return None
    record |= {"folder": folder, "plan": Plan(**record["plan"])}
    return Manifest(**{f.name: record[f.name] for f in fields(Manifest)})


def read_plan(folder: Path, setting: str) -> Plan | None:
    """Returns the plan of a preparation that is not finished; None if there is none.

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
def lock_folder(out: Path) -> Iterator[None]:
    """Makes the folder `out` and locks it: within the block no other process prepares it.

    Raises:
        ConfigError: it cannot be made, holds something else, or another process is preparing it.
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


def start_preparation(out: Path, plan: Plan, note: Callable[[str], None]) -> Manifest | None:
    """Makes the folder ready for parts of `plan`, and removes what other plans have left.

    Args:
        note: called with a line that says what becomes of what is there.

    Returns:
        The manifest where all is done already, else None.

    Raises:
        ConfigError: a manifest or plan there is damaged or another program's, or what is there was made with another
            tokenizer.
    """
    done, old = read_manifest(out, f"out={out}"), read_plan(out, f"out={out}")
    _refuse_another_tokenizer(out, plan, done, old)
    if done and done.plan == plan:
        if not (damage := done.damage()):
            note(f"out={out}: prepared already")
            return done
        note(f"out={out}: {damage}: making it anew")
    elif earlier := old or (done and done.plan):
        changes = plan.changes(earlier)
        note(f"out={out}: {changes} changed: starting anew" if changes else f"out={out}: going on where it stopped")
    if old != plan:
        write_json(out / PLAN, asdict(plan))  # first: a folder without it and without a manifest is not ours
        shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / MANIFEST).unlink(missing_ok=True)  # before the files that it describes
    for split in SPLITS:
        split_path(out, split).unlink(missing_ok=True)
    (out / PARTS).mkdir(exist_ok=True)
    return None


def _refuse_another_tokenizer(out: Path, plan: Plan, done: Manifest | None, old: Plan | None) -> None:
    """Days of work are not removed for a mistyped `out`. The user removes them."""
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
        f"out={out}: this folder holds {held}, made with another tokenizer: name another folder, or remove this "
        "one to make it anew"
    )


def remove_work_files(out: Path) -> None:
    """Removes the files that only an unfinished preparation needs."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / PLAN).unlink(missing_ok=True)
