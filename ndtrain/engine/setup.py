"""The setup of a run before its ranks compute together: configuration, run folder, process group and data."""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path

import torch
import torch.distributed as dist

from ndtrain import checkpoint
from ndtrain.config import (
    DATA_AXES,
    TOKEN_SOURCES,
    Config,
    ConfigError,
    first_rank_of_host,
    log_name,
    resolve,
    resolve_epochs,
    saved_run,
    to_yaml,
    world_from_env,
)
from ndtrain.config.schema import resolved
from ndtrain.config.store import checkpoint_folder, folder_at, in_store
from ndtrain.data import Data, open_data
from ndtrain.device.gpu import own_gpu, use_gpu
from ndtrain.device.heartbeat import DEAD_S
from ndtrain.engine.memory_check import require_memory
from ndtrain.engine.resume import Resume, choose, require_steps_left
from ndtrain.engine.threads import set_threads
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.model.objective import column_names
from ndtrain.observe import grow_segments, keep_freed_memory
from ndtrain.optim.lr_schedule import idle_steps
from ndtrain.run import descriptors, exit_status, folder_lock, rendezvous, shared_config, stop_signals
from ndtrain.run.failure_report import record_failure
from ndtrain.run.folder_lock import Claim
from ndtrain.run.launcher_report import tell_run_folder
from ndtrain.run.refused_start import left_as_found
from ndtrain.run.shared_config import Written
from ndtrain.run.signed_store import SignedStore

log = logging.getLogger("ndtrain")
log.addHandler(logging.NullHandler())  # avoids printing an error twice before there is a log file


@dataclass(frozen=True)
class RunSetup:
    """The state of a rank before it computes with the other ranks.

    Attributes:
        cfg: the resolved and frozen configuration, the same on every rank.
        claim: the claim to the run folder; on rank 0 the lock, which `release` releases.
        resume: the checkpoint to resume, as rank 0 has chosen it; the other ranks know of none.
        notes: messages for the user.
        meeting: the store of the ranks' messages; None: there is only one rank.
    """

    cfg: Config
    rank: int
    world: int
    run_dir: Path
    claim: Claim
    resume: Resume
    notes: list[str]
    data: Data
    device: torch.device
    meeting: rendezvous.Meeting | None


def prepare(cfg: Config) -> RunSetup:
    """Prepare the run up to the process group, including all checks that one rank can do alone.

    Raises:
        ConfigError: the run cannot start; the message is one line.
    """
    rank, local_rank, world = world_from_env()
    notes, written = [], Written.of(cfg)
    if cfg.init_from and not cfg.frozen:
        replaced = _replace_lost_folder(cfg)
        cfg, notes = model_of_folder(cfg, rank)
        notes += replaced
    cfg = resolve(cfg, world)
    descriptors.require(rendezvous.backend_of(_kind(cfg)), rank, world, _group_sizes(cfg))
    notes, noted = notes + cfg.notes, len(cfg.notes)
    resume, meeting = Resume(None, None, cfg.resume), None
    timeout_s = cfg.hardware.timeout_s
    with ExitStack() as undo:
        if rank == 0:
            undo.enter_context(left_as_found(Path(cfg.run.dir)))
            claim, resume = take_run_folder(cfg, Path(cfg.run.dir))
            undo.callback(claim.release)
            undo.enter_context(record_failure(Path(cfg.run.dir)))
        if world > 1:
            patience_s = timeout_s + DEAD_S  # rank 0 may have to wait for the run folder
            meeting = rendezvous.meet(rank, world, patience_s)
            if rank == 0:
                shared_config.publish(meeting.messages, world, cfg, written, claim.as_message(), patience_s)
            else:
                cfg, claimed = shared_config.adopt(meeting.messages, rank, cfg, written, patience_s)
                claim = Claim.from_message(claimed)
                undo.callback(claim.release)
                undo.enter_context(record_failure(Path(cfg.run.dir)))
        if local_rank == 0:
            tell_run_folder(Path(cfg.run.dir))
        if rank == 0:
            _log_to(Path(cfg.run.dir), rank)
        else:
            undo.enter_context(_log_unless_refused(Path(cfg.run.dir), rank))
        device = device_of(cfg, local_rank)
        set_threads(cfg, device)
        require_memory(cfg, device, _ranks_of_host())
        data = open_data(cfg)
        cfg = _plan_epochs(cfg, data, rank, resume)
        notes += cfg.notes[noted:]
        _check_validation(cfg, data)
        check_columns(cfg, data)
        _check_samples(cfg, data)
        notes += data.warnings(cfg)
        if idle := idle_steps(cfg.optim, cfg.train.steps, cfg.train.stop_at or cfg.train.steps):
            notes.append(idle)
        keep_freed_memory()
        meeting = meet(cfg, rank, world, device, meeting)
        undo.pop_all()
    if rank > 0:
        _log_to(Path(cfg.run.dir), rank)
    return RunSetup(cfg, rank, world, Path(cfg.run.dir), claim, resume, notes, data, device, meeting)


