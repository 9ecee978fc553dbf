from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

import freestone
from freestone import MiB, aio
from nbd_servers import FakeServer, nbdkit
from processes import stop

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine with a deadline. Tasks and async generators must have ended then."""

    async def bounded() -> _T:
        result = await asyncio.wait_for(main, 60)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others
        return result

    return asyncio.run(bounded())


def names_of(kind: type[object]) -> dict[str, inspect.Signature | None]:
    """Returns the public members of a class with the signatures of its methods."""
    found: dict[str, inspect.Signature | None] = {}
    for name in dir(kind):
        if name.startswith("_") and name != "__init__":
            continue
        member = inspect.getattr_static(kind, name)
        found[name] = inspect.signature(getattr(kind, name)) if callable(member) else None
    return found


def test_both_faces_have_the_same_names() -> None:
    for name in aio.__all__:
        sync, own = getattr(freestone, name), getattr(aio, name)
        assert sync is not own
        if not inspect.isclass(sync):
            assert inspect.signature(sync) == inspect.signature(own)
            continue
        assert names_of(sync) == names_of(own)


def test_devices_with_asyncio() -> None:
    async def main() -> None:
        async with aio.Server() as server:
            disk = await server.create("disk", "ram", disksize=MiB)
            await disk.write(0, b"base")
            async with await disk.snapshot("base") as base, await base.fork() as fork:
                assert await fork.read(0, 4) == b"base"
                await fork.write(0, b"fork", fua=True)
                assert await fork.changes() == [freestone.Change(0, 4096, zero=False)]
                await fork.rewind()
                assert await fork.read(0, 4) == b"base"
                async with await fork.open() as connection:
                    await connection.zero(0, 4096)
                    await connection.trim(4096, 4096)
                    await connection.flush()
                    assert (await connection.extents())[0].is_zero
                with pytest.raises(freestone.NotSupportedError):
                    await fork.mark("m")
            assert [device.name for device in await server.devices()] == ["disk"]
            async with await aio.connect(server.control) as other:
                assert (await other.stat())["server"]["pid"] == server.pid

    run(main())


def test_many_tasks_at_one_time() -> None:
    async def use(server: aio.Server, number: int) -> bytes:
        async with await server.fork("base", f"fork-{number}") as fork:
            await fork.write(0, b"%d" % number)
            return await fork.read(0, 4)

    async def main() -> list[bytes]:
        async with aio.Server() as server:
            disk = await server.create("disk", "ram", disksize=MiB)
            await disk.snapshot("base")
            found = await asyncio.gather(*(use(server, number) for number in range(100)))
            # One disk in many tasks, which share a connection.
            await asyncio.gather(*(disk.write(n * 4096, b"%d" % n) for n in range(50)))
            shared = await asyncio.gather(*(disk.read(n * 4096, 2) for n in range(50)))
            assert [data.rstrip(b"\0") for data in shared] == [b"%d" % n for n in range(50)]
            return found

    found = run(main())
    assert [data.rstrip(b"\0") for data in found] == [b"%d" % number for number in range(100)]


def test_objects_outlive_a_loop() -> None:
    server = aio.Server()

    async def first() -> aio.Disk:
        await server.start()
        disk = await server.create("disk", "ram", disksize=MiB)
        await disk.write(0, b"x")
        return disk

    async def second(disk: aio.Disk) -> bytes:
        return await disk.read(0, 1)

    disk = run(first())
    assert run(second(disk)) == b"x"
    run(server.close())


def test_cancelled_verb_is_cancelled_at_the_server() -> None:
    async def main() -> None:
        async with aio.Server() as server:
            # The backing device takes 1 MiB a second, so that the verb would take 16 seconds.
            await server.create(
                "slow", "null", size=64 * MiB, memory_backed=True, mbps=1, publish=False
            )
            disk = await server.create(
                "disk", "ram", disksize=16 * MiB, backing_dev="device:slow", comp_algorithm="store"
            )
            await disk.write(0, os.urandom(16 * MiB))
            await server.call("idle", name="disk", which="all")
            task = asyncio.create_task(server.call("writeback", name="disk", type="idle"))
            until = time.monotonic() + 20
            while not (await server.call("jobs"))["jobs"]:
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (await server.call("jobs"))["jobs"]:
                assert time.monotonic() < until, "the job still runs"
                await asyncio.sleep(0.01)
            assert (await disk.stat())["bd_stat"]["bd_writes"] < 4096

    run(main())


def test_cancelled_read_closes_its_connection() -> None:
    async def main() -> None:
        async with aio.Server() as server:
            disk = await server.create(
                "disk", "ram", disksize=MiB, faults="read hang times=1", seed=1
            )
            connection = await disk.open()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(connection.read(0, 4096), 0.2)
            assert connection.is_closed
            await connection.close()
            await server.call("release", name="disk")
            assert await disk.read(0, 1) == b"\0"

    run(main())


def test_deadlines_with_asyncio() -> None:
    async def main() -> None:
        server = await aio.Server().start()
        disk = await server.create("disk", "ram", disksize=MiB)
        stop(server.pid)
        server.call_timeout = 0.2
        began = time.monotonic()
        with pytest.raises(freestone.TimedOutError, match=r"0\.2 s"):
            await server.stat()
        with pytest.raises(freestone.TimedOutError, match=r"0\.2 s"):
            await disk.read(0, 1)
        # Other tasks run while a server does not answer.
        tick = asyncio.create_task(asyncio.sleep(0.01))
        with pytest.raises(freestone.ServerEndError, match="killed"):
            await server.close(timeout=0.2)
        assert tick.done()
        assert time.monotonic() - began < 5

    run(main())


def test_start_errors_with_asyncio(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(freestone.ServerStartError, match="bogus"):
            await aio.Server(options=["--bogus"]).start()
        with pytest.raises(freestone.NoServerError):
            await aio.connect("/nowhere")
        task = asyncio.create_task(aio.Server().start())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_tcp_and_violations_with_asyncio(tmp_path: Path) -> None:
    async def main(uri: str) -> None:
        async with await aio.connect_nbd(uri) as connection:
            await connection.write(0, b"x" * (3 * MiB))
            assert await connection.read(MiB, 2 * MiB) == b"x" * (2 * MiB)
        with pytest.raises(freestone.NoServerError):
            await aio.connect_nbd("nbd://127.0.0.1:1/")
        with pytest.raises(freestone.NoServerError):
            await aio.connect_nbd("nbd://host.invalid/")
        with FakeServer(tmp_path / "garbage", [os.urandom(4096)]) as fake:
            with pytest.raises(freestone.ProtocolError, match="not an NBD server"):
                await aio.connect_nbd(fake.uri)
        with FakeServer(tmp_path / "silent", [b""], stays=True) as fake:
            with pytest.raises(freestone.TimedOutError):
                await aio.connect_nbd(fake.uri, timeout=0.1)

    with nbdkit(tmp_path, "memory", "8M", unix=False) as uri:
        run(main(uri))


def test_interrupt_with_asyncio() -> None:
    """Ctrl-C ends the block in order, also while a call waits."""
    main_thread = threading.main_thread().ident or 0

    async def main() -> None:
        async with aio.Server() as server:
            assert server.pid is not None
            stop(server.pid)
            timer = threading.Timer(0.2, signal.pthread_kill, [main_thread, signal.SIGINT])
            timer.start()
            try:
                await server.stat()
            finally:
                timer.join()
                os.kill(server.pid, signal.SIGCONT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
