from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .projects import ENTRY, SOURCE, Project


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Takes the place of the check of this process: here the runs of pytest must leave nothing
    (`Project.run`).
    """


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """An empty project whose pytest loads the plugin by its entry point."""
    site = tmp_path / "site"
    information = site / "freestone-0.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: freestone\nVersion: 0.0\n")
    (information / "entry_points.txt").write_text(ENTRY)
    path = tmp_path / "project"
    path.mkdir()
    (path / "pytest.ini").write_text("[pytest]\naddopts = -p no:asyncio -p no:timeout\n")
    # Short, because the paths of sockets lie below it, and open to the user that runs PostgreSQL.
    temporary = Path(tempfile.mkdtemp(prefix="fsp-", dir="/tmp"))
    temporary.chmod(0o711)
    paths = [str(SOURCE), str(site), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "FREESTONE_VIA", "FREESTONE_REQUIRE"):
        environment.pop(name, None)
    for name in list(environment):
        if name.startswith(("PYTEST_XDIST", "COV_")):
            del environment[name]
    try:
        yield Project(path, temporary, environment)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
