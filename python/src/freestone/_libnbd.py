"""A client that uses libnbd's Python module. Blocks, each request with a deadline."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from freestone.errors import (
    ConnectionLostError,
    InvalidError,
    NoServerError,
    NotSupportedError,
    TimedOutError,
)

#: Longest payload of a request, in bytes: libnbd's own limit is 64 MiB.
_MAX_PAYLOAD = 32 << 20
#: Longest trim, zeroing or block status, in bytes.
_MAX_LENGTH = (1 << 32) - (64 << 10)
#: Longest wait in libnbd, in milliseconds. Some versions continue to wait after a signal, so Python's
#: handlers, and thus Ctrl-C, run only between two waits.
_WAIT_MS = 100


def module() -> Any:
    """Returns libnbd's module, or None if it is not installed."""
    try:
        found: Any = importlib.import_module("nbd")
    except ImportError:
        return None
    return found if hasattr(found, "NBD") else None


class LibnbdClient:
    """A connection to an export. Runs one request at a time."""

    def __init__(self, uri: str, name: str, contexts: tuple[str, ...], timeout: float) -> None:
        nbd = module()
        if nbd is None:
            raise NotSupportedError(
                "libnbd is not installed: its Python module is Debian's python3-libnbd"
            )
        self._nbd = nbd
        self._name = name
        self._owner = os.getpid()
        self._handle: Any = nbd.NBD()
        self._is_broken = False
        for context in contexts:
            self._handle.add_meta_context(context)
        try:
            self._handle.aio_connect_uri(uri)
            self._wait(lambda: not self._handle.aio_is_connecting(), timeout, "connect")
            if not self._handle.aio_is_ready():
                raise NoServerError(f"{uri}: the connection ended during the handshake")
            self.size = int(self._handle.get_size())
            self.is_read_only = bool(self._handle.is_read_only())
            self._block = int(self._handle.get_block_size(nbd.SIZE_MINIMUM)) or 1
            allowed = int(self._handle.get_block_size(nbd.SIZE_MAXIMUM)) or _MAX_PAYLOAD
            self._maximum = max(min(allowed, _MAX_PAYLOAD) // self._block, 1) * self._block
        except nbd.Error as error:
            raise NoServerError(f"{uri}: {error.string}") from error

    @property
    def is_open(self) -> bool:
        """True until the connection is closed here; false in a child made by ``os.fork()``."""
        return not self._is_broken and self._owner == os.getpid()

    @property
    def is_usable(self) -> bool:
        """True if the connection is open, as far as can be known without a request."""
        if not self.is_open:
            return False
        # An error, or another state: the server has closed the connection.
        with contextlib.suppress(self._nbd.Error):
            self._handle.poll(0)
        return bool(self._handle.aio_is_ready())

    def _wait(self, is_done: Callable[[], bool], timeout: float, what: str) -> None:
        until = time.monotonic() + timeout
        while not is_done():
            left = until - time.monotonic()
            if left <= 0:
                self._is_broken = True
                raise TimedOutError(f"{self._name}: {what}: no answer within {timeout:g} s")
            try:
                self._handle.poll(min(max(1, int(left * 1000)), _WAIT_MS))
            except self._nbd.Error as error:
                # A signal whose handler has returned does not end the request.
                if error.errnum != errno.EINTR:
                    raise

    def _run(self, timeout: float, what: str, start: Any, *arguments: Any, **options: Any) -> None:
        try:
            cookie = start(*arguments, **options)
            self._wait(lambda: bool(self._handle.aio_command_completed(cookie)), timeout, what)
        except self._nbd.Error as error:
            number = int(error.errnum or 0)
            if self._handle.aio_is_dead() or self._handle.aio_is_closed():
                self._is_broken = True
                message = f"{self._name}: {what}: the connection ended"
                raise ConnectionLostError(message) from error
            raise OSError(number, f"{os.strerror(number)}: {self._name}: {what}") from error
        except BaseException:
            self._is_broken = True
            raise

    def _check(self, offset: int, length: int, is_write: bool) -> None:
        if offset < 0 or length < 0 or offset + length > 1 << 63:
            raise InvalidError(
                f"{self._name}: offset {offset} and length {length} must not be negative"
            )
        block = int(self._handle.get_block_size(self._nbd.SIZE_MINIMUM)) or 1
        if offset % block or length % block:
            message = (
                f"{self._name}: offset {offset} and length {length} must be multiples of {block}"
            )
            raise InvalidError(message)
        if is_write and self.is_read_only:
            raise PermissionError(1, f"{self._name}: the export is read-only")

    def read(self, view: memoryview, offset: int, timeout: float) -> None:
        """Reads until the view is full."""
        self._check(offset, len(view), is_write=False)
        for start in range(0, len(view), self._maximum):
            part = view[start : start + self._maximum]
            buffer = self._nbd.Buffer(len(part))
            what = f"read of {len(part)} bytes at {offset + start}"
            self._run(timeout, what, self._handle.aio_pread, buffer, offset + start)
            part[:] = buffer.to_bytearray()

    def write(self, data: memoryview, offset: int, fua: bool, timeout: float) -> None:
        """Writes all of the data; with ``fua`` durably."""
        self._check(offset, len(data), is_write=True)
        flags = self._nbd.CMD_FLAG_FUA if fua and self._handle.can_fua() else 0
        for start in range(0, len(data), self._maximum):
            buffer = self._nbd.Buffer.from_bytearray(bytearray(data[start : start + self._maximum]))
            what = f"write of {buffer.size()} bytes at {offset + start}"
            at = offset + start
            self._run(timeout, what, self._handle.aio_pwrite, buffer, at, flags=flags)
        if fua and not flags:
            self.flush(timeout)

    def flush(self, timeout: float) -> None:
        """Makes all writes that have been answered durable."""
        if not self._handle.can_flush():
            raise NotSupportedError(f"{self._name}: the export does not support flushes")
        self._run(timeout, "flush", self._handle.aio_flush)

    def trim(self, offset: int, length: int, timeout: float) -> None:
        """Discards a range."""
        self._check(offset, length, is_write=True)
        if not self._handle.can_trim():
            raise NotSupportedError(f"{self._name}: the export does not support trims")
        for start in range(0, length, _MAX_LENGTH):
            piece = min(_MAX_LENGTH, length - start)
            what = f"trim of {piece} bytes at {offset + start}"
            self._run(timeout, what, self._handle.aio_trim, piece, offset + start)

    def zero(self, offset: int, length: int, fua: bool, timeout: float) -> None:
        """Fills a range with zeroes."""
        self._check(offset, length, is_write=True)
        if not self._handle.can_zero():
            for start in range(0, length, self._maximum):
                zeroes = memoryview(bytes(min(self._maximum, length - start)))
                self.write(zeroes, offset + start, fua, timeout)
            return
        flags = self._nbd.CMD_FLAG_FUA if fua and self._handle.can_fua() else 0
        for start in range(0, length, _MAX_LENGTH):
            piece = min(_MAX_LENGTH, length - start)
            what = f"write of zeroes of {piece} bytes at {offset + start}"
            at = offset + start
            self._run(timeout, what, self._handle.aio_zero, piece, at, flags=flags)
        if fua and not flags:
            self.flush(timeout)

    def extents(
        self, offset: int, length: int, context: str, timeout: float
    ) -> list[tuple[int, int]]:
        """Returns length and flags of the extents of a range, in order. They cover the range
        exactly.
        """
        self._check(offset, length, is_write=False)
        if not self._handle.can_meta_context(context):
            raise NotSupportedError(f"{self._name}: the export has no metadata context {context}")
        extents: list[tuple[int, int]] = []
        done = 0
        while done < length:
            found: list[int] = []

            def keep(
                name: str, _offset: int, entries: list[int], _error: Any, to: list[int] = found
            ) -> None:
                if name == context:
                    to.extend(entries)

            at, piece = offset + done, min(_MAX_LENGTH, length - done)
            what = f"block status of {piece} bytes at {at}"
            self._run(timeout, what, self._handle.aio_block_status, piece, at, keep)
            if not found:
                raise OSError(5, f"{self._name}: {what}: no extents")
            for size, flags in zip(found[::2], found[1::2]):
                size = min(size, length - done)
                if size and extents and extents[-1][1] == flags:
                    extents[-1] = (extents[-1][0] + size, flags)
                elif size:
                    extents.append((size, flags))
                done += size
        return extents

    def close(self) -> None:
        """Closes the connection in order, unless it is broken or belongs to the parent of this
        process.
        """
        if self._owner != os.getpid():
            return
        if not self._is_broken and self._handle.aio_is_ready():
            # An error: the server has closed the connection meanwhile.
            with contextlib.suppress(self._nbd.Error):
                self._handle.shutdown()
        self._is_broken = True
        # libnbd closes the socket with the last reference to the handle.
        self._handle = None
