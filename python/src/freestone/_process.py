"""The process of a server, and its private directory. Nothing here waits, except the end of this
process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from typing import Final

from freestone import _program
from freestone.errors import InvalidError, ServerStartError

#: Prefix of private directories.
PREFIX: Final = "freestone-py-"
#: File whose lock shows that the process which made a private directory still runs.
LOCK: Final = "lock"
#: Longest path of a Unix socket, in bytes.
MAX_SOCKET_PATH: Final = 107
#: Directory of private directories if that of temporary files is too long for sockets.
_SHORT_PARENT: Final = "/tmp"  # noqa: S108 - mkdtemp makes an unpredictable name in it
#: Longest name of a file that this package or the program puts into a private directory, in bytes.
LONGEST_NAME: Final = len("mount-ffffffffffffffff.sock")
#: Bytes of the program's messages that an error repeats.
MAX_STDERR: Final = 64 << 10
#: Longest wait for the end of a killed program, in seconds.
KILL_GRACE: Final = 10.0
#: Longest wait for a server at the end of this process, in seconds.
EXIT_GRACE: Final = 5.0

#: Ended at the end of this process, even if nothing refers to their objects any more.
_running: set[ServerProcess] = set()
_once = threading.Lock()
_swept_by: int | None = None


class PrivateDirectory:
    """A directory for the sockets of one server, removed by :meth:`remove`.

    A process that is killed leaves its directory behind. The next process that makes one removes
    it, as the lock of the file ``lock`` is free then.
    """

    def __init__(self) -> None:
        _sweep_once()
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=_short_parent())
        # The lock is taken before the file has its name, so that no other process finds it free.
        draft = os.path.join(self.path, ".lock")
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(draft, os.path.join(self.path, LOCK))

    def remove(self) -> None:
        """Removes the directory with all that is in it. May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _short_parent() -> str:
    """Returns the directory of temporary files, or /tmp if paths of sockets would be too long
    there.
    """
    parent = tempfile.gettempdir()
    room = MAX_SOCKET_PATH - LONGEST_NAME - len(PREFIX) - len("xxxxxxxx") - 2
    return parent if len(os.fsencode(parent)) <= room else _SHORT_PARENT


def _sweep_once() -> None:
    """Removes the private directories of ended processes, once for each process."""
    global _swept_by
    with _once:
        if _swept_by == os.getpid():
            return
        _swept_by = os.getpid()
    for parent in {tempfile.gettempdir(), _short_parent()}:
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                if entry.name.startswith(PREFIX):
                    _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # Another user's, or one that is being made or removed.
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # Its process still runs.
    finally:
        os.close(lock)


class ServerProcess:
    """A running program. Only the process that started it may use it, not a child made by
    ``os.fork()``.
    """

    def __init__(
        self,
        program: str,
        arguments: list[str],
        directory: str,
        private: PrivateDirectory | None,
    ) -> None:
        self.program = program
        self.directory = directory
        self._private = private
        self._owner = os.getpid()
        self._log = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by reap()
        try:
            self._popen = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=_program.environment(),
                # Ctrl-C interrupts this process, which then ends the server in order.
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise ServerStartError(f"{program} cannot be started: {error}") from error
        _running.add(self)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._popen.pid

    @property
    def is_owner(self) -> bool:
        """True in the process that started the server, false in a child made by ``os.fork()``."""
        return self._owner == os.getpid()

    def status(self) -> int | None:
        """Returns the exit status, negative for a signal, or None while the program runs."""
        return self._popen.poll()

    def send(self, number: int) -> None:
        """Sends a signal, unless the program has ended."""
        self._popen.send_signal(number)

    def messages(self) -> str:
        """Returns the end of what the program wrote to stderr."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - MAX_STDERR)
        return os.pread(self._log.fileno(), size - start, start).decode("utf-8", "replace")

    def reap(self) -> None:
        """Waits for a killed program, and releases its record in the kernel, its log and its
        directory.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A killed program ends as soon as a disk below it has answered.
            self._popen.wait(timeout=KILL_GRACE)
        _running.discard(self)
        self._log.close()
        if self._private is not None:
            self._private.remove()
            self._private = None

    def end_now(self) -> None:
        """Ends the program at the end of this process: in order if that takes at most
        ``EXIT_GRACE`` seconds.
        """
        with contextlib.suppress(OSError):
            self.send(signal.SIGTERM)
            until = time.monotonic() + EXIT_GRACE
            while self.status() is None and time.monotonic() < until:
                time.sleep(0.005)
            if self.status() is None:
                self.send(signal.SIGKILL)
            self.reap()


def _end_all() -> None:
    for process in list(_running):
        if process.is_owner:
            process.end_now()


atexit.register(_end_all)


def reason(messages: str) -> str:
    """Returns the line of a program's messages that tells why it ended: of usage the first."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")


def check_directory(path: str) -> None:
    """Raises an error if the paths of sockets in a directory are too long."""
    longest = len(os.fsencode(path)) + 1 + LONGEST_NAME
    if longest > MAX_SOCKET_PATH:
        raise InvalidError(
            f"directory: {path}: paths of sockets would have {longest} bytes; "
            f"at most {MAX_SOCKET_PATH} are possible"
        )
