"""The wandb run of a training. wandb never prompts, never blocks for long and never stops the training."""

import math
import netrc
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from ndtrain.config import Config
from ndtrain.observe.jsonl import read_rows
from ndtrain.plugins import register_logger

_INIT_TIMEOUT_S = 15.0  # longest delay of the start if the server does not answer
_FINISH_TIMEOUT_S = 60.0  # longest delay of the end; `wandb sync` uploads the rest


@register_logger("wandb")
class WandbLogger:
    """Logs rows to a wandb run in `<run_dir>/wandb`. Its id is kept in `<run_dir>/wandb_id` across resumes.

    It logs online if the user is logged in (an API key in the environment, in wandb's settings or in netrc) and
    WANDB_MODE allows it, otherwise offline. An error in wandb is passed to `warn` as one line; after that nothing is
    logged.

    Attributes:
        where: the URL of the run, or its folder when offline; None if wandb is off.
    """

    def __init__(self, cfg: Config, run_dir: Path, warn: Callable[[str], None]):
        self._warn = warn
        self._run = None
        self.where: str | None = None
        self._best = best_evaluation(run_dir / "metrics.jsonl")
        try:
            self._run = self._start(cfg, run_dir)
            self.where = None if self._run.disabled else self._run.url or self._run.settings.sync_dir
        except Exception as error:
            warn(f"wandb is off: {_one_line(error)}")

    def log(self, row: dict[str, Any]) -> None:
        """Log `row` at `row["step"]`; an online run drops a step it already has. The run's summary holds the lowest
        evaluation loss and its step, including steps before a resume."""
        if self._run is None:
            return
        try:
            self._run.log(row, step=row["step"], commit=True)
            self._best = min(self._best, evaluation_of(row))
            if self._best == evaluation_of(row) != NO_EVALUATION:
                self._run.summary.update({"best_eval_loss": self._best[0], "best_eval_step": self._best[1]})
        except Exception as error:
            self._run = None
            self._warn(f"wandb failed at step {row['step']} and is now off: {_one_line(error)}")

    def samples(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Log a table of (prompt, text). It belongs to the row of `step`, which is logged after it."""
        if self._run is None:
            return
        try:
            import wandb

            table = wandb.Table(columns=["step", "prompt", "text"], data=[[step, *pair] for pair in texts])
            self._run.log({"samples": table}, step=step, commit=False)
        except Exception as error:
            self._warn(f"wandb could not log the samples of step {step}: {_one_line(error)}")

    def finish(self, exit_code: int = 0) -> None:
        """Flush and end the run. A second call does nothing, even if a signal interrupted the first."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=exit_code)
        except Exception as error:
            self._warn(f"wandb did not finish: {_one_line(error)}")

    def _start(self, cfg: Config, run_dir: Path) -> Any:
        """Start the wandb run with the user's settings, or offline if that fails."""
        import wandb  # slow to import, and optional: a broken installation must not stop a run

        settings = _settings(wandb)
        mode = _mode(wandb.setup(settings=settings).settings, self._warn)
        arguments = {
            "project": cfg.logger.project,
            "entity": cfg.logger.entity,
            "group": cfg.logger.group,
            "tags": list(cfg.logger.tags) or None,
            "name": cfg.run.name,
            "dir": str(run_dir),
            "id": _run_id(run_dir / "wandb_id"),
            "resume": "allow",
            "config": OmegaConf.to_container(OmegaConf.structured(cfg), resolve=True),
            "allow_val_change": True,  # a resumed run may change its mesh
            "settings": settings,
        }
        try:
            return wandb.init(mode=mode, **arguments)
        except Exception as error:
            if mode == "offline":
                raise
            self._warn(f"wandb logs offline, upload later with `wandb sync`: {_one_line(error)}")
            wandb.teardown(exit_code=1)  # its service still has the run's id
            wandb.setup(settings=settings)
            return wandb.init(mode="offline", **arguments)


NO_EVALUATION = (float("inf"), 0)


def evaluation_of(row: dict[str, Any]) -> tuple[float, int]:
    """Return (evaluation loss, step) of a row, or (infinity, 0) if the row has no finite evaluation loss."""
    loss = row.get("eval_loss")
    return (float(loss), int(row["step"])) if loss is not None and math.isfinite(loss) else NO_EVALUATION


def best_evaluation(path: Path) -> tuple[float, int]:
    """Return the lowest evaluation loss in a metrics.jsonl and its step, in the form of `evaluation_of`."""
    return min(map(evaluation_of, read_rows(path)), default=NO_EVALUATION)


def _settings(wandb: Any) -> Any:
    """Return wandb's settings: no output, short timeouts, no capture of stdout (the progress bar uses it). Leaves out
    settings that an older wandb lacks."""
    wanted = {
        "silent": True,
        "console": "off",
        "init_timeout": _INIT_TIMEOUT_S,
        "login_timeout": _INIT_TIMEOUT_S,
        "finish_timeout": _FINISH_TIMEOUT_S,
    }
    return wandb.Settings(**{key: value for key, value in wanted.items() if key in wandb.Settings.model_fields})


def _mode(settings: Any, warn: Callable[[str], None]) -> str | None:
    """Return the argument `mode` of `wandb.init`. Return None if the user's setting applies. Without credentials it is
    always offline, because an online run would prompt for them."""
    if settings.mode in ("offline", "dryrun", "disabled") or _logged_in(settings):
        return None
    if os.environ.get("WANDB_MODE"):
        warn(f"WANDB_MODE={settings.mode} but wandb has no API key (`wandb login`): logging offline")
    return "offline"


def _logged_in(settings: Any) -> bool:
    """Return True if there are credentials for the server in the places where wandb looks for them."""
    if settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    for path in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(Path(path).expanduser()).authenticators(urlsplit(settings.base_url).netloc):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _run_id(path: Path) -> str:
    """Return the id of the run, stored in `path`. The first start creates it."""
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


def _one_line(error: BaseException) -> str:
    """Return the first line of the error's text, or the name of its type."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
