"""The start of a run: its weights, the order of its data, and the files of the starting folder that checkpoints
contain."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndtrain import checkpoint
from ndtrain.checkpoint import CheckpointError, DamagedCheckpoint, State
from ndtrain.checkpoint.companions import Companions, read_companions
from ndtrain.checkpoint.directory import read_state
from ndtrain.checkpoint.elements import damaged
from ndtrain.config import Config, ConfigError
from ndtrain.config.schema import resolved
from ndtrain.config.store import checkpoint_folder, folder_at
from ndtrain.data import Data
from ndtrain.engine.resume import as_on_rank_0, older_one, pass_over
from ndtrain.engine.setup import RunSetup
from ndtrain.mesh.mesh import Mesh
from ndtrain.parallel.build import initialise
from ndtrain.parallel.stages import Stages


@dataclass(frozen=True)
class Start:
    """The starting point of a run.

    Attributes:
        path: the checkpoint that the run resumes; None: a new run.
        state: the state to continue from.
        companions: the files of the starting folder that checkpoints contain, on rank 0.
        notes: messages for the user.
    """

    path: Path | None
    state: State
    companions: Companions
    notes: list[str]


def fill_weights(setup: RunSetup, mesh: Mesh, stages: Stages) -> Start:
    """Fill the stages from rank 0's checkpoint, from the folder `init_from`, or from the seed.

    With resume=auto, an older checkpoint is used if the content of the newest one is damaged.
    """
    cfg, resume = setup.cfg, as_on_rank_0(mesh, setup.resume)
    while resume.path is not None:
        path = resume.path
        try:
            state = resolved(resume.state)
            resets = _resets(cfg, path, stages, mesh)
            notes = checkpoint.load(path, stages, mesh, optimizer=not resets)
            if resets:
                state.reset_at = state.step - state.skipped
                notes.append(f"optim.reset: the state of optim={cfg.optim.name} starts from zero")
            companions = _resumed_companions(path, cfg, mesh)
            if mesh.rank == 0:
                setup.claim.check_checkpoints()
            if mesh.rank == 0 and path.parent.resolve() == checkpoint_folder(cfg).resolve():
                checkpoint.set_aside_later(path)
            return Start(path, state, companions, notes)
        except DamagedCheckpoint as error:
            pass_over(error, resume.how)
            resume = older_one(resume, cfg, mesh)
    companions = Companions()
    if cfg.init_from:
        folder = folder_at(cfg.init_from)
        checkpoint.load_start(folder, stages, mesh, cfg.run.seed if cfg.moe.upcycle else None)
        companions = _companions(folder, cfg, mesh)
    else:
        initialise(stages, cfg.run.seed)
    return Start(None, State(step=0, tokens=0, order=order_of(cfg, setup.data)), companions, [])


def _resets(cfg: Config, path: Path, stages: Stages, mesh: Mesh) -> bool:
    """Return True if the state of the optimizer starts from zero, because the checkpoint has other state.

    Raises:
        ConfigError: it has other state, and `optim.reset` is not set.
    """
    differs = checkpoint.other_state(path, stages, mesh)
    if differs is None or cfg.optim.reset:
        return differs is not None
    other = read_state(path)["config"].get("optim", {}).get("name", "another one")
    raise ConfigError(
        f"optim={cfg.optim.name}: {path} has the state of optim={other} ({differs} is in one of them only): set "
        "optim.reset=true to start from zero, or keep the optimizer and its keys"
    )


def _companions(folder: Path, cfg: Config, mesh: Mesh, resumed: bool = False) -> Companions:
    """Read, on rank 0, the files of the starting folder that the run's checkpoints contain.

    Args:
        resumed: True if the folder is a checkpoint, whose files are verified.

    Raises:
        CheckpointError: a file cannot be read (on every rank). The message names it.
    """
    held = [Companions()]

    def read() -> None:
        try:
            if mesh.rank == 0:
                held[0] = read_companions(folder, cfg.model, read_state(folder)["sha256"] if resumed else None)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error

    checkpoint.together(mesh, read)
    return held[0]


def _resumed_companions(path: Path, cfg: Config, mesh: Mesh) -> Companions:
    """Return the `_companions` of a checkpoint, in which every file was written by a run.

    Raises:
        DamagedCheckpoint: a file cannot be read (on every rank). The message names it.
    """
    try:
        return _companions(path, cfg, mesh, resumed=True)
    except CheckpointError as error:
        raise damaged(path, error) from error


def write_extras(data: Data, companions: Companions, folder: Path) -> None:
    """Write the further files of a checkpoint: the companions of the starting model, and the tokenizer of the data.

    If the data has another tokenizer than the companions, leave out the tokenizer of the companions and all files that
    refer to its tokens.
    """
    theirs = companions.files.get("tokenizer.json")
    if data.tokenizer and theirs is not None and not data.tokenizer.same_ids(theirs):
        companions = companions.without_tokenizer()
    companions.write(folder)
    if data.tokenizer:
        data.tokenizer.save(folder)
    if data.eos_id is not None and not companions.names_end_token():  # otherwise transformers uses Llama's
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": data.eos_id}) + "\n")


def turn_end_warning(data: Data, companions: Companions) -> str | None:
    """Return a warning if a model trained on conversations would not stop at the end of a turn, else None."""
    ends = companions.end_tokens() or {data.eos_id}
    if data.turn_ends is None or (data.turn_ends and data.turn_ends <= ends):
        return None
    if not data.turn_ends:
        return (
            "the assistant's turns end without a trained special token, so generation would not stop there: make the "
            "chat template include the token that ends a turn in {% generation %}"
        )
    token, known = min(data.turn_ends - ends), ", ".join(map(str, sorted(ends)))
    text = data.tokenizer.token(token) if data.tokenizer else ""
    return (
        f"the assistant's turns end with the token {text} ({token}), which is not among the end tokens ({known}) of "
        "generation_config.json, so generation would not stop there: add it to eos_token_id in the folder of init_from"
    )


def order_of(cfg: Config, data: Data) -> dict[str, Any]:
    """Return everything that determines the tokens of a step and their weights in the loss."""
    return {
        "corpus": data.fingerprint,
        "run.seed": cfg.run.seed,
        "train.seq_len": cfg.train.seq_len,
        "train.global_batch": cfg.train.global_batch,
        "train.batch_ramp": cfg.train.batch_ramp or None,
        "data.shuffle": cfg.data.shuffle,
        "data.pack": _told_apart_by(data) if cfg.data.pack else None,
    }


def _told_apart_by(data: Data) -> int | str:
    return "index" if data.eos_id is None else data.eos_id