def meet(
    cfg: Config, rank: int, world: int, device: torch.device, meeting: rendezvous.Meeting | None = None
) -> rendezvous.Meeting | None:
    """Create the process group of all ranks, and return the result of `rendezvous.join`.

    Return None if there is only one rank.

    Args:
        meeting: the result of `rendezvous.meet`; None: the ranks meet here, if they have to.

    Raises:
        ConfigError: two ranks have the same GPU.
    """
    if world == 1:
        return None
    if device.type == "cuda":
        meeting = meeting or rendezvous.meet(rank, world, cfg.hardware.timeout_s)
        _require_own_gpu(meeting.messages, rank, world, cfg.hardware.timeout_s)
    return rendezvous.join(rendezvous.backend_of(device.type), rank, world, cfg.hardware.timeout_s, device, meeting)


def _replace_lost_folder(cfg: Config) -> list[str]:
    """Replace the folder `init_from` by the checkpoint to resume, if the folder no longer exists.

    The checkpoint contains the model and its companion files. Return messages for the user.
    """
    lost, run_dir = resolved(cfg.init_from), Path(cfg.run.dir)
    if folder_at(lost).exists():
        return []
    resume = "auto" if cfg.resume == "none" and exit_status.is_restart(run_dir) else cfg.resume
    options = checkpoint.candidates(resume, checkpoint_folder(cfg))
    if not options:
        return []
    cfg.init_from = str(options[0])
    if cfg.data.tokenizer == lost:
        cfg.data.tokenizer = cfg.init_from
    return [f"init_from={lost} no longer exists: the model and its files are read from the checkpoint {options[0]}"]


def save_config(setup: RunSetup) -> None:
    """Write config.yaml in one rename.

    Call this on rank 0, when the run can no longer be refused. A refused run must leave the file unchanged, and other
    ranks may read it until the ranks have met.

    Raises:
        ConfigError: the file cannot be written.
        FolderLost: another run has taken over the run folder.
    """
    setup.claim.check()
    cfg, run_dir = setup.cfg, setup.run_dir
    part = run_dir / f"{saved_run.NAME}.{os.getpid()}"
    try:
        part.write_text(to_yaml(cfg))
        part.replace(run_dir / saved_run.NAME)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise _unwritable(run_dir, error) from error


def _unwritable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.dir={run_dir} cannot be written ({error.strerror}): give another run.dir")


def model_of_folder(cfg: Config, rank: int) -> tuple[Config, list[str]]:
    """Return the configuration with the model of the folder `init_from`, and messages for the user.

    Rank 0 checks the files of the folder.
    """
    folder = checkpoint.model_folder(cfg.init_from)
    cfg.init_from = str(folder)  # the run's records name the checkpoint rather than its run folder
    held = checkpoint.read_model(folder)
    cfg.model = checkpoint.starting_model(cfg, held)
    if cfg.data.name == "chat" and cfg.data.tokenizer in ("byte", "bpe"):
        cfg.data.tokenizer = str(folder)
    notes = checkpoint.check_folder(folder, held) if rank == 0 else []
    trained = cfg.data.tokenizer in ("byte", "bpe") and cfg.data.name not in TOKEN_SOURCES
    if trained and (folder / "tokenizer.json").exists():
        notes.append(
            f"data.tokenizer={cfg.data.tokenizer} is not the tokenizer of the weights in init_from={folder}: set "
            f"data.tokenizer={folder} to use theirs"
        )
    return cfg, notes


