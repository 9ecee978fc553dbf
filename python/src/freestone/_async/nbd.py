"""The package's own NBD client."""

from __future__ import annotations

import os
from typing import Final

from freestone import _nbd_wire as wire
from freestone._async._io import connect_tcp, connect_unix
from freestone._async.stream import Stream
from freestone._nbd_uri import NbdUri
from freestone.errors import (
    InvalidError,
    NoDeviceError,
    NoServerError,
    NotSupportedError,
    ProtocolError,
)

#: Payload up to which header and data are sent at once, in bytes.
_JOINED: Final = 64 << 10


class NbdClient:
    """A connection to an export, in the transmission phase. Runs one request at a time."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._cookie = 0
        self._is_structured = False
        self._contexts: dict[int, str] = {}
        self._export = wire.Export(0, 0, 1, wire.MAX_PAYLOAD)

    @staticmethod
    async def connect(uri: NbdUri, contexts: tuple[str, ...], timeout: float) -> NbdClient:
        """Connects to an export and negotiates.

        Raises:
            NotSupportedError: The URI or the server asks for TLS, or the server is too old.
            NoDeviceError: The server has no such export.
            NoServerError: No server listens there.
            ProtocolError: The server violates the protocol.
        """
        if uri.is_tls:
            raise NotSupportedError(
                "TLS needs libnbd: install its Python module (Debian: python3-libnbd)"
            )
        if len(uri.export.encode()) > wire.MAX_NAME_BYTES:
            raise InvalidError(f"the name of the export has more than {wire.MAX_NAME_BYTES} bytes")
        if uri.socket is not None:
            sock, peer = await connect_unix(uri.socket, timeout), uri.socket
        else:
            sock, peer = await connect_tcp(uri.host, uri.port, timeout), f"{uri.host}:{uri.port}"
        client = NbdClient(Stream(sock, f"export {uri.export!r} of {peer}"), uri.export)
        try:
            client._stream.begin(timeout)
            await client._negotiate(contexts)
            client._stream.end()
        except BaseException:
            client._stream.close()
            raise
        return client

    @property
    def size(self) -> int:
        """Size of the export when the connection was made, in bytes."""
        return self._export.size

    @property
    def is_read_only(self) -> bool:
        """True if the export cannot be written."""
        return bool(self._export.flags & wire.READ_ONLY)

    @property
    def is_open(self) -> bool:
        """True until the connection is closed here; false in a child made by ``os.fork()``."""
        return self._stream.is_open

    @property
    def is_usable(self) -> bool:
        """True if the connection is open, as far as can be known without a request."""
        return self._stream.is_idle

    async def _negotiate(self, contexts: tuple[str, ...]) -> None:
        flags = wire.greeting(await self._stream.receive(wire.GREETING.size))
        await self._stream.send(
            wire.CLIENT_FLAGS.pack(flags & (wire.FIXED_NEWSTYLE | wire.NO_ZEROES))
        )
        reply, _ = await self._option(wire.OPT_STRUCTURED_REPLY)
        self._is_structured = reply.kind == wire.REP_ACK
        if self._is_structured and contexts:
            data = wire.context_data(self._name, contexts)
            reply, replies = await self._option(wire.OPT_SET_META_CONTEXT, data)
            # A server that refuses the option has no contexts, and a wrong name is reported by GO.
            if reply.kind == wire.REP_ACK:
                named = [
                    wire.context(each.data)
                    for each in replies
                    if each.kind == wire.REP_META_CONTEXT
                ]
                self._contexts = {number: name for number, name in named if name in contexts}
        reply, replies = await self._option(wire.OPT_GO, wire.go_data(self._name))
        if reply.kind != wire.REP_ACK:
            raise self._refused(reply)
        self._export = wire.export([each.data for each in replies if each.kind == wire.REP_INFO])

    def _refused(self, reply: wire.OptionReply) -> Exception:
        why = f"export {self._name!r}: {wire.refusal(reply)}"
        error = reply.kind & 0xFFFF
        if error == 6:
            return NoDeviceError(why)
        if error == 5:
            return NotSupportedError(f"{why}; TLS needs libnbd (Debian: python3-libnbd)")
        return (
            NotSupportedError(f"{why}; NBD_OPT_GO is needed") if error == 1 else NoServerError(why)
        )

    async def _option(
        self, number: int, data: bytes = b""
    ) -> tuple[wire.OptionReply, list[wire.OptionReply]]:
        """Sends an option. Returns the reply that ends it, and those before."""
        await self._stream.send(wire.option(number, data))
        replies: list[wire.OptionReply] = []
        while True:
            head = await self._stream.receive(wire.OPTION_REPLY.size)
            kind, length = wire.option_reply(head, number)
            reply = wire.OptionReply(kind, await self._stream.receive(length))
            if kind == wire.REP_ACK or kind & wire.REP_ERROR:
                return reply, replies
            replies.append(reply)
            if len(replies) > wire.MAX_REPLIES:
                raise ProtocolError(
                    f"the NBD server sent more than {wire.MAX_REPLIES} replies to an option"
                )

    def _check(self, offset: int, length: int, is_write: bool) -> None:
        if offset < 0 or length < 0 or offset + length > 1 << 63:
            raise InvalidError(
                f"{self._name}: offset {offset} and length {length} must not be negative"
            )
        block = self._export.minimum_block
        if offset % block or length % block:
            message = (
                f"{self._name}: offset {offset} and length {length} must be multiples of {block}"
            )
            raise InvalidError(message)
        if is_write and self.is_read_only:
            raise PermissionError(1, f"{self._name}: the export is read-only")

    async def read(self, view: memoryview, offset: int, timeout: float) -> None:
        """Reads until the view is full."""
        self._check(offset, len(view), is_write=False)
        for start in range(0, len(view), self._export.maximum_payload):
            part = view[start : start + self._export.maximum_payload]
            await self._request(wire.CMD_READ, 0, offset + start, len(part), timeout, into=part)

    async def write(self, data: memoryview, offset: int, fua: bool, timeout: float) -> None:
        """Writes all of the data; with ``fua`` durably."""
        self._check(offset, len(data), is_write=True)
        flags = self._fua(fua)
        for start in range(0, len(data), self._export.maximum_payload):
            part = data[start : start + self._export.maximum_payload]
            await self._request(
                wire.CMD_WRITE, flags, offset + start, len(part), timeout, payload=part
            )
        if fua and not flags:
            await self.flush(timeout)

    def _fua(self, fua: bool) -> int:
        return wire.FLAG_FUA if fua and self._export.flags & wire.SEND_FUA else 0

    async def flush(self, timeout: float) -> None:
        """Makes all writes that have been answered durable."""
        if not self._export.flags & wire.SEND_FLUSH:
            raise NotSupportedError(f"{self._name}: the export does not support flushes")
        await self._request(wire.CMD_FLUSH, 0, 0, 0, timeout)

    async def trim(self, offset: int, length: int, timeout: float) -> None:
        """Discards a range."""
        self._check(offset, length, is_write=True)
        if not self._export.flags & wire.SEND_TRIM:
            raise NotSupportedError(f"{self._name}: the export does not support trims")
        for start in range(0, length, wire.MAX_LENGTH):
            piece = min(wire.MAX_LENGTH, length - start)
            await self._request(wire.CMD_TRIM, 0, offset + start, piece, timeout)

    async def zero(self, offset: int, length: int, fua: bool, timeout: float) -> None:
        """Fills a range with zeroes."""
        self._check(offset, length, is_write=True)
        if not self._export.flags & wire.SEND_WRITE_ZEROES:
            zeroes = memoryview(bytes(min(length, self._export.maximum_payload)))
            for start in range(0, length, len(zeroes) or 1):
                await self.write(zeroes[: length - start], offset + start, fua, timeout)
            return
        flags = self._fua(fua)
        for start in range(0, length, wire.MAX_LENGTH):
            piece = min(wire.MAX_LENGTH, length - start)
            await self._request(wire.CMD_WRITE_ZEROES, flags, offset + start, piece, timeout)
        if fua and not flags:
            await self.flush(timeout)

    async def extents(
        self, offset: int, length: int, context: str, timeout: float
    ) -> list[tuple[int, int]]:
        """Returns length and flags of the extents of a range, in order. They cover the range
        exactly.
        """
        self._check(offset, length, is_write=False)
        number = next((number for number, name in self._contexts.items() if name == context), None)
        if number is None:
            raise NotSupportedError(f"{self._name}: the export has no metadata context {context}")
        extents: list[tuple[int, int]] = []
        done = 0
        while done < length:
            piece = min(wire.MAX_LENGTH, length - done)
            found: dict[int, list[tuple[int, int]]] = {}
            await self._request(
                wire.CMD_BLOCK_STATUS, 0, offset + done, piece, timeout, status=found
            )
            if not found.get(number):
                raise self._violation(f"sent no block status of {context}")
            for size, flags in found[number]:
                # The last extent may reach beyond the range.
                size = min(size, length - done)
                if size and extents and extents[-1][1] == flags:
                    extents[-1] = (extents[-1][0] + size, flags)
                elif size:
                    extents.append((size, flags))
                done += size
        return extents

    async def _request(
        self,
        command: int,
        flags: int,
        offset: int,
        length: int,
        timeout: float,
        payload: memoryview | None = None,
        into: memoryview | None = None,
        status: dict[int, list[tuple[int, int]]] | None = None,
    ) -> None:
        self._cookie += 1
        header = wire.request(flags, command, self._cookie, offset, length)
        try:
            self._stream.begin(timeout)
            if payload is None:
                await self._stream.send(header)
            elif len(payload) <= _JOINED:
                await self._stream.send(b"".join((header, payload)))
            else:
                await self._stream.send(header)
                await self._stream.send(payload)
            error = await self._reply(offset, into, status)
            self._stream.end()
        except BaseException:
            # The place in the stream of replies is lost.
            self._stream.close()
            raise
        if error is not None:
            number, message = error
            what = wire.COMMANDS[command]
            where = "" if command == wire.CMD_FLUSH else f" of {length} bytes at {offset}"
            said = f": {message}" if message else ""
            raise OSError(number, f"{os.strerror(number)}: {self._name}: {what}{where}{said}")

    async def _reply(
        self, offset: int, into: memoryview | None, status: dict[int, list[tuple[int, int]]] | None
    ) -> tuple[int, str] | None:
        """Receives the reply to the request in flight. Returns errno and message if the request
        failed.
        """
        head = await self._stream.receive(wire.SIMPLE_REPLY.size)
        magic = wire.REPLY_MAGIC.unpack_from(head)[0]
        if magic == wire.SIMPLE_REPLY_MAGIC:
            _, number, cookie = wire.SIMPLE_REPLY.unpack(head)
            self._check_cookie(cookie)
            if number:
                return number, ""
            if status is not None or (into is not None and self._is_structured):
                raise self._violation(
                    "sent a simple reply to a request that needs a structured one"
                )
            if into is not None:
                await self._stream.receive_into(into)
            return None
        if magic != wire.STRUCTURED_REPLY_MAGIC or not self._is_structured:
            raise self._violation(f"sent {head!r} in place of a reply")
        return await self._chunks(head, offset, into, status)

    async def _chunks(
        self,
        head: bytes,
        offset: int,
        into: memoryview | None,
        status: dict[int, list[tuple[int, int]]] | None,
    ) -> tuple[int, str] | None:
        """Receives the chunks of a structured reply, of which ``head`` is the beginning."""
        error: tuple[int, str] | None = None
        ranges: list[tuple[int, int]] = []
        rest = wire.CHUNK.size - len(head)
        wanted = len(into) if into is not None else 0
        # A data chunk has 512 bytes or more, except for the first and the last.
        for _ in range(wanted // 512 + wire.MAX_REPLIES):
            head += await self._stream.receive(rest)
            _, flags, kind, cookie, length = wire.CHUNK.unpack(head)
            self._check_cookie(cookie)
            if kind in (wire.CHUNK_DATA, wire.CHUNK_HOLE) and into is not None:
                ranges.append(await self._data(kind, length, offset, into))
            elif length > wire.MAX_CHUNK_BYTES:
                raise self._violation(f"sent a chunk of {length} bytes")
            else:
                data = await self._stream.receive(length)
                if kind == wire.CHUNK_STATUS and status is not None:
                    number, extents = wire.descriptors(data)
                    status[number] = extents
                elif kind & 1 << 15:
                    error = error or wire.error_chunk(kind, data)
                elif kind != wire.CHUNK_NONE or data:
                    raise self._violation(f"sent a chunk of type {kind}")
            if flags & wire.CHUNK_DONE:
                if error is None and into is not None:
                    self._check_ranges(ranges, wanted)
                return error
            head = await self._stream.receive(wire.SIMPLE_REPLY.size)
            if wire.REPLY_MAGIC.unpack_from(head)[0] != wire.STRUCTURED_REPLY_MAGIC:
                raise self._violation(f"sent {head!r} in place of a chunk")
        raise self._violation("sent too many chunks")

    async def _data(self, kind: int, length: int, offset: int, into: memoryview) -> tuple[int, int]:
        """Receives a chunk of data or a hole. Returns its place in the buffer."""
        if kind == wire.CHUNK_HOLE:
            if length != wire.HOLE.size:
                raise self._violation(f"sent a hole of {length} bytes")
            at, size = wire.HOLE.unpack(await self._stream.receive(length))
        else:
            if length <= wire.U64.size:
                raise self._violation("sent data without bytes")
            at = wire.U64.unpack(await self._stream.receive(wire.U64.size))[0]
            size = length - wire.U64.size
        start = at - offset
        if start < 0 or size == 0 or start + size > len(into):
            raise self._violation(f"sent {size} bytes at {at}, which were not asked for")
        if kind == wire.CHUNK_HOLE:
            into[start : start + size] = bytes(size)
        else:
            await self._stream.receive_into(into[start : start + size])
        return start, start + size

    def _check_ranges(self, ranges: list[tuple[int, int]], wanted: int) -> None:
        end = 0
        for start, stop in sorted(ranges):
            if start != end:
                break
            end = stop
        if end != wanted:
            raise self._violation("sent parts of a read that do not make a whole")

    def _check_cookie(self, cookie: int) -> None:
        if cookie != self._cookie:
            raise self._violation("sent a reply to a request that is not in flight")

    def _violation(self, what: str) -> ProtocolError:
        return ProtocolError(f"export {self._name!r}: the NBD server {what}")

    async def close(self) -> None:
        """Closes the connection in order, unless it is broken or belongs to the parent of this
        process.
        """
        try:
            if self._stream.is_idle:
                self._stream.begin(1.0)
                await self._stream.send(wire.request(0, wire.CMD_DISC, 0, 0, 0))
                # A server that has closed its side counts the client no more, so a rewind need not
                # wait for it.
                await self._stream.receive(1)
        except OSError:
            pass  # The server has closed the connection, or takes longer than a second.
        finally:
            self._stream.close()
