"""Key-value stores over the databases that `run.py` explores, all with one interface.

A store commits a set of changes, and returns its content. `STORES` lists every database with its settings, and what
the documentation of the database promises for them.
"""

from __future__ import annotations

import importlib
import os
import shelve
import sqlite3
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Values by key. In changes, None deletes the key.
Changes = Mapping[str, "bytes | None"]
Content = dict[str, bytes]


class Sqlite:
    """SQLite. Each commit is a transaction."""

    def __init__(self, directory: Path, journal: str, synchronous: str) -> None:
        self.connection = sqlite3.connect(directory / "db", isolation_level=None)
        self.connection.execute(f"PRAGMA journal_mode={journal}")
        self.connection.execute(f"PRAGMA synchronous={synchronous}")
        # Small enough that the workload checkpoints the log several times.
        self.connection.execute("PRAGMA wal_autocheckpoint=12")
        self.connection.execute("CREATE TABLE IF NOT EXISTS t (k TEXT PRIMARY KEY, v BLOB)")

    def commit(self, changes: Changes) -> None:
        self.connection.execute("BEGIN")
        for key, value in changes.items():
            if value is None:
                self.connection.execute("DELETE FROM t WHERE k = ?", (key,))
            else:
                self.connection.execute("REPLACE INTO t VALUES (?, ?)", (key, value))
        self.connection.execute("COMMIT")

    def content(self) -> Content:
        (result,) = self.connection.execute("PRAGMA integrity_check").fetchone()
        if result != "ok":
            raise ValueError(f"integrity_check: {result}")
        return dict(self.connection.execute("SELECT k, v FROM t"))

    def close(self) -> None:
        self.connection.close()


class Lmdb:
    """LMDB. Each commit is a transaction."""

    def __init__(self, directory: Path, **settings: bool) -> None:
        # Modules are imported by the store that needs them: each check is a process of its own.
        lmdb = importlib.import_module("lmdb")
        self.environment = lmdb.open(str(directory / "lmdb"), map_size=1 << 22, **settings)

    def commit(self, changes: Changes) -> None:
        with self.environment.begin(write=True) as transaction:
            for key, value in changes.items():
                if value is None:
                    transaction.delete(key.encode())
                else:
                    transaction.put(key.encode(), value)

    def content(self) -> Content:
        with self.environment.begin() as transaction:
            return {bytes(key).decode(): bytes(value) for key, value in transaction.cursor()}

    def close(self) -> None:
        self.environment.close()


class LevelDb:
    """LevelDB. Each commit is a write batch."""

    def __init__(self, directory: Path, sync: bool) -> None:
        plyvel = importlib.import_module("plyvel")
        # The buffer is small enough that the workload writes several tables.
        self.database = plyvel.DB(str(directory / "leveldb"), create_if_missing=True, write_buffer_size=1 << 16)
        self.sync = sync

    def commit(self, changes: Changes) -> None:
        with self.database.write_batch(sync=self.sync) as batch:
            for key, value in changes.items():
                if value is None:
                    batch.delete(key.encode())
                else:
                    batch.put(key.encode(), value)

    def content(self) -> Content:
        with self.database.iterator(verify_checksums=True) as pairs:
            return {key.decode(): value for key, value in pairs}

    def close(self) -> None:
        self.database.close()


class Shelf:
    """`shelve` over a module of `dbm`. Each change is written by itself."""

    def __init__(self, directory: Path, module: str, flag: str, sync: bool) -> None:
        database = importlib.import_module(f"dbm.{module}").open(str(directory / "shelf"), flag)
        self.shelf: shelve.Shelf[bytes] = shelve.Shelf(database)
        self.sync = sync

    def commit(self, changes: Changes) -> None:
        for key, value in changes.items():
            if value is None:
                self.shelf.pop(key, None)
            else:
                self.shelf[key] = value
        if self.sync:
            self.shelf.sync()

    def content(self) -> Content:
        return dict(self.shelf)

    def close(self) -> None:
        self.shelf.close()


