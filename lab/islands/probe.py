"""Measures a link between two hosts, as programs see it.

python -m lab.islands.probe serve
python -m lab.islands.probe HOST MEGABYTES
"""

import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.lib.namespaces import Host

_PORT = 29500
_PINGS = 5
_ROOT = Path(__file__).parents[2]


def measure(a: Host, b: Host, megabytes: float) -> dict[str, float]:
    """Return the round trip in ms, and the Mbit/s of a transfer from `a` to `b`."""
    module = [sys.executable, "-m", __name__]
    server = b.popen([*module, "serve"], _ROOT, stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    client = a.popen([*module, b.address, str(megabytes)], _ROOT, stdout=subprocess.PIPE, text=True)
    text, _ = client.communicate(timeout=120)
    server.wait(10)
    return json.loads(text)


def serve() -> None:
    """Answer pings, then take bytes until the other side has sent all."""
    with socket.create_server(("", _PORT)) as listening:
        print("ready", flush=True)
        connection, _ = listening.accept()
    with connection:
        for _ in range(_PINGS):
            connection.sendall(connection.recv(1))
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"x")


def ask(host: str, megabytes: float) -> None:
    """Print the figures of the link to a host as JSON."""
    with socket.create_connection((host, _PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            pings.append(time.perf_counter() - began)
        size, began = int(megabytes * 1e6), time.perf_counter()
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        mbit = 8e-6 * size / (time.perf_counter() - began)
    print(json.dumps({"round_trip_ms": statistics.median(pings) * 1e3, "mbit": mbit}))


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else ask(sys.argv[1], float(sys.argv[2]))
