"""`<run.dir>/exit.json`: how a run ended. torchrun does not pass on the exit status of a rank, so launch scripts derive
their own exit status from this file."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ndtrain.runtime import folder_lock
from ndtrain.runtime.run_owner import LAUNCH

# why a run ended -> exit status of a launch script
CODES = {
    "finished": 0,  # train.steps or train.stop_at was reached, and the last step is saved
    "stopped": 85,  # a signal or the stop file requested it; everything is saved, a restart continues
    "failed": 1,  # an error of the run itself, which a restart would repeat
    "config": 2,  # the configuration is wrong
    "hang": 75,  # a collective exceeded its deadline
    "died": 75,  # an outside cause: a rank was killed or a peer was lost; a restart may help
}
NAME = "exit.json"
JOB = "TORCHELASTIC_RUN_ID"  # set by torchrun, the same for all attempts of a job


@dataclass(frozen=True)
class Exit:
    """The content of exit.json.

    Attributes:
        why: a key of `CODES`.
        signal: the source of the stop request: a signal's name, or "stop file".
        step: the last completed step.
        checkpoint: the newest complete checkpoint of this run.
        requeue: whether the same command would continue the run.
        code: the exit status of a launch script.
        rank: the rank that the error came from.
        error: the text of the error.
        job: the id of the torchrun job.
        launch: the launch script's start; None: it was started by hand.
    """

    why: str
    signal: str | None = None
    step: int | None = None
    checkpoint: str | None = None
    requeue: bool = False
    code: int = 1
    rank: int | None = None
    error: str | None = None
    job: str | None = None
    launch: str | None = None


def write(run_dir: Path, why: str, **facts) -> None:
    """Replaces exit.json in one rename. An OSError is ignored, since the run is about to end anyway. A run whose folder
    belongs to another run by now writes nothing.

    Args:
        facts: further fields of `Exit`.
    """
    if folder_lock.is_lost(run_dir):
        return
    code, job, launch = CODES[why], os.environ.get(JOB), os.environ.get(LAUNCH)
    status = Exit(why, requeue=code in (75, 85), code=code, job=job, launch=launch, **facts)
    part = run_dir / f"{NAME}.{os.getpid()}"
    try:
        part.write_text(json.dumps(asdict(status), indent=2) + "\n")
        part.replace(run_dir / NAME)
    except OSError:
        part.unlink(missing_ok=True)


def begin(run_dir: Path) -> None:
    """Writes "died" at the start of a run. It stays if every process is killed before it can write another status."""
    write(run_dir, "died")


def write_first(run_dir: Path, why: str, **facts) -> None:
    """As `write`, unless a rank has already written its error: the first error is the cause of the later ones."""
    before = read(run_dir)
    if before is None or (before.why == "died" and before.error is None):
        write(run_dir, why, **facts)


def read(run_dir: Path) -> Exit | None:
    """The content of exit.json. None where it is missing or damaged."""
    try:
        return Exit(**json.loads((run_dir / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def of_process(why: str) -> int:
    """The exit status of a process of the run. Under torchrun a rank that was stopped ends with 0: torchrun would take
    any other status for a failure, and start the ranks again."""
    return 0 if why == "stopped" and JOB in os.environ else CODES[why]


def is_restart(run_dir: Path) -> bool:
    """Whether torchrun restarts a run that an earlier attempt of the same job left unfinished. That includes attempts
    that were stopped: to let a host join, torchrun signals the ranks of the other hosts as a user would."""
    before, job = read(run_dir), os.environ.get(JOB, "none")
    if before is None or before.why == "finished":
        return False
    named = job != "none" and before.job == job  # torchrun calls a job without a name "none"
    return named or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
