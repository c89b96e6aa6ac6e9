"""Reads of a file that fail like reads from a broken disk: with EIO, or because the file is truncated meanwhile."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ERROR, CUT = "error", "cut"
_KINDS = {None: 0, ERROR: 1, CUT: 2}


def build_library(folder: Path) -> Path:
    """Compiles the library to preload. The test is skipped if there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    library = folder / "faulty_reads.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def run_preloaded(code: str, library: Path, *args: str, timeout: float) -> subprocess.CompletedProcess:
    """Runs Python code in a process with the library. It may call `watch`."""
    variables = {"LD_PRELOAD": str(library), "FAULTY_READS": str(library)}
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=os.environ | variables, capture_output=True, text=True, timeout=timeout
    )


def watch(endings: Sequence[str], kind: str | None = None, at: int = 0) -> None:
    """From now on the reads that deliver bytes of files whose paths have these endings are counted. With `ERROR`, read
    `at` of a file and all later ones fail; with `CUT`, the file loses its second half before read `at`."""
    library = _library()
    library.watch_none()
    for ending in endings:
        library.watch(ending.encode(), _KINDS[kind], ctypes.c_long(at))


def reads(file: int = 0) -> int:
    """The number of reads of a file since `watch`, by its place in the list."""
    return _library().reads_of(file)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["FAULTY_READS"])
    library.reads_of.restype = ctypes.c_long
    return library
