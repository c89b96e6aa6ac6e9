"""Plans and benches that are no part of an installed package: the makers' `lab`, in a checkout of the repository."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ndtrain.config import ConfigError

LAB = {
    "table": "lab.published.table",
    "fit": "lab.published.fit",
    "peers": "lab.peers.run",
    "attention": "lab.peers.attention",
    "gpu": "lab.gpu.run",
}


def from_checkout(module: str) -> Any:
    """Import a module of `lab`, which is not part of an installed package.

    Raises:
        ConfigError: ndtrain does not run from a checkout.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "lab").is_dir():
        raise ConfigError(f"{module}: it is not installed. Run it from a checkout of the repository")
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return import_module(module)
