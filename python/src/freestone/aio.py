"""The package for asyncio: the names of :mod:`freestone`, with ``async with`` and ``await``.

    import asyncio
    from freestone import MiB, aio

    async def main() -> None:
        async with aio.Server() as server:
            disk = await server.create("disk", "ram", disksize=64 * MiB)
            await disk.write(0, b"hello")

    asyncio.run(main())

Objects are not tied to an event loop, except while a call is in flight. Errors, results and
constants are those of :mod:`freestone`.
"""

from freestone._async.connection import Connection, connect_nbd
from freestone._async.devices import Device, Disk, Fork, Mount, Snapshot, Template
from freestone._async.server import Server, connect

__all__ = [
    "Connection",
    "Device",
    "Disk",
    "Fork",
    "Mount",
    "Server",
    "Snapshot",
    "Template",
    "connect",
    "connect_nbd",
]
