"""The jobs of a sweep (`--multirun`). Each job has its own folder and name, and wandb shows the jobs together."""

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from ndtrain.config import Config

_LONGEST = 80  # maximum number of characters in a folder's name; instead of a longer name, use the job's number
_TAG = 64  # maximum number of characters that wandb allows in a tag


def as_job(cfg: Config, given: Sequence[str]) -> Config:
    """Change the configuration of the job that Hydra is running, and return it. Without a sweep it is unchanged.

    The job's swept values, such as `optim.lr=1e-3`, are appended to `run.dir` as a folder, and to `run.name`. A key
    that already differs between the jobs is not changed. The loggers' group defaults to the sweep's `run.name`, and the
    swept values become additional tags. `hydra.sweep.dir` or `hydra.sweep.subdir` on the command line sets the folders.

    Args:
        given: the overrides of the command line.
    """
    hydra = HydraConfig.get()
    plain = {o.key_or_group for o in OverridesParser.create().parse_overrides(list(given)) if not o.is_sweep_override()}
    changes = [text.lstrip("+") for text in hydra.overrides.task]
    changes = [re.sub("['\"]", "", text) for text in changes if text.partition("=")[0] not in plain]
    if hydra.mode != RunMode.MULTIRUN or not changes:
        return cfg
    keys = {text.partition("=")[0] for text in changes}
    label = ",".join(re.sub(r"[^\w.=+-]+", "_", text) for text in changes)
    label = label if len(label) <= _LONGEST else str(hydra.job.num)
    own = _given_sweep_folder(hydra, label)
    if own or not _differs("run.dir", cfg, keys):
        cfg.run.dir = own or str(Path(cfg.run.dir) / label)
    cfg.logger.group = cfg.logger.group or cfg.run.name
    cfg.logger.tags = [*cfg.logger.tags, *(text[:_TAG] for text in changes)]
    if not _differs("run.name", cfg, keys):
        cfg.run.name = f"{cfg.run.name} {label}"
    return cfg


def _given_sweep_folder(hydra, label: str) -> str | None:
    """Return the folder of this job in the user's `hydra.sweep.dir`; None if the user has given no such folder."""
    given = {text.partition("=")[0] for text in hydra.overrides.hydra}
    if "hydra.sweep.subdir" in given:
        return str(hydra.runtime.output_dir)
    return str(Path(hydra.sweep.dir) / label) if "hydra.sweep.dir" in given else None


def _differs(key: str, cfg: Config, keys: set[str]) -> bool:
    """Return True if a value differs between the jobs.

    It does if the key is swept, or if its text refers to a swept key, to the job or to the time.
    """
    if key in keys:
        return True
    text = cfg.interpolated.get(key, "")
    if "${hydra:" in text or "${now:" in text:
        return True
    return any(_differs(other, cfg, keys) for other in re.findall(r"\$\{([\w.]+)\}", text) if other != key)
