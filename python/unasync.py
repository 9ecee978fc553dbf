#!/usr/bin/env python3
"""Makes the package ``_sync`` from ``_async`` by replacing tokens. Run it after a change of
``_async``.

With ``--check`` it writes nothing, and fails if a file of ``_sync`` is not what it would write.
"""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent / "src" / "freestone"
#: Written by hand in both packages.
BY_HAND = {"__init__.py", "_io.py"}
HEADER = "# Made by python/unasync.py from ../_async/{name}. Do not edit.\n"
REPLACED = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "_async": "_sync",
}


def sync_of(source: str) -> str:
    """Returns the source without asyncio."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    lines = source.splitlines(keepends=True)
    # From the end to the start, so that the places of earlier tokens stay true.
    for token in reversed(tokens):
        if token.type != tokenize.NAME:
            continue
        row, (start, end) = token.start[0] - 1, (token.start[1], token.end[1])
        line = lines[row]
        if token.string in ("async", "await"):
            rest = line[end:]
            lines[row] = line[:start] + rest[len(rest) - len(rest.lstrip(" ")) :]
        elif token.string in REPLACED:
            lines[row] = line[:start] + REPLACED[token.string] + line[end:]
    return "".join(lines)


def main() -> int:
    """Writes or checks the package."""
    is_check = "--check" in sys.argv[1:]
    wrong: list[str] = []
    for path in sorted((PACKAGE / "_async").glob("*.py")):
        if path.name in BY_HAND:
            continue
        target = PACKAGE / "_sync" / path.name
        text = HEADER.format(name=path.name) + sync_of(path.read_text())
        if is_check:
            if not target.exists() or target.read_text() != text:
                wrong.append(target.name)
        else:
            target.write_text(text)
    for name in wrong:
        sys.stderr.write(f"_sync/{name} differs; run python/unasync.py\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
