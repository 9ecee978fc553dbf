from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import freestone
from freestone import MiB, _process, _program
from freestone._sync.control import Control
from processes import is_alive, stop, wait_for_end


def wait_until_ended(server: freestone.Server) -> None:
    until = time.monotonic() + 10
    while server.is_running:
        assert time.monotonic() < until, "the server still runs"
        time.sleep(0.01)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run_python(text: str, *, wait: bool = True) -> subprocess.Popen[str]:
    """Runs a program of Python that prints lines."""
    source = str(Path(freestone.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=environment
    )
    if wait:
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0, out
    return process


def test_start_and_end() -> None:
    server = freestone.Server()
    assert not server.is_running
    assert server.control == ""
    with server:
        assert server.is_running
        assert server.devices() == []
        assert server.nbd == f"unix:{Path(server.control).parent}/nbd.sock"
        assert server.stat()["server"]["pid"] == server.pid
        with pytest.raises(freestone.InvalidError, match="runs already"):
            server.start()
        directory = Path(server.control).parent
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
    assert not server.is_running
    with pytest.raises(freestone.NoServerError, match="not started, or closed"):
        server.stat()
    server.close()
    # The object can be started again.
    with server:
        assert server.is_running


def test_devices_and_options(tmp_path: Path) -> None:
    devices = ["a=null,size=1M", "b=ram,disksize=1M"]
    with freestone.Server(devices=devices, options=["--max-connections", "7"]) as server:
        assert [device.name for device in server.devices()] == ["a", "b"]
        assert [info.get("kind") for info in server.describe("b*")] == ["ram"]
        disk = server.device("b")
        assert isinstance(disk, freestone.Disk)
        disk.write(0, b"x")
        with disk:
            pass  # Not created by this object, so not removed.
        assert disk.read(0, 1) == b"x"


def test_state_keeps_devices(tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    with freestone.Server(state=tmp_path / "state", directory=directory) as server:
        kept = server.create("kept", "ram", disksize=MiB, keep=True)
        kept.write(0, b"content")
        server.shutdown()
    assert directory.is_dir()
    with freestone.Server(state=tmp_path / "state", directory=directory) as server:
        again = server.device("kept")
        assert isinstance(again, freestone.Disk)
        assert again.read(0, 7) == b"content"


def test_start_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(freestone.ServerStartError, match="not a program"):
        freestone.Server(program=tmp_path / "none").start()
    with pytest.raises(freestone.ServerStartError, match="status 2") as usage:
        freestone.Server(options=["--bogus"]).start()
    assert usage.value.status == 2
    assert "--bogus" in usage.value.stderr
    with pytest.raises(freestone.ServerStartError, match="disksize"):
        freestone.Server(devices=["x=ram"]).start()
    slow = script(tmp_path / "slow", "echo starting >&2; exec sleep 60")
    with pytest.raises(freestone.ServerStartError, match=r"not ready within 0\.2 s") as late:
        freestone.Server(program=slow, timeout=0.2).start()
    assert late.value.stderr == "starting\n"
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    with pytest.raises(freestone.ServerStartError, match="cannot be started"):
        freestone.Server(program=broken).start()
    with pytest.raises(freestone.InvalidError, match="107"):
        freestone.Server(directory=tmp_path / ("x" * 100)).start()
    monkeypatch.setenv("FREESTONE_PROGRAM", str(tmp_path / "none"))
    with pytest.raises(freestone.ServerStartError, match="FREESTONE_PROGRAM"):
        freestone.Server().start()


def test_long_temporary_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with freestone.Server() as server:
        assert server.control.startswith("/tmp/freestone-py-")


def test_program_of_the_environment_is_found_before_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = script(tmp_path / "freestone", "exit 0")
    monkeypatch.setenv("FREESTONE_PROGRAM", str(own))
    assert _program.find(None) == str(own)
    monkeypatch.delenv("FREESTONE_PROGRAM")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Path(_program.find(None)).name == "freestone"
    assert _program.find(own) == str(own)


def test_environment_of_a_service_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _program.REMOVED_VARIABLES:
        monkeypatch.setenv(name, "/nowhere")
    with freestone.Server() as server:
        environment = Path(f"/proc/{server.pid}/environ").read_bytes()
    assert b"/nowhere" not in environment


def test_killed_server_is_reported() -> None:
    with pytest.raises(freestone.ServerEndError, match="killed by signal 9") as end:
        with freestone.Server() as server:
            disk = server.create("disk", "ram", disksize=MiB)
            disk.write(0, b"x")
            pid = server.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until_ended(server)
            with pytest.raises((freestone.NoServerError, freestone.ServerEndedError)):
                server.stat()
            with pytest.raises(ConnectionError):
                disk.read(0, 1)
    assert end.value.status == -9


def test_error_of_the_block_wins_over_the_end_of_the_server() -> None:
    with pytest.raises(ZeroDivisionError):
        with freestone.Server() as server, server.create("disk", "ram", disksize=MiB):
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            raise ZeroDivisionError


def test_server_that_ends_during_a_call_is_reported() -> None:
    server = freestone.Server().start()
    try:
        server.create("hung", "ram", disksize=MiB, faults="write hang", seed=1)
        seen: list[BaseException] = []

        def compact() -> None:
            try:
                # The verb waits until the server is killed, as the process is stopped.
                server.call("compact", name="hung")
            except freestone.FreestoneError as error:
                seen.append(error)

        assert server.pid is not None
        stop(server.pid)
        caller = threading.Thread(target=compact)
        caller.start()
        time.sleep(0.1)
        os.kill(server.pid, signal.SIGKILL)
        caller.join(10)
        assert isinstance(seen[0], freestone.ServerEndedError)
        assert "compact" in str(seen[0])
    finally:
        with pytest.raises(freestone.ServerEndError):
            server.close()


def test_stopped_server_meets_its_deadlines() -> None:
    server = freestone.Server().start()
    disk = server.create("disk", "ram", disksize=MiB)
    stop(server.pid)
    server.call_timeout = 0.2
    began = time.monotonic()
    with pytest.raises(freestone.TimedOutError, match=r"stat: .*0\.2 s"):
        server.stat()
    with pytest.raises(freestone.TimedOutError, match=r"0\.2 s"):
        disk.read(0, 1)
    with pytest.raises(freestone.ServerEndError, match="killed"):
        server.close(timeout=0.2)
    assert time.monotonic() - began < 5


def test_closed_connections_of_the_pool_are_replaced(server: freestone.Server) -> None:
    control = Control(server.control)
    control.call("stat", {}, 5)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGTERM)
    wait_until_ended(server)
    with pytest.raises(freestone.NoServerError):
        control.call("stat", {}, 5)
    control.close()


def test_connect_uses_a_running_server(
    server: freestone.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREESTONE_CONTROL", server.control)
    with freestone.connect() as other:
        assert other.pid is None
        assert other.nbd == server.nbd
        with other.create("disk", "ram", disksize=MiB) as disk:
            disk.write(0, b"x")
            mine = server.device("disk")
            assert isinstance(mine, freestone.Disk)
            assert mine.read(0, 1) == b"x"
    assert server.is_running
    assert server.devices() == []
    with pytest.raises(freestone.NoServerError, match="no server answers at /nowhere"):
        freestone.connect("/nowhere")


def test_shutdown_ends_a_connected_server() -> None:
    server = freestone.Server().start()
    with freestone.connect(server.control) as other:
        other.shutdown()
    wait_until_ended(server)
    server.close()


def test_devices_are_created_in_threads() -> None:
    def use(server: freestone.Server, number: int) -> int:
        with server.fork("base", f"disk-{number}") as fork:
            fork.write(number, bytes([number % 256]))
            fork.rewind()
            assert fork.read(number, 1) == b"\0"
            fork.write(number, bytes([number % 256]))
            return fork.read(number, 1)[0]

    with freestone.Server() as server, server.create("d", "ram", disksize=MiB) as disk:
        disk.snapshot("base")
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(use, [server] * 200, range(200)))
        assert found == [number % 256 for number in range(200)]
        assert [device.name for device in server.devices()] == ["d", "base"]
        server.device("base").remove()


def test_200_disks_at_one_time(server: freestone.Server, base: freestone.Snapshot) -> None:
    def write(fork: freestone.Fork) -> None:
        fork.write(0, fork.name.encode())

    def read(fork: freestone.Fork) -> bytes:
        return fork.read(0, len(fork.name))

    forks = server.forks(base, "job", 200)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, forks))
        found = list(pool.map(read, forks))
    assert found == [fork.name.encode() for fork in forks]


