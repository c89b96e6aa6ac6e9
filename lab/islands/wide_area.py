"""A network with a long delay and a low bandwidth between network namespaces, in user space.

python -m lab.islands.wide_area MBIT DELAY_MS NAMESPACE ...

Each namespace gets a network card `wan0`. Its frames pass a queue with the bandwidth, wait for the delay, and pass the
queue of the receiving card. A full queue drops frames, as routers do. The kernel's own netem does the same, but many
kernels are built without it.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from tests.lib.namespaces import Host

CARD = "wan0"
_QUEUE_S = 0.2  # of sending at full speed, after which a queue is full
_LEAST_QUEUE = 64 * 1024
_FRAME = 2048  # bytes that a frame has at most
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns
_DEVICE = Path("/dev/net/tun")
_SET_INTERFACE, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002  # TUNSETIFF; IFF_TAP | IFF_NO_PI
_BROADCAST = 1  # this bit of the first byte of a target


class Line:
    """One direction of a link: a queue that is emptied at a constant rate.

    Args:
        bytes_per_s: the rate.
    """

    def __init__(self, bytes_per_s: float):
        self._rate, self._free_at = bytes_per_s, 0.0
        self._most = max(_LEAST_QUEUE, _QUEUE_S * bytes_per_s)

    def send(self, now: float, size: int) -> float | None:
        """Return the time at which the last bit of a frame has left. Return None if the queue is full."""
        begin = max(now, self._free_at)
        if (begin - now) * self._rate + size > self._most:
            return None
        self._free_at = begin + size / self._rate
        return self._free_at


class Network:
    """The frames under way between cards.

    Args:
        cards: the number of cards.
        bytes_per_s: of each card, in each direction.
        delay_s: between any two cards, one way.
    """

    def __init__(self, cards: int, bytes_per_s: float, delay_s: float):
        self._up, self._down = ([Line(bytes_per_s) for _ in range(cards)] for _ in range(2))
        self._delay_s, self._order = delay_s, count()
        self._places: dict[bytes, int] = {}  # hardware address -> card
        self._travelling: list[tuple[float, int, int | None, int, bytes]] = []

    def accept(self, now: float, card: int, frame: bytes) -> None:
        """Take a frame that a card sends."""
        self._places[frame[6:12]] = card
        if (left := self._up[card].send(now, len(frame))) is not None:
            self._push(left + self._delay_s, None, card, frame)

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Yield (card, frame) of each frame that has arrived by now."""
        while self._travelling and self._travelling[0][0] <= now:
            at, _, target, source, frame = heapq.heappop(self._travelling)
            if target is not None:
                yield target, frame
                continue
            for card in self._targets(source, frame):
                if (arrived := self._down[card].send(at, len(frame))) is not None:
                    self._push(arrived, card, source, frame)

    def next_at(self) -> float | None:
        """Return the time of the next event, or None if no frame is under way."""
        return self._travelling[0][0] if self._travelling else None

    def _targets(self, source: int, frame: bytes) -> list[int]:
        known = None if frame[0] & _BROADCAST else self._places.get(frame[:6])
        return [x for x in range(len(self._down)) if x != source] if known is None else [known]

    def _push(self, at: float, target: int | None, source: int, frame: bytes) -> None:
        heapq.heappush(self._travelling, (at, next(self._order), target, source, frame))


def missing() -> str | None:
    """Return the reason why this network cannot be created here, or None."""
    return None if _DEVICE.exists() else f"a slow network needs {_DEVICE}"


def open_card(namespace: str) -> int:
    """Create the card of a namespace, and return its file descriptor. This process then is in that namespace.

    Raises:
        OSError: this process is not root, or the kernel has no such device.
    """
    with open(f"/run/netns/{namespace}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    card = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(card, _SET_INTERFACE, struct.pack("16sH22x", CARD.encode(), _TAP_WITHOUT_HEADER))
    return card


def forward(cards: Sequence[int], network: Network) -> None:
    """Forward frames until the process is killed."""
    numbers = {card: number for number, card in enumerate(cards)}
    while True:
        next_at = network.next_at()
        wait = None if next_at is None else max(0.0, next_at - time.monotonic())
        for card in select.select(cards, [], [], wait)[0]:
            with suppress(BlockingIOError):
                network.accept(time.monotonic(), numbers[card], os.read(card, _FRAME))
        for number, frame in network.due(time.monotonic()):
            with suppress(OSError):  # the card is down
                os.write(cards[number], frame)


@contextmanager
def wide_area(hosts: Sequence[Host], mbit: float, delay_ms: float) -> Iterator[None]:
    """Return a context in which hosts are connected by this network instead of their bridge. They stay on it after.

    Raises:
        OSError: the network cannot be created.
    """
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-m", __name__, str(mbit), str(delay_ms), *(host.namespace for host in hosts)]
    process = subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        if process.stdout.readline().strip() != "ready":
            raise OSError("the slow network cannot be created; its message is above")
        for host in hosts:
            host.replace_card(CARD)
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(mbit: str, delay_ms: str, *namespaces: str) -> None:
    """Create the cards, print "ready", and forward frames."""
    cards = [open_card(name) for name in namespaces]
    network = Network(len(cards), float(mbit) * 1e6 / 8, float(delay_ms) / 1e3)
    print("ready", flush=True)
    forward(cards, network)


if __name__ == "__main__":
    main(*sys.argv[1:])
