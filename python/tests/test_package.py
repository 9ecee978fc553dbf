"""The package itself: its generated part, its imports, and mounts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import freestone
from freestone import MiB

PYTHON = Path(__file__).parents[1]


def test_sync_package_is_made_of_the_async_one() -> None:
    command = [sys.executable, str(PYTHON / "unasync.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_does_not_load_asyncio() -> None:
    text = (
        "import sys, freestone; print([m for m in ('asyncio', 'nbd', 'ssl') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(freestone.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_all_names_are_sorted_and_exist() -> None:
    assert len(set(freestone.__all__)) == len(freestone.__all__)
    for name in freestone.__all__:
        member = getattr(freestone, name)
        assert not isinstance(member, type) or member.__doc__


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image of 32 MiB with an ext4 file system."""
    if os.geteuid() != 0:
        pytest.skip("left out: mounts, which need root")
    for program, package in (("mke2fs", "e2fsprogs"), ("nbdfuse", "nbdfuse")):
        if shutil.which(program) is None:
            pytest.skip(f"left out: {program} (package {package})")
    path = tmp_path / "golden.img"
    with path.open("wb") as file:
        file.truncate(32 * MiB)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", str(path)], check=True)
    return path


def test_mount(
    server: freestone.Server, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREESTONE_MOUNTS", str(tmp_path / "mounts"))
    server.create("golden", "file", path=image, readonly=True)
    with server.fork("golden") as fork:
        with fork.mount(via="nbdfuse") as mount:
            inside = Path(mount, "file")
            inside.write_text("content")
            with inside.open():
                with pytest.raises(freestone.BusyError, match="use"):
                    mount.unmount()
                with pytest.raises(freestone.BusyError):
                    fork.rewind()
            fork.rewind()
            assert os.path.ismount(mount.path)
            assert not inside.exists()
            inside.write_text("again")
        assert not Path(mount.path).exists()
        mount.unmount()
        directory = tmp_path / "here"
        directory.mkdir()
        fork.mount(directory, via="nbdfuse")
        assert (directory / "file").read_text() == "again"
        fork.reset()
        assert not (directory / "file").exists()
    # The end of the block unmounts as well.
    assert directory.exists()
    assert not os.path.ismount(directory)


def test_mounts_end_with_the_server(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREESTONE_MOUNTS", str(tmp_path / "mounts"))
    for end in (signal.SIGTERM, signal.SIGKILL):
        server = freestone.Server().start()
        server.create("golden", "file", path=image, readonly=True)
        mount = server.fork("golden").mount(via="nbdfuse")
        assert os.path.ismount(mount.path)
        if end == signal.SIGKILL:
            os.kill(server.pid or 0, end)
        with contextlib.suppress(freestone.ServerEndError):
            server.close()
        assert not os.path.ismount(mount.path)
        assert not Path(mount.path).exists()


def test_mount_errors(
    server: freestone.Server, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREESTONE_MOUNTS", str(tmp_path / "mounts"))
    with server.create("empty", "ram", disksize=MiB) as empty:
        with pytest.raises(freestone.FreestoneError, match="empty"):
            empty.mount(via="nbdfuse")
        with pytest.raises(freestone.FreestoneError, match="nowhere"):
            empty.mount("/nowhere")
