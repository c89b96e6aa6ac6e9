"""Processes on any hosts that share the items of one piece of work, over a folder that all of them see.

A process has a file in `members/`, with its identity and a heartbeat (`device/heartbeat`). It claims an item with a
file `NAME.claim`, which holds the token of its identity. A claim is free again once its process has ended: at once if
that was on this host, else after its heartbeat has not changed for `DEAD_S`.

Two processes may still do the same item: a paused one, and the one that took its claim over. So a result must have the
same bytes whoever makes it, and has to appear as a whole.
"""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ndtrain.device.heartbeat import DEAD_S, Heartbeat, Silence, beat_of
from ndtrain.device.process_owner import Owner, read_owner

MEMBERS = "members"
POLL_S = 0.5  # interval at which a process looks for heartbeats, claims and results
_TOKEN = re.compile(r"[0-9a-f]{32}")


class Claims:
    """The claims of this process in a folder, which must exist. The process is a member until the block ends.

    Args:
        me: the identity of this process; None: `Owner.this_process()`.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, me: Owner | None = None, clock: Callable[[], float] = time.monotonic):
        self._folder, self._me, self._clock = folder, me or Owner.this_process(), clock
        self._mine: set[str] = set()
        self._silences: dict[str, Silence] = {}  # token of a process on another host -> its heartbeat as seen from here
        self._file = _member_file(folder, self.token)
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(asdict(self._me)))
        self._heartbeat = Heartbeat(self._file, "claims")

    @property
    def token(self) -> str:
        """The token of this process, unique."""
        return self._me.token

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *_) -> None:
        self._heartbeat.stop()
        with suppress(OSError):
            for name in tuple(self._mine):
                self.release(name)
            self._file.unlink(missing_ok=True)

    def take(self, name: str) -> bool:
        """Claim an item. Return False if another process that may be alive has claimed it.

        Raises:
            OSError: the folder cannot be written, or has been removed.
        """
        file = self._claim_file(name)
        try:
            with file.open("x") as new:
                new.write(self.token)
        except FileExistsError:
            holder = _holder_of(file)
            if holder != self.token:
                if holder is not None and not self._is_gone(holder):
                    return False
                self._replace(file)
        self._mine.add(name)
        return True

    def release(self, name: str) -> None:
        """Give up the claim of an item, unless another process has taken it over."""
        self._mine.discard(name)
        file = self._claim_file(name)
        if _holder_of(file) == self.token:
            file.unlink(missing_ok=True)

    def _claim_file(self, name: str) -> Path:
        return self._folder / f"{name}.claim"

    def _replace(self, file: Path) -> None:
        mine = file.with_name(f"{file.name}.{self.token}.tmp")
        mine.write_text(self.token)
        mine.replace(file)

    def _is_gone(self, token: str) -> bool:
        """Return True if the process with this token has ended, as far as this process can tell by now."""
        file = _member_file(self._folder, token)
        owner, beat = read_owner(file), beat_of(file)
        if owner is not None and (gone := owner.is_gone(self._me)) is not None:
            return gone
        silence = self._silences.setdefault(token, Silence(beat, self._clock))
        return silence.look(beat) >= DEAD_S


def members(folder: Path) -> list[Owner]:
    """Return the members of a folder that have not ended, as far as this host can tell without waiting."""
    me = Owner.this_process()
    owners = [(file, read_owner(file)) for file in sorted((folder / MEMBERS).glob("*.json"))]
    return [owner for file, owner in owners if owner and file.stem == owner.token and not owner.is_gone(me)]


def living_member(
    folder: Path, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> Owner | None:
    """Return a member of the folder that is alive; None if there is none.

    Wait up to `DEAD_S` for heartbeats if members are on other hosts.
    """
    me, silences = Owner.this_process(), {}
    while undecided := members(folder):
        for owner in undecided:
            beat = beat_of(_member_file(folder, owner.token))
            silence = silences.setdefault(owner.token, Silence(beat, clock))
            if owner.is_gone(me) is False or beat not in (silence.beat, None):
                return owner
            silence.look(beat)
        if all(silences[owner.token].seconds >= DEAD_S for owner in undecided):
            return None
        sleep(POLL_S)
    return None


def _member_file(folder: Path, token: str) -> Path:
    return folder / MEMBERS / f"{token}.json"


def _holder_of(file: Path) -> str | None:
    """Return the token in a claim; "" while it is being written, or if it is damaged; None if there is no claim."""
    try:
        with file.open("rb") as opened:
            text = opened.read(64).decode("ascii", "replace")
    except FileNotFoundError:
        return None
    return text if _TOKEN.fullmatch(text) else ""
