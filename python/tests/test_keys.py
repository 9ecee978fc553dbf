from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from freestone import KiB, MiB, _keys
from freestone.errors import InvalidError

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "keys.md"


def keys_of_reference() -> dict[str, str]:
    """Returns the keys of all kinds with the forms of their values."""
    cells: list[str] = re.findall(r"^\| `([^`]+)` \|", REFERENCE.read_text(), re.MULTILINE)
    words = ", ".join(cells).replace("\\|", "|").split(", ")
    return dict(word.split("=", 1) for word in words)


def test_sizes_and_paths_are_those_of_the_reference() -> None:
    keys = keys_of_reference()
    assert len(keys) > 70
    # The size of a ram device is in the heading of its table.
    sizes = {key for key, form in keys.items() if re.match(r"SIZE|OFFSET", form)} | {"disksize"}
    assert sizes == _keys.SIZES
    paths = {key for key, form in keys.items() if re.match(r"PATH|FILE|DIR", form)} | {"path"}
    assert paths == _keys.PATHS


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("disksize", 64 * MiB, "65536K"),
        ("mem_limit", 0, "0"),
        ("mem_limit", "none", "none"),
        ("seed", 7, "7"),
        ("iops", 1000, "1000"),
        ("readonly", True, "yes"),
        ("power_cut", False, "no"),
        ("tls_clients", ["a", "b"], "a+b"),
        ("badblocks", ["+1-2", "+5-6"], "+1-2;+5-6"),
        ("zone_offline", [MiB, 2 * MiB], "1024K;2048K"),
        ("path", "/x/y", "/x/y"),
        ("path", Path("/x/../y"), "/y"),
        ("cow", "device", "device"),
        ("backing_dev", "device:spill", "device:spill"),
        ("cache", "none", "none"),
        ("url", "file:///x:y", "file:///x:y"),
    ],
)
def test_value_text(key: str, value: _keys.KeyValue, text: str) -> None:
    assert _keys.value_text(key, value) == text


def test_relative_paths_start_at_the_working_directory() -> None:
    here = os.getcwd()
    assert _keys.value_text("record", "a.log") == f"{here}/a.log"
    assert _keys.value_text("cow", "./a") == f"{here}/a"


def test_path_of_any_bytes_has_a_text() -> None:
    raw = b"/x\xff\xc3\xa9\xee\xbe\x80"  # A lone byte, a character, and U+EF80 itself.
    assert _keys.path_text(os.fsdecode(raw)) == "/x\uefff\u00e9\uefee\uefbe\uef80"


def test_sizes_that_cannot_be_written_are_refused() -> None:
    for size in (1, 1025, -1024):
        with pytest.raises(InvalidError, match="multiple of 1024"):
            _keys.value_text("disksize", size)


def test_device_text_doubles_commas() -> None:
    keys = {"path": "/a,b", "size": 4 * KiB, "readonly": None}
    assert _keys.device_text("f", "file", keys) == "f=file,path=/a,,b,size=4K"
    for name in ("", "a,b", "a=b"):
        with pytest.raises(InvalidError):
            _keys.device_text(name, "ram", {})


def test_generated_names_differ() -> None:
    names = {_keys.generated_name("x" * 300) for _ in range(100)}
    assert len(names) == 100
    assert max(map(len, names)) <= 255
