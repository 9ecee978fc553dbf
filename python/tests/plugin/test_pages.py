"""Runs the examples of the pages about the plugin, each heading as a project of its own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from .projects import Project, is_full, needs, needs_root, slow

_HOW_TO = Path(__file__).parents[3] / "docs" / "how-to"
_BLOCK = re.compile(r"^```\w+\n(?:#|//) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [
    needs_root,
    needs("mke2fs", "nbdfuse"),
]


def files_of(page: str) -> dict[str, dict[str, str]]:
    """Returns the files of each heading of a page that has some: names and texts."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", (_HOW_TO / page).read_text(), flags=re.MULTILINE)[1:]:
        files = dict(_BLOCK.findall(part))
        if files:
            found[part.partition("\n")[0]] = files
    return found


def write(project: Project, files: dict[str, str]) -> None:
    project.write("pytest.ini", "[pytest]\nfreestone_require = mount power_cut sqlite postgres\n")
    for name, text in files.items():
        project.write(name, text)


def headings(page: str) -> list[str]:
    return list(files_of(page))


@pytest.mark.parametrize("heading", headings("pytest.md"))
def test_example_of_the_plugin(project: Project, heading: str) -> None:
    files = files_of("pytest.md")[heading]
    if not is_full() and any("freestone_postgres" in text for text in files.values()):
        pytest.skip("slow lane")
    write(project, files)
    if not any(name.startswith("test_") for name in files):
        project.write("test_it.py", "def test_it(freestone_mount): pass\n")
    printed = project.run("-p", "no:asyncio")
    assert re.search(r"=+ \d+ passed in", printed), printed


@slow
@pytest.mark.parametrize("heading", headings("test-durability.md")[1:])
def test_example_of_durability(project: Project, heading: str) -> None:
    page = files_of("test-durability.md")
    files = {**page[headings("test-durability.md")[0]], **page[heading]}
    if "redb/Cargo.toml" in files and shutil.which("cargo") is None:
        pytest.skip("left out: cargo")
    write(project, files)
    printed = project.run("-p", "no:asyncio")
    # Each page has a check that must fail, which pytest counts as such only if it failed.
    assert re.search(r"=+ \d+ passed, \d+ xfailed in", printed), printed


def test_pages_have_examples() -> None:
    assert len(headings("pytest.md")) == 6
    assert headings("test-durability.md") == [
        "Run a program and cut the power",
        "SQLite",
        "PostgreSQL",
        "A program of your own: redb",
    ]
