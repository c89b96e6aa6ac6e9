"""Programs from Debian's packages that some tests need."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def install_debian_packages(*packages: str) -> str | None:
    """Installs packages, one process at a time. Returns the reason if that is not possible, else None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("apt-get"):
        return "installing it needs root and apt-get"
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    with (Path(tempfile.gettempdir()) / "ndtrain-tests-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run(["apt-get", "-qq", *words], env=quiet, capture_output=True, text=True)
            if done.returncode:
                return f"apt-get {words[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
    return None
