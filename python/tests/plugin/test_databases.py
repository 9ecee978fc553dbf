"""SQLite and PostgreSQL on disks of tests, and what they lose when the power fails."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from .projects import Project, is_full, left_out, needs, needs_root, slow

pytestmark = [
    needs_root,
    needs("mke2fs", "nbdfuse"),
]

_INI = "[pytest]\nfreestone_size = 256M\naddopts = -p no:asyncio -p no:timeout\n"


def has_postgres() -> bool:
    from pytest_freestone._postgres import NotInstalledError, find_programs

    try:
        find_programs()
    except NotInstalledError:
        return False
    return True


postgres = left_out([] if has_postgres() else ["PostgreSQL (package postgresql)"])


def test_sqlite_has_the_schema_and_nothing_else(project: Project) -> None:
    project.write("pytest.ini", _INI)
    project.write(
        "test_it.py",
        """
import os, sqlite3, pytest

@pytest.fixture(scope="session")
def freestone_sqlite_schema():
    return "CREATE TABLE t (n INTEGER); INSERT INTO t VALUES (7);"

@pytest.mark.parametrize("number", range(4))
def test_sqlite(freestone_sqlite, number):
    assert os.listdir(freestone_sqlite.path.parent).count("database.sqlite") == 1
    connection = freestone_sqlite.connect()
    assert connection.execute("SELECT n FROM t").fetchall() == [(7,)]
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("INSERT INTO t VALUES (8)")
    connection.commit()
    # A connection of the test itself.
    other = sqlite3.connect(freestone_sqlite)
    assert len(other.execute("SELECT n FROM t").fetchall()) == 2
    other.close()
    assert freestone_sqlite.url == f"sqlite:///{freestone_sqlite.path}"
""",
    )
    assert "4 passed" in project.run()


def test_sqlite_disks_are_renewed(project: Project) -> None:
    project.write("pytest.ini", _INI)
    project.write(
        "test_it.py",
        """
import os, sqlite3, pytest

KEPT = []

@pytest.fixture(scope="session")
def freestone_sqlite_schema():
    return "CREATE TABLE t (n INTEGER)"

@pytest.mark.parametrize("number", range(16))
def test_sqlite(freestone_sqlite, number):
    directory = freestone_sqlite.path.parent
    with open("disks", "a") as file:
        print(directory.name, number, file=file)
    assert sorted(os.listdir(directory)) == ["database.sqlite", "lost+found"]
    connection = freestone_sqlite.connect()
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.execute("CREATE TABLE u AS SELECT randomblob(1 << 20)")
    connection.commit()
    (directory / "more").write_bytes(os.urandom(1 << 20))
    if number == 5:
        KEPT.append(sqlite3.connect(freestone_sqlite))
        KEPT[-1].execute("SELECT count(*) FROM t").fetchone()
    assert number != 9
""",
    )
    printed = project.run(status=1)
    # The failure of 9, and the connection of 5, which is still open at the end of the session.
    assert "1 failed, 15 passed, 2 errors" in printed, printed
    assert "in use by" in printed, printed
    lines = (project.path / "disks").read_text().splitlines()
    disks = [line.split()[0] for line in lines]
    # Two are ready while a test uses one. The disks of 5 and 9 are not renewed.
    assert len(set(disks)) <= 5, lines
    for number in (5, 9):
        assert disks[number] not in disks[number + 1 :], lines


@slow
def test_sqlite_schema_by_a_function_and_a_file(project: Project) -> None:
    project.write("pytest.ini", _INI)
    project.write("schema.sql", "CREATE TABLE t (n INTEGER); INSERT INTO t VALUES (1);")
    for directory, schema in (("a", 'pathlib.Path("schema.sql")'), ("b", "fill")):
        project.write(
            f"{directory}/test_{directory}.py",
            f"""
import pathlib, pytest

def fill(connection):
    connection.execute("CREATE TABLE t (n INTEGER)")
    connection.executemany("INSERT INTO t VALUES (?)", [(1,)])

@pytest.fixture(scope="session")
def freestone_sqlite_schema():
    return {schema}

def test_sqlite(freestone_sqlite):
    assert freestone_sqlite.connect().execute("SELECT n FROM t").fetchall() == [(1,)]
""",
        )
    assert "2 passed" in project.run()


@slow
def test_sqlite_schema_that_fails_is_an_error_of_each_test(project: Project) -> None:
    project.write("pytest.ini", _INI)
    project.write(
        "test_it.py",
        """
import pytest

@pytest.fixture(scope="session")
def freestone_sqlite_schema():
    return "CREATE TABEL t (n INTEGER)"

def test_one(freestone_sqlite): pass
def test_two(freestone_sqlite): pass
def test_disk(freestone_disk): pass
""",
    )
    printed = project.run(status=1)
    assert "1 passed, 2 errors" in printed
    assert 'near "TABEL": syntax error' in printed


@slow
@postgres
def test_postgres_has_the_setup_and_nothing_else(project: Project) -> None:
    project.write("pytest.ini", _INI)
    project.write(
        "conftest.py",
        """