def _plan_epochs(cfg: Config, data: Data, rank: int, resume: Resume) -> Config:
    """Return the configuration with `train.steps` computed from `train.epochs`."""
    if cfg.train.epochs is None:
        return cfg
    cfg = resolve_epochs(cfg, data.epoch_sequences(cfg))
    if rank == 0:
        require_steps_left(cfg, resume)
    return cfg


def _check_validation(cfg: Config, data: Data) -> None:
    if cfg.train.eval_every and not data.validation:
        raise ConfigError(
            f"train.eval_every={cfg.train.eval_every}: there is no validation data: raise data.validation="
            f"{cfg.data.validation:g}, the fraction of documents held out (token files without documents need "
            "data.validation_path, a stream data.eval_split), or set train.eval_every=0"
        )


def check_columns(cfg: Config, data: Data) -> None:
    """Check that the data has the columns that the objective reads.

    Raises:
        ConfigError: a column is missing.
    """
    wanted = column_names(cfg.objective)
    if missing := [name for name in wanted if name not in data.columns]:
        raise ConfigError(
            f"objective={cfg.objective.name}: data={cfg.data.name} has no {', '.join(missing)}: use data=chat, whose "
            "rows may have weights, or objective=cross_entropy"
        )


def _check_samples(cfg: Config, data: Data) -> None:
    if not cfg.train.sample_every:
        return
    every = f"train.sample_every={cfg.train.sample_every}"
    if data.tokenizer is None:
        raise ConfigError(
            f"{every}: the data has no tokenizer to decode text: set it to 0, or prepare the data with a tokenizer"
        )
    if not cfg.train.sample_prompts:
        raise ConfigError(f"{every}: train.sample_prompts is empty: set at least one prompt")


def _group_sizes(cfg: Config) -> list[int]:
    """Return the sizes of a rank's process groups: of each axis, and of the data axes together."""
    spec = MeshSpec.of(cfg.mesh)
    several = sum(spec.size(axis) > 1 for axis in DATA_AXES) > 1
    return [*(spec.size(axis) for axis in spec.order), *[spec.size(*DATA_AXES)] * several]


def _kind(cfg: Config) -> str:
    """Return "cpu" or "cuda"."""
    if cfg.hardware.device != "auto":
        return cfg.hardware.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_of(cfg: Config, local_rank: int) -> torch.device:
    """Return the device of this rank. A GPU becomes the current device of the process.

    Raises:
        ConfigError: the machine has no such device, or fewer GPUs than ranks.
    """
    kind = _kind(cfg)
    if kind == "cpu":
        if cfg.hardware.attention != "auto":
            raise ConfigError(
                f"hardware.attention={cfg.hardware.attention} is a GPU kernel, but this run is on the CPU: "
                "set it to auto"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "hardware.device=cuda: this machine has no CUDA device that torch can use; set it to cpu or auto"
        )
    here, gpus, index = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count(), own_gpu(local_rank)
    if index is None or here > gpus > 1:
        raise ConfigError(f"{here} ranks on this host but {gpus} GPUs: lower --nproc-per-node to {gpus}")
    device = torch.device("cuda", index)
    grow_segments()
    use_gpu(device)
    return device


def _require_own_gpu(messages: SignedStore, rank: int, world: int, timeout_s: float) -> None:
    """Refuse ranks that see only one GPU, if it is the same GPU. Call this on every rank; rank 0 compares.

    Args:
        messages: the messages of all ranks.
        timeout_s: seconds that rank 0 waits for the other ranks.

    Raises:
        ConfigError: two ranks see the same GPU (on rank 0).
        dist.DistError: a rank has not sent the id of its GPU (on rank 0).
    """
    sees_one = torch.cuda.device_count() == 1
    uuid = str(torch.cuda.get_device_properties(0).uuid) if sees_one else ""
    messages.put(f"gpu/{rank}", uuid)
    if rank > 0:
        return
    owners: dict[str, int] = {}
    gpus = messages.wait_all([f"gpu/{r}" for r in range(world)], timeout_s)
    for other in range(world):
        if (gpu := gpus.get(f"gpu/{other}")) is None:
            raise dist.DistStoreError(f"rank {other} did not report its GPU within {timeout_s:g} s")
        if gpu and gpu in owners:
            raise ConfigError(
                f"ranks {owners[gpu]} and {other} see only one GPU, and the same one ({gpu}): lower --nproc-per-node "
                "to the number of GPUs, or give each task its own GPU (srun --gpus-per-task=1)"
            )
        owners[str(gpu)] = other


