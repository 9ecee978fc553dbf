"""Uses the installed package with its program, and prints the version of the program."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import freestone
from freestone import MiB, aio

#: Longest start of the program, in seconds: an emulator is slow.
START = 60.0


def use() -> str:
    """Forks, rewinds, and cuts the power. Returns the path of the program."""
    with freestone.Server(timeout=START) as server:
        disk = server.create("disk", "ram", disksize=64 * MiB)
        disk.write(0, b"base", fua=True)
        base = disk.snapshot("base")
        with server.fork(base, power_cut=True, seed=1) as fork:
            fork.write(4096, b"lost?")
            assert fork.power_cut(seed=42).seed == 42
            fork.rewind()
            assert fork.read(0, 5) == b"base\0"
        pid = server.pid
        assert pid is not None
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")[0].decode()


async def use_asyncio() -> None:
    """Writes to ten disks at a time."""
    async with aio.Server(timeout=START) as server:
        disk = await server.create("disk", "ram", disksize=64 * MiB)
        await disk.snapshot("base")
        forks = await server.forks("base", "job", 10)
        await asyncio.gather(*(fork.write(0, fork.name.encode()) for fork in forks))
        assert [await fork.read(0, 5) for fork in forks] == [f.name.encode() for f in forks]


def main() -> None:
    """Uses both faces of the package."""
    program = use()
    asyncio.run(use_asyncio())
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    name = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    sys.stdout.write(f"{name}, {version.stdout.strip()}, {program}\n")


main()
