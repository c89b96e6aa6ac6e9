"""What a run does before its first step: resolve, take a run folder, meet the ranks, open the data, fill weights."""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndtrain import checkpoint
from ndtrain.checkpoint import CheckpointError, DamagedCheckpoint, State
from ndtrain.checkpoint.companions import Companions, read_companions
from ndtrain.checkpoint.directory import read_state
from ndtrain.checkpoint.elements import damaged
from ndtrain.config import (
    AXES,
    TOKEN_SOURCES,
    Config,
    ConfigError,
    resolve,
    resolve_epochs,
    saved_run,
    to_yaml,
    world_from_env,
)
from ndtrain.config.schema import resolved
from ndtrain.data import Data, open_data
from ndtrain.data.token_array import Packing
from ndtrain.device.gpu import own_gpu, use_gpu
from ndtrain.engine.memory_check import require_memory
from ndtrain.engine.threads import set_threads
from ndtrain.mesh.json_messages import broadcast_json
from ndtrain.mesh.mesh import Mesh
from ndtrain.model.objective import make_objective
from ndtrain.observe import grow_segments, keep_freed_memory
from ndtrain.optim.lr_schedule import idle_steps
from ndtrain.parallel.build import Stages, initialise
from ndtrain.run import descriptors, exit_status, folder_lock, rendezvous, shared_config, stop_signals
from ndtrain.run.failure_report import record_failure
from ndtrain.run.folder_lock import Claim
from ndtrain.run.launcher_report import tell_run_folder
from ndtrain.run.refused_start import left_as_found
from ndtrain.run.shared_config import Written
from ndtrain.run.signed_store import SignedStore

log = logging.getLogger("ndtrain")
log.addHandler(logging.NullHandler())  # an error before there is a log file is not printed twice


@dataclass(frozen=True)
class RunSetup:
    """What a rank has before it computes with the others.

    Attributes:
        cfg: resolved and frozen, the same on every rank.
        claim: to the run folder; on rank 0 the lock, which `release` gives free.
        resume: as `cfg.resume`, or auto where torchrun starts the run again.
        path, state: on rank 0, the checkpoint to resume.
        notes: what the user is to know.
        connect: opens another connection to the messages of the ranks; None: there is one rank.
    """

    cfg: Config
    rank: int
    world: int
    run_dir: Path
    claim: Claim
    resume: str
    path: Path | None
    state: State | None
    notes: list[str]
    data: Data
    device: torch.device
    connect: Callable[[], SignedStore] | None


def prepare(cfg: Config) -> RunSetup:
    """Everything up to the ranks' meeting, with every error that one rank can find alone.

    Raises:
        ConfigError: the run cannot start; one line says why.
    """
    rank, local_rank, world = world_from_env()
    notes, written = [], Written.of(cfg)
    if cfg.init_from and not cfg.frozen:
        replaced = _replace_lost_folder(cfg)
        cfg, notes = model_of_folder(cfg, rank)
        notes += replaced
    cfg = resolve(cfg, world)
    axes = [getattr(cfg.mesh, axis) for axis in AXES]
    descriptors.require(rendezvous.backend_of(_kind(cfg)), rank, world, axes)
    notes, noted = notes + cfg.notes, len(cfg.notes)
    resume, path, state, meeting = cfg.resume, None, None, None
    timeout_s = cfg.hardware.timeout_s
    with ExitStack() as undo:
        if rank == 0:
            undo.enter_context(left_as_found(Path(cfg.run.dir)))
            claim, resume, path, state = take_run_folder(cfg, Path(cfg.run.dir))
            undo.callback(claim.release)
            undo.enter_context(record_failure(Path(cfg.run.dir)))
        if world > 1:
            patience_s = timeout_s + folder_lock.DEAD_S  # rank 0 may wait for its folder
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
        require_memory(cfg, device, _ranks_of_host(rank, local_rank))
        data = open_data(cfg)
        cfg = _plan_epochs(cfg, data, rank, path, state)
        notes += cfg.notes[noted:]
        _check_validation(cfg, data)
        check_columns(cfg, data)
        _check_samples(cfg, data)
        notes += data.warnings(cfg)
        if idle := idle_steps(cfg.optim, cfg.train.steps, cfg.train.stop_at or cfg.train.steps):
            notes.append(idle)
        keep_freed_memory()
        connect = meet(cfg, rank, world, device, meeting)
        undo.pop_all()
    if rank > 0:
        _log_to(Path(cfg.run.dir), rank)
    return RunSetup(cfg, rank, world, Path(cfg.run.dir), claim, resume, path, state, notes, data, device, connect)


