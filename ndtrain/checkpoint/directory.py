"""The folder of a run's checkpoints: lists them, picks those to resume from, and removes old ones."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ndtrain.checkpoint.elements import FORMAT, CheckpointError, DamagedCheckpoint, State, digest, sha256
from ndtrain.checkpoint.safetensors_io import read_header
from ndtrain.config import ModelConfig
from ndtrain.model.families.hf_config import to_hf


def list_checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints in a `checkpoints/` folder, newest first."""
    named = (p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir())
    return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name[5:])


def candidates(resume: str, run_dir: Path) -> list[Path]:
    """The checkpoints that `resume` may refer to, best first; empty for a fresh start.

    Raises:
        CheckpointError: `resume` is a path without a checkpoint.
    """
    if resume == "none":
        return []
    if resume == "auto":
        return list_checkpoints(run_dir / "checkpoints")
    path = Path(resume)
    if (path / "state.json").is_file():
        return [path]
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints:
        what = "holds no checkpoint (a folder step-* with a state.json)" if path.exists() else "does not exist"
        raise CheckpointError(f"resume={resume}: {what}; give a checkpoint or a run folder, or resume=auto")
    return checkpoints[:1]


def inspect(path: Path, m: ModelConfig) -> State:
    """Reads and verifies a checkpoint, without the contents of its tensors.

    Raises:
        CheckpointError: damaged (the file is named), or of another architecture (the first differing field is named).
    """
    body = read_state(path)
    for _, problem in file_problems(path, body):
        raise DamagedCheckpoint(f"{path} is damaged: {problem}")
    _check_architecture(path, m)
    return State(body["step"], body["tokens"], body["order"], body.get("skipped", 0), body.get("stream"))


def file_problems(path: Path, body: dict) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it) of the files that are not as state.json says. The contents of tensors are not read.

    Args:
        body: of `read_state`.
    """
    for name, (size, header) in body["files"].items():
        actual = (path / name).stat().st_size if (path / name).exists() else None
        if actual != size:
            yield name, f"{name} is missing" if actual is None else f"{name} has {actual} bytes instead of {size}"
        elif sha256(read_header(path / name)) != header:
            yield name, f"the header of {name} is not what was written"
    for name, expected in body["sha256"].items():
        if not (path / name).exists() or sha256((path / name).read_bytes()) != expected:
            yield name, f"{name} is not what was written"


def read_state(path: Path) -> dict:
    """The content of state.json.

    Raises:
        DamagedCheckpoint: it cannot be read, is not what was written, or has another format.
    """
    try:
        body = json.loads((path / "state.json").read_text())
        expected = body.pop("digest")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: state.json cannot be read") from error
    if expected != digest(body):
        raise DamagedCheckpoint(f"{path} is damaged: state.json is not what was written")
    if body["format"] != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {body['format']}, this version reads format {FORMAT}")
    return body


# what may differ between a checkpoint and the model that resumes it
_FREE = ("architectures", "initializer_range", "max_position_embeddings", "use_cache")


def _check_architecture(path: Path, m: ModelConfig) -> None:
    there = json.loads((path / "config.json").read_text())
    for key, here in to_hf(m).items():
        if key not in _FREE and there.get(key) != here:
            raise CheckpointError(
                f"{path} is of another architecture: {key} is {there.get(key)} there and {here} here: "
                f"set model.{key} as there, or train in another run.dir"
            )


def set_aside_later(chosen: Path) -> None:
    """Renames the checkpoints of later steps than the one resumed. They belong to an abandoned continuation, or are
    damaged. They stay under a name that nothing resumes, so that a later `resume=auto` does not pick them."""
    for path in list_checkpoints(chosen.parent):
        if path.name > chosen.name:
            aside = path.with_name(f"superseded-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


def prune(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Removes all but the newest `keep` checkpoints, and what a killed process left half written or half removed. A
    checkpoint whose step is a multiple of `keep_every` stays."""
    for path in list_checkpoints(folder)[keep:]:
        if not keep_every or _step(path) % keep_every:
            with suppress(OSError):  # then the old one stays: the new one is already saved
                remove(path)
    for pattern in (".removing-*", ".writing-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a kill in between leaves nothing that looks like a
    checkpoint."""
    renamed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(path, renamed)
    shutil.rmtree(renamed, ignore_errors=True)
