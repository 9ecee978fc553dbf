"""The settings of the plugin, from pytest's configuration file and the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, Union

import pytest

#: What the disks of tests hold; see the fixture ``freestone_base``.
Base = Union[str, "os.PathLike[str]", Callable[[Path], object], None]

#: Values of ``freestone_via``.
WAYS: Final = ("auto", "ublk", "nbd", "nbdfuse", "fuse2fs")
#: Values of ``freestone_require``.
REQUIREMENTS: Final = ("mount", "power_cut", "sqlite", "postgres")
#: Largest ``freestone_ready``: each ready disk has a mount, two processes and a loop device.
MAX_READY: Final = 16
#: Smallest disk: an ext4 with a journal, in bytes.
MIN_SIZE: Final = 16 << 20

_Function = TypeVar("_Function", bound=Callable[..., object])
_UNITS: Final = {"K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class Settings:
    """The settings of a session."""

    program: str | None
    """Path of the program; None: as :class:`freestone.Server` finds it."""
    size: int
    """Size of a disk without an image, in bytes."""
    via: str
    """Way to mount, one of :data:`WAYS`."""
    ready: int
    """Number of disks that are prepared while a test runs."""
    require: frozenset[str]
    """Fixtures that must not be skipped."""
    artifacts: Path
    """Directory of the disks of failed tests."""
    artifacts_max: int
    """Number of failed tests whose disks are kept."""


def read(config: pytest.Config) -> Settings:
    """Returns the settings of a session.

    Raises:
        pytest.UsageError: A value is invalid.
    """
    program = _text(config, "freestone_program")
    via = os.environ.get("FREESTONE_VIA") or _text(config, "freestone_via")
    if via not in WAYS:
        raise pytest.UsageError(f"freestone_via={via}: the values are {', '.join(WAYS)}")
    words = os.environ.get("FREESTONE_REQUIRE", "").replace(",", " ").split()
    require = frozenset([*words, *config.getini("freestone_require")])
    unknown = sorted(require.difference(REQUIREMENTS))
    if unknown:
        known = ", ".join(REQUIREMENTS)
        raise pytest.UsageError(f"freestone_require={unknown[0]}: the values are {known}")
    return Settings(
        program=str(config.rootpath / program) if "/" in program else program or None,
        size=_size(_text(config, "freestone_size")),
        via=via,
        ready=_number(config, "freestone_ready", MAX_READY),
        require=require,
        artifacts=config.rootpath / _text(config, "freestone_artifacts"),
        artifacts_max=_number(config, "freestone_artifacts_max", 1000),
    )


def configured_base(config: pytest.Config) -> Path | None:
    """Returns the image of the setting ``freestone_base``, whose relative paths start at pytest's
    root directory.
    """
    path = _text(config, "freestone_base")
    return config.rootpath / path if path else None


def text_or_function(source: str | os.PathLike[str] | _Function) -> str | _Function:
    """Returns the text of a file, or the argument if it is a text or a function itself."""
    if isinstance(source, str) or callable(source):
        return source
    return Path(source).read_text()


def _text(config: pytest.Config, name: str) -> str:
    return str(config.getini(name)).strip()


def _number(config: pytest.Config, name: str, most: int) -> int:
    text = _text(config, name)
    if not text.isdecimal() or int(text) > most:
        raise pytest.UsageError(f"{name}={text}: must be a number from 0 to {most}")
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,7})([KMGT])", text)
    size = int(found[1]) << _UNITS[found[2]] if found else 0
    if size < MIN_SIZE:
        raise pytest.UsageError(
            f"freestone_size={text}: must be at least 16M, with a unit (K, M, G, T)"
        )
    return size
