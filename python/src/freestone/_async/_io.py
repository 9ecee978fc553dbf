"""Waiting with asyncio: sockets, programs, sleep, locks. ``_sync/_io.py`` has the same functions
for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
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

#: Each request to libnbd would change threads, which takes longer than the request.
PREFERS_LIBNBD = False
Lock = asyncio.Lock
monotonic = time.monotonic
_T = TypeVar("_T")
#: Pause before another connect to a socket whose queue is full, in seconds.
_FULL_QUEUE_PAUSE = 0.001


class Socket:
    """A connected socket with a deadline for each exchange. Not tied to an event loop between
    exchanges.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = 0.0
        self._is_late = False

    def begin(self, timeout: float) -> None:
        """Starts an exchange that has to end within ``timeout`` seconds."""
        self._timeout = timeout
        self._is_late = False
        self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)

    def end(self) -> None:
        """Ends the exchange."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._is_late = True
        # Ends the call that waits for the socket.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self._is_late:
            raise TimedOutError(f"no answer within {self._timeout:g} s")

    async def recv_into(self, view: memoryview) -> int:
        """Receives at least one byte, or returns 0 if the peer has closed the connection."""
        try:
            count = await asyncio.get_running_loop().sock_recv_into(self.sock, view)
        except OSError:
            self._check()
            raise
        self._check()
        return count

    async def send(self, data: bytes | memoryview) -> None:
        """Sends all bytes."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.sock, data)
        except OSError:
            self._check()
            raise

    def close(self) -> None:
        """Closes the socket."""
        self.end()
        self.sock.close()


async def connect_unix(path: str, timeout: float) -> Socket:
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
                raise NoServerError(
                    f"no server answers at {path}: {error.strerror or error}"
                ) from error
            await sleep(_FULL_QUEUE_PAUSE)
    except BaseException:
        sock.close()
        raise


async def connect_tcp(host: str, port: int, timeout: float) -> Socket:
    """Connects to a TCP address.

    Raises:
        NoServerError: No server listens there.
        TimedOutError: There was no answer in time.
    """
    try:
        return await asyncio.wait_for(_connect_tcp(host, port), timeout)
    except asyncio.TimeoutError:
        raise TimedOutError(f"{host}:{port}: no connection within {timeout:g} s") from None


async def _connect_tcp(host: str, port: int) -> Socket:
    loop = asyncio.get_running_loop()
    refusal: OSError = OSError("the name has no address")
    try:
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NoServerError(f"{host}: {error.strerror or error}") from error
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Socket(sock)
        except OSError as error:
            sock.close()
            refusal = error
        except BaseException:
            sock.close()
            raise
    raise NoServerError(
        f"no server answers at {host}:{port}: {refusal.strerror or refusal}"
    ) from refusal


async def sleep(seconds: float) -> None:
    """Waits."""
    await asyncio.sleep(seconds)


def unless_locked(lock: Lock, check: Callable[[], bool]) -> bool:
    """Returns what the check returns, or False if a task holds the lock."""
    return not lock.locked() and check()


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Runs a function that blocks on a thread of the loop's executor."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


async def run_program(
    arguments: list[str], environment: dict[str, str], timeout: float
) -> tuple[int, str, str]:
    """Runs a program and returns its exit status and what it wrote to stdout and stderr.

    Raises:
        TimedOutError: The program did not end in time, and was killed.
    """
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    except asyncio.TimeoutError:
        message = f"{' '.join(arguments[:3])}: did not end within {timeout:g} s"
        raise TimedOutError(message) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return process.returncode or 0, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
