"""The disks of failed tests."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .projects import Project, needs, needs_module, needs_root, slow

#: Longest run of the commands of a report, in seconds.
_SHELL_MAX = 120


def commands(printed: str) -> list[list[str]]:
    """Returns the commands of each report: those that open the disk, and those that close it."""
    found: list[list[str]] = []
    for part in printed.split("Open a fork of it with these commands:\n")[1:]:
        opening = [
            line.strip()
            for line in re.findall(r"^    (.*)$", part.split("Close it with: ")[0], re.M)
        ]
        closing = part.split("Close it with: ")[1].splitlines()[0]
        found.append([*opening, closing])
    return found


def run_commands(lines: list[str], look: str, project: Project) -> str:
    """Runs the commands of a report, and between opening and closing the disk another one; returns
    what that prints.
    """
    *opening, closing = lines
    script = "\n".join(["exec 3>&1 >&2; set -e", *opening, f"{{ {look}; }} >&3", closing, "wait"])
    environment = {**project.environment, "FREESTONE_MOUNTS": str(project.path / "records")}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SHELL_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    return done.stdout


@needs("mke2fs", "nbdfuse")
@needs_root
@pytest.mark.parametrize("fixtures", ["freestone_mount", "freestone_mount, freestone_power_cut"])
def test_commands_of_the_report_open_the_disk(project: Project, fixtures: str) -> None:
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\n")
    project.write(
        "test_it.py",
        f"""
def test_it({fixtures}):
    (freestone_mount / "evidence").write_text("written by the test")
    assert False

def test_good({fixtures}):
    pass
""",
    )
    printed = project.run(status=1)
    assert "1 failed, 1 passed" in printed
    [lines] = commands(printed)
    artifact = project.path / ".freestone-artifacts" / "test_it.py-test_it"
    assert str(artifact) in lines[0]
    # The artifact can be moved: it has all that it needs.
    moved = project.path / "moved"
    artifact.rename(moved)
    lines = [line.replace(str(artifact), str(moved)) for line in lines]
    directory = re.search(r"mkdir -p (\S+)", "\n".join(lines))
    assert directory is not None
    found = run_commands(lines, f"cat {directory[1]}/evidence", project)
    assert found == "written by the test"
    os.rmdir(directory[1])


@slow
@needs("nbdinfo", "nbdcopy")
def test_raw_disk_over_an_image_of_the_user(project: Project) -> None:
    (project.path / "image").write_bytes(b"image" + bytes((1 << 20) - 5))
    project.write("pytest.ini", "[pytest]\nfreestone_base = image\n")
    project.write(
        "test_it.py",
        """
def test_it(freestone_disk):
    freestone_disk.write(4096, b"by the test" + bytes(4085))
    assert False
""",
    )
    [lines] = commands(project.run(status=1))
    artifact = project.path / ".freestone-artifacts" / "test_it.py-test_it"
    # The image of the user stays where it is.
    assert sorted(file.name for file in artifact.iterdir()) == ["changes-0.qcow2", "freestone.json"]
    uri = lines[-2].removeprefix("nbdinfo ")
    found = run_commands(lines, f"nbdcopy {uri} - | head -c 4107", project)
    assert found.startswith("image")
    assert found.endswith("by the test")


@slow
@needs("mke2fs", "nbdfuse")
@needs_root
def test_disk_is_kept_as_it_was_before_the_teardown(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\nfreestone_artifacts = kept\n")
    project.write(
        "test_it.py",
        """
import pytest

@pytest.fixture
def program(freestone_mount):
    (freestone_mount / "file").write_text("in use")
    yield
    (freestone_mount / "file").unlink()

def test_call(program):
    assert False

@pytest.fixture
def broken(freestone_mount):
    (freestone_mount / "file").write_text("in use")
    raise ValueError

def test_setup(broken):
    pass
""",
    )
    printed = project.run(status=1)
    assert "1 failed, 1 error" in printed
    for lines in commands(printed):
        directory = re.search(r"mkdir -p (\S+)", "\n".join(lines))
        assert directory is not None
        assert run_commands(lines, f"cat {directory[1]}/file", project) == "in use"
        os.rmdir(directory[1])
    assert len(commands(printed)) == 2


@slow
@needs("mke2fs")
@needs_module("xdist")
def test_number_of_artifacts_is_bounded(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\nfreestone_artifacts_max = 3\n")
    project.write(
        "test_it.py",
        """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_it(freestone_disk, number):
    assert False
""",
    )
    artifacts = project.path / ".freestone-artifacts"

    def names() -> list[str]:
        return sorted(file.name for file in artifacts.iterdir())

    printed = project.run("-n", "2", status=1)
    assert len(names()) == 3
    assert printed.count("The disk of the failed test is kept") == 3
    assert printed.count("has the disks of 3 failed tests (freestone_artifacts_max)") == 2
    # A later run takes the place of the older ones.
    printed = project.run("-k", "4", status=1)
    assert "test_it.py-test_it-4" in names()
    assert len(names()) == 3
    # Copies of the image that the plugin has made are links to one file, so they take its place
    # once.
    images = list(artifacts.glob("*/*.img"))
    assert len(images) == 3
    assert len({file.stat().st_ino for file in images}) == 2
    # What is not an artifact is not removed.
    (artifacts / "notes").mkdir()
    project.write("pytest.ini", "[pytest]\nfreestone_size = 64M\nfreestone_artifacts_max = 0\n")
    printed = project.run("-k", "3", status=1)
    assert "The disk is not kept: freestone_artifacts_max is 0." in printed
    assert len(names()) == 4


@needs("mke2fs")
def test_directory_that_cannot_be_written_does_not_hide_the_failure(project: Project) -> None:
    project.write(
        "pytest.ini", "[pytest]\nfreestone_size = 64M\nfreestone_artifacts = pytest.ini/artifacts\n"
    )
    project.write("test_it.py", "def test_it(freestone_disk):\n    assert 1 == 2\n")
    printed = project.run(status=1)
    assert "assert 1 == 2" in printed
    assert "The disk is not kept: NotADirectoryError" in printed


def test_name_of_an_artifact_is_a_valid_file_name() -> None:
    from pytest_freestone._artifacts import artifact_name

    assert artifact_name("a/b.py::test_it[x/../y z]") == "a-b.py-test_it-x-..-y-z"
    assert artifact_name("..") == "test"
    long = artifact_name("t" * 400)
    assert len(long) == 120
    assert long != artifact_name("t" * 401)
    assert Path(long).name == long