class Piped:
    """redb and sled, by the program of `rust/`, which takes requests on its standard input."""

    def __init__(self, directory: Path, database: str, durability: str) -> None:
        command = [os.environ["EXPLORE_RUST_STORES"], database, durability, str(directory / database)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _ask(self, *lines: str) -> list[str]:
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the program has no pipes")
        try:
            stdin.writelines(f"{line}\n" for line in lines)
            stdin.flush()
        except BrokenPipeError:
            pass
        answer = []
        for line in stdout:
            if line == "ok\n":
                return answer
            answer.append(line.rstrip("\n"))
        raise ValueError(f"the program ended with status {self.process.wait()}: {' '.join(answer)}")

    def commit(self, changes: Changes) -> None:
        edits = (f"del {k}" if v is None else f"set {k} {v.decode()}" for k, v in changes.items())
        self._ask(*edits, "commit")

    def content(self) -> Content:
        pairs = (line.split(" ", 1) for line in self._ask("content"))
        return {key: value.encode() for key, value in pairs}

    def close(self) -> None:
        self._ask("close")
        self.process.wait()


Store = Sqlite | Lmdb | LevelDb | Shelf | Piped


@dataclass(frozen=True)
class Kind:
    """A database with its settings."""

    open: Callable[[Path], Store]
    # What the documentation promises after a power loss: `durable` (every acknowledged commit), `consistent` (an
    # earlier state), or `nothing`.
    promise: str
    # False if a commit is not atomic.
    atomic: bool = True
    # Reason why a failure is known although the promise excludes it.
    known: str = ""


def _kinds() -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    promises = {
        "DELETE": {"EXTRA": "durable", "FULL": "consistent", "NORMAL": "consistent", "OFF": "nothing"},
        "WAL": {"EXTRA": "durable", "FULL": "durable", "NORMAL": "consistent", "OFF": "nothing"},
    }
    for journal, settings in promises.items():
        for synchronous, promise in settings.items():
            kinds[f"sqlite-{journal}-{synchronous}".lower()] = Kind(
                lambda d, j=journal, s=synchronous: Sqlite(d, j, s), promise
            )
    kinds |= {
        "lmdb-sync": Kind(Lmdb, "durable"),
        "lmdb-writemap": Kind(lambda d: Lmdb(d, writemap=True), "durable"),
        "lmdb-nometasync": Kind(lambda d: Lmdb(d, metasync=False), "consistent"),
        "lmdb-nosync": Kind(lambda d: Lmdb(d, sync=False), "nothing"),
        "lmdb-writemap-mapasync": Kind(lambda d: Lmdb(d, writemap=True, map_async=True), "nothing"),
        "leveldb-sync": Kind(lambda d: LevelDb(d, sync=True), "durable"),
        "leveldb-nosync": Kind(
            lambda d: LevelDb(d, sync=False), "consistent", known="LevelDB before 1.23 does not sync its first MANIFEST"
        ),
        "redb-immediate": Kind(lambda d: Piped(d, "redb", "immediate"), "durable"),
        "redb-none": Kind(lambda d: Piped(d, "redb", "none"), "consistent"),
        "sled-flush": Kind(
            lambda d: Piped(d, "sled", "flush"), "durable", known="flush() calls sync_file_range, sled issue 1452"
        ),
        "sled-noflush": Kind(lambda d: Piped(d, "sled", "none"), "consistent"),
    }
    kinds |= {
        "shelve-dumb-sync": Kind(
            lambda d: Shelf(d, "dumb", "c", sync=True),
            "durable",
            atomic=False,
            known="sync() of dbm.dumb calls no fsync",
        ),
        "shelve-dumb-nosync": Kind(lambda d: Shelf(d, "dumb", "c", sync=False), "nothing", atomic=False),
        # What sync() writes is durable, but a power loss in a later update damages the file.
        "shelve-gnu-sync": Kind(lambda d: Shelf(d, "gnu", "cs", sync=True), "nothing", atomic=False),
        "shelve-gnu-nosync": Kind(lambda d: Shelf(d, "gnu", "c", sync=False), "nothing", atomic=False),
        # The module has no sync().
        "shelve-ndbm": Kind(lambda d: Shelf(d, "ndbm", "c", sync=True), "nothing", atomic=False),
    }
    return kinds


STORES = _kinds()