def meet(
    cfg: Config, rank: int, world: int, device: torch.device, meeting: rendezvous.Meeting | None = None
) -> Callable[[], SignedStore] | None:
    """Creates the process group of all ranks, which have had their `meeting` or meet here. Returns what
    `rendezvous.join` does; None: there is one rank.

    Raises:
        ConfigError: two ranks have one GPU.
    """
    if world == 1:
        return None
    if device.type == "cuda":
        meeting = meeting or rendezvous.meet(rank, world, cfg.hardware.timeout_s)
        _require_own_gpu(meeting.messages, rank, world, cfg.hardware.timeout_s)
    return rendezvous.join(rendezvous.backend_of(device.type), rank, world, cfg.hardware.timeout_s, device, meeting)


def _replace_lost_folder(cfg: Config) -> list[str]:
    """Where a run that resumes no longer finds the folder `init_from`, names the checkpoint in its place: it holds the
    model and all that came with it. Returns what the user is to know."""
    lost, run_dir = resolved(cfg.init_from), Path(cfg.run.dir)
    if Path(lost).expanduser().exists():
        return []
    resume = "auto" if cfg.resume == "none" and exit_status.is_restart(run_dir) else cfg.resume
    options = checkpoint.candidates(resume, run_dir)
    if not options:
        return []
    cfg.init_from = str(options[0])
    if cfg.data.tokenizer == lost:
        cfg.data.tokenizer = cfg.init_from
    return [f"init_from={lost} is gone: the model and its files are taken from the checkpoint {options[0]}"]


def save_config(setup: RunSetup) -> None:
    """Writes config.yaml in one rename. Call it on rank 0 once nothing can refuse the run any more: a refused one must
    leave the file as it was, and other ranks may still read it before the ranks have met.

    Raises:
        ConfigError: it cannot be written.
        FolderLost: another run has taken the run folder over.
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
    """The configuration with the model that starts from the Hugging Face folder `init_from`, whose files rank 0 checks;
    and what the user is to know."""
    folder = checkpoint.model_folder(cfg.init_from)
    cfg.init_from = str(folder)  # the run's records name the checkpoint of a run folder
    held = checkpoint.read_model(folder)
    cfg.model = checkpoint.starting_model(cfg, held)
    if cfg.data.name == "chat" and cfg.data.tokenizer in ("byte", "bpe"):
        cfg.data.tokenizer = str(folder)
    notes = checkpoint.check_folder(folder, held) if rank == 0 else []
    trained = cfg.data.tokenizer in ("byte", "bpe") and cfg.data.name not in TOKEN_SOURCES
    if trained and (folder / "tokenizer.json").exists():
        notes.append(
            f"data.tokenizer={cfg.data.tokenizer} is not the one the weights of init_from={folder} were trained with: "
            f"that is data.tokenizer={folder}"
        )
    return cfg, notes


def _plan_epochs(cfg: Config, data: Data, rank: int, path: Path | None, state: State | None) -> Config:
    """Returns the configuration with the steps of `train.epochs`."""
    if cfg.train.epochs is None:
        return cfg
    cfg = resolve_epochs(cfg, data.epoch_sequences(cfg))
    if rank == 0:
        _require_steps_left(cfg, path, state)
    return cfg


def _check_validation(cfg: Config, data: Data) -> None:
    if cfg.train.eval_every and not data.validation:
        raise ConfigError(
            f"train.eval_every={cfg.train.eval_every}: there is nothing to validate on: raise data.validation="
            f"{cfg.data.validation:g}, the fraction of documents held out (token files without documents need "
            "data.validation_path, a stream data.eval_split), or set train.eval_every=0"
        )


def _check_samples(cfg: Config, data: Data) -> None:
    if not cfg.train.sample_every:
        return
    every = f"train.sample_every={cfg.train.sample_every}"
    if data.tokenizer is None:
        raise ConfigError(f"{every}: the data has no tokenizer to write text with: set it to 0, or prepare the data")
    if not cfg.train.sample_prompts:
        raise ConfigError(f"{every}: train.sample_prompts is empty: give texts to start with")


def _kind(cfg: Config) -> str:
    """Return "cpu" or "cuda"."""
    if cfg.hardware.device != "auto":
        return cfg.hardware.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_of(cfg: Config, local_rank: int) -> torch.device:
    """The device of this rank; a GPU becomes the process's current one.

    Raises:
        ConfigError: the machine has no such device, or too few of them.
    """
    kind = _kind(cfg)
    if kind == "cpu":
        if cfg.hardware.attention != "auto":
            raise ConfigError(
                f"hardware.attention={cfg.hardware.attention} is a kernel of GPUs, and this run is on the CPU: "
                "leave it at auto"
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
    """Refuses ranks that see one GPU, and the same one. Every rank calls this; rank 0 compares.

    Args:
        messages: of all ranks.
        timeout_s: seconds that rank 0 waits for the others.

    Raises:
        ConfigError: on rank 0.
        dist.DistError: on rank 0, where a rank has not said which GPU it sees.
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
            raise dist.DistStoreError(f"rank {other} has not said within {timeout_s:g} s which GPU it sees")
        if gpu and gpu in owners:
            raise ConfigError(
                f"ranks {owners[gpu]} and {other} see one GPU only, and the same ({gpu}): lower --nproc-per-node to "
                "the number of GPUs, or give each task its own (srun --gpus-per-task=1)"
            )
        owners[str(gpu)] = other


