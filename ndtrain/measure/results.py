"""Results of a bench as JSON: the options, the environment that the figures depend on, and the figures."""

import json
import os
import re
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ndtrain.config import ConfigError
from ndtrain.device.measured_peak import cpu_model

_PATHS = ("out", "plot", "folder")  # options that name an output path; no figure depends on them
_SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def save(bench: str, options: Any, **measured: Any) -> None:
    """Write the file `options.out`, unless it is "". A measured value overrides an option of the same name.

    Args:
        options: an instance of the bench's dataclass.
    """
    if options.out:
        asked = {k: v for k, v in asdict(options).items() if k not in _PATHS}
        write(Path(options.out), {"bench": bench, **asked, **surroundings(), **measured})


def write(path: Path, body: dict[str, Any]) -> None:
    """Write JSON with one line per innermost list or object. Writes a temporary file and renames it, so an interrupted
    call leaves the old file intact."""
    text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda m: re.sub(r"\n\s*", " ", m[0]), json.dumps(body, indent=1))
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


def require_folder(key: str, path: str) -> None:
    """Check that the file `path` can be made, or is "".

    Raises:
        ConfigError: its folder does not exist.
    """
    if path and not Path(path).parent.is_dir():
        raise ConfigError(f"{key}={path}: the folder {Path(path).parent} does not exist")


def size_name(n: float) -> str:
    """Format a number of bytes as text: 4 KiB, 1.5 GiB."""
    unit = next((u for u, size in _SIZES.items() if n >= size), "B")
    return f"{n / _SIZES[unit]:.4g} {unit}"


def surroundings() -> dict[str, Any]:
    """Return the environment that a figure depends on in addition to the options."""
    return {
        "hardware": {"cpu": cpu_model(), "cores": os.cpu_count(), "gpus": _gpus()},
        "versions": {name: _version(name) for name in ("torch", "transformers", "numpy")},
        "commit": _commit(),
    }


def _gpus() -> list[str]:
    """Return name, driver and memory of each GPU, without creating a context. Return [] if there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return NDTRAIN_COMMIT if it is set, else the checkout's commit, with `-dirty` if files differ from it. Return
    None outside a checkout.

    NDTRAIN_COMMIT is for a copy of the working tree on another machine, where git would find no commit or a wrong one.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if said := os.environ.get("NDTRAIN_COMMIT"):
        return said
    try:
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return None
    return commit or None
