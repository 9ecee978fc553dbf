"""A pytest plugin that keeps the tests that use a database, by the fixture `dsn` of pgqueuer's suite."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def uses_database(item: pytest.Item) -> bool:
        return "dsn" in getattr(item, "fixturenames", ())

    config.hook.pytest_deselected(items=[item for item in items if not uses_database(item)])
    items[:] = [item for item in items if uses_database(item)]
