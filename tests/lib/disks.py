"""Small disks, full disks, read-only disks."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(place: Path) -> Iterator[Callable[[str], Path]]:
    """mount(options) makes `place` a tmpfs with these mount options ("size=4096", "ro"), mount(options) again changes
    them. It is gone at the end of the block. Where mounting is not allowed, the test is skipped."""
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
