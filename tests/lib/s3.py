"""A local S3 server that fails at random: it refuses requests, cuts connections and loses answers.

Run as a program, it prints its port and serves until it is killed.
"""

import os
import random
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

_BUSY = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>'
_GONE = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
BUCKET = "bucket"


class Failing:
    """Fails a share of the requests before the server sees them, or after it has done them.

    A GET of `/faults` answers with the number of faults so far; `/faults/0.2` sets the share, and `/gone` removes the
    bucket for good.
    """

    def __init__(self, server, seed: int):
        self.server, self.draw, self.rate, self.gone = server, random.Random(seed), 0.0, False
        self.faults, self.lock = 0, threading.Lock()

    def __call__(self, environ, start):
        path = environ["PATH_INFO"]
        if path.startswith("/faults"):
            self.rate = float(path.removeprefix("/faults").strip("/") or self.rate)
            start("200 OK", [("Content-Type", "text/plain")])
            return [str(self.faults).encode()]
        if path == "/gone":
            self.gone = True
            start("200 OK", [])
            return [b""]
        if self.gone:
            start("404 Not Found", [("Content-Type", "application/xml")])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [_GONE]
        with self.lock:
            fault = self.draw.choice(["busy", "cut", "lost", "half"]) if self.draw.random() < self.rate else None
            self.faults += fault is not None
        if fault == "busy":
            start("503 Slow Down", [("Content-Type", "application/xml"), ("Connection", "close")])
            return [_BUSY]
        if fault == "cut":
            return self._cut(environ)
        if fault == "lost":
            list(self.server(environ, lambda *args: None))
            return self._cut(environ)
        body = self.server(environ, start)
        return self._half(environ, body) if fault == "half" else body

    def _cut(self, environ):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError

    def _half(self, environ, body):
        """Cut the connection in the middle of an answer."""
        content = b"".join(body)
        yield content[: len(content) // 2]
        self._cut(environ)


def serve() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = Failing(DomainDispatcherApplication(create_backend_app), int(sys.argv[1]))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


class Server:
    """The running server, and what its clients need.

    Attributes:
        env: variables of a client's environment.
    """

    def __init__(self, port: int):
        self._url = f"http://127.0.0.1:{port}"
        self.env = {
            "AWS_ENDPOINT_URL": self._url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def fail(self, rate: float) -> int:
        """Fail this share of the requests from now on. Return the number of failed requests so far."""
        return int(self._ask(f"faults/{rate}"))

    def remove_bucket(self) -> None:
        self._ask("gone")

    def _ask(self, path: str) -> bytes:
        return urllib.request.urlopen(f"{self._url}/{path}", timeout=30).read()

    def create_bucket(self) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self._url}/{BUCKET}", method="PUT"), timeout=30).read()


@contextmanager
def running(seed: int = 0) -> Iterator[Server]:
    """Run a server with an empty bucket, and set the environment of its clients."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.lib.s3", str(seed)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    before = dict(os.environ)
    try:
        server = Server(int(process.stdout.readline()))
        server.create_bucket()
        os.environ.update(server.env)
        yield server
    finally:
        process.kill()
        process.wait()
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    serve()
