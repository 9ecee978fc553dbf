"""The fixture ``freestone_postgres``."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Union

from pytest_freestone import _cleanup, _settings, _system
from pytest_freestone._mounts import UnavailableError
from pytest_freestone._ready import Recipe
from pytest_freestone._session import cuts_power, fixtures_of

if TYPE_CHECKING:
    import pytest

    from pytest_freestone._session import PluginSession
    from pytest_freestone._settings import Base

#: SQL, a file with SQL, or a function that is called once with the running server.
PostgresSetup = Union[str, "os.PathLike[str]", Callable[["Postgres"], object]]

USER: Final = "postgres"
PORT: Final = 5432
#: Data directory on the disk.
DATA: Final = "data"
#: Longest duration of initdb, in seconds.
_INITDB_MAX: Final = 300.0
#: Longest start, in seconds: after a power cut it includes the recovery.
_START_MAX: Final = 60.0
#: Longest end, in seconds.
_STOP_MAX: Final = 30.0
#: Longest run of psql, in seconds.
_PSQL_MAX: Final = 600.0
_PAUSE: Final = 0.002
#: Directories in which packages install the servers.
_DIRECTORIES: Final = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/libexec/postgresql*",
    "/usr/local/pgsql/bin",
)
#: Settings that make a server small: it has one client, and its memory is that of a test machine.
SMALL: Final = {
    "listen_addresses": "",
    "shared_buffers": "16MB",
    "max_connections": "50",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "dynamic_shared_memory_type": "mmap",
    "huge_pages": "off",
    "logging_collector": "off",
}
#: Settings for a disk whose power is not cut: the cache of the kernel is not lost, and a commit is
#: still written to it.
_FAST: Final = {"fsync": "off", "full_page_writes": "off"}


class NotInstalledError(Exception):
    """There is no PostgreSQL server."""


def find_programs() -> Path:
    """Returns the directory of PostgreSQL's programs: that of ``initdb`` in PATH, else the newest
    installed.

    Raises:
        NotInstalledError: There is none.
    """
    initdb = _system.find("initdb")
    if initdb is not None:
        directory = Path(initdb).resolve().parent
        if (directory / "postgres").is_file():
            return directory
    found = [Path(each) for pattern in _DIRECTORIES for each in glob.glob(pattern)]
    found = [
        each for each in found if (each / "postgres").is_file() and (each / "initdb").is_file()
    ]
    if not found:
        raise NotInstalledError(
            f"PATH and {', '.join(_DIRECTORIES)} have no initdb and postgres "
            "(Debian package postgresql)"
        )
    return max(found, key=version)


def version(directory: Path) -> list[int]:
    """Returns the numbers in the path of a directory, by which the newest server is chosen."""
    return [int(each) for each in re.findall(r"\d+", str(directory))]


def server_user() -> str | None:
    """Returns the user that runs the server if this process is root, which PostgreSQL refuses; else
    None.
    """
    if os.geteuid() != 0:
        return None
    import pwd

    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"


class Postgres:
    """A PostgreSQL server of a test. Clients of this user connect at a Unix socket, without a
    password.

    Attributes:
        host: Directory of the socket.
        port: Number of the socket.
        user: Superuser of the server.
        dbname: The database.
        data: The data directory.
        log: The file with the server's messages.
    """

    def __init__(
        self,
        programs: Path,
        session: str,
        data: Path,
        settings: Mapping[str, str],
        log: str | None = None,
    ) -> None:
        """Made by the fixture."""
        self.data = data
        self.user = USER
        self.port = PORT
        self.dbname = "postgres"
        self._programs = programs
        self._session = session
        self._settings = dict(settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = server_user()
        self.host = tempfile.mkdtemp(prefix="pg-", dir=session)
        self.log = Path(log or os.path.join(self.host, "log"))
        if self._owner is not None:
            import pwd

            os.chown(self.host, pwd.getpwnam(self._owner).pw_uid, -1)

    def __repr__(self) -> str:
        return f"<Postgres {self.dsn}>"

    @property
    def dsn(self) -> str:
        """Connection string for libpq, psycopg and psql."""
        return f"host={self.host} port={self.port} user={self.user} dbname={self.dbname}"

    @property
    def url(self) -> str:
        """URL for SQLAlchemy, asyncpg and others.

        Put a driver after ``postgresql`` if one is needed.
        """
        return f"postgresql://{self.user}@/{self.dbname}?host={self.host}&port={self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead libpq to this server."""
        return {
            "PGHOST": self.host,
            "PGPORT": str(self.port),
            "PGUSER": self.user,
            "PGDATABASE": self.dbname,
        }

    @property
    def pid(self) -> int | None:
        """Number of the server's first process, or None if the server does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def psql(self, sql: str, *, dbname: str | None = None) -> str:
        """Runs SQL and returns the rows: a line for each, without headings, fields separated by
        ``|``.

        Args:
            sql: Statements. The first that fails ends the run.
            dbname: Another database.

        Raises:
            pytest_freestone.types.ProgramError: A statement failed; the message is the server's.
        """
        command = [
            str(self._programs / "psql"),
            "-qAtX",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            dbname or self.dbname,
        ]
        environment = {**os.environ, **self.environment}
        return _system.run(command, _PSQL_MAX, environment=environment, stdin=sql)

    def start(self) -> None:
        """Starts the server and returns when clients can connect. After a crash this includes the
        recovery.

        Raises:
            pytest_freestone.types.ProgramError: The server does not start; the message has the end
            of its log.
        """
        if self.pid is not None:
            return
        # A server that was killed has left the file. The disk belongs to this test alone, so no
        # server uses it.
        pidfile = self.data / "postmaster.pid"
        with contextlib.suppress(FileNotFoundError):
            pidfile.unlink()
        command = [
            str(self._programs / "postgres"),
            "-D",
            str(self.data),
            "-k",
            self.host,
            "-p",
            str(self.port),
        ]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        with open(self.log, "ab") as log:
            self._process = _system.start(command, log, user=self._owner)
        _cleanup.record_process(self._session, self._process.pid)
        until = time.monotonic() + _START_MAX
        while not _is_ready(pidfile):
            if self._process.poll() is not None:
                raise _system.ProgramError(f"postgres does not start: {self.messages()[-2000:]}")
            if time.monotonic() > until:
                raise _system.ProgramError(
                    f"postgres was not ready within {_START_MAX:g} s: {self.messages()[-2000:]}"
                )
            time.sleep(_PAUSE)

    def stop(self) -> None:
        """Disconnects the clients, writes all data to the disk and ends the server."""
        self._end(signal.SIGINT)

    def restart(self, **settings: str) -> None:
        """Ends the server in order and starts it again.

        Args:
            settings: Settings to change from now on, such as ``fsync="off"``.
        """
        self.stop()
        self._settings.update(settings)
        self.start()

    def kill(self) -> None:
        """Ends the server as a crash does: what it has not written to the file system is lost."""
        self._end(signal.SIGQUIT)

    def messages(self) -> str:
        """Returns the log of the server."""
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""

    def power_off(self) -> None:
        """Kills the server, after the power of its disk was cut."""
        self.kill()

    def power_on(self) -> None:
        """Starts the server again, which recovers the database."""
        self.start()

    def close(self) -> None:
        """Ends the server, whose disk will be removed, and removes its socket and log."""
        import shutil

        self.kill()
        shutil.rmtree(self.host, ignore_errors=True)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout=_STOP_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=_STOP_MAX)
        _cleanup.forget_process(self._session, process.pid)


def _is_ready(pidfile: Path) -> bool:
    """Returns true if the server has noted in its file that clients can connect, which pg_ctl also
    looks for.
    """
    try:
        lines = pidfile.read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[7].strip() == "ready"


@dataclass(frozen=True)
class _Start:
    """How to start a server on a mounted disk."""

    programs: Path
    session: str
    settings: tuple[tuple[str, str], ...]

    def start(self, directory: Path) -> Postgres:
        server = Postgres(self.programs, self.session, directory / DATA, dict(self.settings))
        try:
            server.start()
        except BaseException:
            server.close()
            raise
        return server


@contextlib.contextmanager
def lease(
    session: PluginSession,
    request: pytest.FixtureRequest,
    base: Base,
    setup: PostgresSetup,
    settings: Mapping[str, str],
    following: pytest.Item | None,
) -> Generator[Postgres, None, None]:
    """Leases a server to a test."""
    try:
        programs = find_programs()
    except NotInstalledError as reason:
        session.skip(str(reason), "postgres")
    image = session.images.of(base)
    source = _settings.text_or_function(setup)
    key = session.images.key(
        "postgres", source, str(image.path), str(programs), repr(sorted(settings.items()))
    )
    directory = str(session.directory)

    def change(mounted: Path) -> None:
        fill(programs, directory, mounted, source, settings)

    try:
        image = session.images.derived(image, key, session.mounted, change)
    except UnavailableError as reason:
        session.skip(f"no way to mount works here: {reason}", "mount", "postgres")

    def recipe(item: pytest.Item) -> Recipe | None:
        if "freestone_postgres" not in fixtures_of(item):
            return None
        is_cut = cuts_power(item)
        own = {**SMALL, **({} if is_cut else _FAST), **settings}
        start = _Start(programs, directory, tuple(own.items()))
        # The server rewinds no disk with unflushed writes that has a client.
        return Recipe(
            image, is_mounted=True, power_cut=is_cut, service=start, is_renewed=not is_cut
        )

    with session.lease(
        request, recipe(request.node), recipe(following) if following else None
    ) as prepared:
        server = prepared.service
        if not isinstance(server, Postgres):
            raise RuntimeError(f"{prepared.disk.name} has no server")
        yield server


def fill(
    programs: Path,
    session: str,
    directory: Path,
    setup: str | Callable[[Postgres], object],
    settings: Mapping[str, str],
) -> None:
    """Makes the database cluster of the image, and runs the setup in it."""
    data = directory / DATA
    data.mkdir(mode=0o700, exist_ok=True)
    server = Postgres(programs, session, data, {**SMALL, **_FAST, **settings})
    try:
        if not (data / "PG_VERSION").exists():
            owner = server_user()
            if owner is not None:
                import pwd

                os.chown(data, pwd.getpwnam(owner).pw_uid, pwd.getpwnam(owner).pw_gid)
            command = [
                str(programs / "initdb"),
                "-D",
                str(data),
                "-U",
                USER,
                "-A",
                "trust",
                "-E",
                "UTF8",
            ]
            command += ["--locale=C", "--no-sync", "--no-instructions"]
            _system.run(command, _INITDB_MAX, user=owner)
        server.start()
        if callable(setup):
            setup(server)
        elif setup:
            server.psql(setup)
        # A server that ended in order starts without a recovery.
        server.stop()
    finally:
        server.close()
