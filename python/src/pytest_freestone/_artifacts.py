"""Keeps the disks of failed tests: the changes as a qcow2 overlay, beside the image that they
belong to.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_freestone import _images, _system

if TYPE_CHECKING:
    from freestone import Fork, Server
    from pytest_freestone._ready import Prepared
    from pytest_freestone._settings import Settings

#: File that marks a directory as an artifact, and names its test and its test run.
_NOTE: Final = "freestone.json"
#: Longest name of an artifact's directory, in characters.
_NAME_MAX: Final = 120
#: Longest wait for another worker that keeps a disk, in seconds.
_LOCK_MAX: Final = 120.0
#: Longest duration of cp, in seconds.
_COPY_MAX: Final = 600.0


class Artifacts:
    """The directory with the disks of failed tests.

    Workers of xdist and several sessions may share it.
    """

    def __init__(self, settings: Settings, server: Server, program: str, run: Path) -> None:
        """Args: the settings, the server, its program, and the directory of the test run."""
        self._program = (
            "freestone" if shutil.which("freestone") == program else shlex.quote(program)
        )
        self._directory = settings.artifacts
        self._max = settings.artifacts_max
        self._server = server
        self._run = run

    def keep(self, test: str, disks: Sequence[Prepared]) -> str:
        """Keeps the disks of a test, and returns a text for its report.

        Never raises an exception.
        """
        if self._max == 0:
            return "The disk is not kept: freestone_artifacts_max is 0."
        lines: list[str] = []
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with _locked(self._directory):
                target = self._directory / artifact_name(test)
                if not self._make_room(target):
                    return (
                        f"The disk is not kept: {self._directory} has the disks of "
                        f"{self._max} failed tests (freestone_artifacts_max)."
                    )
                target.mkdir()
                note = {"test": test, "run": self._run.name, "time": time.time()}
                (target / _NOTE).write_text(json.dumps(note))
                for number, prepared in enumerate(disks):
                    lines += self._keep_disk(prepared, target, number)
        except Exception as error:  # The test's own failure must be reported in any case.
            lines.append(f"The disk is not kept: {type(error).__name__}: {error}")
        return "\n".join(lines)

    def _make_room(self, target: Path) -> bool:
        """Removes a former artifact of the test, and the oldest of other runs beyond the limit."""
        if (target / _NOTE).is_file():
            shutil.rmtree(target)
        elif target.exists():
            raise FileExistsError(f"{target} exists and is not the disk of a failed test")
        notes = list(self._notes())
        total = len(notes)
        old = [(each["time"], path) for path, each in notes if each["run"] != self._run.name]
        for _, directory in sorted(old):
            if total < self._max:
                break
            shutil.rmtree(directory)
            total -= 1
        return total < self._max

    def _notes(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yields the artifacts and their notes.

        Whatever else lies in the directory is not an artifact.
        """
        for file in self._directory.glob(f"*/{_NOTE}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                note = json.loads(file.read_text())
                yield file.parent, {"run": str(note["run"]), "time": float(note["time"])}

    def _keep_disk(self, prepared: Prepared, target: Path, number: int) -> list[str]:
        image = prepared.recipe.image
        if prepared.mounted is not None:
            # The power of the disk may be off, or its faults fail the writes.
            with contextlib.suppress(OSError):
                _system.write_back(prepared.mounted.directory)
        # The overlay names an image in its own directory without a path, so both can be moved
        # together.
        overlay = (
            image.path.parent / f"kept-{os.getpid()}-{number}.qcow2" if image.is_built else None
        )
        changes = target / f"changes-{number}.qcow2"
        self._save(prepared, overlay or changes)
        if overlay is not None:
            shutil.move(overlay, changes)
            self._add_image(image.path, target)
        return _commands(changes, self._program, is_mounted=prepared.mounted is not None)

    def _save(self, prepared: Prepared, overlay: Path) -> None:
        if not prepared.recipe.power_cut:
            prepared.disk.save_changes(overlay)
            return
        # A disk that keeps unflushed writes apart cannot be saved itself.
        with self._server.fork(prepared.recipe.image.device) as plain:
            copy_changes(prepared.disk, plain)
            plain.save_changes(overlay)

    def _add_image(self, path: Path, target: Path) -> None:
        to = target / path.name
        for directory, content in self._notes():
            # Another artifact of the same run has the same image.
            if directory != target and content["run"] == self._run.name:
                with contextlib.suppress(OSError):
                    os.link(directory / path.name, to)
                    return
        _system.run(["cp", "--sparse=always", "--reflink=auto", str(path), str(to)], _COPY_MAX)


def copy_changes(disk: Fork, to: Fork) -> None:
    """Writes the content of a fork to another fork of its base, where the two differ."""
    for extent in disk.extents():
        end = extent.offset + extent.length
        if extent.is_zero:
            for zeroes in to.extents(extent.offset, extent.length):
                if not zeroes.is_zero:
                    to.zero(zeroes.offset, zeroes.length)
            continue
        for offset in range(extent.offset, end, _images.PIECE):
            length = min(_images.PIECE, end - offset)
            wanted, found = disk.read(offset, length), to.read(offset, length)
            if wanted == found:
                continue
            for start in range(0, length, _images.BLOCK_BYTES):
                block = wanted[start : start + _images.BLOCK_BYTES]
                if block != found[start : start + len(block)]:
                    to.write(offset + start, block)


def _commands(changes: Path, program: str, *, is_mounted: bool) -> list[str]:
    """Returns the lines of the report: commands of a shell that open the disk again."""
    path = shlex.quote(str(changes))
    # Paths for the user's own commands, so that several failed disks can be open.
    place = f"/tmp/freestone-failed-{_digest(str(changes))}"  # noqa: S108
    control, nbd, directory = f"{place}.sock", f"{place}.nbd", place
    lines = [
        f"The disk of the failed test is kept: {changes}",
        "Open a fork of it with these commands:",
        f"    {program} serve kept=qcow2,path={path.replace(',', ',,')},publish=no "
        f"failed=fork,base=kept --control {control} --nbd unix:{nbd} &",
        f"    {program} wait --control {control}",
    ]
    if is_mounted:
        lines.append(
            f"    mkdir -p {directory} && {program} mount failed {directory} --control {control}"
        )
        lines.append(
            f"Close it with: {program} umount {directory} && {program} shutdown --control {control}"
        )
    else:
        lines.append(f"    nbdinfo 'nbd+unix:///failed?socket={nbd}'")
        lines.append(f"Close it with: {program} shutdown --control {control}")
    return lines


def artifact_name(test: str) -> str:
    """Returns the name of a directory for a test."""
    name = re.sub(r"[^A-Za-z0-9._=-]+", "-", test).strip("-.") or "test"
    if len(name) <= _NAME_MAX:
        return name
    return f"{name[: _NAME_MAX - 9]}-{_digest(test)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@contextlib.contextmanager
def _locked(directory: Path) -> Generator[None, None, None]:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _LOCK_MAX
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"{directory}: another process keeps a disk") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(file)
