"""Removes what a session left that was killed: processes, mounts and its directory.

Runs in two places: a watcher process calls it as soon as its session has ended without a clean-up,
and the next session calls it for every directory whose lock is free. The file uses only the
standard library, because the watcher starts it by its path: ``python _cleanup.py DIRECTORY``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Final

#: File whose lock the session holds.
LOCK: Final = "lock"
#: File with the path of the program, which undoes mounts.
PROGRAM: Final = "program"
#: Directory with a file for each process of the session: its number is the name, its start time the
#: content.
PROCESSES: Final = "processes"
#: Directory of the records of ``freestone mount``.
RECORDS: Final = "records"
#: Longest wait for the end of a process after a signal, in seconds.
_END_MAX: Final = 5.0
#: Longest duration of one unmount, in seconds.
_UNMOUNT_MAX: Final = 30.0
_MNT_DETACH: Final = 2


def start_time(pid: int) -> str:
    """Returns the start time of a process as the kernel prints it, or an empty text if it has
    ended.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    # A process that nobody has waited for has ended as well.
    return "" if fields[0] == "Z" else fields[19]


def record_process(directory: str, pid: int) -> None:
    """Notes a process that must not outlive the session."""
    with open(os.path.join(directory, PROCESSES, str(pid)), "w", encoding="ascii") as file:
        file.write(start_time(pid))


def forget_process(directory: str, pid: int) -> None:
    """Removes the note of a process that has ended."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, PROCESSES, str(pid)))


@contextlib.contextmanager
def lock(directory: str) -> Generator[bool, None, None]:
    """Holds the lock of a session's directory.

    Yields false if the session runs, or the directory is gone.
    """
    try:
        file = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield os.fstat(file).st_nlink > 0
    finally:
        os.close(file)


def clean(directory: str) -> None:
    """Ends the processes of a session, undoes its mounts and removes its directory. The caller
    holds the lock.

    A mount that cannot be undone stays with the directory, for the next session.
    """
    _end_processes(os.path.join(directory, PROCESSES))
    _undo_records(directory)
    for path in mounts_below(directory):
        detach(path)
    if not mounts_below(directory):
        remove_tree(directory)


def remove_tree(directory: str) -> None:
    """Removes a directory.

    Its lock goes last, so that a directory that cannot be removed can still be cleaned.
    """
    for name in os.listdir(directory):
        if name != LOCK:
            path = os.path.join(directory, name)
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(path)
    if os.listdir(directory) == [LOCK]:
        shutil.rmtree(directory, ignore_errors=True)


def clean_all(root: str) -> None:
    """Cleans the directories of all sessions below a directory whose processes have ended."""
    for run in _subdirectories(root):
        for session in _subdirectories(run):
            with lock(session) as is_free:
                if is_free:
                    clean(session)
        remove_run(run)


def remove_run(run: str) -> None:
    """Removes the directory of a test run, unless one of its processes still uses it or a mount is
    left.
    """
    with lock(run) as is_free:
        if is_free and not mounts_below(run):
            # Under another name, no process that joins the run meanwhile finds a half of it.
            removed = f"{run}.{os.getpid()}"
            os.rename(run, removed)
            remove_tree(removed)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(run))


def _subdirectories(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def mounts_below(directory: str) -> list[str]:
    """Returns the mount points below a directory, the innermost first."""
    found: list[str] = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            path = line.split(" ")[4]
            path = path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
            if path.startswith(directory + "/"):
                found.append(path)
    return found[::-1]


def detach(path: str) -> None:
    """Unmounts a file system lazily, and ignores failures: the caller looks what is left."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).umount2(os.fsencode(path), _MNT_DETACH)
        return
    for program in ("fusermount3", "fusermount"):
        found = shutil.which(program)
        if found is not None:
            _run([found, "-u", "-z", path])
            return


def _end_processes(records: str) -> None:
    running: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(records):
            with open(os.path.join(records, name), encoding="ascii") as file:
                started = file.read()
            if started and started == start_time(int(name)):
                running.append(int(name))
    # PostgreSQL ends its own processes and frees its shared memory after SIGQUIT.
    for number in (signal.SIGQUIT, signal.SIGKILL):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + _END_MAX
        while running and time.monotonic() < until:
            running = [pid for pid in running if start_time(pid)]
            time.sleep(0.01)


def _undo_records(directory: str) -> None:
    records = os.path.join(directory, RECORDS)
    try:
        with open(os.path.join(directory, PROGRAM), encoding="utf-8") as file:
            program = file.read()
        names = os.listdir(records)
    except OSError:
        return
    for name in names:
        if not name.endswith(".json"):
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):
            with open(os.path.join(records, name), encoding="utf-8") as file:
                path = json.load(file)["dir"]
            _run([program, "umount", path, "--force"], {**os.environ, "FREESTONE_MOUNTS": records})


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_UNMOUNT_MAX,
            check=False,
        )


def main() -> None:
    """Cleans the directory that the command line names, unless its session still runs."""
    directory = sys.argv[1]
    with lock(directory) as is_free:
        if is_free:
            clean(directory)
    remove_run(os.path.dirname(directory))


if __name__ == "__main__":
    main()