def _ranks_of_host() -> range:
    """Return the ranks of this host."""
    first = first_rank_of_host()
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextmanager
def _log_unless_refused(run_dir: Path, rank: int) -> Iterator[None]:
    """Keep log lines in memory until `_log_to`, and drop them if the run is refused, which then leaves no file.

    Any error other than ConfigError opens the log.
    """
    _replace_handlers(MemoryHandler(10_000))
    try:
        yield
    except Exception as error:
        if not isinstance(error, ConfigError):
            _log_to(run_dir, rank)
        raise


def _log_to(run_dir: Path, rank: int) -> None:
    """Open the log file of this host in the run folder. All its ranks append lines to it."""
    folder = run_dir / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(folder / log_name())
    except OSError:
        handler = logging.NullHandler()  # rank 0 reports a folder that cannot be written
    handler.handleError = lambda record: None  # on a full disk every line would print a traceback
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    _replace_handlers(handler)


def _replace_handlers(handler: logging.Handler) -> None:
    """Send log lines only to `handler`, including the lines that were kept in memory."""
    for old in log.handlers[:]:
        log.removeHandler(old)
        if isinstance(old, MemoryHandler):
            old.setTarget(handler)
            old.close()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def take_run_folder(cfg: Config, run_dir: Path) -> tuple[Claim, Resume]:
    """Make this run the owner of its folder, on rank 0.

    Return the lock and the checkpoint to resume. A run that torchrun has restarted continues as with resume=auto.

    Raises:
        ConfigError: the folder cannot be written, has another live owner, or contains a run that this run would
            overwrite; or there is no checkpoint to resume. The message names `run.dir` or `resume`.
    """
    with ExitStack() as undo:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(
                dir=run_dir
            ) as trial:  # raises the system's error, also on a read-only file system
                now = os.fstat(trial.fileno()).st_mtime
            how = "auto" if cfg.resume == "none" and exit_status.is_restart(run_dir) else cfg.resume
            _check_new(how, cfg)
            claim = folder_lock.acquire(run_dir)
            undo.callback(claim.release)
            claim.checkpoints = _lock_in_store(checkpoint_folder(cfg))
            _check_new(how, cfg)
            resume = choose(cfg, how)
            if cfg.train.epochs is None:
                require_steps_left(cfg, resume)
            stop = run_dir / stop_signals.STOP_FILE
            if not exit_status.is_restart(run_dir) and stop_signals.remove_stale(stop, now):
                print(f"removed {stop}, which was left by an earlier run", file=sys.stderr)
            exit_status.begin(run_dir)
        except OSError as error:
            raise _unwritable(run_dir, error) from error
        undo.pop_all()
    return claim, resume


def _lock_in_store(folder: Path) -> folder_lock.FolderLock | None:
    if not in_store(folder):
        return None
    try:
        return folder_lock.acquire(folder)
    except OSError as error:
        raise ConfigError(
            f"checkpoint.folder={folder} cannot be written ({error.strerror}): give another one"
        ) from error


def _check_new(resume: str, cfg: Config) -> None:
    """Refuse a folder that contains a run, unless this run resumes."""
    if resume != "none":
        return
    run_dir, folder = Path(cfg.run.dir), cfg.checkpoint.folder
    held = _holds_checkpoints(cfg)
    if (run_dir / "metrics.jsonl").exists() or (held and not folder):
        raise ConfigError(
            f"run.dir={run_dir} already holds a run: continue it with resume=auto, or give another run.dir"
        )
    if held:
        raise ConfigError(
            f"checkpoint.folder={folder} already holds checkpoints: continue with resume=auto, or give another folder"
        )


def _holds_checkpoints(cfg: Config) -> bool:
    try:
        return bool(checkpoint.list_checkpoints(checkpoint_folder(cfg)))
    except OSError as error:
        folder = cfg.checkpoint.folder
        raise ConfigError(f"checkpoint.folder={folder} cannot be read: {error.strerror or error}") from error
