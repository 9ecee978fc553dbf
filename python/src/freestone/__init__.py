"""Disks for tests and sandboxes: a server of block devices, and its forks, snapshots and power
cuts.

    import freestone
    from freestone import MiB

    with freestone.Server() as server, server.create("disk", "ram", disksize=64 * MiB) as disk:
        disk.write(0, b"hello")
        base = disk.snapshot("base")
        with server.fork(base) as fork:
            fork.write(0, b"fork!")
            fork.rewind()
            assert fork.read(0, 5) == b"hello"

:mod:`freestone.aio` has the same names for asyncio.
"""

from freestone._keys import GiB, KeyValue, KiB, MiB
from freestone._sync.connection import Connection, connect_nbd
from freestone._sync.devices import Device, Disk, Fork, Mount, Snapshot, Template
from freestone._sync.server import Server, connect
from freestone._types import Change, DeviceInfo, Export, Extent, PowerCut
from freestone.errors import (
    AddressError,
    BusyError,
    ConnectionLostError,
    ExistsError,
    FreestoneError,
    InvalidError,
    IoError,
    JobCancelledError,
    NoDeviceError,
    NoServerError,
    NoSpaceError,
    NotPermittedError,
    NotSupportedError,
    OutOfMemoryError,
    PageRangeError,
    ProtocolError,
    ReadOnlyError,
    ServerEndedError,
    ServerEndError,
    ServerStartError,
    TimedOutError,
    TooManyActiveZonesError,
    TooManyOpenZonesError,
)

__all__ = [
    "AddressError",
    "BusyError",
    "Change",
    "Connection",
    "ConnectionLostError",
    "Device",
    "DeviceInfo",
    "Disk",
    "ExistsError",
    "Export",
    "Extent",
    "Fork",
    "FreestoneError",
    "GiB",
    "InvalidError",
    "IoError",
    "JobCancelledError",
    "KeyValue",
    "KiB",
    "MiB",
    "Mount",
    "NoDeviceError",
    "NoServerError",
    "NoSpaceError",
    "NotPermittedError",
    "NotSupportedError",
    "OutOfMemoryError",
    "PageRangeError",
    "PowerCut",
    "ProtocolError",
    "ReadOnlyError",
    "Server",
    "ServerEndError",
    "ServerEndedError",
    "ServerStartError",
    "Snapshot",
    "Template",
    "TimedOutError",
    "TooManyActiveZonesError",
    "TooManyOpenZonesError",
    "connect",
    "connect_nbd",
]
