"""Small disks, full disks, read-only disks."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(place: Path) -> Iterator[Callable[[str], Path]]:
    """Yields a function `mount(options)` that mounts a tmpfs at `place` with these mount options ("size=4096", "ro"). A
    second call changes the options. It is unmounted at the end of the block. The test is skipped where mounting is not
    allowed."""
    place.mkdir(parents=True, exist_ok=True)

    def mount(options: str) -> Path:
        again = "remount," if place.is_mount() else ""
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", again + options, "none", place], capture_output=True
        ).returncode:
            pytest.skip("needs the right to mount")
        return place

    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True)