def test_one_disk_in_several_threads(disk: freestone.Disk) -> None:
    def use(number: int) -> bytes:
        disk.write(number * 4096, bytes([number]) * 4096)
        return disk.read(number * 4096, 4096)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(use, range(64)))
    assert found == [bytes([number]) * 4096 for number in range(64)]


def test_server_outlives_the_thread_that_started_it() -> None:
    server = freestone.Server()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert server.is_running
    server.stat()
    server.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_of_fork_does_not_disturb_its_parent(server: freestone.Server) -> None:
    disk = server.create("disk", "ram", disksize=MiB)
    disk.write(0, b"parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # The child has connections of its own, and ends nothing.
            assert disk.read(0, 6) == b"parent"
            disk.write(6, b"child")
            server.stat()
            server.close()
            status = 0
        finally:
            os._exit(status)
    _, waited = os.waitpid(child, 0)
    assert waited == 0
    assert server.is_running
    assert disk.read(0, 11) == b"parentchild"


def test_interrupt_closes_the_connection_of_its_call(server: freestone.Server) -> None:
    server.create("disk", "ram", disksize=MiB)
    assert server.pid is not None
    stop(server.pid)
    timer = threading.Timer(
        0.2, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    )
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        server.stat()
    timer.join()
    os.kill(server.pid, signal.SIGCONT)
    # The connection is not used again: its answer would be taken for that of the next call.
    assert server.call("get", name="disk", attr="disksize") == {"disksize": MiB}


def test_server_ends_with_its_process() -> None:
    text = (
        "import freestone; server = freestone.Server().start(); print(server.pid, server.control)"
    )
    out, _ = run_python(text, wait=False).communicate(timeout=30)
    pid, control = out.split()
    assert not is_alive(int(pid))
    assert not Path(control).parent.exists()


def test_forgotten_and_stopped_server_ends_with_its_process() -> None:
    text = (
        "import freestone, os, gc, signal; pid = freestone.Server().start().pid; gc.collect();"
        "os.kill(pid, signal.SIGSTOP); print(pid); freestone._process.EXIT_GRACE = 0.1"
    )
    out, _ = run_python(text, wait=False).communicate(timeout=30)
    assert not is_alive(int(out))


def test_server_of_a_killed_process_ends_and_its_directory_is_swept() -> None:
    text = (
        "import freestone, time; server = freestone.Server().start();"
        "print(server.pid, server.control, flush=True); time.sleep(60)"
    )
    process = run_python(text, wait=False)
    assert process.stdout is not None
    pid, control = process.stdout.readline().split()
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for_end(int(pid))
    directory = Path(control).parent
    assert not Path(control).exists()
    assert directory.exists()
    # The next process removes it, and leaves the directory of a running server alone.
    with freestone.Server() as running:
        run_python("import freestone\nwith freestone.Server(): pass")
        assert Path(running.control).exists()
    assert not directory.exists()


def test_private_directory_is_removed_once() -> None:
    private = _process.PrivateDirectory()
    assert Path(private.path, _process.LOCK).exists()
    private.remove()
    private.remove()
    assert not Path(private.path).exists()
