"""The session: its directory, its server, and the disks of its tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import pytest

import freestone
from freestone import _program
from pytest_freestone import _cleanup, _settings
from pytest_freestone._artifacts import Artifacts
from pytest_freestone._images import Images
from pytest_freestone._mounts import Mounts, UnavailableError
from pytest_freestone._power import PowerCutter
from pytest_freestone._ready import Prepared, Ready, Recipe
from pytest_freestone._system import ProgramError

if TYPE_CHECKING:
    from freestone import Disk, Fork, Server
    from pytest_freestone._settings import Base

#: Prefix of the directory of a user's sessions.
_PREFIX: Final = "freestone-pytest-"
#: Longest directory of temporary files, in bytes, below which paths of sockets are short enough.
_TMP_MAX: Final = 30
#: Attempts to join a test run whose directory other processes remove.
_JOIN_ATTEMPTS: Final = 100
#: Longest end of the server, in seconds: its devices hold nothing that must be written.
_SERVER_END_MAX: Final = 20.0

_POWER_CUT: Final = "freestone_power_cut"


@dataclass
class _TestDisks:
    """The disks of a test that runs."""

    disks: list[Prepared] = field(default_factory=list[Prepared])
    has_failed: bool = False
    kept: str | None = None
    """What the report says about the disks that were kept."""


class PluginSession:
    """What the fixtures of one pytest process share. Used by the thread of the tests."""

    def __init__(self, config: pytest.Config) -> None:
        """Makes the directory of the session and starts the server."""
        self.settings = _settings.read(config)
        worker: dict[str, str] = getattr(config, "workerinput", {})
        self._run = _join_run(worker.get("testrunuid") or uuid.uuid4().hex)
        self._stack = contextlib.ExitStack()
        self._tests: pytest.StashKey[_TestDisks] = pytest.StashKey()
        self._numbers = count(1)
        self._number_lock = threading.Lock()
        try:
            self._open(worker.get("workerid", "main"))
        except BaseException:
            self._stack.close()
            raise

    def _open(self, worker: str) -> None:
        self._stack.callback(self._run.leave)
        self.directory = self._run.path / f"{worker}-{os.getpid()}"
        self._stack.enter_context(_private_directory(self.directory))
        program = _program.find(self.settings.program)
        self.server: Server = freestone.Server(program=program, directory=self.directory / "server")
        self.server.start()
        self._stack.callback(self._end_server)
        (self.directory / _cleanup.PROGRAM).write_text(program)
        self.images = Images(self.server, self._run.images, self.settings.size)
        self.mounts = Mounts(self.settings.via, program, self.server.control, str(self.directory))
        self.artifacts = Artifacts(self.settings, self.server, program, self._run.path)
        self.ready = Ready(self.prepare, self.renew, self.remove, self.settings.ready)

    def close(self) -> None:
        """Removes all disks and ends the server.

        Raises:
            RuntimeError: A disk could not be removed in order.
        """
        try:
            self.ready.close()
        finally:
            self._stack.close()
        if self.ready.failures:
            raise RuntimeError(
                "freestone: disks were not removed in order: " + "; ".join(self.ready.failures)
            )

    def _end_server(self) -> None:
        # Content in memory is not needed any more, so a server that was killed is no failure of the
        # tests.
        with contextlib.suppress(freestone.FreestoneError):
            self.server.close(timeout=_SERVER_END_MAX)

    # Disks of tests.

    @contextlib.contextmanager
    def disk(
        self, request: pytest.FixtureRequest, base: Base, following: pytest.Item | None
    ) -> Generator[Prepared, None, None]:
        """Leases the disk of the fixture ``freestone_disk`` to a test."""
        image = self.images.of(base)

        def recipe(item: pytest.Item) -> Recipe | None:
            names = fixtures_of(item)
            if "freestone_disk" not in names:
                return None
            return Recipe(image, "freestone_mount" in names, _POWER_CUT in names)

        with self.lease(
            request, recipe(request.node), recipe(following) if following else None
        ) as prepared:
            yield prepared

    @contextlib.contextmanager
    def lease(
        self, request: pytest.FixtureRequest, recipe: Recipe | None, following: Recipe | None
    ) -> Generator[Prepared, None, None]:
        """Leases a disk to a test, and prepares that of the next test meanwhile."""
        if recipe is None:
            raise pytest.UsageError(
                f"{request.node.nodeid}: request the fixtures of freestone as arguments, "
                "not by getfixturevalue(): the disk of a test is made for all of them"
            )
        try:
            prepared = self.ready.take(recipe)
        except UnavailableError as reason:
            requirements = ("mount", "power_cut") if recipe.power_cut else ("mount",)
            self.skip(f"no way to mount works here: {reason}", *requirements)
        prepared.test = request.node.nodeid
        test = self.test(request.node)
        test.disks.append(prepared)
        try:
            if following is not None:
                self.ready.want(following)
            yield prepared
        finally:
            test.disks.remove(prepared)
            prepared.has_failed = test.has_failed
            self._release(prepared)

    def _release(self, prepared: Prepared) -> None:
        mounted = prepared.mounted
        try:
            # The traceback of a failure holds the objects of the test, and so the files that it has
            # opened.
            if mounted is not None and prepared.service is None and not prepared.has_failed:
                mounted.check_unused()
        except BaseException:
            self.ready.remove(prepared)
            raise
        self.ready.give_back(prepared)

    def directory_of(self, request: pytest.FixtureRequest, disk: Fork) -> Path:
        """Returns the directory at which the disk of a test is mounted."""
        for prepared in self.test(request.node).disks:
            if prepared.disk is disk and prepared.mounted is not None:
                return prepared.mounted.directory
        raise pytest.UsageError(
            f"{request.node.nodeid}: freestone_mount must be an argument of the test or of a "
            "fixture, not the value of getfixturevalue()"
        )

    def power_cutter(self, request: pytest.FixtureRequest) -> PowerCutter:
        """Returns the value of the fixture ``freestone_power_cut``."""
        return PowerCutter(self.test(request.node).disks, self.mount)

    def test(self, item: pytest.Item) -> _TestDisks:
        """Returns the disks of a test."""
        return item.stash.setdefault(self._tests, _TestDisks())

    def skip(self, reason: str, *fixtures: str) -> NoReturn:
        """Skips a test that needs what does not work here, or fails it if ``freestone_require`` has
        one of the names.
        """
        required = sorted(self.settings.require.intersection(fixtures))
        if required:
            pytest.fail(
                f"freestone: {reason} (freestone_require: {', '.join(required)})", pytrace=False
            )
        pytest.skip(f"freestone: {reason}")

    def after_phase(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Keeps the disks of a test whose setup or call failed, while they are as the test left
        them.
        """
        test = item.stash.get(self._tests, None)
        if test is None or not report.failed:
            return
        test.has_failed = True
        if test.kept is not None or not test.disks:
            return
        test.kept = self.artifacts.keep(item.nodeid, test.disks)
        report.sections.append(("freestone", test.kept))

    # Preparing and removing. May run in threads.

    def prepare(self, recipe: Recipe) -> Prepared:
        """Makes a disk."""
        disk = self.server.fork(
            recipe.image.device, f"disk-{self.number()}", power_cut=recipe.power_cut or None
        )
        prepared = Prepared(recipe, disk)
        try:
            if recipe.is_mounted:
                self.mount(prepared)
            if recipe.service is not None and prepared.mounted is not None:
                prepared.service = recipe.service.start(prepared.mounted.directory)
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove(prepared)
            raise
        return prepared

    def mount(self, prepared: Prepared) -> None:
        """Mounts a disk at its directory."""
        directory = self.directory / "mounts" / prepared.disk.name
        directory.mkdir(mode=0o755, exist_ok=True)
        try:
            prepared.mounted = self.mounts.mount(
                prepared.disk, directory, keeps_order=prepared.recipe.power_cut
            )
        except BaseException:
            directory.rmdir()
            raise

    def renew(self, prepared: Prepared) -> bool:
        """Gives a disk its first content again, and starts its service again. Returns false if the
        disk must be removed instead.
        """
        mounted, service = prepared.mounted, prepared.recipe.service
        if mounted is None:
            return False
        try:
            self._close_service(prepared)
            if not mounted.keep_attached():
                return False
            mounted.renew(lambda: prepared.disk.rewind(force=True))
            if service is not None:
                prepared.service = service.start(mounted.directory)
        except (OSError, ProgramError, freestone.FreestoneError, subprocess.TimeoutExpired):
            return False
        return True

    def remove(self, prepared: Prepared) -> None:
        """Ends what runs on a disk, unmounts and removes it."""
        self._close_service(prepared)
        if prepared.mounted is not None:
            prepared.mounted.unmount()
            prepared.mounted.directory.rmdir()
            prepared.mounted = None
        prepared.disk.remove(force=True)

    @staticmethod
    def _close_service(prepared: Prepared) -> None:
        service, prepared.service = prepared.service, None
        if service is not None:
            service.close()

    @contextlib.contextmanager
    def mounted(self, disk: Disk) -> Generator[Path, None, None]:
        """Mounts a disk for a while."""
        directory = self.directory / "mounts" / disk.name
        directory.mkdir(mode=0o755)
        try:
            mounted = self.mounts.mount(disk, directory, keeps_order=False)
            try:
                yield directory
            finally:
                mounted.unmount()
        finally:
            with contextlib.suppress(OSError):
                directory.rmdir()

    def number(self) -> int:
        """Returns a number that the session has not used."""
        with self._number_lock:
            return next(self._numbers)


