"""Types of the database fixtures, for annotations."""

from pytest_freestone._postgres import Postgres, PostgresSetup
from pytest_freestone._sqlite import Sqlite, SqliteSchema

__all__ = ["Postgres", "PostgresSetup", "Sqlite", "SqliteSchema"]
