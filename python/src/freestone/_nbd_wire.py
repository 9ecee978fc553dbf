"""The NBD protocol: fixed newstyle handshake, requests, simple and structured replies. Packs and
unpacks; does no I/O.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from freestone.errors import ProtocolError

NBD_MAGIC: Final = 0x4E42444D41474943
OPTION_MAGIC: Final = 0x49484156454F5054
OPTION_REPLY_MAGIC: Final = 0x0003E889045565A9
REQUEST_MAGIC: Final = 0x25609513
SIMPLE_REPLY_MAGIC: Final = 0x67446698
STRUCTURED_REPLY_MAGIC: Final = 0x668E33EF

# Flags of both sides of the handshake.
FIXED_NEWSTYLE: Final = 1
NO_ZEROES: Final = 2

OPT_ABORT: Final = 2
OPT_GO: Final = 7
OPT_STRUCTURED_REPLY: Final = 8
OPT_SET_META_CONTEXT: Final = 10

REP_ACK: Final = 1
REP_INFO: Final = 3
REP_META_CONTEXT: Final = 4
REP_ERROR: Final = 1 << 31

INFO_EXPORT: Final = 0
INFO_BLOCK_SIZE: Final = 3

# Transmission flags.
READ_ONLY: Final = 1 << 1
SEND_FLUSH: Final = 1 << 2
SEND_FUA: Final = 1 << 3
SEND_TRIM: Final = 1 << 5
SEND_WRITE_ZEROES: Final = 1 << 6

CMD_READ: Final = 0
CMD_WRITE: Final = 1
CMD_DISC: Final = 2
CMD_FLUSH: Final = 3
CMD_TRIM: Final = 4
CMD_WRITE_ZEROES: Final = 6
CMD_BLOCK_STATUS: Final = 7
COMMANDS: Final = {
    CMD_READ: "read",
    CMD_WRITE: "write",
    CMD_FLUSH: "flush",
    CMD_TRIM: "trim",
    CMD_WRITE_ZEROES: "write of zeroes",
    CMD_BLOCK_STATUS: "block status",
}

FLAG_FUA: Final = 1
FLAG_NO_HOLE: Final = 2

CHUNK_DONE: Final = 1
CHUNK_NONE: Final = 0
CHUNK_DATA: Final = 1
CHUNK_HOLE: Final = 2
CHUNK_STATUS: Final = 5
CHUNK_ERROR: Final = (1 << 15) + 1
CHUNK_ERROR_OFFSET: Final = (1 << 15) + 2

#: Longest data of an option's reply that is read, in bytes.
MAX_OPTION_BYTES: Final = 64 << 10
#: Longest payload of a chunk without data, in bytes: 64 Ki extents.
MAX_CHUNK_BYTES: Final = 4 + 8 * (64 << 10)
#: Option replies of one kind that are read; more are a violation.
MAX_REPLIES: Final = 256
#: Longest name of an export, in bytes.
MAX_NAME_BYTES: Final = 4096
#: Longest payload of a read or write, in bytes, unless the server allows less.
MAX_PAYLOAD: Final = 32 << 20
#: Longest trim, zeroing or block status, in bytes: a multiple of every minimum block.
MAX_LENGTH: Final = (1 << 32) - (64 << 10)

GREETING: Final = struct.Struct(">QQH")
CLIENT_FLAGS: Final = struct.Struct(">I")
OPTION: Final = struct.Struct(">QII")
OPTION_REPLY: Final = struct.Struct(">QIII")
REQUEST: Final = struct.Struct(">IHHQQI")
SIMPLE_REPLY: Final = struct.Struct(">IIQ")
CHUNK: Final = struct.Struct(">IHHQI")
#: What both kinds of reply begin with.
REPLY_MAGIC: Final = struct.Struct(">I")
U16: Final = struct.Struct(">H")
U32: Final = struct.Struct(">I")
U64: Final = struct.Struct(">Q")
HOLE: Final = struct.Struct(">QI")
DESCRIPTOR: Final = struct.Struct(">II")
BLOCK_SIZES: Final = struct.Struct(">HIII")
EXPORT: Final = struct.Struct(">HQH")

_ERRORS: Final = {
    1: "the server does not know the option",
    2: "the server does not allow it",
    3: "the server calls the request invalid",
    4: "not possible on the server's platform",
    5: "the server requires TLS",
    6: "there is no such export",
    7: "the server is shutting down",
    8: "the server requires the negotiation of block sizes",
    9: "the request is too large",
}


class Export(NamedTuple):
    """What a server has told about an export."""

    size: int
    flags: int
    minimum_block: int
    maximum_payload: int


class OptionReply(NamedTuple):
    """A reply to an option."""

    kind: int
    data: bytes


def greeting(data: bytes) -> int:
    """Returns the server's handshake flags."""
    magic, option, flags = GREETING.unpack(data)
    if magic != NBD_MAGIC:
        raise ProtocolError(f"not an NBD server: it greets with {data[:8]!r}")
    if option != OPTION_MAGIC or not flags & FIXED_NEWSTYLE:
        raise ProtocolError("the NBD server does not offer the fixed newstyle handshake")
    return int(flags)


