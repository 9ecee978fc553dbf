"""The pytest plugin of Freestone: a fresh disk, file system or database for each test.

The module holds the hooks and the fixtures, and imports the rest when a test first needs it. pytest
loads the plugin into every session, so the module imports nothing that pytest has not imported
already.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from freestone import Fork, Server
    from pytest_freestone._power import PowerCutter
    from pytest_freestone._session import PluginSession
    from pytest_freestone._settings import Base
    from pytest_freestone.types import Postgres, PostgresSetup, Sqlite, SqliteSchema

__all__ = [
    "freestone_base",
    "freestone_disk",
    "freestone_mount",
    "freestone_postgres",
    "freestone_postgres_settings",
    "freestone_postgres_setup",
    "freestone_power_cut",
    "freestone_server",
    "freestone_sqlite",
    "freestone_sqlite_schema",
]

#: The session object, once a test has needed it.
_SESSION: pytest.StashKey[PluginSession] = pytest.StashKey()
#: The test after the one that runs, whose disk can be prepared meanwhile.
_NEXT: pytest.StashKey[pytest.Item | None] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the settings, which ``_settings`` reads."""
    parser.addini("freestone_program", "Path of the program freestone.", default="")
    parser.addini(
        "freestone_base", "Image (raw or qcow2) that the disks of tests are forks of.", default=""
    )
    parser.addini("freestone_size", "Size of a disk without an image, such as 256M.", default="1G")
    parser.addini(
        "freestone_via",
        "Way to mount: auto, ublk, nbd, nbdfuse or fuse2fs.",
        default="auto",
    )
    parser.addini(
        "freestone_ready",
        "Number of disks that are prepared while a test runs; 0 prepares each when it is needed.",
        default="2",
    )
    parser.addini(
        "freestone_require",
        "Fixtures that fail instead of skipping: mount, power_cut, sqlite, postgres.",
        type="args",
        default=[],
    )
    parser.addini(
        "freestone_artifacts",
        "Directory of the disks of failed tests.",
        default=".freestone-artifacts",
    )
    parser.addini(
        "freestone_artifacts_max",
        "Number of failed tests whose disks are kept; 0 keeps none.",
        default="10",
    )


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Notes the next test."""
    item.config.stash[_NEXT] = nextitem


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Keeps the disk of a test that failed, before its fixtures are torn down."""
    outcome = yield
    session = item.config.stash.get(_SESSION, None)
    if session is not None:
        session.after_phase(item, outcome.get_result())


@pytest.fixture(scope="session")
def _freestone_session(pytestconfig: pytest.Config) -> Iterator[PluginSession]:
    from pytest_freestone._session import PluginSession

    session = PluginSession(pytestconfig)
    try:
        pytestconfig.stash[_SESSION] = session
        yield session
    finally:
        del pytestconfig.stash[_SESSION]
        session.close()


@pytest.fixture(scope="session")
def freestone_server(_freestone_session: PluginSession) -> Server:
    """The server of this session, with xdist that of this worker. It ends with the session."""
    return _freestone_session.server


@pytest.fixture(scope="session")
def freestone_base(pytestconfig: pytest.Config) -> Base:
    """What the disks of tests hold: a path, a function or None.

    Override it in a ``conftest.py`` or a test module. A path names an image, raw or qcow2. A
    function is called once with an empty directory, and the files that it makes there become an
    ext4 of ``freestone_size``. None is an empty ext4. The default is the setting
    ``freestone_base``.
    """
    from pytest_freestone._settings import configured_base

    return configured_base(pytestconfig)


@pytest.fixture
def freestone_disk(
    request: pytest.FixtureRequest, _freestone_session: PluginSession, freestone_base: Base
) -> Iterator[Fork]:
    """A disk of this test alone: a fork of ``freestone_base``."""
    with _freestone_session.disk(request, freestone_base, _next(request)) as prepared:
        yield prepared.disk


@pytest.fixture
def freestone_mount(
    request: pytest.FixtureRequest, _freestone_session: PluginSession, freestone_disk: Fork
) -> Path:
    """The directory at which ``freestone_disk`` is mounted.

    Skips the test if nothing on this machine can mount it, unless ``freestone_require`` lists
    ``mount``.
    """
    return _freestone_session.directory_of(request, freestone_disk)


@pytest.fixture
def freestone_power_cut(
    request: pytest.FixtureRequest, _freestone_session: PluginSession
) -> PowerCutter:
    """A function that cuts the power of the disks of this test and mounts them again."""
    return _freestone_session.power_cutter(request)


@pytest.fixture(scope="session")
def freestone_sqlite_schema() -> SqliteSchema:
    """The schema of ``freestone_sqlite``: SQL, or a function, called once with a connection."""
    return ""


@pytest.fixture
def freestone_sqlite(
    request: pytest.FixtureRequest,
    _freestone_session: PluginSession,
    freestone_base: Base,
    freestone_sqlite_schema: SqliteSchema,
) -> Iterator[Sqlite]:
    """An SQLite database with the schema of ``freestone_sqlite_schema``, on a disk of this test
    alone.
    """
    from pytest_freestone import _sqlite

    with _sqlite.lease(
        _freestone_session, request, freestone_base, freestone_sqlite_schema, _next(request)
    ) as database:
        yield database


@pytest.fixture(scope="session")
def freestone_postgres_setup() -> PostgresSetup:
    """The content of ``freestone_postgres``: SQL, or a function that is called once with the
    running server.
    """
    return ""


@pytest.fixture(scope="session")
def freestone_postgres_settings() -> dict[str, str]:
    """Settings of PostgreSQL, as in ``postgresql.conf``, beside those of the plugin."""
    return {}


@pytest.fixture
def freestone_postgres(
    request: pytest.FixtureRequest,
    _freestone_session: PluginSession,
    freestone_base: Base,
    freestone_postgres_setup: PostgresSetup,
    freestone_postgres_settings: dict[str, str],
) -> Iterator[Postgres]:
    """A PostgreSQL server with the content of ``freestone_postgres_setup``, on a disk of this test
    alone.
    """
    from pytest_freestone import _postgres

    with _postgres.lease(
        _freestone_session,
        request,
        freestone_base,
        freestone_postgres_setup,
        freestone_postgres_settings,
        _next(request),
    ) as server:
        yield server


def _next(request: pytest.FixtureRequest) -> pytest.Item | None:
    return request.config.stash.get(_NEXT, None)
