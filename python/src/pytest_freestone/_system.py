"""Programs and file systems of this machine."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

#: Directories of administrators' programs, which not every user has in PATH.
_SYSTEM_DIRECTORIES: Final = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
#: Longest part of a program's message that an error repeats, in characters.
_MESSAGE_MAX: Final = 2000
_MNT_EXPIRE: Final = 4
#: Writes and drops what the kernel caches of a block device (linux/fs.h).
_BLKFLSBUF: Final = 0x1261
#: Makes a loop device read and write its file without a cache (linux/loop.h).
_LOOP_SET_DIRECT_IO: Final = 0x4C08
#: Ends all I/O of an ext4; the argument below discards what is not written (EXT4_IOC_SHUTDOWN).
_SHUTDOWN: Final = 0x8004587D
_SHUTDOWN_NOLOGFLUSH: Final = 2

_libc: Final = ctypes.CDLL(None, use_errno=True)


class ProgramError(Exception):
    """A program failed, did not end in time or is not installed."""


def find(name: str) -> str | None:
    """Returns the path of a program, or None."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM_DIRECTORIES])
    return shutil.which(name, path=path)


def run(
    command: Sequence[str | os.PathLike[str]],
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
    user: str | None = None,
    stdin: str | None = None,
) -> str:
    """Runs a program and returns what it prints.

    Args:
        command: Program and arguments. A program without a directory is searched.
        timeout: Longest duration, in seconds, after which the program is killed.
        environment: Its environment; by default that of this process.
        user: User that runs it; only root can name another.
        stdin: What it reads; by default nothing.

    Raises:
        ProgramError: The message has what the program wrote to stderr.
    """
    name = os.fspath(command[0])
    program = name if "/" in name else find(name)
    if program is None:
        raise ProgramError(f"{name} is not installed")
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [program, *command[1:]],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=timeout,
            check=False,
            # Ctrl-C interrupts this process, which then undoes what the program did.
            start_new_session=True,
            **_credentials(user),
        )
    except OSError as error:
        raise ProgramError(f"{name} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"{name} did not end within {timeout:g} s") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-_MESSAGE_MAX:]
        raise ProgramError(said or f"{name} ended with status {done.returncode}")
    return done.stdout


def _credentials(user: str | None) -> dict[str, Any]:
    if user is None:
        return {}
    import pwd

    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def write_back(directory: Path) -> None:
    """Writes what the kernel and the file system cache of a mounted file system.

    Raises:
        OSError: The disk failed.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(file) != 0:
            raise OSError(ctypes.get_errno(), f"{directory}: cannot be written back")
        # fuse2fs writes its own cache only for this.
        os.fsync(file)
    finally:
        os.close(file)


def is_busy(directory: Path) -> bool:
    """Returns true if a process uses the file system that is mounted at a directory. Needs root."""
    # The kernel marks an unused mount as expired, and fails with EAGAIN.
    result = _libc.umount2(os.fsencode(directory), _MNT_EXPIRE)
    return bool(result != 0 and ctypes.get_errno() == errno.EBUSY)


def unmount(directory: Path) -> None:
    """Unmounts a file system of this user.

    Raises:
        OSError: The file system is in use.
        ProgramError: The same, reported by fusermount.
    """
    if os.geteuid() != 0:
        program = "fusermount3" if find("fusermount3") else "fusermount"
        run([program, "-u", directory], timeout=60)
    elif _libc.umount2(os.fsencode(directory), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{directory}: cannot be unmounted: {os.strerror(number)}")


def mount_at(directory: Path) -> tuple[str, str]:
    """Returns the block device and the type of the file system that is mounted at a directory.

    Raises:
        OSError: Nothing is mounted there.
    """
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in reversed(file.readlines()):
            mount, _, source = line.partition(" - ")
            if mount.split(" ")[4] == str(directory):
                words = source.split(" ")
                return words[1], words[0]
    raise OSError(errno.EINVAL, f"{directory}: is not mounted")


class BlockDevice:
    """A block device that stays attached while this process has it open, and keeps its number.

    A loop device is detached by the kernel when its last user ends, which includes a process that
    is killed.
    """

    def __init__(self, path: str) -> None:
        """Opens the device.

        Raises:
            OSError: It cannot be opened, or its cache cannot be switched off.
        """
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # udev probes no device that is locked: what it reads would stay in the cache.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.startswith("/dev/loop"):
                fcntl.ioctl(self._file, _LOOP_SET_DIRECT_IO, 1)
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Closes the device."""
        os.close(self._file)

    def drop_cache(self) -> None:
        """Writes and drops what the kernel caches of the device.

        Raises:
            OSError: The disk failed.
        """
        fcntl.ioctl(self._file, _BLKFLSBUF, 0)

    def mount_ext4(self, directory: Path) -> None:
        """Mounts the ext4 of the device.

        Raises:
            OSError: The mount failed.
        """
        path = os.fsencode(directory)
        if _libc.mount(os.fsencode(self._path), path, b"ext4", 0, None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{directory}: cannot be mounted: {os.strerror(number)}")


def discard_ext4(directory: Path) -> None:
    """Unmounts an ext4 without writing what is cached. Its content is damaged.

    Raises:
        OSError: The file system is in use, and is shut down nevertheless.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, _SHUTDOWN, _SHUTDOWN_NOLOGFLUSH.to_bytes(4, sys.byteorder))
    finally:
        os.close(file)
    unmount(directory)


def start(
    command: Sequence[str], log: BinaryIO, *, user: str | None = None
) -> subprocess.Popen[bytes]:
    """Starts a program that runs on, and writes its messages to a file.

    Raises:
        ProgramError: It cannot be started.
    """
    try:
        process: Any = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            **_credentials(user),
        )
    except OSError as error:
        raise ProgramError(f"{command[0]} cannot be started: {error}") from error
    return cast("subprocess.Popen[bytes]", process)
