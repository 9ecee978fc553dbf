"""Ways to mount a disk: ``freestone mount`` for root, fuse2fs for everybody."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_freestone import _cleanup, _system

if TYPE_CHECKING:
    from freestone import Disk

#: Longest duration of a mount or unmount, in seconds.
_MOUNT_MAX: Final = 60.0
#: Longest wait for the end of nbdfuse or fuse2fs after an unmount, in seconds.
_END_MAX: Final = 10.0
_PAUSE: Final = 0.001
_NO_JOURNAL: Final = "fuse2fs: it writes without a journal, so a power cut damages its file system"


class UnavailableError(Exception):
    """No way to mount works on this machine. The message has the reason for each way."""


class Mounted:
    """A disk that is mounted at a directory."""

    def __init__(self, directory: Path, way: str) -> None:
        self.directory = directory
        self.way = way

    def check_unused(self) -> None:
        """Raises ``ProgramError`` if a process uses the file system."""

    def unmount(self) -> None:
        """Unmounts the file system, which writes what is cached.

        Raises:
            ProgramError: It is in use, or the disk failed.
            OSError: The same.
        """
        raise NotImplementedError

    def keep_attached(self) -> bool:
        """Keeps the block device for :meth:`renew`. Returns false if that is impossible here."""
        return False

    def renew(self, rewind: Callable[[], None]) -> None:
        """Unmounts the file system without writing what is cached, and mounts it again.

        Args:
            rewind: Replaces the content meanwhile.

        Raises:
            OSError: The file system is in use, or the disk failed. Only :meth:`unmount` may follow.
            FreestoneError: ``rewind`` failed. The same.
        """
        raise NotImplementedError


class Mounts:
    """Mounts the disks of one server. May be used by several threads.

    The first mount of the session tries the ways one after the other. Later ones use the way that
    worked.
    """

    def __init__(self, via: str, program: str, control: str, directory: str) -> None:
        """Args: the setting, the program, the control socket of its server, and the session's
        directory.
        """
        self._via = via
        self._program = program
        self._control = control
        self._directory = directory
        self._environment = {
            **os.environ,
            "FREESTONE_MOUNTS": os.path.join(directory, _cleanup.RECORDS),
        }
        self._way: dict[bool, str] = {}
        self._reasons: dict[bool, str] = {}
        self._lock = threading.Lock()

    def mount(self, disk: Disk, directory: Path, *, keeps_order: bool) -> Mounted:
        """Mounts the file system of a disk.

        Args:
            disk: The disk, which is published at a Unix socket.
            directory: An empty directory.
            keeps_order: The power of the disk will be cut. This excludes ublk, whose block device
                would write old blocks over the result of the cut, and fuse2fs, which writes without
                a journal.

        Raises:
            UnavailableError: Nothing on this machine can mount it.
            ProgramError: The mount failed, although the way worked before.
        """
        with self._lock:
            way, reasons = self._way.get(keeps_order), self._reasons.get(keeps_order)
        if reasons is not None:
            raise UnavailableError(reasons)
        if way is not None:
            return self._by(way, disk, directory)
        found: list[str] = []
        for way in self._ways(keeps_order):
            try:
                mounted = self._by(way, disk, directory)
            except _system.ProgramError as error:
                found.append(f"{way}: {_one_line(error)}")
                continue
            with self._lock:
                self._way[keeps_order] = way
            return mounted
        if keeps_order:
            found.append(_NO_JOURNAL)
        with self._lock:
            self._reasons[keeps_order] = "; ".join(found)
        raise UnavailableError("; ".join(found))

    def _ways(self, keeps_order: bool) -> list[str]:
        if self._via == "fuse2fs" and keeps_order:
            raise UnavailableError(_NO_JOURNAL)
        if self._via != "auto":
            return [self._via]
        return ["nbd", "nbdfuse"] if keeps_order else ["auto", "fuse2fs"]

    def _by(self, way: str, disk: Disk, directory: Path) -> Mounted:
        if way == "fuse2fs":
            return _ByFuse2fs(self._directory, disk, directory)
        command = [self._program, "mount", disk.name, str(directory), "--control", self._control]
        if way != "auto":
            command += ["--via", way]
        _system.run(command, _MOUNT_MAX, environment=self._environment)
        return _ByProgram(self._program, self._environment, directory, way)


class _ByProgram(Mounted):
    """A mount of ``freestone mount``."""

    def __init__(
        self, program: str, environment: dict[str, str], directory: Path, way: str
    ) -> None:
        super().__init__(directory, way)
        self._program = program
        self._environment = environment
        self._device: _system.BlockDevice | None = None

    def keep_attached(self) -> bool:
        if self._device is None:
            path, kind = _system.mount_at(self.directory)
            # A kernel may be too old to switch off the cache of a loop device.
            with contextlib.suppress(OSError):
                self._device = _system.BlockDevice(path) if kind == "ext4" else None
        return self._device is not None

    def renew(self, rewind: Callable[[], None]) -> None:
        if self._device is None:
            raise RuntimeError(f"{self.directory}: its device is not kept")
        _system.discard_ext4(self.directory)
        self._device.drop_cache()
        rewind()
        self._device.drop_cache()
        self._device.mount_ext4(self.directory)

    def check_unused(self) -> None:
        if not _system.is_busy(self.directory):
            return
        gc.collect()  # Files that the test has not closed, and that refer to each other.
        if _system.is_busy(self.directory):
            # The command waits for half a second, and names the process.
            self.unmount()

    def unmount(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None
        command = [self._program, "umount", str(self.directory)]
        try:
            _system.run(command, _MOUNT_MAX, environment=self._environment)
        except _system.ProgramError as error:
            if "no such mount" not in str(error):
                raise


class _ByFuse2fs(Mounted):
    """A mount of fuse2fs over the file of nbdfuse."""

    def __init__(self, session: str, disk: Disk, directory: Path) -> None:
        super().__init__(directory, "fuse2fs")
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            raise _system.ProgramError("/dev/fuse does not exist, or this user may not open it")
        self._session = session
        self._fuse = directory.with_name(directory.name + ".fuse")
        self._fuse.mkdir(mode=0o700)
        self._running: list[subprocess.Popen[bytes]] = []
        file = self._fuse / "disk"
        ready = directory.with_name(directory.name + ".pid")
        # fuse2fs reads the file for the user that started it. The options give root's own access to
        # other users.
        options = ["-o", "allow_other,default_permissions"] if os.geteuid() == 0 else []
        try:
            self._start(
                ["nbdfuse", "-P", str(ready), str(file), disk.uri], lambda: _has_text(ready)
            )
            self._start(["fuse2fs", "-f", str(file), str(directory), *options], directory.is_mount)
        except BaseException:
            self._undo()
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                ready.unlink()

    def _start(self, command: list[str], is_ready: Callable[[], bool]) -> None:
        program = _system.find(command[0])
        if program is None:
            package = {"nbdfuse": "libnbd-bin"}.get(command[0], command[0])
            raise _system.ProgramError(f"{command[0]} is not installed (Debian package {package})")
        log = self._fuse.with_suffix(".log")
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._running.append(process)
        _cleanup.record_process(self._session, process.pid)
        until = time.monotonic() + _MOUNT_MAX
        try:
            while not is_ready():
                if process.poll() is not None:
                    said = log.read_text(errors="replace").strip() or f"status {process.returncode}"
                    raise _system.ProgramError(f"{command[0]}: {said[-500:]}")
                if time.monotonic() > until:
                    raise _system.ProgramError(
                        f"{command[0]} was not ready within {_MOUNT_MAX:g} s"
                    )
                time.sleep(_PAUSE)
        finally:
            log.unlink()

    def check_unused(self) -> None:
        # fuse2fs unmounts in a few milliseconds, and only an unmount shows users that are not root
        # whether it is busy.
        self._unmount(self.directory)

    def unmount(self) -> None:
        self._unmount(self.directory)
        self._end(1)
        self._unmount(self._fuse)
        self._end(0)
        self._fuse.rmdir()

    def _unmount(self, directory: Path) -> None:
        until = time.monotonic() + 0.5
        # `is_mount` is also false at a file system whose process has died.
        while str(directory) in _cleanup.mounts_below(str(directory.parent)):
            try:
                _system.unmount(directory)
            except (OSError, _system.ProgramError) as error:
                if time.monotonic() > until:
                    raise _system.ProgramError(f"{directory} is in use: {error}") from error
                time.sleep(0.02)

    def _end(self, index: int) -> None:
        """Waits for the end of a process after its unmount."""
        if len(self._running) <= index:
            return
        process = self._running.pop(index)
        try:
            process.wait(timeout=_END_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=_END_MAX)
        _cleanup.forget_process(self._session, process.pid)

    def _undo(self) -> None:
        for directory in (self.directory, self._fuse):
            if str(directory) in _cleanup.mounts_below(str(directory.parent)):
                _cleanup.detach(str(directory))
        for process in self._running:
            process.kill()
        for index in reversed(range(len(self._running))):
            self._end(index)
        with contextlib.suppress(OSError):
            self._fuse.rmdir()


def _has_text(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return file.stat().st_size > 0
    return False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
