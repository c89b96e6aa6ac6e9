"""The folder of a run's checkpoints: lists them, picks those to resume from, and removes old ones."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ndtrain.checkpoint.elements import FORMAT, CheckpointError, DamagedCheckpoint, State, damaged, digest, sha256
from ndtrain.checkpoint.safetensors_io import PlannedFile
from ndtrain.checkpoint.safetensors_reader import read_header
from ndtrain.config import ModelConfig
from ndtrain.config.json_file import JsonError, read_object
from ndtrain.config.saved_run import NAME as SAVED
from ndtrain.config.saved_run import read_saved
from ndtrain.config.store import StorePath, folder_at, in_store
from ndtrain.model.families import family_of
from ndtrain.model.families.hf_config import to_hf

STATE = "state.json"
_SUPERSEDED = "superseded.json"  # what state.json becomes in an object store, where no folder can be renamed
_NAME = re.compile(r"step-[0-9]{8,}")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the published checkpoints in a `checkpoints/` folder, newest first.

    In an object store, a checkpoint is published by its state.json.
    """
    published = (lambda p: (p / STATE).is_file()) if in_store(folder) else Path.is_dir
    named = (p for p in folder.glob("step-*") if _NAME.fullmatch(p.name) and published(p))
    return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name[5:])


def candidates(resume: str, folder: Path) -> list[Path]:
    """Return the checkpoints that `resume` may refer to, best first. The list is empty for a fresh start.

    Args:
        folder: the result of `checkpoint_folder`.

    Raises:
        CheckpointError: `resume` is a path without a checkpoint, or the object store cannot be reached.
    """
    if resume == "none":
        return []
    try:
        return list_checkpoints(folder) if resume == "auto" else _named(resume)
    except OSError as error:
        raise CheckpointError(f"resume={resume}: {error.filename or folder}: {error.strerror or error}") from error


def _named(resume: str) -> list[Path]:
    path = folder_at(resume)
    if (path / STATE).is_file():
        return [path]
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path) or _elsewhere(path)
    if not checkpoints:
        what = "holds no checkpoint (a folder step-* with a state.json)" if path.exists() else "does not exist"
        raise CheckpointError(f"resume={resume}: {what}; name a checkpoint or a run folder, or use resume=auto")
    return checkpoints[:1]


