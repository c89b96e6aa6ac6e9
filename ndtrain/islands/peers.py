"""Signs of life of other islands."""

from ndtrain.islands.epoch import Member
from ndtrain.islands.messages import Beat


class Peers:
    """Records when the processes of other islands were last heard from.

    Args:
        me: the life of this island, which is always alive.
        timeout_s: seconds without a sign of life after which a process counts as lost.

    Attributes:
        beats: life -> its last beat.
        ended: life -> True if its process has provably ended.
    """

    def __init__(self, me: str, timeout_s: float):
        self._me, self._timeout_s = me, timeout_s
        self._heard: dict[str, float] = {}  # life -> the time of its last message
        self.beats: dict[str, Beat] = {}
        self.ended: dict[str, bool] = {}
        self._computed_at: dict[str, tuple[int, float]] = {}  # life -> `Beat.computed`, and when it was first heard

    @property
    def are_silent(self) -> bool:
        """True if there was never a message."""
        return not self._heard

    def hear(self, life: str, now: float) -> None:
        """Record a message of a process."""
        self._heard[life] = now

    def has_spoken(self, life: str, now: float) -> bool:
        """Return True if the last message of a process is not too old."""
        return now - self._heard.get(life, -1e9) < self._timeout_s

    def is_alive(self, member: Member, now: float) -> bool:
        """Return True if the process of a member counts as alive."""
        life = member.life
        return life == self._me or (not self.ended.get(life) and self.has_spoken(life, now))

    def done(self, member: Member) -> int | None:
        """Return the number of steps that a member has finished; None: unknown, or it has no weights."""
        beat = self.beats.get(member.life)
        return beat.done if beat else None

    def take(self, life: str, beat: Beat, now: float) -> None:
        """Record a sign of life."""
        self.beats[life] = beat
        if self._computed_at.get(life, (0, now))[0] < beat.computed:
            self._computed_at[life] = beat.computed, now

    def computed(self, member: Member) -> int:
        """Return the last step whose gradient a member offers, as far as known."""
        beat = self.beats.get(member.life)
        return beat.computed if beat else 0

    def offered_s(self, member: Member, step: int, now: float) -> float:
        """Return for how many seconds a member has offered its gradient of a step; 0: it has not."""
        computed, since = self._computed_at.get(member.life, (0, now))
        return now - since if computed >= step else 0.0

    def is_leaving(self, member: Member) -> bool:
        beat = self.beats.get(member.life)
        return beat is not None and beat.leaving