def _ranks_of_host(rank: int, local_rank: int) -> range:
    """The ranks of this host. torchrun numbers them one after the other."""
    first = rank - local_rank
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextmanager
def _log_unless_refused(run_dir: Path, rank: int) -> Iterator[None]:
    """Keeps the lines of the log in memory until `_log_to`, so that a rank whose run is refused leaves no file. Any
    other error that leaves the block opens the log."""
    _replace_handlers(MemoryHandler(10_000))
    try:
        yield
    except Exception as error:
        if not isinstance(error, ConfigError):
            _log_to(run_dir, rank)
        raise


def _log_to(run_dir: Path, rank: int) -> None:
    """Every rank keeps a log of its own in the run folder."""
    folder = run_dir / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(folder / f"rank-{rank}.log")
    except OSError:
        handler = logging.NullHandler()  # rank 0 has said that the folder cannot be written, or will see it later
    handler.handleError = lambda record: None  # a full disk: else every line would be a traceback on the console
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _replace_handlers(handler)


def _replace_handlers(handler: logging.Handler) -> None:
    """Sends the lines of the log to `handler` alone, those that are kept in memory too."""
    for old in log.handlers[:]:
        log.removeHandler(old)
        if isinstance(old, MemoryHandler):
            old.setTarget(handler)
            old.close()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def take_run_folder(cfg: Config, run_dir: Path) -> tuple[Claim, str, Path | None, State | None]:
    """On rank 0: makes this run the owner of its folder, which can be written, has no other live owner, and holds no
    run that this one would overwrite. Returns the lock, how the run resumes, and the checkpoint to resume with its
    state. What torchrun starts again goes on where it was, as with resume=auto.

    Raises:
        ConfigError: naming `run.dir` or `resume`.
    """
    with ExitStack() as undo:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=run_dir) as trial:  # the system says why not, also where it is read-only
                now = os.fstat(trial.fileno()).st_mtime
            resume = "auto" if cfg.resume == "none" and exit_status.is_restart(run_dir) else cfg.resume
            _check_new(resume, run_dir)
            claim = folder_lock.acquire(run_dir)
            undo.callback(claim.release)
            _check_new(resume, run_dir)
            path, state = _choose(cfg, resume, run_dir)
            if cfg.train.epochs is None:
                _require_steps_left(cfg, path, state)
            stop = run_dir / stop_signals.STOP_FILE
            if not exit_status.is_restart(run_dir) and stop_signals.remove_stale(stop, now):
                print(f"removed {stop}, which an earlier run has left", file=sys.stderr)
            exit_status.begin(run_dir)
        except OSError as error:
            raise _unwritable(run_dir, error) from error
        undo.pop_all()
    return claim, resume, path, state


def _check_new(resume: str, run_dir: Path) -> None:
    """A run that resumes nothing needs a folder that holds none."""
    held = (run_dir / "metrics.jsonl").exists() or bool(checkpoint.list_checkpoints(run_dir / "checkpoints"))
    if resume == "none" and held:
        raise ConfigError(
            f"run.dir={run_dir} already holds a run: continue it with resume=auto, or give another run.dir"
        )