def _elsewhere(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder whose run has saved them in `checkpoint.folder`."""
    if in_store(run) or not (run / SAVED).is_file():
        return []
    folder = read_saved(run / SAVED).values.get("checkpoint", {}).get("folder")
    return list_checkpoints(folder_at(folder)) if folder else []


def inspect(path: Path, m: ModelConfig) -> State:
    """Read and verify a checkpoint, without the contents of its tensors.

    Raises:
        CheckpointError: it is damaged or unreadable (the message names the file), or has another architecture (the
            message names every differing key).
    """
    body = read_state(path)
    for _, problem in file_problems(path, body):
        raise damaged(path, problem)
    _check_architecture(path, m)
    later = body.get("skipped") or 0, body.get("stream"), body.get("reset_at") or 0
    return State(body["step"], body["tokens"], body["order"], *later)


def facts_of_files(folder: Path, large: Iterable[PlannedFile]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the small files in an unpublished checkpoint, and the entries of state.json for all files.

    Args:
        large: the files of tensors. Only their headers are in state.json, besides the checksums of the tensors.
    """
    sizes = {file.name: [file.size, sha256(file.header)] for file in large}
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    small = sorted(name for name in names if name not in sizes)
    return small, {"files": sizes, "sha256": {name: sha256((folder / name).read_bytes()) for name in small}}


def file_problems(path: Path, body: dict) -> Iterator[tuple[str, str]]:
    """Yield (file, its problem) for each file that does not match state.json. The contents of tensors are not read.

    Args:
        body: the result of `read_state`.
    """
    for problem_of, expected in ((_problem_of_tensors, body["files"]), (_problem_of_content, body["sha256"])):
        for name, wanted in expected.items():
            try:
                problem = problem_of(path, name, wanted)
            except FileNotFoundError:
                problem = f"{name} is missing"
            except OSError as error:
                problem = f"{name} cannot be read ({error.strerror or error})"
            if problem:
                yield name, problem


def _problem_of_tensors(path: Path, name: str, expected: tuple[int, str]) -> str | None:
    """Return what is wrong with the size or the header of a safetensors file, or None if nothing is."""
    size, header = expected
    if (actual := (path / name).stat().st_size) != size:
        return f"{name} has {actual} bytes instead of {size}"
    return None if sha256(read_header(path / name)) == header else f"the header of {name} does not match its checksum"


def _problem_of_content(path: Path, name: str, expected: str) -> str | None:
    with (path / name).open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    return None if actual == expected else f"{name} does not match its checksum"


def read_state(path: Path) -> dict:
    """Return the content of state.json, after checking that its fields have the types that a run relies on.

    Raises:
        DamagedCheckpoint: it cannot be read, does not match its checksum, or has another format. Or the step in
            the folder's name is another one.
    """
    try:
        body = read_object(path / "state.json")
    except JsonError as error:
        raise damaged(path, error) from error
    if body.pop("digest", None) != digest(body):
        raise damaged(path, "state.json does not match its checksum")
    if body.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {body.get('format')}, but this version reads format {FORMAT}")
    for key, right in _FIELDS.items():
        if not right(body.get(key)):
            raise damaged(path, f"state.json has no valid {key}")
    named = path.absolute().name
    if _NAME.fullmatch(named) and named != (own := f"step-{body['step']:08d}"):
        raise DamagedCheckpoint(f"{path} holds step {body['step']}: rename the folder to {own}, or remove it")
    return body


def plugins_of(body: dict[str, Any]) -> list[str]:
    """Return the plugins of the run that wrote a state.json. The list is empty if the configuration lists no names.

    Args:
        body: the result of `read_state`.
    """
    plugins = body["config"].get("plugins")
    return [name for name in plugins if isinstance(name, str)] if isinstance(plugins, list) else []


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _by_file(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a predicate: True for an object whose keys name files in the folder, False if any file is elsewhere."""
    is_file = lambda name: "\0" not in name and not {"", ".", ".."} & set(name.split("/"))
    return lambda value: _is_object(value) and all(map(is_file, value)) and all(map(is_value, value.values()))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _is_checksum(value: Any) -> bool:
    return _is_pair(value) and all(isinstance(word, str) and _WORD.fullmatch(word) for word in value)


_WORD = re.compile(r"[0-9a-f]{16}")
# fields of a state.json that a run reads -> a function that returns True if the value is usable
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "tokens": _is_count,
    "skipped": lambda value: value is None or _is_count(value),
    "reset_at": lambda value: value is None or _is_count(value),
    "order": _is_object,
    "stream": lambda value: value is None or _is_object(value),
    "config": _is_object,
    "files": _by_file(lambda value: _is_pair(value) and _is_count(value[0]) and isinstance(value[1], str)),
    "sha256": _by_file(lambda value: isinstance(value, str)),
    "checksums": lambda value: _is_object(value) and all(map(_is_checksum, value.values())),
}


# fields that may differ between a checkpoint and the model that resumes it
_FREE = ("architectures", "initializer_range", "max_position_embeddings", "use_cache")


def _check_architecture(path: Path, m: ModelConfig) -> None:
    try:
        there = read_object(path / "config.json")
    except JsonError as error:
        raise damaged(path, error) from error
    if different := _differences(there, m):
        raise CheckpointError(
            f"{path} is of another architecture: {', '.join(different)}: to resume it, remove the recipe and these "
            "keys, as in `resume=auto run.dir=FOLDER`, which uses the model of the run folder; for a new run, set "
            "another run.dir and remove resume"
        )


def _differences(there: dict[str, Any], m: ModelConfig) -> list[str]:
    """Return the keys of `model` that differ between a checkpoint's config.json and the model here, with both values.

    Fields of config.json that follow from these keys are listed only if nothing else differs."""
    count = family_of(m).moe.count if family_of(m).moe else ""
    different = {key: here for key, here in to_hf(m).items() if key not in _FREE and there.get(key) != here}
    keys = {key: "num_experts" if key == count else key for key in different}
    own = [key for key in different if hasattr(m, keys[key])]
    return [
        f"model.{keys[key]} is {there.get(key)} in the checkpoint and {different[key]} in this run"
        for key in own or different
    ]


def set_aside_later(chosen: Path) -> None:
    """Rename the checkpoints of steps after the resumed one, so that a later `resume=auto` does not pick them.

    They belong to an abandoned continuation, or are damaged. No resume uses their new names."""
    for path in list_checkpoints(chosen.parent):
        if _NAME.fullmatch(chosen.name) and _step(path) > _step(chosen):
            if in_store(path):
                (path / _SUPERSEDED).write_bytes((path / STATE).read_bytes())
                (path / STATE).unlink()
                continue
            aside = path.with_name(f"superseded-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


def older_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints in the folder of `path` that are of earlier steps, newest first."""
    return [p for p in list_checkpoints(path.parent) if _NAME.fullmatch(path.name) and _step(p) < _step(path)]


def prune(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Remove all but the newest `keep` checkpoints, except those whose step is a multiple of `keep_every`.

    Also remove folders that a killed process left half written or half removed."""
    for path in list_checkpoints(folder)[keep:]:
        if not keep_every or _step(path) % keep_every:
            with suppress(OSError):  # on failure the old checkpoint stays. The new one is already saved
                remove(path)
    if in_store(folder):
        with suppress(OSError):
            _remove_half_written(folder)
        return
    for pattern in (".removing-*", ".writing-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _remove_half_written(folder: Path) -> None:
    for path in folder.glob("step-*"):
        if _NAME.fullmatch(path.name) and not any((path / name).is_file() for name in (STATE, _SUPERSEDED)):
            cast(StorePath, path).remove_all()


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill in between leaves no incomplete folder under its name.
    In an object store, its state.json is removed first."""
    if in_store(path):
        (path / STATE).unlink(missing_ok=True)
        cast(StorePath, path).remove_all()
        return
    renamed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(path, renamed)
    shutil.rmtree(renamed, ignore_errors=True)