import pytest

@pytest.fixture(scope="session")
def freestone_postgres_setup():
    return "CREATE TABLE t AS SELECT generate_series(1, 1000) AS n"

@pytest.fixture(scope="session")
def freestone_postgres_settings():
    return {"work_mem": "3MB"}
""",
    )
    project.write(
        "test_it.py",
        """
import os, subprocess, pytest

@pytest.mark.parametrize("number", range(3))
def test_postgres(freestone_postgres, number):
    psql = freestone_postgres.psql
    assert psql("SELECT count(*) FROM t") == "1000\\n"
    assert psql("SHOW work_mem") == "3MB\\n"
    assert psql("SHOW fsync") == "off\\n"
    psql("DROP TABLE t; CREATE DATABASE other")
    psql("CREATE TABLE u (n int)", dbname="other")
    environment = {**os.environ, **freestone_postgres.environment}
    for more in ([], [freestone_postgres.url]):
        command = ["psql", "-Atc", "SELECT 1", *more]
        found = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert found.stdout == b"1\\n"
        environment = None

def test_statement_that_fails(freestone_postgres):
    with pytest.raises(Exception, match="syntax error"):
        freestone_postgres.psql("SELEKT")

def test_server_that_crashes(freestone_postgres):
    freestone_postgres.psql("CREATE TABLE u AS SELECT 1 AS n")
    pid = freestone_postgres.pid
    freestone_postgres.kill()
    assert freestone_postgres.pid is None
    # A server that is killed leaves its file, and that of the test's own server must not prevent a
    # start.
    (freestone_postgres.data / "postmaster.pid").write_text(f"{os.getppid()}\\n")
    freestone_postgres.start()
    assert freestone_postgres.pid not in (None, pid)
    assert freestone_postgres.psql("SELECT n FROM u") == "1\\n"
""",
    )
    shared = sorted(os.listdir("/dev/shm"))
    assert "5 passed" in project.run()
    if is_full():
        assert "5 passed" in project.run("-n", "2")
    assert [
        name
        for name in os.listdir("/dev/shm")
        if name.startswith("PostgreSQL") and name not in shared
    ] == []


@slow
@postgres
def test_postgres_disks_are_renewed(project: Project) -> None:
    project.write("pytest.ini", _INI)
    project.write(
        "test_it.py",
        """
import os, pytest

KEPT = []

@pytest.fixture(scope="session")
def freestone_postgres_setup():
    return "CREATE TABLE t (n INTEGER)"

@pytest.mark.parametrize("number", range(10))
def test_postgres(freestone_postgres, number):
    server = freestone_postgres
    directory = server.data.parent
    with open("disks", "a") as file:
        print(directory.name, number, file=file)
    assert sorted(os.listdir(directory)) == ["data", "lost+found"]
    assert server.psql("SELECT count(*) FROM t; SHOW work_mem") == "0\\n4MB\\n"
    server.psql("INSERT INTO t SELECT generate_series(1, 10000); CREATE DATABASE other")
    if number == 2:
        server.restart(work_mem="5MB")
    if number == 3:
        server.kill()
    if number == 4:
        KEPT.append(open(directory / "file", "w"))
    assert number != 6
""",
    )
    printed = project.run(status=1)
    # The failure of 6, and the file of 4, which is still open at the end of the session.
    assert "1 failed, 9 passed" in printed, printed
    lines = (project.path / "disks").read_text().splitlines()
    disks = [line.split()[0] for line in lines]
    # Two are ready while a test uses one. The disks of 4 and 6 are not renewed.
    assert len(set(disks)) <= 5, lines
    for number in (4, 6):
        assert disks[number] not in disks[number + 1 :], lines


@slow
@postgres
def test_postgres_that_is_not_found(project: Project) -> None:
    project.write("pytest.ini", _INI)
    project.write(
        "conftest.py",
        """
from pathlib import Path
from pytest_freestone import _postgres

def nothing():
    raise _postgres.NotInstalledError("PATH has no initdb")

_postgres.find_programs = nothing
""",
    )
    project.write("test_it.py", "def test_it(freestone_postgres): pass\n")
    assert "PATH has no initdb" in project.run("-rs")
    project.environment["FREESTONE_REQUIRE"] = "postgres"
    assert "PATH has no initdb (freestone_require: postgres)" in project.run(status=1)


@slow
@postgres
def test_failed_test_keeps_the_database(project: Project) -> None:
    project.write("pytest.ini", _INI)
    project.write(
        "test_it.py",
        """
def test_it(freestone_postgres):
    freestone_postgres.psql("CREATE TABLE evidence AS SELECT 42 AS n")
    assert False