def _choose(cfg: Config, resume: str, run_dir: Path) -> tuple[Path | None, State | None]:
    """The best checkpoint that `resume` may mean; nothing for a fresh start."""
    options = checkpoint.candidates(resume, run_dir)
    return _first_whole(options, cfg, resume) if options else (None, None)


def _require_steps_left(cfg: Config, path: Path | None, state: State | None) -> None:
    """A plan that ends before the checkpoint is a mistake. One that ends there is complete: nothing is to be done."""
    t = cfg.train
    key, last = ("train.stop_at", t.stop_at) if t.stop_at else ("train.steps", t.steps)
    end = f"{key}={last}"
    if key == "train.steps" and t.epochs is not None:
        key, end = "train.epochs", f"train.epochs={t.epochs:g} (train.steps={last})"
    if state is not None and state.step > last:
        raise ConfigError(
            f"{end}: the run is at step {state.step} already ({path}): raise {key} to train on, or give another run.dir"
        )


def _first_whole(options: list[Path], cfg: Config, resume: str) -> tuple[Path, State]:
    """The first that is whole; damaged ones are named and, with resume=auto, passed over."""
    for path in options:
        try:
            return path, checkpoint.inspect(path, cfg.model)
        except DamagedCheckpoint as error:
            _pass_over(error, resume)
    raise CheckpointError(
        f"resume=auto: every checkpoint in {cfg.run.dir}/checkpoints is damaged; another run.dir starts anew"
    )


def _pass_over(error: DamagedCheckpoint, resume: str) -> None:
    if resume != "auto":
        raise error
    if world_from_env()[0] == 0:
        print(f"warning: {error}; trying the one before it", file=sys.stderr)


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
        path: the checkpoint that it resumes, or None.
        state: to go on from.
        companions: on rank 0, what its checkpoints hold of the folder that it starts from.
        notes: messages for the user.
    """

    path: Path | None
    state: State
    companions: Companions
    notes: list[str]


def fill_weights(setup: RunSetup, mesh: Mesh, stages: Stages) -> Start:
    """Fills the stages: from rank 0's checkpoint (or, with resume=auto, an older one if its content is damaged), from a
    Hugging Face folder, or from the seed."""
    cfg, (path, state, resume) = setup.cfg, _as_on_rank_0(mesh, (setup.path, setup.state, setup.resume))
    while path is not None:
        try:
            notes = checkpoint.load(path, stages, mesh)
            companions = _resumed_companions(path, cfg, mesh)
            if mesh.rank == 0:
                setup.claim.check()
            if mesh.rank == 0 and path.parent.resolve() == (Path(cfg.run.dir) / "checkpoints").resolve():
                checkpoint.set_aside_later(path)
            return Start(path, state, companions, notes)
        except DamagedCheckpoint as error:
            _pass_over(error, resume)
            path, state, _ = _as_on_rank_0(mesh, (*_older_one(path, cfg, resume, mesh), resume))
    companions = Companions()
    if cfg.init_from:
        checkpoint.load_start(cfg, stages, mesh)
        companions = _companions(Path(cfg.init_from), cfg, mesh)
    else:
        initialise(stages, cfg)
    return Start(None, State(step=0, tokens=0, order=order_of(cfg, setup.data)), companions, [])


def _companions(folder: Path, cfg: Config, mesh: Mesh, resumed: bool = False) -> Companions:
    """Reads, on rank 0, what the checkpoints of the run hold of the folder that it starts from.

    Args:
        resumed: the folder is a checkpoint, whose files are verified.

    Raises:
        CheckpointError: on every rank, naming the file that cannot be read.
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
    """`_companions` of a checkpoint, in which every file was written by a run.

    Raises:
        DamagedCheckpoint: on every rank, naming the file that cannot be read.
    """
    try:
        return _companions(path, cfg, mesh, resumed=True)
    except CheckpointError as error:
        raise damaged(path, error) from error


def _as_on_rank_0(mesh: Mesh, chosen: tuple[Path | None, State | None, str]) -> tuple[Path | None, State | None, str]:
    """The checkpoint, its state and how the run resumes, as rank 0 has chosen them."""
    if mesh.world is None:
        return chosen
    path, state, resume = chosen
    message = {"path": path and str(path), "state": state and asdict(state), "resume": resume}
    return _chosen(broadcast_json(message, mesh.world, mesh.device))


