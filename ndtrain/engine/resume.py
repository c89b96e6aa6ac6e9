"""The choice of the checkpoint that a run resumes. Rank 0 makes it, and all ranks follow it."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ndtrain import checkpoint
from ndtrain.checkpoint import CheckpointError, DamagedCheckpoint, State
from ndtrain.config import Config, ConfigError, world_from_env
from ndtrain.config.schema import resolved
from ndtrain.config.store import checkpoint_folder, folder_at
from ndtrain.mesh.json_messages import broadcast_json
from ndtrain.mesh.mesh import Mesh


class Resume(NamedTuple):
    """The checkpoint that a run resumes.

    Attributes:
        path, state: the checkpoint and its state; None: a new run.
        how: the value of `resume`, or auto if torchrun has restarted the run.
    """

    path: Path | None
    state: State | None
    how: str


def choose(cfg: Config, how: str) -> Resume:
    """Return the best checkpoint that `resume=how` can refer to, on rank 0."""
    options = checkpoint.candidates(how, checkpoint_folder(cfg))
    return _first_whole(options, cfg, how) if options else Resume(None, None, how)


def _first_whole(options: list[Path], cfg: Config, how: str) -> Resume:
    """Return the first undamaged checkpoint. With resume=auto, print a warning for each damaged one and skip it."""
    for path in options:
        try:
            return Resume(path, checkpoint.inspect(path, cfg.model), how)
        except DamagedCheckpoint as error:
            pass_over(error, how)
    raise CheckpointError(
        f"resume=auto: every checkpoint in {cfg.run.dir}/checkpoints is damaged: use another run.dir to start a new run"
    )


def pass_over(error: DamagedCheckpoint, how: str) -> None:
    """Warn about a damaged checkpoint with resume=auto, otherwise raise the error."""
    if how != "auto":
        raise error
    if world_from_env()[0] == 0:
        print(f"warning: {error}; trying the checkpoint before it", file=sys.stderr)


def require_steps_left(cfg: Config, resume: Resume) -> None:
    """Refuse a planned end before the checkpoint. If it ends exactly there, the run is complete."""
    t = cfg.train
    key, last = ("train.stop_at", t.stop_at) if t.stop_at else ("train.steps", t.steps)
    end = f"{key}={last}"
    if key == "train.steps" and t.epochs is not None:
        key, end = "train.epochs", f"train.epochs={t.epochs:g} (train.steps={last})"
    if resume.state is not None and resume.state.step > last:
        raise ConfigError(
            f"{end}: the run is already at step {resume.state.step} ({resume.path}): raise {key} to train on, or give "
            "another run.dir"
        )


def older_one(resume: Resume, cfg: Config, mesh: Mesh) -> Resume:
    """Return the newest undamaged checkpoint before a damaged one, as rank 0 chooses it.

    The other ranks might not be able to read the same files.

    Raises:
        CheckpointError: there is no older checkpoint (on every rank).
    """
    chosen = [resume]

    def look() -> None:
        if mesh.rank == 0:
            chosen[0] = _first_whole(checkpoint.older_checkpoints(resolved(resume.path)), cfg, resume.how)

    checkpoint.together(mesh, look)
    return as_on_rank_0(mesh, chosen[0])


def as_on_rank_0(mesh: Mesh, resume: Resume) -> Resume:
    """Return the choice of rank 0."""
    if mesh.world is None:
        return resume
    path, state, how = resume
    message = {"path": path and str(path), "state": state and asdict(state), "resume": how}
    return _chosen(broadcast_json(message, mesh.world, mesh.device))


def _chosen(message: Any) -> Resume:
    """Return the choice in rank 0's message.

    Raises:
        ValueError: the message has another form.
    """
    match message:
        case {"path": None, "state": None, "resume": str(how)}:
            return Resume(None, None, how)
        case {"path": str(path), "state": dict(state), "resume": str(how)} if _is_state(state):
            return Resume(folder_at(path), State(**state), how)
    raise ValueError("rank 0 sent a message that names no checkpoint")


def _is_state(state: dict[str, Any]) -> bool:
    """Return True if `state` is a `State` as a dict."""
    match state:
        case {
            "step": int(), "tokens": int(), "order": dict(), "skipped": int(), "stream": None | dict(),
            "reset_at": int(), **rest,
        }:  # fmt: skip
            return not rest
    return False
