"""Where a run begins: its folder, the checkpoint it resumes, its first weights."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ndtrain import checkpoint
from ndtrain.checkpoint import CheckpointError, DamagedCheckpoint, State
from ndtrain.config import Config, ConfigError, to_yaml, world_from_env
from ndtrain.data import Data
from ndtrain.distributed.mesh import Mesh
from ndtrain.parallel.build import Stages, initialise
from ndtrain.runtime import exit_status


def prepare_run_folder(cfg: Config, run_dir: Path) -> tuple[Path | None, State | None]:
    """On one rank, before any process group: the folder exists, can be written, and holds no run that this one would
    overwrite. Returns the checkpoint to resume, with its state. What torchrun starts again goes on where it was:
    `cfg.resume` becomes auto.

    Raises:
        ConfigError: naming `run.dir` or `resume`.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir).close()  # says what the system says, also of a read-only file system
        if cfg.resume == "none" and exit_status.is_restart(run_dir):
            cfg.resume = "auto"
        held = (run_dir / "metrics.jsonl").exists() or bool(checkpoint.list_checkpoints(run_dir / "checkpoints"))
        if cfg.resume == "none" and held:
            raise ConfigError(
                f"run.dir={run_dir} already holds a run: continue it with resume=auto, or give another run.dir"
            )
        found = _choose(cfg, run_dir)
        (run_dir / "config.yaml").write_text(to_yaml(cfg))
        exit_status.begin(run_dir)
        return found
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir} cannot be written ({error.strerror}): give another run.dir") from error


def _choose(cfg: Config, run_dir: Path) -> tuple[Path | None, State | None]:
    """The best checkpoint that `resume` may mean; nothing for a fresh start."""
    options = checkpoint.candidates(cfg.resume, run_dir)
    return _first_whole(options, cfg) if options else (None, None)


def _first_whole(options: list[Path], cfg: Config) -> tuple[Path, State]:
    """The first that is whole; damaged ones are named and, with resume=auto, passed over."""
    for path in options:
        try:
            return path, checkpoint.inspect(path, cfg.model)
        except DamagedCheckpoint as error:
            _pass_over(error, cfg)
    raise CheckpointError(
        f"resume=auto: every checkpoint in {cfg.run.dir}/checkpoints is damaged; another run.dir starts anew"
    )


def _pass_over(error: DamagedCheckpoint, cfg: Config) -> None:
    if cfg.resume != "auto":
        raise error
    if world_from_env()[0] == 0:
        print(f"warning: {error}; trying the one before it", file=sys.stderr)


def fill(
    cfg: Config, mesh: Mesh, stages: Stages, path: Path | None, state: State | None, order: dict[str, Any]
) -> tuple[Path | None, State, list[str]]:
    """Fills the stages: from rank 0's checkpoint (or, with resume=auto, an older one if its content is damaged), from a
    Hugging Face folder, or from the seed. Returns the checkpoint, if any, the state to go on from,
    and what the user is to know.

    Args:
        order: what the data order of a fresh run depends on.
    """
    if mesh.world is not None:
        chosen = [(path, state, cfg.resume)]
        dist.broadcast_object_list(chosen, src=0)
        path, state, cfg.resume = chosen[0]
    while path is not None:
        try:
            notes = checkpoint.load(path, stages, mesh)
            if mesh.rank == 0 and path.parent.resolve() == (Path(cfg.run.dir) / "checkpoints").resolve():
                checkpoint.set_aside_later(path)
            return path, state, notes
        except DamagedCheckpoint as error:
            _pass_over(error, cfg)
            older = [p for p in checkpoint.list_checkpoints(path.parent) if p.name < path.name]
            path, state = _first_whole(older, cfg)
    if cfg.init_from:
        checkpoint.load_weights(Path(cfg.init_from), stages, mesh)
    else:
        initialise(stages, cfg)
    return None, State(step=0, tokens=0, order=order), []


def order_of(cfg: Config, data: Data) -> dict[str, Any]:
    """All that the tokens of a step, and which of them count, depend on."""
    return {
        "corpus": data.fingerprint,
        "run.seed": cfg.run.seed,
        "train.seq_len": cfg.train.seq_len,
        "train.global_batch": cfg.train.global_batch,
        "data.shuffle": cfg.data.shuffle,
        "data.pack": packed_at(cfg, data),
    }


def packed_at(cfg: Config, data: Data) -> int | None:
    """The token that the documents of a sequence are told apart by; None without packing."""
    return data.eos_id if cfg.data.pack else None
