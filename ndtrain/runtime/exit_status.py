"""`<run.dir>/exit.json`: how a run ended. Exit statuses do not cross torchrun; this file does, and launch scripts make
their own status of it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

# why a run ended -> the status of a launch script
CODES = {
    "finished": 0,  # the plan's or train.stop_at's last step was reached, and saved
    "stopped": 85,  # as a signal or the stop file asked, with everything saved: start it again to go on
    "failed": 1,  # by an error of its own, which starting again would meet again
    "config": 2,  # it cannot start as configured
    "hang": 75,  # a collective passed its deadline
    "died": 75,  # from outside: a rank was killed, a peer lost. Starting again may help
}
NAME = "exit.json"
JOB = "TORCHELASTIC_RUN_ID"  # torchrun's, the same for all attempts of a job


@dataclass(frozen=True)
class Exit:
    """What exit.json holds.

    Attributes:
        why: a key of `CODES`.
        signal: what asked for the stop: a signal's name, or "stop file".
        step: the last step that was made.
        checkpoint: the newest one of this run, complete.
        requeue: whether starting the same command again goes on with the work.
        code: the status of a launch script.
        rank: which one an error came from.
        error: its text.
        job: of which torchrun job this is an attempt.
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


def write(run_dir: Path, why: str, **facts) -> None:
    """Replaces exit.json, in one rename. A folder that cannot be written is none of a dying run's troubles."""
    code = CODES[why]
    found = Exit(why, requeue=code in (75, 85), code=code, job=os.environ.get(JOB), **facts)
    part = run_dir / f"{NAME}.{os.getpid()}"
    try:
        part.write_text(json.dumps(asdict(found), indent=2) + "\n")
        part.replace(run_dir / NAME)
    except OSError:
        part.unlink(missing_ok=True)


def begin(run_dir: Path) -> None:
    """What holds if every process is killed before it can say more."""
    write(run_dir, "died")


def write_first(run_dir: Path, why: str, **facts) -> None:
    """As `write`, unless a rank has already said why: the first error is the cause of the later ones."""
    before = read(run_dir)
    if before is None or (before.why == "died" and before.error is None):
        write(run_dir, why, **facts)


def read(run_dir: Path) -> Exit | None:
    """None where there is none that can be read."""
    try:
        return Exit(**json.loads((run_dir / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def is_restart(run_dir: Path) -> bool:
    """Whether torchrun starts a run again that its own earlier attempt left unfinished. (To let a host join, it stops
    the ranks of the others as a user would.)"""
    before, job = read(run_dir), os.environ.get(JOB, "none")
    if before is None or before.why == "finished":
        return False
    named = job != "none" and before.job == job  # "none" is torchrun's for a job without a name
    return named or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
