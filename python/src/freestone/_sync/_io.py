"""Waiting on a thread: sockets, programs, sleep, locks. ``_async/_io.py`` has the same functions
for asyncio.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from freestone.errors import NoServerError, TimedOutError

__all__ = [
    "PREFERS_LIBNBD",
    "Lock",
    "Socket",
    "connect_tcp",
    "connect_unix",
    "in_thread",
    "monotonic",
    "run_program",
    "sleep",
    "unless_locked",
]

#: On a thread, requests of libnbd take no longer than those of the package's own client.
PREFERS_LIBNBD = True
Lock = threading.Lock
monotonic = time.monotonic
sleep = time.sleep
_T = TypeVar("_T")
#: Pause before another connect to a socket whose queue is full, in seconds.
_FULL_QUEUE_PAUSE = 0.001


class Socket:
    """A connected socket with a deadline for each exchange."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._timeout = 0.0
        self._until = 0.0

    def begin(self, timeout: float) -> None:
        """Starts an exchange that has to end within ``timeout`` seconds."""
        self._timeout = timeout
        self._until = monotonic() + timeout

    def end(self) -> None:
        """Ends the exchange."""

    def _limit(self) -> None:
        left = self._until - monotonic()
        if left <= 0:
            raise TimedOutError(f"no answer within {self._timeout:g} s")
        self.sock.settimeout(left)

    def recv_into(self, view: memoryview) -> int:
        """Receives at least one byte, or returns 0 if the peer has closed the connection."""
        self._limit()
        try:
            return self.sock.recv_into(view)
        except socket.timeout:
            raise TimedOutError(f"no answer within {self._timeout:g} s") from None

    def send(self, data: bytes | memoryview) -> None:
        """Sends all bytes."""
        self._limit()
        try:
            self.sock.sendall(data)
        except socket.timeout:
            raise TimedOutError(f"no answer within {self._timeout:g} s") from None

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()


def connect_unix(path: str, timeout: float) -> Socket:
    """Connects to a Unix socket.

    Raises:
        NoServerError: No server listens there.
        TimedOutError: The queue of the server stayed full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        until = monotonic() + timeout
        while True:
            try:
                sock.connect(path)
                return Socket(sock)
            except BlockingIOError:
                if monotonic() > until:
                    raise TimedOutError(f"{path}: no connection within {timeout:g} s") from None
            except OSError as error:
                why = error.strerror or error
                raise NoServerError(f"no server answers at {path}: {why}") from error
            sleep(_FULL_QUEUE_PAUSE)
    except BaseException:
        sock.close()
        raise


def connect_tcp(host: str, port: int, timeout: float) -> Socket:
    """Connects to a TCP address.

    Raises:
        NoServerError: No server listens there.
        TimedOutError: There was no answer in time.
    """
    try:
        sock = socket.create_connection((host, port), timeout)
    except socket.timeout:
        raise TimedOutError(f"{host}:{port}: no connection within {timeout:g} s") from None
    except OSError as error:
        why = error.strerror or error
        raise NoServerError(f"no server answers at {host}:{port}: {why}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Socket(sock)


def unless_locked(lock: threading.Lock, check: Callable[[], bool]) -> bool:
    """Returns what the check returns, or False if a thread holds the lock. Holds it meanwhile."""
    if not lock.acquire(blocking=False):
        return False
    try:
        return check()
    finally:
        lock.release()


def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Runs a function that blocks: on this thread."""
    return function(*arguments)


def run_program(arguments: list[str], environment: dict[str, str], timeout: float) -> tuple[int,
str, str]:
    """Runs a program and returns its exit status and what it wrote to stdout and stderr.

    Raises:
        TimedOutError: The program did not end in time, and was killed.
    """
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=timeout,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"{' '.join(arguments[:3])}: did not end within {timeout:g} s"
        raise TimedOutError(message) from None
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8",
    "replace")
