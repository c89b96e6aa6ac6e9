"""The flight recorder's record of one operation."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class CollectiveRecord:
    """One collective, one message, or one wait for something else.

    Attributes:
        op: the name of the operation.
        channel: the process group, or the pair of ranks, that it runs over. All members of a channel number its
            operations alike. Empty for a wait without communication.
        number: counted from 1 on this channel.
        nbytes: bytes of the whole buffer.
        step, action: the rank's step and action at the launch.
        launched, waited, ended: when it was launched, and when the wait for it began and ended; seconds of this
            machine's monotonic clock, 0 until then. On a GPU `ended` is when the host continued, not when the operation
            completed.
        on_device: True if a GPU runs the operation and the recorder follows it. For other waits: True if the wait ends
            when the GPU has completed its queue.
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
        """The mesh axis of the channel, or several axes as in "fsdp+cp". It is the first word of the channel; the name
        of a lane or the ranks follow it."""
        return self.channel.partition(" ")[0]