""",
    )
    printed = project.run(status=1)
    artifact = project.path / ".freestone-artifacts" / "test_it.py-test_it"
    assert f"The disk of the failed test is kept: {artifact / 'changes-0.qcow2'}" in printed
    # Another session starts the database from the artifact, as its base.
    project.write("pytest.ini", f"{_INI}freestone_base = {artifact / 'changes-0.qcow2'}\n")
    project.write(
        "test_it.py",
        """
def test_it(freestone_postgres):
    assert freestone_postgres.psql("SELECT n FROM evidence") == "42\\n"
""",
    )
    assert "1 passed" in project.run()


_SQLITE_DURABILITY = """
import sqlite3, subprocess, sys, time, pytest

WRITER = '''
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA synchronous=" + sys.argv[2])
for n in range(1, 100000):
    database.execute("INSERT INTO t VALUES (?)", (n,))
    print(n, flush=True)
'''

@pytest.fixture(scope="session")
def freestone_sqlite_schema():
    return "CREATE TABLE t (n INTEGER)"

@pytest.mark.parametrize("seed", range(SEEDS))
def test_acknowledged_rows_are_there(freestone_sqlite, freestone_power_cut, seed):
    command = [sys.executable, "-c", WRITER, str(freestone_sqlite.path), "SYNCHRONOUS"]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    acknowledged = [int(writer.stdout.readline()) for _ in range(5)]
    def stop():
        writer.kill()
        acknowledged.extend(int(line) for line in writer.communicate()[0].splitlines())
    freestone_power_cut(seed, stop=stop)
    database = freestone_sqlite.connect()
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    (last,) = database.execute("SELECT coalesce(max(n), 0) FROM t").fetchone()
    assert last >= acknowledged[-1]
"""


@slow
@pytest.mark.parametrize(("synchronous", "is_durable"), [("EXTRA", True), ("OFF", False)])
def test_sqlite_without_fsync_loses_rows(
    project: Project, synchronous: str, is_durable: bool
) -> None:
    project.write("pytest.ini", _INI)
    text = _SQLITE_DURABILITY.replace("SYNCHRONOUS", synchronous).replace("SEEDS", "4")
    project.write("test_it.py", text)
    printed = project.run(status=0 if is_durable else 1)
    assert ("4 passed" if is_durable else "4 failed") in printed
    if not is_durable:
        assert "assert last >= acknowledged[-1]" in printed


@slow
@postgres
@pytest.mark.parametrize("fsync", ["on", "off"])
def test_postgres_without_fsync_loses_rows(project: Project, fsync: str) -> None:
    project.write("pytest.ini", _INI)
    project.write(
        "test_it.py",
        f"""
import subprocess, pytest

@pytest.fixture(scope="session")
def freestone_postgres_setup():
    return "CREATE TABLE t (n INTEGER)"

@pytest.fixture(scope="session")
def freestone_postgres_settings():
    return {{"fsync": "{fsync}"}}

@pytest.mark.parametrize("seed", range(2))
def test_acknowledged_rows_are_there(freestone_postgres, freestone_power_cut, seed):
    for n in range(1, 6):
        freestone_postgres.psql(f"INSERT INTO t VALUES ({{n}})")
    freestone_power_cut(seed)
    assert freestone_postgres.psql("SELECT count(*) FROM t") == "5\\n"
""",
    )
    printed = project.run(status=0 if fsync == "on" else 1)
    if fsync == "on":
        assert "2 passed" in printed
    else:
        assert "2 failed" in printed


def test_programs_are_found_in_path_and_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytest_freestone import _postgres, _system

    def nothing(name: str) -> None:
        return None

    def in_13(name: str) -> str:
        return str(tmp_path / "13" / "bin" / name)

    def version_below(path: Path) -> list[int]:
        """The directory of the test has digits in its own path."""
        return [int(each) for each in path.relative_to(tmp_path).parts[0].split(".")]

    for version in ("9.6", "13", "15"):
        directory = tmp_path / version / "bin"
        directory.mkdir(parents=True)
        for name in ("initdb", "postgres"):
            (directory / name).write_text("#!/bin/sh\n")
            (directory / name).chmod(0o755)
    monkeypatch.setattr(_postgres, "_DIRECTORIES", (f"{tmp_path}/*/bin",))
    monkeypatch.setattr(_system, "find", nothing)
    monkeypatch.setattr(_postgres, "version", version_below)
    assert _postgres.find_programs() == tmp_path / "15" / "bin"
    monkeypatch.setattr(_system, "find", in_13)
    assert _postgres.find_programs() == tmp_path / "13" / "bin"
    monkeypatch.setattr(_system, "find", nothing)
    monkeypatch.setattr(_postgres, "_DIRECTORIES", (f"{tmp_path}/none/*",))
    with pytest.raises(_postgres.NotInstalledError, match="postgresql"):
        _postgres.find_programs()


def test_connections_are_closed_after_the_test(tmp_path: Path) -> None:
    from pytest_freestone.types import Sqlite

    database = Sqlite(tmp_path / "file")
    connection = database.connect()
    connection.execute("CREATE TABLE t (n)")
    database.close()
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")
