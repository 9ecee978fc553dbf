from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import freestone

#: Longest wait for what ends by itself shortly after a test, in seconds.
_GRACE = 5.0


def pytest_configure(config: pytest.Config) -> None:
    """Gives the run a directory of temporary files of its own, in which nothing may be left."""
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="fst-")
    tempfile.tempdir = None
    config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))


def children() -> set[int]:
    """Returns the processes that this process started and that still exist."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "children").read_text()
        except OSError:
            continue  # The thread has ended.
        found |= {int(word) for word in text.split()}
    return found


def descriptors() -> dict[str, str]:
    """Returns what each open descriptor refers to. A read of the directory opens one more."""
    found: dict[str, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def private_directories() -> set[str]:
    return {name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("freestone-")}


def _left(before: dict[str, object]) -> str | None:
    """Returns what exists now and did not before, or None."""
    new_children = children() - before["children"]  # type: ignore[operator]
    if new_children:
        return f"processes {new_children}"
    known: dict[str, str] = before["descriptors"]  # type: ignore[assignment]
    new = {n: to for n, to in descriptors().items() if known.get(n) != to and "/proc" not in to}
    if new:
        return f"descriptors {new}"
    new_threads = set(threading.enumerate()) - before["threads"]  # type: ignore[operator]
    if new_threads:
        return f"threads {new_threads}"
    new_directories = private_directories() - before["directories"]  # type: ignore[operator]
    return f"directories {new_directories}" if new_directories else None


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, descriptor, thread or private directory."""
    before: dict[str, object] = {
        "children": children(),
        "descriptors": descriptors(),
        "threads": set(threading.enumerate()),
        "directories": private_directories(),
    }
    yield
    until = time.monotonic() + _GRACE
    while _left(before) is not None and time.monotonic() < until:
        time.sleep(0.01)
    left = _left(before)
    assert left is None, f"the test leaves {left}"


@pytest.fixture
def server(nothing_is_left: None) -> Iterator[freestone.Server]:
    """A running server without devices."""
    with freestone.Server() as running:
        yield running


@pytest.fixture
def disk(server: freestone.Server) -> freestone.Disk:
    """A RAM disk of 16 MiB."""
    return server.create("disk", "ram", disksize=16 * freestone.MiB)


@pytest.fixture
def base(disk: freestone.Disk) -> freestone.Snapshot:
    """A snapshot of a RAM disk that begins with 4 KiB of the letter b."""
    disk.write(0, b"b" * 4096)
    return disk.snapshot("base")
