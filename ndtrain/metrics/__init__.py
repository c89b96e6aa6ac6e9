"""Metrics of a run: metrics.jsonl, wandb and the console. Rank 0 alone makes a `Metrics`."""

import atexit
from pathlib import Path

from ndtrain.config import Config
from ndtrain.config.registry import get
from ndtrain.metrics.console import Console
from ndtrain.metrics.jsonl import JsonlWriter
from ndtrain.metrics.memory import free_memory_bytes, keep_freed_memory, peak_memory_bytes, reset_peak_memory
from ndtrain.metrics.peak import peak_flops

__all__ = ["Metrics", "free_memory_bytes", "keep_freed_memory", "peak_flops", "peak_memory_bytes", "reset_peak_memory"]


class Metrics:
    """Derives rates from what the loop measures and sends one row a step everywhere it belongs.

    Args:
        cfg: the resolved run.
        run_dir: folder of the run, which exists.
        start_step: steps done before this process; rows after it are dropped from an older metrics.jsonl.
        flops_per_token: model FLOPs a token (`cost.flops_per_token`), for MFU.
        hardware_flops_per_token: FLOPs a token with recompute, for HFU.
        peak_flops_per_device: FLOP/s (`peak_flops`).
        world_size: devices of the run.
        resume: whether metrics.jsonl is continued; if not, it starts afresh.

    Raises:
        OSError: metrics.jsonl cannot be opened.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        start_step: int,
        flops_per_token: float,
        hardware_flops_per_token: float,
        peak_flops_per_device: float,
        world_size: int,
        resume: bool,
    ):
        self._flops = flops_per_token
        self._hardware_flops = hardware_flops_per_token
        self._peak = peak_flops_per_device
        self._world_size = world_size
        self._disk_trouble = False
        self._jsonl = JsonlWriter(run_dir / "metrics.jsonl", start_step if resume else 0)
        self._console = Console(cfg.train.stop_at or cfg.train.steps, cfg.train.log_every)
        name = cfg.logger.name
        self._logger = get("logger", name)(cfg, run_dir, self.warn) if name != "jsonl" else None
        if where := getattr(self._logger, "where", None):
            self.note(f"{name}: {where}")
        self._closed = False
        # After wandb's own exit hook, hence run before it. Who gets here without close() did not end well.
        atexit.register(self.close, exit_code=1)

    def log(
        self,
        step: int,
        loss: float,
        grad_norm: float | None,
        lr: float,
        tokens: int,
        step_tokens: int,
        step_time_s: float,
        data_wait_s: float,
        peak_memory_bytes: int,
        **extra: float,
    ) -> None:
        """Records one step.

        Args:
            step: counted from 1.
            loss: mean over the global batch's tokens, before the update.
            grad_norm: global norm before clipping.
            lr: learning rate of the update.
            tokens: of the run so far, this step included.
            step_tokens: of this step over the whole mesh.
            step_time_s: wall time of the step.
            data_wait_s: the part of it that waited for data.
            peak_memory_bytes: maximum over ranks.
            extra: further numbers, written after the others to metrics.jsonl and wandb.
        """
        rate = step_tokens / step_time_s
        device_rate = rate / self._world_size
        row = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": device_rate,
            "tflops_per_device": device_rate * self._flops / 1e12,
            "mfu": device_rate * self._flops / self._peak,
            "hfu": device_rate * self._hardware_flops / self._peak,
            "step_time_s": step_time_s,
            "data_wait_s": data_wait_s,
            "peak_memory_bytes": peak_memory_bytes,
            **extra,
        }
        self._write(row)
        if self._logger:
            self._logger.log(row)
        self._console.update(row)

    def note(self, text: str) -> None:
        """Prints a line, above the progress bar where there is one."""
        self._console.note(text)

    def warn(self, text: str) -> None:
        """Prints a line marked as a warning."""
        self._console.warn(text)

    def close(self, exit_code: int = 0) -> None:
        """Ends the bar, the wandb run (with the status of the training) and the file. Call it on every way out: a
        second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._console.close()
        if self._logger:
            self._logger.finish(exit_code)
        self._jsonl.close()

    def _write(self, row: dict) -> None:
        """To metrics.jsonl. A full disk is said once, and rows wait for room while the training goes on."""
        try:
            self._jsonl.write(row)
            self._disk_trouble = False
        except OSError as error:
            if not self._disk_trouble:
                self.warn(f"metrics.jsonl: {error}; rows are kept in memory until they can be written")
            self._disk_trouble = True
