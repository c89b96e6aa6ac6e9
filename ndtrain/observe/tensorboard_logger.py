"""TensorBoard event files, written with `torch.utils.tensorboard`. They need the optional package tensorboard."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ndtrain.config import Config, ConfigError, to_yaml
from ndtrain.plugins import register_logger


@register_logger("tensorboard")
class TensorBoardLogger:
    """Logs rows to event files in `<run_dir>/tensorboard`. A failed write is passed to `warn` once; after that nothing
    is logged.

    Attributes:
        where: the folder, for `tensorboard --logdir`.
    """

    def __init__(self, cfg: Config, run_dir: Path, warn: Callable[[str], None]):
        from torch.utils.tensorboard import SummaryWriter  # optional and slow to import

        self._warn, self._off = warn, False
        self.where = str(run_dir / "tensorboard")
        self._make = lambda step: SummaryWriter(self.where, purge_step=step)
        self._writer: Any = None  # made at the first row, because it needs the step
        self._config = to_yaml(cfg)

    @staticmethod
    def check(cfg: Config) -> None:
        """Refuse a run if the package is missing.

        Raises:
            ConfigError: names the command that installs the package.
        """
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "logger=tensorboard: the package tensorboard is not installed: pip install 'ndtrain[tensorboard]', or "
                "pip install tensorboard"
            )

    def log(self, row: dict[str, Any]) -> None:
        """Log the numbers of `row` at `row["step"]`. A resumed run repeats steps: TensorBoard hides the older files'
        values from the first new step on."""
        numbers = {key: float(value) for key, value in row.items() if key != "step" and value is not None}
        self._write(row["step"], lambda writer: [writer.add_scalar(*item, row["step"]) for item in numbers.items()])

    def samples(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Log texts, given as (prompt, continuation written by the model)."""
        named = [(f"sample {i}", f"**{prompt}**{text}") for i, (prompt, text) in enumerate(texts)]
        self._write(step, lambda writer: [writer.add_text(*item, step) for item in named])

    def _write(self, step: int, write: Callable[[Any], object]) -> None:
        if self._off:
            return
        try:
            if self._writer is None:
                self._writer = self._make(step)
                self._writer.add_text("config", f"```\n{self._config}\n```", step)
            write(self._writer)
        except Exception as error:
            self._off = True
            self._warn(f"tensorboard failed at step {step} and is now off: {error}")

    def finish(self, exit_code: int = 0) -> None:
        """Flush and close the event file. A second call does nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