def option(number: int, data: bytes = b"") -> bytes:
    """Returns an option request."""
    return OPTION.pack(OPTION_MAGIC, number, len(data)) + data


def option_reply(data: bytes, number: int) -> tuple[int, int]:
    """Returns the kind of an option reply and the length of its data."""
    magic, answered, kind, length = OPTION_REPLY.unpack(data)
    if magic != OPTION_REPLY_MAGIC:
        raise ProtocolError(f"the NBD server sent {data[:8]!r} in place of an option reply")
    if answered != number:
        raise ProtocolError(
            f"the NBD server replied to option {answered}; option {number} was sent"
        )
    if length > MAX_OPTION_BYTES:
        raise ProtocolError(f"the NBD server sent an option reply of {length} bytes")
    return int(kind), int(length)


def refusal(reply: OptionReply) -> str:
    """Returns why a server refuses an option."""
    reason = _ERRORS.get(reply.kind & 0xFFFF, f"error {reply.kind:#x}")
    text = reply.data.decode("utf-8", "replace").strip()
    return f"{reason}: {text}" if text else reason


def name_bytes(name: str) -> bytes:
    """Returns an export name with its length."""
    raw = name.encode()
    return U32.pack(len(raw)) + raw


def go_data(name: str) -> bytes:
    """Returns the data of the option GO with a request for the block sizes."""
    return name_bytes(name) + U16.pack(1) + U16.pack(INFO_BLOCK_SIZE)


def context_data(name: str, contexts: tuple[str, ...]) -> bytes:
    """Returns the data of the option SET_META_CONTEXT."""
    return name_bytes(name) + U32.pack(len(contexts)) + b"".join(map(name_bytes, contexts))


def export(infos: list[bytes]) -> Export:
    """Returns the description of an export from the information replies to GO."""
    size = flags = None
    minimum, maximum = 1, MAX_PAYLOAD
    for info in infos:
        kind = U16.unpack_from(info)[0] if len(info) >= U16.size else None
        if kind == INFO_EXPORT and len(info) == EXPORT.size:
            _, size, flags = EXPORT.unpack(info)
        elif kind == INFO_BLOCK_SIZE and len(info) == BLOCK_SIZES.size:
            _, minimum, _, maximum = BLOCK_SIZES.unpack(info)
    if size is None or flags is None:
        raise ProtocolError("the NBD server did not tell the size of the export")
    if minimum == 0 or minimum & (minimum - 1) or minimum > 64 << 10 or maximum < minimum:
        raise ProtocolError(f"the NBD server announces blocks of {minimum} to {maximum} bytes")
    maximum = min(maximum, MAX_PAYLOAD) // minimum * minimum
    return Export(size, flags, minimum, maximum)


def context(data: bytes) -> tuple[int, str]:
    """Returns identifier and name in a META_CONTEXT reply."""
    if len(data) < U32.size:
        raise ProtocolError("the NBD server sent a metadata context without an identifier")
    return U32.unpack_from(data)[0], data[U32.size :].decode("utf-8", "replace")


def request(flags: int, command: int, cookie: int, offset: int, length: int) -> bytes:
    """Returns the header of a request."""
    return REQUEST.pack(REQUEST_MAGIC, flags, command, cookie, offset, length)


def error_chunk(kind: int, data: bytes) -> tuple[int, str]:
    """Returns errno and message of an error chunk."""
    head = U32.size + U16.size
    if len(data) < head:
        raise ProtocolError("the NBD server sent an error chunk that is too short")
    number = U32.unpack_from(data)[0]
    length = U16.unpack_from(data, U32.size)[0]
    rest = len(data) - head - (U64.size if kind == CHUNK_ERROR_OFFSET else 0)
    if length > rest:
        raise ProtocolError("the NBD server sent an error chunk whose message is too long")
    return number, data[head : head + length].decode("utf-8", "replace")


def descriptors(data: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Returns the context of a block status chunk, and length and flags of each extent."""
    count, rest = divmod(len(data) - U32.size, DESCRIPTOR.size)
    if count < 1 or rest:
        raise ProtocolError(f"the NBD server sent a block status of {len(data)} bytes")
    extents = [DESCRIPTOR.unpack_from(data, U32.size + n * DESCRIPTOR.size) for n in range(count)]
    if any(length == 0 for length, _ in extents):
        raise ProtocolError("the NBD server sent an extent of length 0")
    return U32.unpack_from(data)[0], extents
