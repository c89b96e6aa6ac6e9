"""The example package of `tests/plugins`, as a user has it: a package of its own, which ndtrain does not know."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ndtrain.config import registry

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"


@contextmanager
def importable(*packages: str) -> Iterator[None]:
    """Let Python find the packages of this folder. Afterwards forget what they have registered.

    Args:
        packages: others that are forgotten too.
    """
    sys.path.insert(0, str(PLUGINS))
    ours = lambda module: module.split(".")[0] in ("example_package", *packages)
    try:
        yield
    finally:
        sys.path.remove(str(PLUGINS))
        for key in [key for key, part in registry._parts.items() if ours(part.module)]:
            del registry._parts[key]
        registry._loaded -= {module for module in registry._loaded if ours(module)}
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
