"""Projects whose tests a pytest of their own runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

_SPEC = importlib.util.find_spec("pytest_freestone")
assert _SPEC is not None
assert _SPEC.origin is not None
SOURCE = Path(_SPEC.origin).parents[1]
#: Longest run of pytest, in seconds.
_RUN_MAX = 900.0
#: Longest wait for what ends by itself after a session was killed, in seconds.
_GRACE = 20.0

#: File with the output of the last run.
_OUTPUT = "output"

ENTRY = """\
[pytest11]
freestone = pytest_freestone
"""


@dataclass
class Project:
    """A directory with tests that a pytest of its own runs, in a temporary directory that nothing
    else uses.
    """

    path: Path
    temporary: Path
    environment: dict[str, str]

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "pytest", *arguments]

    def start(self, *arguments: str, is_group: bool = False) -> subprocess.Popen[bytes]:
        """Starts pytest, with its output to a file, as a test may leave processes that hold a pipe
        open.
        """
        with open(self.path / _OUTPUT, "wb") as output:
            return subprocess.Popen(
                self.command(*arguments),
                cwd=self.path,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=is_group,
            )

    def finish(self, process: subprocess.Popen[bytes]) -> str:
        """Waits for the end of pytest, and returns what it has printed."""
        try:
            process.wait(timeout=_RUN_MAX)
        finally:
            process.kill()
            process.wait()
        return (self.path / _OUTPUT).read_text(errors="replace")

    def run(self, *arguments: str, status: int | None = 0) -> str:
        """Runs pytest and returns what it prints. Nothing may be left afterwards."""
        process = self.start(*arguments)
        printed = self.finish(process)
        if status is not None:
            assert process.returncode == status, printed
        assert self.left() == [], printed
        return printed

    def processes(self) -> list[tuple[int, str]]:
        """Returns the processes that inherited the environment of a run, with command lines."""
        mark = f"TMPDIR={self.temporary}".encode()
        found: list[tuple[int, str]] = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (directory / "environ").read_bytes().split(b"\0"):
                    command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append((int(directory.name), command))
            except OSError:
                continue  # Ended, or another user's.
        return found

    def left(self) -> list[str]:
        """Returns what exists of the runs: processes, mounts, loop devices, sockets and files."""
        place = str(self.temporary)
        found = [f"process {pid}: {command}" for pid, command in self.processes()]
        found += [
            line for line in Path("/proc/self/mountinfo").read_text().splitlines() if place in line
        ]
        found += [line for line in Path("/proc/net/unix").read_text().splitlines() if place in line]
        for file in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                backing = file.read_text()
            except OSError:
                continue  # Detached meanwhile.
            if place in backing:
                found.append(f"{file}: {backing}")
        # pytest-xdist keeps a directory of its own.
        names = [name for name in os.listdir(self.temporary) if not name.startswith("pytest-of-")]
        return found + [f"{self.temporary}/{name}" for name in names]

    def is_clean_soon(self) -> bool:
        """Returns true once nothing is left of runs that were killed."""
        until = time.monotonic() + _GRACE
        while self.left():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True


#: Debian's packages of the programs that have another name.
_PACKAGES = {
    "mke2fs": "e2fsprogs",
    "nbdcopy": "libnbd-bin",
    "nbdinfo": "libnbd-bin",
    "qemu-img": "qemu-utils",
}


def left_out(missing: list[str]) -> pytest.MarkDecorator:
    """Skips a test where something is missing, except in continuous integration, where it fails."""
    is_skipped = bool(missing) and not os.environ.get("CI")
    return pytest.mark.skipif(is_skipped, reason=f"left out: {', '.join(missing)}")


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips a test where programs are missing."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [each for each in programs if shutil.which(each, path=path) is None]
    return left_out([f"{each} (package {_PACKAGES.get(each, each)})" for each in missing])


def needs_module(*modules: str) -> pytest.MarkDecorator:
    """Skips a test where modules of Python are missing."""
    missing = [each for each in modules if importlib.util.find_spec(each) is None]
    return left_out([f"the module {each}" for each in missing])


#: Skips a test except for root.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="left out: mounts, which need root")


def is_full() -> bool:
    """Returns true in the slow lane, which runs everything."""
    return os.environ.get("FREESTONE_EFFORT") == "full"


#: Leaves a test to the slow lane.
slow = pytest.mark.skipif(not is_full(), reason="slow lane")
