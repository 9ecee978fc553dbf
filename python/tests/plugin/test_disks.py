"""The fixtures for disks, mounts and power cuts, each in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .projects import Project, needs, needs_module, needs_root, slow


@needs("mke2fs")
def test_each_test_has_a_fresh_disk(project: Project) -> None:
    project.write(
        "test_it.py",
        """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_disk(freestone_disk, number):
    assert freestone_disk.size == 1 << 30
    assert freestone_disk.read(300 << 20, 4096) == bytes(4096)
    freestone_disk.write(300 << 20, b"x" * 4096)
    assert freestone_disk.read(300 << 20, 4) == b"xxxx"
""",
    )
    assert "6 passed" in project.run()


def test_base_is_an_image_of_the_configuration(project: Project) -> None:
    (project.path / "image").write_bytes(b"image" + bytes(4091))
    project.write("pytest.ini", "[pytest]\nfreestone_base = image\n")
    project.write(
        "test_it.py",
        """
def test_disk(freestone_disk):
    assert freestone_disk.size == 4096
    assert freestone_disk.read(0, 5) == b"image"
    freestone_disk.write(0, b"other")
""",
    )
    assert "1 passed" in project.run()
    assert (project.path / "image").read_bytes()[:5] == b"image"


@slow
@needs("qemu-img", "mke2fs")
@needs_root
def test_base_is_a_qcow2_image_for_disk_and_database(project: Project) -> None:
    image = project.path / "image.qcow2"
    raw = project.path / "raw"
    files = project.path / "files"
    files.mkdir()
    (files / "hello").write_text("from qcow2")
    raw.touch()
    os.truncate(raw, 64 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(files), str(raw)], check=True)
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", str(raw), str(image)], check=True)
    project.write("pytest.ini", "[pytest]\nfreestone_base = image.qcow2\n")
    project.write(
        "test_it.py",
        """
def test_mount(freestone_mount, freestone_sqlite):
    assert (freestone_mount / "hello").read_text() == "from qcow2"
    assert (freestone_sqlite.path.parent / "hello").read_text() == "from qcow2"
""",
    )
    assert "1 passed" in project.run("-rs")


@needs("mke2fs")
@needs_module("xdist")
@needs_root
def test_base_is_a_function_called_once_for_all_workers(project: Project) -> None:
    project.write(
        "pytest.ini", "[pytest]\nfreestone_size = 32M\naddopts = -p no:asyncio -p no:timeout\n"
    )
    project.write(
        "conftest.py",
        """
import os, pytest

def fill(directory):
    with open(os.path.join(os.environ["CALLS"], str(os.getpid())), "w"):
        pass
    (directory / "hello").write_text("world")

@pytest.fixture(scope="session")
def freestone_base():
    return fill
""",
    )
    project.write(
        "test_it.py",
        """
import os, pytest

@pytest.mark.parametrize("number", range(8))
def test_mount(freestone_mount, number):
    assert sorted(os.listdir(freestone_mount)) == ["hello", "lost+found"]
    assert (freestone_mount / "hello").read_text() == "world"
    (freestone_mount / "hello").write_text("changed")
    stat = os.statvfs(freestone_mount)
    assert stat.f_blocks * stat.f_frsize < 32 << 20
""",
    )
    calls = project.path / "calls"
    calls.mkdir()
    project.environment["CALLS"] = str(calls)
    assert "8 passed" in project.run("-n", "2")
    assert len(list(calls.iterdir())) == 1


@needs("mke2fs")
@needs_root
@pytest.mark.parametrize("ready", [pytest.param(0, marks=slow), 1, pytest.param(4, marks=slow)])
def test_mounts_are_fresh_and_apart(project: Project, ready: int) -> None:
    project.write("pytest.ini", f"[pytest]\nfreestone_ready = {ready}\nfreestone_size = 64M\n")
    project.write(
        "test_it.py",
        """
import os, pytest

@pytest.mark.parametrize("number", range(8))
def test_mount(freestone_mount, freestone_disk, number):
    assert os.path.ismount(freestone_mount)
    assert os.listdir(freestone_mount) == ["lost+found"]
    (freestone_mount / "file").write_bytes(os.urandom(1 << 20))
""",
    )
    assert "8 passed" in project.run()


@needs("mke2fs", "nbdfuse", "fuse2fs")
@needs_root
def test_fuse2fs_mounts_without_a_block_device(project: Project) -> None:
    project.environment["FREESTONE_VIA"] = "fuse2fs"
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\n")
    project.write(
        "test_it.py",
        """
import os, pytest

@pytest.mark.parametrize("number", range(3))
def test_mount(freestone_mount, number):
    assert os.listdir(freestone_mount) == ["lost+found"]
    (freestone_mount / "file").write_text("hello")
    assert "fuse" in open("/proc/mounts").read()

def test_power_cut_is_refused(freestone_mount, freestone_power_cut):
    pass
