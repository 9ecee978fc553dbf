"""Images: what the disks of tests are forks of.

Images that the plugin makes lie in the directory of the test run, which all workers of xdist share.
The first worker that needs one makes it, while the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
import types
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_freestone import _system
from pytest_freestone._settings import Base

if TYPE_CHECKING:
    from freestone import Disk, Server

#: Longest wait for an image that another worker makes, in seconds.
_BUILD_MAX: Final = 1800.0
#: Longest duration of mke2fs or cp, in seconds.
_PROGRAM_MAX: Final = 600.0
_QCOW2_MAGIC: Final = b"QFI\xfb"
#: Block size of the file systems: a page of a fork, so that a write of a block does not read the
#: base.
BLOCK_BYTES: Final = 4096
#: Bytes that are copied at a time.
PIECE: Final = 1 << 20


@dataclass(frozen=True)
class Image:
    """An image that the server has opened."""

    path: Path
    """The file."""
    device: str
    """Name of its device."""
    is_built: bool
    """True if the plugin made it, so that it ends with the test run."""


class Images:
    """The images of one session. Only the thread of the tests uses it."""

    def __init__(self, server: Server, shared: Path, size: int) -> None:
        """Args: the server, the directory of the test run, and the size of new images in bytes."""
        self._server = server
        self._shared = shared
        self._size = size
        self._opened: dict[Path, Image] = {}
        # A function that is not shared is known by its address, so it must live as long as the
        # session.
        self._functions: list[object] = []

    def of(self, base: Base) -> Image:
        """Returns the image of a ``freestone_base``.

        Raises:
            FileNotFoundError: There is no such file.
            ProgramError: mke2fs failed.
        """
        if base is not None and not callable(base):
            path = Path(base).resolve()
            if not path.is_file():
                raise FileNotFoundError(f"freestone_base: {path} is not a file")
            return self._open(path, is_built=False)
        key = self.key("files", base, str(self._size))
        return self.build(key, lambda path: self._make_files(base, path))

    def derived(
        self, base: Image, key: str, mount: Mount, change: Callable[[Path], object]
    ) -> Image:
        """Returns a copy of an image whose file system was changed.

        Args:
            base: The image.
            key: Its name, from :meth:`key`.
            mount: Mounts a disk for the duration of a ``with`` block.
            change: Called with the directory of the mounted file system.
        """

        def make(path: Path) -> None:
            self._copy(base, path)
            with self._server.create(f"build-{key}", "file", path=path) as disk:
                with mount(disk) as directory:
                    change(directory)
                disk.flush()

        return self.build(key, make)

    def key(self, kind: str, source: object, *more: str) -> str:
        """Returns the name of an image that a text or a function decides."""
        if isinstance(source, types.FunctionType) and source.__closure__ is None:
            code = source.__code__
            words = [
                source.__module__,
                source.__qualname__,
                code.co_filename,
                str(code.co_firstlineno),
            ]
        elif callable(source):
            # What a closure or an object would do is unknown, so the image is not shared with other
            # workers.
            self._functions.append(source)
            words = [str(os.getpid()), str(id(source))]
        else:
            words = [repr(source)]
        return f"{kind}-{hashlib.sha256('|'.join([*words, *more]).encode()).hexdigest()[:16]}"

    def build(self, key: str, make: Callable[[Path], object]) -> Image:
        """Returns an image of the test run, which ``make`` writes to a new file if it does not
        exist.
        """
        path = self._shared / f"{key}.img"
        if path not in self._opened:
            with _locked(self._shared / f"{key}.lock"):
                if not path.exists():
                    part = path.with_suffix(f".{os.getpid()}")
                    try:
                        make(part)
                        part.rename(path)
                    finally:
                        with contextlib.suppress(FileNotFoundError):
                            part.unlink()
        return self._open(path, is_built=True)

    def _open(self, path: Path, *, is_built: bool) -> Image:
        image = self._opened.get(path)
        if image is None:
            with open(path, "rb") as file:
                is_qcow2 = file.read(4) == _QCOW2_MAGIC
            name = f"base-{len(self._opened)}"
            if is_qcow2:
                self._server.create(name, "qcow2", path=path, publish=False)
            else:
                self._server.create(name, "file", path=path, readonly=True, publish=False)
            image = self._opened[path] = Image(path, name, is_built)
        return image

    def _make_files(self, fill: Callable[[Path], object] | None, path: Path) -> None:
        """Makes an ext4 with the files that a function writes."""
        files = path.with_suffix(".files")
        files.mkdir(mode=0o755)
        try:
            if fill is not None:
                fill(files)
            with open(path, "wb") as file:
                file.truncate(self._size)
            # All of the file system is written now: otherwise the kernel goes on with it on every
            # fork.
            extended = (
                f"lazy_itable_init=0,lazy_journal_init=0,root_owner={os.geteuid()}:{os.getegid()}"
            )
            command = ["mke2fs", "-q", "-F", "-t", "ext4", "-b", str(BLOCK_BYTES), "-m", "0"]
            command += ["-E", extended, "-d", str(files), str(path)]
            _system.run(command, _PROGRAM_MAX)
        finally:
            shutil.rmtree(files, ignore_errors=True)

    def _copy(self, base: Image, path: Path) -> None:
        with open(base.path, "rb") as file:
            is_qcow2 = file.read(4) == _QCOW2_MAGIC
        if not is_qcow2:
            command = ["cp", "--sparse=always", "--reflink=auto", str(base.path), str(path)]
            _system.run(command, _PROGRAM_MAX)
            return
        with self._server.fork(base.device) as disk, open(path, "wb") as file:
            file.truncate(disk.size)
            for offset, piece in pieces(disk):
                os.pwrite(file.fileno(), piece, offset)


#: Mounts a disk for the duration of a ``with`` block.
Mount = Callable[["Disk"], "contextlib.AbstractContextManager[Path]"]


def pieces(disk: Disk) -> Iterator[tuple[int, bytes]]:
    """Yields the content of a disk that is not known to be zeroes, as offsets and bytes."""
    for extent in disk.extents():
        if extent.is_zero:
            continue
        end = extent.offset + extent.length
        for offset in range(extent.offset, end, PIECE):
            yield offset, disk.read(offset, min(PIECE, end - offset))


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None, None, None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + _BUILD_MAX
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{path.stem}: another worker has made this image for {_BUILD_MAX:g} s"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(file)
