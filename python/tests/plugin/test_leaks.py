"""No process, mount, loop device, socket or file outlives a session, however it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .projects import Project, is_full, needs, needs_module, needs_root, slow

pytestmark = [
    needs_root,
    needs("mke2fs", "nbdfuse"),
]
#: Longest wait for a test that signals that it runs, in seconds.
_START_MAX = 120.0

_SMALL = "[pytest]\nfreestone_size = 64M\naddopts = -p no:asyncio\n"


def wait_for(file: Path) -> None:
    until = time.monotonic() + _START_MAX
    while not file.exists():
        assert time.monotonic() < until, f"{file} does not appear"
        time.sleep(0.02)


@needs_module("xdist")
def test_many_tests_in_workers(project: Project) -> None:
    tests, workers = (1000, 8) if is_full() else (60, 4)
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        f"""
import os, pytest

@pytest.fixture(scope="session")
def freestone_sqlite_schema():
    return "CREATE TABLE t (n INTEGER)"

@pytest.mark.parametrize("number", range({tests // 4}))
def test_disk(freestone_disk, number):
    assert freestone_disk.read(20 << 20, 4096) == bytes(4096)
    freestone_disk.write(20 << 20, os.urandom(4096))

@pytest.mark.parametrize("number", range({tests // 4}))
def test_mount(freestone_mount, number):
    assert os.listdir(freestone_mount) == ["lost+found"]
    (freestone_mount / "file").write_bytes(os.urandom(100_000))

@pytest.mark.parametrize("number", range({tests // 4}))
def test_sqlite(freestone_sqlite, number):
    connection = freestone_sqlite.connect()
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    connection.execute("INSERT INTO t VALUES (1)")
    connection.commit()

@pytest.mark.parametrize("number", range({tests // 4}))
def test_power_cut(freestone_mount, freestone_power_cut, number):
    (freestone_mount / "file").write_bytes(os.urandom(100_000))
    freestone_power_cut(number)
    assert os.listdir(freestone_mount) == ["lost+found"]
""",
    )
    assert f"{tests} passed" in project.run("-q", "-n", str(workers))


def test_failures_in_every_phase(project: Project) -> None:
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
import pytest

@pytest.fixture
def setup_fails(freestone_mount):
    raise ValueError

@pytest.fixture
def teardown_fails(freestone_mount):
    yield
    raise ValueError

def test_setup(setup_fails): pass
def test_teardown(teardown_fails): pass
def test_call(freestone_mount): raise ValueError
def test_good(freestone_mount): pass
""",
    )
    assert "1 failed, 2 passed, 2 errors" in project.run(status=1)
    assert "1 error" in project.run("-x", status=1)


def test_files_that_stay_open(project: Project) -> None:
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
import pytest

def test_cycle(freestone_mount):
    file = open(freestone_mount / "file", "w")
    cycle = [file]
    cycle.append(cycle)

@pytest.mark.parametrize("number", range(3))
def test_bad(freestone_mount, number):
    file = open(freestone_mount / "file", "w")
    assert False

def test_good(freestone_mount):
    pass
""",
    )
    # The failures are those of the tests alone: a traceback holds the file.
    assert "3 failed, 2 passed in" in project.run("-W", "ignore", status=1)


@slow
def test_last_failed_of_the_cache(project: Project) -> None:
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
def test_good(freestone_mount): pass
def test_bad(freestone_mount): assert False
def test_other(freestone_mount): pass
""",
    )
    arguments = ("-o", "cache_dir=.cache")
    assert "1 failed, 2 passed" in project.run(*arguments, status=1)
    assert "= 1 failed in" in project.run(*arguments, "--lf", status=1)


@slow
@needs_module("pytest_timeout")
def test_timeout_in_a_test(project: Project) -> None:
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
import time, pytest

@pytest.mark.timeout(3, method="signal")
def test_slow(freestone_mount):
    time.sleep(600)

@pytest.mark.timeout(300)
def test_good(freestone_mount):
    (freestone_mount / "file").touch()
""",
    )
    assert "1 failed, 1 passed" in project.run(status=1)


@slow
@needs_module("pytest_asyncio")
def test_asyncio_tests_use_the_fixtures(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\nasyncio_mode = auto\n")
    project.write(
        "test_it.py",
        """
import asyncio

async def test_one(freestone_mount):
    await asyncio.sleep(0)
    (freestone_mount / "file").touch()

async def test_two(freestone_mount):
    await asyncio.sleep(0)
    assert not (freestone_mount / "file").exists()
""",
    )
    assert "2 passed" in project.run()


def interrupt(project: Project, pid: int) -> None:
    os.kill(pid, signal.SIGINT)


def kill_process(project: Project, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_group(project: Project, pid: int) -> None:
    """Kills all that a terminal or a job of CI would kill: the process group of pytest."""
    os.killpg(pid, signal.SIGKILL)


@needs("fuse2fs")
@pytest.mark.parametrize(
    ("end", "via"),
    [
        (kill_group, "auto"),
        pytest.param(interrupt, "auto", marks=slow),
        pytest.param(kill_process, "auto", marks=slow),
        pytest.param(kill_group, "fuse2fs", marks=slow),
        pytest.param(interrupt, "fuse2fs", marks=slow),
        pytest.param(kill_process, "fuse2fs", marks=slow),
    ],
)
def test_session_that_is_ended(
    project: Project, end: Callable[[Project, int], None], via: str
) -> None:
    project.environment["FREESTONE_VIA"] = via
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
import time, pathlib

def test_first(freestone_mount):
    (freestone_mount / "file").write_text("x")

def test_slow(freestone_mount):
    pathlib.Path("started").touch()
    time.sleep(600)

def test_third(freestone_mount):
    pass
""",
    )
    process = project.start(is_group=True)
    try:
        wait_for(project.path / "started")
        end(project, process.pid)
    finally:
        printed = project.finish(process)
    assert process.returncode == (2 if end is interrupt else -signal.SIGKILL), printed
    assert project.is_clean_soon(), project.left()


@pytest.mark.parametrize(
    "delay", [0.0, *[pytest.param(n / 200, marks=slow) for n in range(1, 11)]]
)
def test_session_that_is_killed_while_disks_are_renewed(project: Project, delay: float) -> None:
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
import pathlib, pytest

@pytest.mark.parametrize("number", range(5000))
def test_it(freestone_sqlite, number):
    freestone_sqlite.connect().execute("CREATE TABLE t (n INTEGER)")
    if number == 20:
        pathlib.Path("started").touch()
""",
    )
    process = project.start("-q", is_group=True)
    try:
        wait_for(project.path / "started")
        time.sleep(delay)
        kill_group(project, process.pid)
    finally:
        printed = project.finish(process)
    assert process.returncode == -signal.SIGKILL, printed
    assert project.is_clean_soon(), project.left()


@slow
def test_next_session_cleans_what_even_the_watcher_has_left(project: Project) -> None:
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
import time, pathlib

def test_slow(freestone_mount):
    if not pathlib.Path("started").exists():
        pathlib.Path("started").touch()
        time.sleep(600)
""",
    )
    process = project.start(is_group=True)
    try:
        wait_for(project.path / "started")
        # Everything at once, as at the end of a container's control group.
        for pid, _ in project.processes():
            os.kill(pid, signal.SIGKILL)
    finally:
        project.finish(process)
    assert project.left()
    assert "1 passed" in project.run()


@slow
@needs_module("xdist")
def test_worker_that_is_killed_is_replaced(project: Project) -> None:
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
import os, signal, pytest

@pytest.mark.parametrize("number", range(8))
def test_it(freestone_mount, number):
    (freestone_mount / "file").write_text("x")
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    printed = project.finish(project.start("-n", "2"))
    assert "1 failed, 7 passed" in printed, printed
    assert project.is_clean_soon(), project.left()


@slow
def test_server_that_is_killed_ends_no_other_session(project: Project) -> None:
    project.write("pytest.ini", _SMALL)
    project.write(
        "test_it.py",
        """
import os, signal

def test_kill(freestone_server, freestone_mount):
    os.kill(freestone_server.pid, signal.SIGKILL)

def test_other():
    pass
""",
    )
    printed = project.finish(project.start())
    assert "2 passed" in printed, printed
    assert "error" in printed, printed
    assert project.is_clean_soon(), project.left()


def test_child_of_fork_leaves_the_session_alone(project: Project) -> None:
    project.write("pytest.ini", _SMALL + "filterwarnings = error\n")
    project.write(
        "test_it.py",
        """
import os, time

def test_fork(freestone_mount):
    (freestone_mount / "before").touch()
    # Threads that prepare the next disk end by themselves; Python warns of a fork beside threads.
    time.sleep(1)
    child = os.fork()
    if child == 0:
        (freestone_mount / "child").touch()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(os.listdir(freestone_mount)) == ["before", "child", "lost+found"]

def test_next(freestone_mount):
    assert os.listdir(freestone_mount) == ["lost+found"]
""",
    )
    assert "2 passed" in project.run("-p", "no:timeout")