def _chosen(message: Any) -> tuple[Path | None, State | None, str]:
    """The checkpoint to resume, its state, and how the run resumes, as rank 0 has sent them.

    Raises:
        ValueError: they are something else.
    """
    match message:
        case {"path": None, "state": None, "resume": str(resume)}:
            return None, None, resume
        case {"path": str(path), "state": dict(state), "resume": str(resume)} if _is_state(state):
            return Path(path), State(**state), resume
    raise ValueError("what rank 0 has sent names no checkpoint")


def _is_state(state: dict[str, Any]) -> bool:
    """Whether it is a `State` as a dict."""
    match state:
        case {"step": int(), "tokens": int(), "order": dict(), "skipped": int(), "stream": None | dict(), **rest}:
            return not rest
    return False


def _older_one(path: Path, cfg: Config, resume: str, mesh: Mesh) -> tuple[Path | None, State | None]:
    """On rank 0 the newest whole checkpoint before a damaged one. The other ranks choose none: they might not be able
    to read what rank 0 can.

    Raises:
        CheckpointError: on every rank: there is no older one.
    """
    chosen: list[tuple[Path | None, State | None]] = [(None, None)]

    def choose() -> None:
        if mesh.rank == 0:
            chosen[0] = _first_whole(checkpoint.older_checkpoints(path), cfg, resume)

    checkpoint.together(mesh, choose)
    return chosen[0]


def write_extras(data: Data, companions: Companions, folder: Path) -> None:
    """Writes what a checkpoint holds besides the weights: the companions of the model that the run started from, and
    the tokenizer of the data.

    Where the data has another tokenizer than the companions, theirs is left out, and with it all that names its tokens.
    """
    theirs = companions.files.get("tokenizer.json")
    if data.tokenizer and theirs is not None and not data.tokenizer.same_ids(theirs):
        companions = companions.without_tokenizer()
    companions.write(folder)
    if data.tokenizer:
        data.tokenizer.save(folder)
    if data.eos_id is not None and not companions.names_end_token():  # else transformers takes Llama's
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": data.eos_id}) + "\n")


def turn_end_warning(data: Data, companions: Companions) -> str | None:
    """Returns what the user is to know if a model that learns conversations would not stop where a turn ends."""
    ends = companions.end_tokens() or {data.eos_id}
    if data.turn_ends is None or (data.turn_ends and data.turn_ends <= ends):
        return None
    if not data.turn_ends:
        return (
            "the assistant's turns end without a special token that is learned, so a text would not stop there: let "
            "the chat template mark the token that ends a turn with {% generation %}"
        )
    token, known = min(data.turn_ends - ends), ", ".join(map(str, sorted(ends)))
    text = data.tokenizer.token(token) if data.tokenizer else ""
    return (
        f"the assistant's turns end with the token {text} ({token}), which is not among the end tokens ({known}) of "
        "generation_config.json, so a text would not stop there: add it to eos_token_id in the folder of init_from"
    )


def order_of(cfg: Config, data: Data) -> dict[str, Any]:
    """All that the tokens of a step, and which of them count, depend on."""
    return {
        "corpus": data.fingerprint,
        "run.seed": cfg.run.seed,
        "train.seq_len": cfg.train.seq_len,
        "train.global_batch": cfg.train.global_batch,
        "data.shuffle": cfg.data.shuffle,
        "data.pack": _told_apart_by(data) if cfg.data.pack else None,
    }


def _told_apart_by(data: Data) -> int | str:
    return "index" if data.eos_id is None else data.eos_id


def check_columns(cfg: Config, data: Data) -> None:
    """Check that the data has the columns that the objective reads.

    Raises:
        ConfigError: it has not.
    """
    wanted = [column.name for column in make_objective(cfg.objective).columns]
    if missing := [name for name in wanted if name not in data.columns]:
        raise ConfigError(
            f"objective={cfg.objective.name}: it reads {', '.join(missing)}, which data={cfg.data.name} does not have: "
            "use data=chat, whose rows may have weights, or objective=cross_entropy"
        )


def packing_of(cfg: Config, data: Data) -> Packing | None:
    """How the documents of a sequence are told apart; None without packing."""
    return Packing(data.eos_id) if cfg.data.pack else None
