"""Types of the fixtures, for annotations, and the error that they raise."""

from pytest_freestone._postgres import Postgres, PostgresSetup
from pytest_freestone._power import Cut, PowerCutter
from pytest_freestone._settings import Base
from pytest_freestone._sqlite import Sqlite, SqliteSchema
from pytest_freestone._system import ProgramError

__all__ = [
    "Base",
    "Cut",
    "Postgres",
    "PostgresSetup",
    "PowerCutter",
    "ProgramError",
    "Sqlite",
    "SqliteSchema",
]
