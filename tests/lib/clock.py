"""A clock of the tests, on which nobody waits."""

from collections.abc import Callable


class Clock:
    """A clock that only `sleep` moves on. `then` is called at every sleep."""

    def __init__(self, then: Callable[[float], None] = lambda now: None):
        self.now, self._then = 0.0, then

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._then(self.now)
