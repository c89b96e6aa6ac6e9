"""What the flight recorder writes down of one operation."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class CollectiveRecord:
    """One collective, one message, or one wait for something else.

    Attributes:
        op: the name of the operation.
        channel: the process group or pair of ranks it went over; operations of one channel have the same numbers on
            all its members. Empty for a wait without communication.
        number: counted from 1 on this channel.
        nbytes: bytes of the whole buffer.
        step, action: the rank's step and action at the launch.
        launched, waited, ended: the time of the launch, of the start of the wait and of its end, in seconds of this
            machine's monotonic clock; 0 until then. On a GPU `ended` is when the host continued, not when the
            operation completed.
        on_device: whether the operation runs on a GPU that the recorder follows.
    """

    op: str
    channel: str
    number: int
    nbytes: int
    step: int
    action: str
    launched: float
    waited: float = 0.0
    ended: float = 0.0
    on_device: bool = False

    @property
    def axis(self) -> str:
        """The mesh axis that it went along, or several as in "fsdp+cp": the first word of its channel, whatever the
        lane or pair."""
        return self.channel.partition(" ")[0]
