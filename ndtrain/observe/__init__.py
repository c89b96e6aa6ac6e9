"""Metrics of a run: metrics.jsonl, the loggers and the console. Only rank 0 creates a `Metrics`."""

import atexit
import json
from collections.abc import Sequence
from pathlib import Path

from ndtrain.config import Config
from ndtrain.device.memory import (
    free_memory_bytes,
    grow_segments,
    keep_freed_memory,
    peak_memory_bytes,
    reset_peak_memory,
)
from ndtrain.device.peak import peak_flops
from ndtrain.observe.console import Console
from ndtrain.observe.jsonl import JsonlWriter
from ndtrain.observe.loggers import make_loggers

__all__ = [
    "Metrics", "free_memory_bytes", "grow_segments", "keep_freed_memory", "peak_flops", "peak_memory_bytes",
    "reset_peak_memory",
]  # fmt: skip


class Metrics:
    """Derives rates from the measurements of each step. Writes one row per step to metrics.jsonl, the loggers and the
    console.

    Args:
        cfg: the resolved configuration.
        run_dir: the run folder, which exists.
        start_step: steps completed before this process; later rows of an existing metrics.jsonl are dropped. None: they
            are dropped when the first step is written.
        flops_per_token: model FLOPs per token (`model.flops`), for MFU.
        hardware_flops_per_token: FLOPs per token including recompute, for HFU.
        peak_flops_per_device: FLOP/s (`peak_flops`).
        world_size: number of devices.
        resume: if True, continue metrics.jsonl; otherwise overwrite it.

    Raises:
        OSError: metrics.jsonl cannot be opened.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        start_step: int | None,
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
        self._write_failed = False
        self._samples = run_dir / "samples.jsonl"
        self._jsonl = JsonlWriter(run_dir / "metrics.jsonl", start_step if resume or start_step is None else 0)
        self._console = Console(cfg.train.stop_at or cfg.train.steps, cfg.train.log_every)
        self._loggers = make_loggers(cfg, run_dir, self.warn)
        for name, logger in self._loggers.items():
            if where := getattr(logger, "where", None):
                self.note(f"{name}: {where}")
        self._closed = False
        # Exit hooks run in reverse order, so this runs before wandb's. A run that has not called close() has failed.
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
        """Record one step.

        Args:
            step: counted from 1.
            loss: mean over the tokens of the global batch, before the update.
            grad_norm: global norm before clipping.
            lr: learning rate of the update.
            tokens: tokens of the run so far, including this step.
            step_tokens: tokens of this step over the whole mesh.
            step_time_s: wall time of the step in seconds.
            data_wait_s: the part of `step_time_s` spent waiting for data.
            peak_memory_bytes: maximum over ranks.
            extra: further numbers, appended to the row in metrics.jsonl and the loggers.
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
        for logger in self._loggers.values():
            logger.log(row)
        self._console.update(row)

    def samples(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Record texts generated after a step, in samples.jsonl and in the loggers that have a `samples` method.

        Args:
            texts: (prompt, continuation).
        """
        try:
            with open(self._samples, "a") as file:
                for prompt, text in texts:
                    file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        except OSError as error:
            self.warn(f"samples.jsonl: {error}")
        for logger in self._loggers.values():
            if hasattr(logger, "samples"):
                logger.samples(step, texts)

    def note(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self._console.note(text)

    def warn(self, text: str) -> None:
        """Print a line marked as a warning."""
        self._console.warn(text)

    def close(self, exit_code: int = 0) -> None:
        """End the progress bar and the loggers' runs, and close metrics.jsonl. A second call does nothing.

        Args:
            exit_code: the exit status of the training, for the loggers.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._console.close()
        for logger in self._loggers.values():
            logger.finish(exit_code)
        self._jsonl.close()

    def _write(self, row: dict) -> None:
        """Write a row to metrics.jsonl. If the disk is full, warn once and keep the rows in memory until a later write
        succeeds."""
        try:
            self._jsonl.write(row)
            self._write_failed = False
        except OSError as error:
            if not self._write_failed:
                self.warn(f"metrics.jsonl: {error}; rows are kept in memory until they can be written")
            self._write_failed = True
