"""NBD connections, by the package's own client or by libnbd."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, TypeVar, Union

from freestone import _nbd_uri
from freestone._async._io import PREFERS_LIBNBD, Lock, in_thread, unless_locked
from freestone._async.nbd import NbdClient
from freestone._types import Extent
from freestone.errors import ConnectionLostError, InvalidError

#: The metadata context that tells holes and zeroes.
ALLOCATION: Final = "base:allocation"
#: The metadata context of forks and snapshots that tells what the device itself holds.
CHANGED: Final = "freestone:changed"

Buffer = Union[bytes, bytearray, memoryview]
_Self = TypeVar("_Self", bound="Connection")


class Connection:
    """A connection to an NBD export: reads and writes without a mount.

    May be used by several threads or tasks, which take turns. A request that fails raises
    :class:`OSError` with the errno of the reply, and the connection stays usable. A request that is
    interrupted or cancelled, or takes longer than ``timeout``, closes it. Offsets and lengths are
    in bytes; exports of Freestone accept any, except for zoned devices, and other servers may
    require multiples of a block (:class:`InvalidError`).
    """

    def __init__(self, client: Any, timeout: float, is_libnbd: bool) -> None:
        self._client = client
        self._timeout = timeout
        self._is_libnbd = is_libnbd
        self._lock = Lock()
        self._is_closed = False

    @property
    def size(self) -> int:
        """Size of the export when the connection was made, in bytes."""
        return int(self._client.size)

    @property
    def is_read_only(self) -> bool:
        """True if the export cannot be written."""
        return bool(self._client.is_read_only)

    @property
    def client(self) -> str:
        """The client in use: ``libnbd`` or ``own``."""
        return "libnbd" if self._is_libnbd else "own"

    @property
    def is_closed(self) -> bool:
        """True if the connection has ended, as far as can be known without a request."""
        return self._is_closed or unless_locked(self._lock, lambda: not self._client.is_usable)

    async def read(self, offset: int, length: int) -> bytes:
        """Returns ``length`` bytes from ``offset`` on.

        Raises:
            OSError: The server refuses the read: EINVAL beyond the end of the export, EIO for a
                disk error.
            ConnectionLostError: The connection ended.
            TimedOutError: There was no answer in time.
        """
        if length < 0:
            raise InvalidError(f"length {length} must not be negative")
        data = bytearray(length)
        await self._run("read", memoryview(data), offset)
        return bytes(data)

    async def read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fills a buffer with the bytes from ``offset`` on. Raises the errors of :meth:`read`."""
        await self._run("read", memoryview(buffer).cast("B"), offset)

    async def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        """Writes all of ``data`` at ``offset``.

        Args:
            offset: Place of the first byte.
            data: The bytes.
            fua: Return when the data is durable.

        Raises:
            OSError: The server refuses the write: EPERM if the export is read-only, ENOSPC without
                space or beyond the end, EIO for a disk error. A part of the data may have been
                written.
            ConnectionLostError: The connection ended. The data may have been written.
            TimedOutError: There was no answer in time. The data may have been written.
        """
        await self._run("write", memoryview(data).cast("B"), offset, fua)

    async def zero(self, offset: int, length: int, *, fua: bool = False) -> None:
        """Fills a range with zeroes. Raises the errors of :meth:`write`."""
        await self._run("zero", offset, length, fua)

    async def trim(self, offset: int, length: int) -> None:
        """Discards a range; afterwards it reads as zeroes or as before. Raises the errors of
        :meth:`write`.

        Raises:
            NotSupportedError: The export does not support trims.
        """
        await self._run("trim", offset, length)

    async def flush(self) -> None:
        """Returns when all writes that were answered on any connection are durable.

        Raises:
            NotSupportedError: The export does not support flushes.
        """
        await self._run("flush")

    async def extents(
        self, offset: int = 0, length: int | None = None, *, context: str = ALLOCATION
    ) -> list[Extent]:
        """Returns the extents of a range, in order, without gaps.

        Args:
            offset: Start of the range.
            length: Its length; by default up to the end of the export.
            context: Metadata context that was named when the connection was made.

        Raises:
            NotSupportedError: The export has no such context.
        """
        length = self.size - offset if length is None else length
        found: list[tuple[int, int]] = await self._run("extents", offset, length, context)
        extents: list[Extent] = []
        for size, flags in found:
            extents.append(Extent(offset, size, flags))
            offset += size
        return extents

    async def _run(self, method: str, *arguments: object) -> Any:
        async with self._lock:
            if self._is_closed or not self._client.is_open:
                raise ConnectionLostError("the NBD connection has ended or is closed")
            function = getattr(self._client, method)
            if not self._is_libnbd:
                return await function(*arguments, self._timeout)
            try:
                return await in_thread(function, *arguments, self._timeout)
            except Exception:
                raise
            except BaseException:
                # The thread may still use the client, until the deadline of its request.
                self._is_closed = True
                raise

    async def close(self) -> None:
        """Closes the connection, after the request of another thread or task."""
        async with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._is_libnbd:
                await in_thread(self._client.close)
            else:
                await self._client.close()

    async def __aenter__(self: _Self) -> _Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def connect_nbd(
    uri: str,
    *,
    client: str = "auto",
    contexts: tuple[str, ...] = (ALLOCATION,),
    timeout: float = 60.0,
) -> Connection:
    """Connects to an export of any NBD server.

    Args:
        uri: ``nbd://HOST[:PORT]/EXPORT`` or ``nbd+unix:///EXPORT?socket=PATH``; ``nbds`` for TLS,
            which needs libnbd.
        client: ``own`` for the package's client, ``libnbd``, or ``auto``: libnbd for TLS, and with
            threads also for the rest if it is installed; otherwise the own one.
        contexts: Metadata contexts for :meth:`Connection.extents`; an export need not have them.
        timeout: Longest duration of the connect and of each request, in seconds.

    Raises:
        InvalidError: The URI or an option is invalid.
        NoDeviceError: The server has no such export.
        NoServerError: No server listens there.
        NotSupportedError: libnbd is needed and not installed, or the server is too old.
        ProtocolError: The server violates the protocol.
        TimedOutError: There was no answer in time.
    """
    parsed = _nbd_uri.parse(uri)
    if client not in ("auto", "own", "libnbd"):
        raise InvalidError(f"client={client!r}: must be auto, own or libnbd")
    # Imported late: looking for libnbd takes time, and asyncio needs it only for TLS.
    if client == "auto" and (PREFERS_LIBNBD or parsed.is_tls):
        from freestone._libnbd import module

        client = "libnbd" if parsed.is_tls or module() is not None else "own"
    if client == "libnbd":
        from freestone._libnbd import LibnbdClient

        opened = await in_thread(LibnbdClient, uri, parsed.export, contexts, timeout)
        return Connection(opened, timeout, is_libnbd=True)
    own = await NbdClient.connect(parsed, contexts, timeout)
    return Connection(own, timeout, is_libnbd=False)
