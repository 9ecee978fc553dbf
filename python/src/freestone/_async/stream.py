"""A byte stream over a socket: exact reads, lines, and the bounds of both."""

from __future__ import annotations

import os
import select
import socket
from typing import Final

from freestone._async._io import Socket
from freestone.errors import ConnectionLostError, ProtocolError

#: Bytes that are received at once, unless the caller has a larger buffer.
_CHUNK: Final = 64 << 10


class Stream:
    """Exchanges bytes with a server. One task or thread at a time."""

    def __init__(self, sock: Socket, peer: str) -> None:
        self._socket = sock
        self._peer = peer
        self._owner = os.getpid()
        self._buffer = bytearray(_CHUNK)
        self._start = 0
        self._end = 0
        self.is_closed = False

    def begin(self, timeout: float) -> None:
        """Starts an exchange that has to end within ``timeout`` seconds."""
        self._socket.begin(timeout)

    def end(self) -> None:
        """Ends the exchange."""
        self._socket.end()

    @property
    def is_open(self) -> bool:
        """True until the connection is closed here; false in a child made by ``os.fork()``."""
        return not self.is_closed and self._owner == os.getpid()

    @property
    def is_idle(self) -> bool:
        """True if the connection is open, and the server has neither closed it nor sent more."""
        if not self.is_open or self._end > self._start:
            return False
        poll = select.poll()
        poll.register(self._socket.sock, select.POLLIN)
        return not poll.poll(0)

    async def send(self, data: bytes | memoryview) -> None:
        """Sends all bytes."""
        try:
            await self._socket.send(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectionLostError(f"{self._peer}: the server closed the connection") from error

    async def _fill(self) -> None:
        """Receives more bytes behind those in the buffer, which has room for them."""
        self._end += await self._receive(memoryview(self._buffer)[self._end :])

    async def _receive(self, view: memoryview) -> int:
        try:
            count = await self._socket.recv_into(view)
        except ConnectionResetError as error:
            raise ConnectionLostError(f"{self._peer}: the server closed the connection") from error
        if count == 0:
            raise ConnectionLostError(f"{self._peer}: the server closed the connection")
        return count

    def _make_room(self, count: int) -> None:
        """Makes room for ``count`` bytes from the first unread one on."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + count > len(self._buffer):
            unread = self._buffer[self._start : self._end]
            self._buffer[: len(unread)] = unread
            self._start, self._end = 0, len(unread)

    async def receive(self, count: int) -> bytes:
        """Receives exactly ``count`` bytes."""
        if count > _CHUNK:
            large = bytearray(count)
            await self.receive_into(memoryview(large))
            return bytes(large)
        if self._end - self._start < count:
            self._make_room(count)
            while self._end - self._start < count:
                await self._fill()
        data = bytes(memoryview(self._buffer)[self._start : self._start + count])
        self._start += count
        return data

    async def receive_into(self, view: memoryview) -> None:
        """Receives bytes until the view is full."""
        done = min(len(view), self._end - self._start)
        view[:done] = memoryview(self._buffer)[self._start : self._start + done]
        self._start += done
        while done < len(view):
            done += await self._receive(view[done:])

    async def receive_line(self, limit: int) -> bytes:
        """Receives a line of at most ``limit`` bytes, and returns it without its end."""
        parts: list[bytes] = []
        length = 0
        while True:
            at = self._buffer.find(b"\n", self._start, self._end)
            if at >= 0:
                parts.append(bytes(self._buffer[self._start : at]))
                self._start = at + 1
                return b"".join(parts)
            part = bytes(self._buffer[self._start : self._end])
            self._start = self._end = 0
            parts.append(part)
            length += len(part)
            if length > limit:
                raise ProtocolError(
                    f"{self._peer}: the server sent a line of more than {limit} bytes"
                )
            await self._fill()

    def shut_down(self) -> None:
        """Ends the sending direction, so that the server sees an orderly end."""
        if self._owner == os.getpid():
            self._socket.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection. In a child made by ``os.fork()`` the parent's stays open."""
        self.is_closed = True
        self._socket.close()
