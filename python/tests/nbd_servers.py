"""Other NBD servers for tests: qemu-nbd, nbdkit, and one that sends what a test tells it to."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest


def needs(program: str, package: str) -> str:
    """Returns the path of a program, or skips the test with the name of its package."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"left out: {program} (package {package})")
    return found


@contextlib.contextmanager
def running(command: list[str], ready: Callable[[], bool]) -> Generator[None, None, None]:
    """Runs a program until the block ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        until = time.monotonic() + 10
        while not ready():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until, f"{command[0]} is not ready"
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def accepts(path: Path) -> bool:
    """Returns true if a server listens at a Unix socket. The file exists before it does."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        return client.connect_ex(str(path)) == 0


@contextlib.contextmanager
def qemu_nbd(directory: Path, size: int, *options: str) -> Generator[str, None, None]:
    """Serves a raw image with qemu-nbd as the export ``x`` and returns its URI."""
    program = needs("qemu-nbd", "qemu-utils")
    image, path = directory / "qemu.img", directory / "qemu.sock"
    with image.open("wb") as file:
        file.truncate(size)
    command = [program, "-k", str(path), "-x", "x", "-t", "-f", "raw", *options, str(image)]
    with running(command, lambda: accepts(path)):
        yield f"nbd+unix:///x?socket={path}"


@contextlib.contextmanager
def nbdkit(directory: Path, *arguments: str, unix: bool = True) -> Generator[str, None, None]:
    """Serves a plugin of nbdkit and returns its URI."""
    program = needs("nbdkit", "nbdkit")
    path = directory / f"nbdkit-{len(list(directory.iterdir()))}.sock"
    if unix:
        with running([program, "-f", "-U", str(path), *arguments], lambda: accepts(path)):
            yield f"nbd+unix:///?socket={path}"
        return
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port: int = free.getsockname()[1]

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    with running([program, "-f", "-i", "127.0.0.1", "-p", str(port), *arguments], listens):
        yield f"nbd://127.0.0.1:{port}/"


class FakeServer:
    """A Unix socket that sends each client the next of several answers, and keeps what it sent.

    The answer ends with the connection, unless ``stays``: then it stays open and silent. With
    ``by_line``, there is one connection, and each line of the client gets the next answer.
    """

    def __init__(
        self, path: Path, answers: list[bytes], *, stays: bool = False, by_line: bool = False
    ) -> None:
        self.path = path
        self.uri = f"nbd+unix:///x?socket={path}"
        self._stays = stays
        self._by_line = by_line
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._answers = answers
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Wakes the thread out of accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        if self._by_line:
            client, _ = self._listener.accept()
            with client, client.makefile("rb") as lines:
                for answer, _ in zip(self._answers, lines):
                    client.sendall(answer)
            return
        for answer in self._answers:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.sendall(answer)
                if self._stays:
                    while client.recv(65536):
                        pass
                else:
                    client.shutdown(socket.SHUT_WR)
                    client.settimeout(0.05)
                    while client.recv(65536):
                        pass


class Recorder:
    """Passes one connection on to a server and keeps what the server sent."""

    def __init__(self, path: Path, server: str) -> None:
        self.uri = f"nbd+unix:///x?socket={path}"
        self.sent = bytearray()
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._server)

        def forward() -> None:
            while data := client.recv(65536):
                server.sendall(data)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)

        forwarder = threading.Thread(target=forward)
        forwarder.start()
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                self.sent += data
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        forwarder.join()
        client.close()
        server.close()
