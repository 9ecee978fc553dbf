"""Runs the examples of the documentation, each in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import freestone
from freestone import aio

ROOT = Path(__file__).parents[2]
PAGES = ["docs/how-to/python.md", "python/README.md"]


def examples() -> list[tuple[str, str]]:
    """Returns the headings and texts of the examples."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            heading = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
            found.append((f"{page}: {heading}", match[1]))
    for module in (freestone, aio):
        text = module.__doc__ or ""
        block = "\n".join(line for line in text.splitlines() if line.startswith("    ") or not line)
        found.append(
            (f"{module.__name__}", "".join(re.sub(r"^    ", "", block, flags=re.MULTILINE)))
        )
    return found


@pytest.mark.parametrize(("title", "text"), examples(), ids=[title for title, _ in examples()])
def test_example(title: str, text: str, tmp_path: Path) -> None:
    if text.startswith("# root"):
        if os.geteuid() != 0:
            pytest.skip("left out: mounts, which need root")
        for program, package in (("mke2fs", "e2fsprogs"), ("nbdfuse", "nbdfuse")):
            if shutil.which(program) is None:
                pytest.skip(f"left out: {program} (package {package})")
    environment = {**os.environ, "PYTHONPATH": str(Path(freestone.__file__).parents[1])}
    environment["FREESTONE_MOUNTS"] = str(tmp_path / "mounts")
    command = [sys.executable, "-W", "error", "-c", text]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{title}:\n{done.stderr}"


def test_pages_have_examples() -> None:
    assert len(examples()) > 9