""",
    )
    printed = project.run("-rs")
    assert "3 passed, 1 skipped" in printed
    assert "fuse2fs: it writes without a journal" in printed


@needs("mke2fs")
@pytest.mark.parametrize("is_required", [pytest.param(False, marks=slow), True])
def test_machine_without_mounts_skips_with_each_reason(project: Project, is_required: bool) -> None:
    programs = project.path / "bin"
    programs.mkdir()
    (programs / "mke2fs").symlink_to("/usr/sbin/mke2fs")
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\n")
    # The plugin and the program also search the directories of the system, so the way itself must
    # be impossible.
    project.environment["FREESTONE_VIA"] = "ublk"
    if Path("/dev/ublk-control").exists():
        pytest.skip("this machine can mount by ublk")
    if is_required:
        project.environment["FREESTONE_REQUIRE"] = "mount"
    project.write(
        "test_it.py",
        """
def test_disk(freestone_disk):
    assert freestone_disk.size == 64 << 20

def test_mount(freestone_mount):
    assert False

def test_sqlite(freestone_sqlite):
    assert False
""",
    )
    printed = project.run("-rs", status=1 if is_required else 0)
    assert "no way to mount works here: ublk: " in printed
    assert ("1 passed, 2 errors" if is_required else "1 passed, 2 skipped") in printed


@needs("mke2fs", "nbdfuse")
@needs_root
def test_power_cut_loses_what_was_not_flushed(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\n")
    project.write(
        "test_it.py",
        """
import os, pytest

def test_synced_file_stays(freestone_mount, freestone_power_cut):
    for name, is_synced in (("synced", True), ("cached", False)):
        with open(freestone_mount / name, "w") as file:
            file.write("hello")
            file.flush()
            if is_synced:
                os.fsync(file)
                directory = os.open(freestone_mount, os.O_RDONLY)
                os.fsync(directory)
                os.close(directory)
    cut = freestone_power_cut(seed=7)
    assert cut.seed == 7
    assert (freestone_mount / "synced").read_text() == "hello"
    assert not (freestone_mount / "cached").exists()
    # And again, on the disk that is mounted again.
    (freestone_mount / "other").write_text("hello")
    freestone_power_cut()
    assert not (freestone_mount / "other").exists()

def test_disk_alone(freestone_disk, freestone_power_cut):
    freestone_disk.write(64 << 10, b"flushed" + bytes(4089))
    freestone_disk.flush()
    for number in range(16):
        freestone_disk.write((128 << 10) + number * 4096, b"x" * 4096)
    cut = freestone_power_cut(seed=1)
    assert cut.kept_blocks + cut.lost_blocks == 16 and cut.lost_blocks > 0
    assert freestone_disk.read(64 << 10, 7) == b"flushed"
    kept = [freestone_disk.read((128 << 10) + n * 4096, 1) == b"x" for n in range(16)]
    assert sum(kept) == cut.kept_blocks

def test_programs_are_stopped_after_the_cut(freestone_mount, freestone_power_cut):
    file = open(freestone_mount / "open", "w")
    freestone_power_cut(stop=file.close)

def test_without_a_disk(freestone_power_cut):
    with pytest.raises(RuntimeError, match="the test has no disk"):
        freestone_power_cut()
""",
    )
    assert "4 passed" in project.run("-rs")


@slow
@needs("mke2fs", "nbdfuse")
@needs_root
def test_process_that_stays_in_the_mount_fails_its_test(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\n")
    project.write(
        "test_it.py",
        """
import subprocess

def test_first(freestone_mount):
    null = subprocess.DEVNULL
    subprocess.Popen(["sleep", "300"], cwd=freestone_mount, stdin=null, stdout=null, stderr=null)

def test_second(freestone_mount):
    (freestone_mount / "file").write_text("hello")
""",
    )
    printed = project.finish(project.start())
    assert "2 passed" in printed
    assert "1 error" in printed or "2 errors" in printed
    assert "is in use by sleep" in printed
    for pid, command in project.processes():
        assert command.startswith("sleep ")
        os.kill(pid, 9)
    # The mount ends with the last process in it; the next session removes the directory.
    assert "1 passed" in project.run("-k", "second")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("freestone_size = 7M", "freestone_size=7M: must be at least 16M"),
        ("freestone_size = big", "freestone_size=big"),
        ("freestone_via = floppy", "freestone_via=floppy: the values are auto"),
        ("freestone_ready = 99", "freestone_ready=99: must be a number from 0 to 16"),
        ("freestone_require = mouse", "freestone_require=mouse: the values are mount"),
        ("freestone_base = missing", "missing is not a file"),
        ("freestone_program = missing/freestone", "is not a program that can be started"),
    ],
)
def test_invalid_setting_is_refused(project: Project, setting: str, message: str) -> None:
    project.write("pytest.ini", f"[pytest]\n{setting}\n")
    project.write("test_it.py", "def test_it(freestone_disk): pass\n")
    project.environment.pop("FREESTONE_PROGRAM", None) if "program" in setting else None
    printed = project.run(status=1)
    assert message in printed
    assert "1 error" in printed


@needs("mke2fs")
def test_fixture_by_getfixturevalue_is_refused(project: Project) -> None:
    project.write(
        "test_it.py",
        """
def test_it(request):
    request.getfixturevalue("freestone_disk")
""",
    )
    assert "request the fixtures of freestone as arguments" in project.run(status=1)


def test_session_without_the_fixtures_does_nothing(project: Project) -> None:
    project.write(
        "test_it.py",
        """
import sys

def test_it():
    assert "pytest_freestone" in sys.modules
    assert "freestone" not in sys.modules
    assert not any(name.startswith("pytest_freestone.") for name in sys.modules)
""",
    )
    assert "1 passed" in project.run()
