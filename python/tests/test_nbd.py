from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import freestone
from freestone import GiB, KiB, MiB, _libnbd, _nbd_uri, aio
from freestone import _nbd_wire as wire
from nbd_servers import FakeServer, Recorder, nbdkit, qemu_nbd

CLIENTS = [
    "own",
    pytest.param(
        "libnbd",
        marks=pytest.mark.skipif(
            _libnbd.module() is None, reason="left out: libnbd (package python3-libnbd)"
        ),
    ),
]


@pytest.fixture(params=["freestone", "qemu-nbd", "nbdkit", "nbdkit by TCP"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty export of 64 MiB of each server."""
    if request.param == "freestone":
        with freestone.Server() as server:
            yield server.create("x", "ram", disksize=64 * MiB).uri
    elif request.param == "qemu-nbd":
        with qemu_nbd(tmp_path, 64 * MiB) as uri:
            yield uri
    else:
        with nbdkit(tmp_path, "memory", "64M", unix=request.param == "nbdkit") as uri:
            yield uri


@pytest.mark.parametrize("client", CLIENTS)
def test_every_request(uri: str, client: str) -> None:
    with freestone.connect_nbd(uri, client=client) as connection:
        assert connection.client == client
        assert connection.size == 64 * MiB
        assert not connection.is_read_only
        data = random.Random(1).randbytes(40 * MiB)
        # Longer than the payload of one request.
        connection.write(8 * KiB, data)
        assert connection.read(8 * KiB, len(data)) == data
        buffer = bytearray(4 * KiB)
        connection.read_into(12 * KiB, buffer)
        assert buffer == data[4 * KiB : 8 * KiB]
        connection.write(0, memoryview(b"x" * 4096), fua=True)
        connection.zero(16 * KiB, 32 * KiB, fua=True)
        assert connection.read(16 * KiB, 32 * KiB) == bytes(32 * KiB)
        connection.trim(MiB, MiB)
        connection.flush()
        assert connection.read(0, 0) == b""
        connection.write(0, b"")
        connection.zero(0, 0)
        extents = connection.extents()
        assert sum(extent.length for extent in extents) == 64 * MiB
        assert [extent.offset for extent in extents][:1] == [0]
        assert connection.extents(60 * MiB, MiB)[-1].is_zero
        assert connection.extents(0, 512)[0] == freestone.Extent(0, 512, 0)
        with pytest.raises(OSError, match=r".") as beyond:
            connection.read(64 * MiB - 512, 1024)
        assert beyond.value.errno == errno.EINVAL
        # The connection is usable after an error.
        assert connection.read(0, 1) == b"x"
        assert not connection.is_closed
    assert connection.is_closed
    with pytest.raises(freestone.ConnectionLostError):
        connection.read(0, 1)
    connection.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_unknown_export_and_no_server(tmp_path: Path, client: str) -> None:
    with freestone.Server() as server:
        uri = server.create("x", "null", size=MiB).uri.replace("///x", "///y")
        with pytest.raises(freestone.FreestoneError):
            freestone.connect_nbd(uri, client=client)
    with pytest.raises(freestone.NoServerError):
        freestone.connect_nbd(f"nbd+unix:///x?socket={tmp_path}/none", client=client)
    with pytest.raises(freestone.NoServerError):
        freestone.connect_nbd("nbd://127.0.0.1:1/x", client=client)


@pytest.mark.parametrize("client", CLIENTS)
def test_injected_errors_have_their_errno(server: freestone.Server, client: str) -> None:
    faults = ["read error=EIO at=4K+4K", "write error=ENOSPC at=8K+4K", "flush error=EIO times=1"]
    disk = server.create("disk", "ram", disksize=MiB, faults=faults, seed=1)
    with disk.open(client=client) as connection:
        with pytest.raises(OSError, match=r"disk.*read") as error:
            connection.read(4096, 4096)
        assert error.value.errno == errno.EIO
        with pytest.raises(OSError, match=r"disk.*write") as error:
            connection.write(8192, bytes(4096))
        assert error.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match=r"disk.*flush") as error:
            connection.flush()
        assert error.value.errno == errno.EIO
        connection.flush()
        assert connection.read(0, 4096) == bytes(4096)


@pytest.mark.parametrize("client", CLIENTS)
def test_read_only_export(server: freestone.Server, base: freestone.Snapshot, client: str) -> None:
    with base.open(client=client) as connection:
        assert connection.is_read_only
        assert connection.read(0, 1) == b"b"
        with pytest.raises(PermissionError, match="read-only"):
            connection.write(0, b"x")
        with pytest.raises(PermissionError, match="read-only"):
            connection.zero(0, 1)
        with pytest.raises(PermissionError, match="read-only"):
            connection.trim(0, 1)


@pytest.mark.parametrize("client", CLIENTS)
def test_hung_request_meets_its_deadline(server: freestone.Server, client: str) -> None:
    disk = server.create("disk", "ram", disksize=MiB, faults="read hang", seed=1)
    connection = disk.open(client=client, timeout=0.2)
    began = time.monotonic()
    with pytest.raises(freestone.TimedOutError, match=r"0\.2 s"):
        connection.read(0, 4096)
    assert time.monotonic() - began < 5
    assert connection.is_closed
    with pytest.raises(freestone.ConnectionLostError):
        connection.read(0, 4096)
    connection.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_interrupted_read_closes_its_connection(server: freestone.Server, client: str) -> None:
    disk = server.create("disk", "ram", disksize=MiB, faults="read hang times=1", seed=1)
    handled: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    main = threading.main_thread().ident or 0
    timers = [
        threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGUSR1]),
        threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]),
    ]
    with disk.open(client=client) as connection:
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            connection.read(0, 4096)
        for timer in timers:
            timer.join()
        # A signal with a handler does not end the request.
        assert handled == [signal.SIGUSR1]
        assert connection.is_closed
    signal.signal(signal.SIGUSR1, previous)
    server.call("release", name="disk")
    assert disk.read(0, 1) == b"\0"


def test_client_is_chosen(disk: freestone.Disk) -> None:
    with disk.open() as connection:
        assert connection.client == ("own" if _libnbd.module() is None else "libnbd")

    async def client_of_asyncio() -> str:
        async with await aio.connect_nbd(disk.uri) as connection:
            return connection.client

    assert asyncio.run(client_of_asyncio()) == "own"


@pytest.mark.parametrize("client", CLIENTS)
def test_connection_of_a_removed_device_is_lost(server: freestone.Server, client: str) -> None:
    with server.create("disk", "ram", disksize=MiB) as disk:
        connection = disk.open(client=client)
        connection.write(0, b"x")
        disk.remove(force=True)
        with pytest.raises(OSError, match=r"."):
            connection.read(0, 1)
        connection.close()


def test_kept_connection_is_replaced_after_a_power_cut(
    server: freestone.Server, base: freestone.Snapshot
) -> None:
    with server.fork(base, power_cut=True) as fork:
        fork.write(0, b"x", fua=True)
        assert fork.power_cut().connections_ended == 1
        assert fork.read(0, 1) == b"x"
        fork.power_cut(after="2writes", seed=1)
        fork.write(0, b"y")
        # The cut may end the connection before the reply to the last write is sent.
        with contextlib.suppress(freestone.ConnectionLostError):
            fork.write(0, b"z")
        assert fork.read(0, 1) in b"xyz"
        assert fork.stat()["power"]["cuts"] == 2


def test_changed_extents_beyond_the_first_4096(server: freestone.Server) -> None:
    disk = server.create("disk", "ram", disksize=128 * MiB)
    disk.write(0, b"b" * MiB)
    base = disk.snapshot()
    with server.fork(base) as fork:
        for block in range(0, 10000, 2):
            fork.write(block * 4096, b"x")
        fork.zero(0, 4096)
        fork.zero(4096, 4096)
        changes = fork.changes()
    assert changes[0] == freestone.Change(0, 8192, zero=True)
    assert changes[1] == freestone.Change(8192, 4096, zero=False)
    assert len(changes) == 5000
    assert changes[-1] == freestone.Change(9998 * 4096, 4096, zero=False)


@pytest.mark.parametrize("client", CLIENTS)
def test_export_without_block_status_or_trim(tmp_path: Path, client: str) -> None:
    filters = ["--filter=nozero", "--filter=noextents", "--filter=fua", "memory", "1M"]
    modes = ["fuamode=discard", "zeromode=none"]
    with nbdkit(tmp_path, *filters, *modes) as uri:
        connection = freestone.connect_nbd(uri, client=client)
        connection.write(0, b"x" * 8192, fua=True)
        # The export cannot write zeroes itself.
        connection.zero(4096, 512 * KiB, fua=True)
        assert connection.read(4095, 2) == b"x\0"
        assert connection.read(516 * KiB, 2) == b"\0\0"
        connection.close()
    with nbdkit(tmp_path, "--no-sr", "memory", "1M") as uri:
        simple = freestone.connect_nbd(uri, client=client)
        simple.write(0, b"x")
        assert simple.read(0, 2) == b"x\0"
        with pytest.raises(freestone.NotSupportedError, match="base:allocation"):
            simple.extents()
        simple.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_export_with_blocks(tmp_path: Path, client: str) -> None:
    options = ["blocksize-minimum=4K", "blocksize-preferred=4K", "blocksize-maximum=64K"]
    filters = [
        "--filter=blocksize-policy",
        "memory",
        "1M",
        *options,
        "blocksize-error-policy=error",
    ]
    with nbdkit(tmp_path, *filters) as uri, freestone.connect_nbd(uri, client=client) as connection:
        data = random.Random(1).randbytes(512 * KiB)
        connection.write(4096, data)
        assert connection.read(4096, len(data)) == data
        for offset, length in ((1, 4096), (0, 1)):
            with pytest.raises(freestone.InvalidError, match="multiples of 4096"):
                connection.read(offset, length)


def test_sizes_beyond_32_bits(server: freestone.Server) -> None:
    disk = server.create("disk", "ram", disksize=16 * GiB)
    disk.write(10 * GiB, b"x")
    assert [extent.is_hole for extent in disk.extents()] == [True, False, True]
    disk.zero(0, 16 * GiB)
    disk.trim(0, 16 * GiB)
    assert [extent.is_zero for extent in disk.extents()] == [True]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("nbd://h/x", ("x", None, "h", 10809, False)),
        ("nbd://[::1]:7", ("", None, "::1", 7, False)),
        ("nbds://h/a%20b/c", ("a b/c", None, "h", 10809, True)),
        ("nbd+unix:///?socket=/a%3fb", ("", "/a?b", "", 0, False)),
        ("nbds+unix:///x?socket=/s&y=1", ("x", "/s", "", 0, True)),
    ],
)
def test_uri(text: str, parsed: tuple[object, ...]) -> None:
    assert _nbd_uri.parse(text) == parsed


@pytest.mark.parametrize(
    "text",
    ["", "x", "http://h/", "nbd:///x", "nbd+unix:///x", "nbd://h:x/", "nbd+unix:///?socket="],
)
def test_invalid_uri(text: str) -> None:
    with pytest.raises(freestone.InvalidError):
        _nbd_uri.parse(text)


def test_arguments_are_checked(disk: freestone.Disk) -> None:
    for offset, length in ((-1, 1), (0, -1), (1 << 63, 1)):
        with pytest.raises(freestone.InvalidError):
            disk.read(offset, length)
    with pytest.raises(freestone.InvalidError, match="auto, own or libnbd"):
        disk.open(client="other")
    with disk.open(contexts=()) as connection:
        with pytest.raises(freestone.NotSupportedError):
            connection.extents()


def test_tls_needs_libnbd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libnbd, "module", lambda: None)
    with pytest.raises(freestone.NotSupportedError, match="python3-libnbd"):
        freestone.connect_nbd("nbds://localhost/x")
    with pytest.raises(freestone.NotSupportedError, match="python3-libnbd"):
        freestone.connect_nbd("nbds://localhost/x", client="own")


# The handshake of a server that speaks simple and structured replies.
GREETING = wire.GREETING.pack(wire.NBD_MAGIC, wire.OPTION_MAGIC, 3)


def reply(option: int, kind: int, data: bytes = b"") -> bytes:
    return wire.OPTION_REPLY.pack(wire.OPTION_REPLY_MAGIC, option, kind, len(data)) + data


ALLOCATION = reply(10, wire.REP_META_CONTEXT, wire.U32.pack(7) + b"base:allocation")
EXPORT = reply(7, wire.REP_INFO, wire.EXPORT.pack(0, MiB, 1 | 4 | 8)) + reply(7, 1)
STRUCTURED = GREETING + reply(8, 1) + ALLOCATION + reply(10, 1) + EXPORT
SIMPLE = GREETING + reply(8, wire.REP_ERROR + 1) + EXPORT


def chunk(flags: int, kind: int, data: bytes, cookie: int = 1) -> bytes:
    return wire.CHUNK.pack(wire.STRUCTURED_REPLY_MAGIC, flags, kind, cookie, len(data)) + data


HUGE_CHUNK = wire.CHUNK.pack(wire.STRUCTURED_REPLY_MAGIC, 1, 0x8003, 1, 1 << 30)


def data_chunk(flags: int, offset: int, data: bytes) -> bytes:
    return chunk(flags, wire.CHUNK_DATA, wire.U64.pack(offset) + data)


@pytest.mark.parametrize(
    ("handshake", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not an NBD server"),
        (b"", "closed"),
        (GREETING[:10], "closed"),
        (wire.GREETING.pack(wire.NBD_MAGIC, 1, 3), "fixed newstyle"),
        (wire.GREETING.pack(wire.NBD_MAGIC, wire.OPTION_MAGIC, 0), "fixed newstyle"),
        (GREETING + b"\0" * 20, "in place of an option reply"),
        (GREETING + reply(7, 1), "replied to option 7"),
        (GREETING + wire.OPTION_REPLY.pack(wire.OPTION_REPLY_MAGIC, 8, 1, 1 << 31), "2147483648"),
        (GREETING + reply(8, 1) + reply(10, 3) * 300, "more than 256"),
        (GREETING + reply(8, 1) + reply(10, 4, b"x") + reply(10, 1), "without an identifier"),
        (GREETING + reply(8, 1) + reply(10, 1) + reply(7, 1), "size of the export"),
        (GREETING + reply(8, 1) + reply(10, 1) + reply(7, wire.REP_ERROR + 1), "NBD_OPT_GO"),
        (GREETING + reply(8, 1) + reply(10, 1) + reply(7, wire.REP_ERROR + 6, b"no x"), "no x"),
        (GREETING + reply(8, 1) + reply(10, 1) + reply(7, wire.REP_ERROR + 5), "TLS"),
        (
            GREETING + reply(8, 1) + reply(10, 1) + reply(7, 3, wire.EXPORT.pack(0, MiB, 1))
            + reply(7, 3, wire.BLOCK_SIZES.pack(3, 0, 0, 0)) + reply(7, 1),
            "blocks of 0",
        ),
    ],
)  # fmt: skip
def test_handshake_violations(tmp_path: Path, handshake: bytes, message: str) -> None:
    with FakeServer(tmp_path / "s", [handshake]) as fake:
        with pytest.raises(freestone.FreestoneError, match=message):
            freestone.connect_nbd(fake.uri, client="own", timeout=5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (SIMPLE + b"\0" * 16, "in place of a reply"),
        (SIMPLE + wire.SIMPLE_REPLY.pack(wire.SIMPLE_REPLY_MAGIC, 0, 2) + b"x" * 4, "in flight"),
        (SIMPLE + wire.SIMPLE_REPLY.pack(wire.SIMPLE_REPLY_MAGIC, 0, 1) + b"x", "closed"),
        (SIMPLE + chunk(1, 0, b""), "in place of a reply"),
        (STRUCTURED + wire.SIMPLE_REPLY.pack(wire.SIMPLE_REPLY_MAGIC, 0, 1), "structured one"),
        (STRUCTURED + chunk(1, 0, b""), "do not make a whole"),
        (STRUCTURED + chunk(1, 0, b"x"), "chunk of type 0"),
        (STRUCTURED + chunk(1, 9, b""), "chunk of type 9"),
        (STRUCTURED + chunk(1, 0, b"", cookie=2), "in flight"),
        (STRUCTURED + data_chunk(1, 0, b"xxxxx"), "not asked for"),
        (STRUCTURED + data_chunk(1, 4, b"xxxx"), "not asked for"),
        (STRUCTURED + data_chunk(1, 0, b""), "without bytes"),
        (STRUCTURED + data_chunk(0, 0, b"xx") + data_chunk(1, 1, b"xxx"), "make a whole"),
        (STRUCTURED + data_chunk(0, 0, b"xx") + chunk(1, 2, b"short"), "hole of 5"),
        (STRUCTURED + chunk(1, 2, wire.HOLE.pack(0, 1 << 31)), "not asked for"),
        (STRUCTURED + data_chunk(0, 0, b"x") * 1000, "too many chunks"),
        (STRUCTURED + data_chunk(0, 0, b"xx") + b"\0" * 20, "in place of a chunk"),
        (STRUCTURED + chunk(1, wire.CHUNK_ERROR, b"xx"), "too short"),
        (STRUCTURED + chunk(1, wire.CHUNK_ERROR, b"\0\0\0\5\0\7xxx"), "too long"),
        (STRUCTURED + HUGE_CHUNK, "1073741824"),
    ],
)  # fmt: skip
def test_violations_of_a_read(tmp_path: Path, answer: bytes, message: str) -> None:
    with FakeServer(tmp_path / "s", [answer]) as fake:
        with freestone.connect_nbd(fake.uri, client="own", timeout=5) as connection:
            with pytest.raises(freestone.FreestoneError, match=message):
                connection.read(0, 4)
            # The place in the stream is lost, so no later answer can be taken for a reply.
            assert connection.is_closed


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (chunk(1, 5, wire.U32.pack(7)), "block status of 4 bytes"),
        (chunk(1, 5, wire.U32.pack(7) + wire.DESCRIPTOR.pack(0, 0)), "length 0"),
        (chunk(1, 5, wire.U32.pack(8) + wire.DESCRIPTOR.pack(4, 0)), "no block status"),
        (chunk(1, 0, b""), "no block status"),
        (wire.SIMPLE_REPLY.pack(wire.SIMPLE_REPLY_MAGIC, 0, 1), "structured one"),
    ],
)
def test_violations_of_block_status(tmp_path: Path, answer: bytes, message: str) -> None:
    with FakeServer(tmp_path / "s", [STRUCTURED + answer]) as fake:
        with freestone.connect_nbd(fake.uri, client="own", timeout=5) as connection:
            with pytest.raises(freestone.ProtocolError, match=message):
                connection.extents(0, 4)


def test_error_chunks_and_parts_of_a_read(tmp_path: Path) -> None:
    error = wire.U32.pack(5) + wire.U16.pack(3) + b"bad"
    at = wire.U64.pack(2)
    good = data_chunk(0, 2, b"cd") + chunk(1, 2, wire.HOLE.pack(0, 2))
    answers = [
        STRUCTURED + chunk(0, wire.CHUNK_ERROR_OFFSET, error + at) + chunk(1, 0, b""),
        STRUCTURED + good,
    ]
    with FakeServer(tmp_path / "s", answers) as fake:
        with freestone.connect_nbd(fake.uri, client="own", timeout=5) as connection:
            with pytest.raises(OSError, match=r"read of 4 bytes at 0: bad") as failed:
                connection.read(0, 4)
            assert failed.value.errno == errno.EIO
        with freestone.connect_nbd(fake.uri, client="own", timeout=5) as connection:
            assert connection.read(0, 4) == b"\0\0cd"


def test_silent_server_meets_the_deadline(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "s", [GREETING], stays=True) as fake:
        began = time.monotonic()
        with pytest.raises(freestone.TimedOutError):
            freestone.connect_nbd(fake.uri, client="own", timeout=0.2)
        assert time.monotonic() - began < 5


def use(connection: freestone.Connection) -> None:
    """Sends a request of each kind."""
    connection.read(0, 4096)
    connection.write(0, b"x" * 4096)
    connection.flush()
    connection.zero(4096, 4096)
    connection.trim(8192, 4096)
    connection.extents(0, 65536)
    connection.read(0, 300 * KiB)


def test_damaged_answers_end_in_an_error(server: freestone.Server, tmp_path: Path) -> None:
    """Replays the answers of a real server, each time with other damage."""
    server.create("x", "ram", disksize=MiB)
    assert server.nbd is not None
    with Recorder(tmp_path / "r", server.nbd[len("unix:") :]) as recorder:
        with freestone.connect_nbd(recorder.uri, client="own") as connection:
            use(connection)
    real = bytes(recorder.sent)
    assert len(real) > 4096
    seed = 20261130
    chance = random.Random(seed)
    answers: list[bytes] = []
    # Damage of data is no violation, so most of it goes to the headers in front.
    for _ in range(300):
        damaged = bytearray(real)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(min(len(real), chance.choice([160, 600, len(real)])))
            damaged[at] = chance.randrange(256)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        answers.append(bytes(damaged))
    ended: list[str] = []
    began = time.monotonic()
    with FakeServer(tmp_path / "s", answers) as fake:
        for number in range(len(answers)):
            try:
                with freestone.connect_nbd(fake.uri, client="own", timeout=10) as connection:
                    use(connection)
                ended.append("accepted")
            except (freestone.FreestoneError, OSError) as error:
                assert str(error), f"seed {seed}, answer {number}"
                ended.append(type(error).__name__)
    assert time.monotonic() - began < 60
    assert ended.count("ProtocolError") > 50
    assert ended.count("TimedOutError") == 0
