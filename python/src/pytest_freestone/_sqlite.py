"""The fixture ``freestone_sqlite``."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Union

from pytest_freestone import _settings
from pytest_freestone._mounts import UnavailableError
from pytest_freestone._ready import Recipe
from pytest_freestone._session import cuts_power, fixtures_of

if TYPE_CHECKING:
    import pytest

    from pytest_freestone._session import PluginSession
    from pytest_freestone._settings import Base

#: SQL, a file with SQL, or a function that is called once with a connection.
SqliteSchema = Union[str, "os.PathLike[str]", Callable[[sqlite3.Connection], object]]

FILE: Final = "database.sqlite"


class Sqlite:
    """A database file on a disk of a test. Can be passed to ``sqlite3.connect`` and ``open`` as a
    path.

    Attributes:
        path: The file. The directory beside it is empty, and part of the disk.
    """

    def __init__(self, path: Path) -> None:
        """Made by the fixture."""
        self.path = path
        self._connections: list[sqlite3.Connection] = []

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<Sqlite {self.path}>"

    @property
    def url(self) -> str:
        """URL of the database for SQLAlchemy."""
        return f"sqlite:///{self.path}"

    def connect(self, **options: Any) -> sqlite3.Connection:
        """Returns a new connection, which is closed after the test and at a power cut.

        Args:
            options: Those of ``sqlite3.connect``.
        """
        connection: sqlite3.Connection = sqlite3.connect(self.path, **options)
        self._connections.append(connection)
        return connection

    def power_off(self) -> None:
        """Closes all connections of :meth:`connect`."""
        connections, self._connections = self._connections, []
        for connection in connections:
            # A transaction that is open fails to roll back without the disk. A connection of
            # another thread is closed by that thread.
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def power_on(self) -> None:
        """Does nothing: the next connection recovers the database."""

    def close(self) -> None:
        """Closes all connections of :meth:`connect`."""
        self.power_off()


@contextlib.contextmanager
def lease(
    session: PluginSession,
    request: pytest.FixtureRequest,
    base: Base,
    schema: SqliteSchema,
    following: pytest.Item | None,
) -> Generator[Sqlite, None, None]:
    """Leases a database to a test."""
    image = session.images.of(base)
    source = _settings.text_or_function(schema)
    key = session.images.key("sqlite", source, str(image.path))
    try:
        image = session.images.derived(
            image, key, session.mounted, lambda directory: fill(directory, source)
        )
    except UnavailableError as reason:
        session.skip(f"no way to mount works here: {reason}", "mount", "sqlite")

    def recipe(item: pytest.Item) -> Recipe | None:
        is_used = "freestone_sqlite" in fixtures_of(item)
        cuts = cuts_power(item)
        # The server rewinds no disk with unflushed writes that has a client.
        return Recipe(image, True, cuts, is_renewed=not cuts) if is_used else None

    with session.lease(
        request, recipe(request.node), recipe(following) if following else None
    ) as prepared:
        if prepared.mounted is None:
            raise RuntimeError(f"{prepared.disk.name} is not mounted")
        database = Sqlite(prepared.mounted.directory / FILE)
        prepared.service = database
        try:
            yield database
        finally:
            database.close()
            prepared.service = None


def fill(directory: Path, schema: str | Callable[[sqlite3.Connection], object]) -> None:
    """Makes the database of the image."""
    connection = sqlite3.connect(directory / FILE)
    try:
        if callable(schema):
            schema(connection)
        else:
            connection.executescript(schema)
        connection.commit()
    finally:
        connection.close()
