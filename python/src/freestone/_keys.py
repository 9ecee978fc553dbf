"""Device keys: conversion of Python values to the texts of a device specification."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Union

from freestone.errors import InvalidError

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30

#: Value of a device key or attribute. An int of a size key is a number of bytes, a bool is yes or
#: no.
KeyValue = Union[str, int, bool, "os.PathLike[str]", Sequence[Union[str, int]]]

#: Keys whose value is a size. A test compares them with the reference of the keys.
SIZES: Final = frozenset(
    {
        "backing_size",
        "bps",
        "bps_burst",
        "cache_size",
        "chunk_size",
        "cow_size",
        "disksize",
        "mem_limit",
        "mem_min",
        "power_cut_unit",
        "size",
        "zone_capacity",
        "zone_offline",
        "zone_readonly",
        "zone_size",
    }
)
#: Keys whose value is a path. Relative ones start at the working directory of this process.
PATHS: Final = frozenset(
    {
        "backing_dev",
        "cache",
        "conf",
        "cow",
        "credentials",
        "key",
        "path",
        "record",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "zone_state",
    }
)


def path_text(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path as text for the server.

    A byte that is not part of a UTF-8 character is written as U+EF00 plus the byte, as the server
    expects it.
    """
    raw = os.fsencode(os.path.abspath(path))
    text: list[str] = []
    for char in raw.decode("utf-8", "surrogateescape"):
        point = ord(char)
        if 0xDC80 <= point <= 0xDCFF:
            text.append(chr(0xEF00 + point - 0xDC00))
        elif 0xEF80 <= point <= 0xEFFF:
            text.extend(chr(0xEF00 + byte) for byte in char.encode())
        else:
            text.append(char)
    return "".join(text)


def size_text(key: str, size: int) -> str:
    """Returns a number of bytes in the form of the server, which has no unit below 1024 bytes."""
    if size < 0 or size % KiB:
        raise InvalidError(f"{key}={size}: a size is a multiple of 1024 bytes")
    return f"{size // KiB}K" if size else "0"


def value_text(key: str, value: KeyValue) -> str:
    """Returns the text of a key's value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return size_text(key, value) if key in SIZES else str(value)
    if isinstance(value, os.PathLike):
        return path_text(value)
    if isinstance(value, str):
        return _path_of_key(key, value)
    separator = "+" if key == "tls_clients" else ";"
    return separator.join(value_text(key, item) for item in value)


def _path_of_key(key: str, value: str) -> str:
    if key not in PATHS or not value:
        return value
    is_device = (key == "cow" and "/" not in value) or (
        key == "backing_dev" and value.startswith("device:")
    )
    if is_device or (key == "cache" and value == "none"):
        return value
    return path_text(value)


def texts(keys: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of all keys that are not None."""
    return {key: value_text(key, value) for key, value in keys.items() if value is not None}


def device_text(name: str, kind: str, keys: Mapping[str, Any]) -> str:
    """Returns a device as ``NAME=KIND,key=value``; a comma of a value is doubled."""
    if not name or any(char in name for char in "=,"):
        raise InvalidError(
            f"{name!r}: a device name is printable characters without '=', ',' and blanks"
        )
    words = [f"{name}={kind}"]
    words += [f"{key}={value.replace(',', ',,')}" for key, value in texts(keys).items()]
    return ",".join(words)


def generated_name(stem: str) -> str:
    """Returns a name that no other process generates: the stem and 8 hexadecimal digits."""
    return f"{stem[:200]}-{os.urandom(4).hex()}"
