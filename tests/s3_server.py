"""A real S3 server on loopback (moto's, a process of its own), and a proxy that fails before it."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from samecurve.storage.place import Place
from samecurve.storage.url import ObjectUrl

_SERVE = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server, WSGIRequestHandler

WSGIRequestHandler.protocol_version = "HTTP/1.1"
app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "an-access-key", "AWS_SECRET_ACCESS_KEY": "a-secret-that-leaks"}


class S3:
    """The server. variables: what a program needs to reach it"""

    def __init__(self, port: int) -> None:
        self.port = port
        self.variables = {
            **KEYS,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_REGION": "us-east-1",
        }

    def place(self, prefix: str) -> Place:
        """A place in the bucket, reached by the environment of this process."""
        return Place(ObjectUrl(BUCKET, prefix))


@contextmanager
def s3_server(log: Path) -> Iterator[S3]:
    """A server with an empty bucket."""
    with (
        open(log, "wb") as errors,
        subprocess.Popen(
            [sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        try:
            assert process.stdout
            server = S3(int(process.stdout.readline()))
            _make_bucket(server.port)
            yield server
        finally:
            process.kill()


def _make_bucket(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            f"PUT /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode()
        )
        assert b"200" in connection.recv(4096).partition(b"\r\n")[0]


class Proxy:
    """A line to the server that a test can break. mode: "open", "drop" (connections end in the
    middle), "refuse" (nothing listens), "stall" (nothing moves).

    hold_part: the number of a part of an upload that never arrives; held: one was held
    """

    def __init__(self, to: int) -> None:
        self.mode = "open"
        self.hold_part: int | None = None
        self.held = threading.Event()
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self.mode = "drop"
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._to))
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                while self.mode == "stall":
                    time.sleep(0.02)
                if self.mode in {"drop", "refuse"}:
                    break
                request = piece.partition(b"\r\n")[0]
                if self.hold_part and f"partNumber={self.hold_part}".encode() in request:
                    self.held.set()
                    self.mode = "stall"
                    continue
                target.sendall(piece)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def proxy(to: int) -> Iterator[Proxy]:
    line = Proxy(to)
    try:
        yield line
    finally:
        line.close()


def reach(server: S3, monkeypatch: pytest.MonkeyPatch, **others: str) -> None:
    """Have this process, and those that it starts, reach the server. others: variables beside"""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in {**server.variables, **others}.items():
        monkeypatch.setenv(name, value)