def fixtures_of(item: pytest.Item) -> list[str]:
    """Returns the names of the fixtures that a test uses, directly or not."""
    return list(getattr(item, "fixturenames", []))


def cuts_power(item: pytest.Item) -> bool:
    """Returns true if a test may cut the power of its disks."""
    return _POWER_CUT in fixtures_of(item)


class _Run:
    """The directory that the processes of one test run share. The last one removes it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.images = path / "images"
        self._lock = lock

    def leave(self) -> None:
        """Releases the lock, and removes the directory if no other process uses it."""
        os.close(self._lock)
        _cleanup.remove_run(str(self.path))


def _join_run(name: str) -> _Run:
    temporary = tempfile.gettempdir()
    parent = temporary if len(os.fsencode(temporary)) <= _TMP_MAX else "/tmp"  # noqa: S108 - Checked below.
    root = Path(parent) / f"{_PREFIX}{os.geteuid()}"
    _cleanup.clean_all(str(root))
    path = root / name[:8]
    for _ in range(_JOIN_ATTEMPTS):
        try:
            root.mkdir(mode=0o711, exist_ok=True)
            found = root.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o022 or root.is_symlink():
                raise PermissionError(
                    f"{root} must be a directory that only its owner may write; remove it"
                )
            path.mkdir(mode=0o711, exist_ok=True)
            (path / "images").mkdir(mode=0o700, exist_ok=True)
            lock = os.open(path / _cleanup.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # The last process of another run has removed the directory meanwhile.
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_nlink > 0:
            return _Run(path, lock)
        os.close(lock)
    raise FileNotFoundError(f"{path}: other processes remove it again and again")


@contextlib.contextmanager
def _private_directory(path: Path) -> Generator[None, None, None]:
    """Makes the directory of a session, and a process that cleans up if this one is killed."""
    path.mkdir(mode=0o711)
    for name in (_cleanup.PROCESSES, _cleanup.RECORDS):
        (path / name).mkdir(mode=0o700)
    (path / "mounts").mkdir(mode=0o711)
    # The lock is taken before it has its name: a process that finds it free removes the directory.
    draft = path / "lock.new"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft.rename(path / _cleanup.LOCK)
        # `read` ends when the last descriptor of the pipe is closed, so when this process has
        # ended.
        script = 'read -r _; exec "$0" -I -S "$1" "$2"'
        with subprocess.Popen(
            ["/bin/sh", "-c", script, sys.executable, _cleanup.__file__, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as watcher:
            try:
                yield
            finally:
                watcher.kill()
        _cleanup.clean(str(path))
    finally:
        os.close(lock)
