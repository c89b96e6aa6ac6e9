"""Lets the ranks of a test compose a configuration once and share it. Composing takes a rank longer than three steps of
a small model.

`ranks.py` has this imported in the process that ranks are forked from, before any module that takes `load_config`.
"""

import fcntl
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

from ndtrain import config
from ndtrain.config import Config, composition

_OF_FILES = ("resume", "init_from", "plugins", "run.")  # what these say depends on more than the overrides
_compose = composition.load_config


def load_config(overrides: list[str], *args: Any, **kwargs: Any) -> Config:
    """As `ndtrain.config.load_config`. The first process that is asked for some overrides composes them."""
    if args or kwargs or any(o.lstrip("+~").startswith(_OF_FILES) for o in overrides):
        return _compose(overrides, *args, **kwargs)
    folder = Path(os.environ["NDTRAIN_CACHE"], "composed")
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / hashlib.sha256(repr(overrides).encode()).hexdigest()
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            return pickle.loads(made.read_bytes())
        cfg = _compose(overrides)
        made.with_suffix(".writing").write_bytes(pickle.dumps(cfg))
        made.with_suffix(".writing").rename(made)
    return cfg


composition.load_config = config.load_config = load_config
