"""Finds the program ``freestone``."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

from freestone.errors import ServerStartError

#: Environment variable with the path of the program.
VARIABLE: Final = "FREESTONE_PROGRAM"
#: Variables of a service manager or another server, which a server of this package must not
#: inherit.
REMOVED_VARIABLES: Final = (
    "NOTIFY_SOCKET",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "FREESTONE_CONTROL",
)


def find(program: str | os.PathLike[str] | None) -> str:
    """Returns the path of the program.

    The first of these is taken: the argument, ``$FREESTONE_PROGRAM``, the program of the installed
    wheel, ``PATH``.

    Raises:
        ServerStartError: There is no such program.
    """
    named = os.fspath(program) if program is not None else os.environ.get(VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            source = "program" if program is not None else f"${VARIABLE}"
            raise ServerStartError(f"{source}: {named} is not a program that can be started")
        return os.path.abspath(found)
    for directory in _script_directories():
        path = os.path.join(directory, "freestone")
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    found = shutil.which("freestone")
    if found is None:
        raise ServerStartError(
            f"the program freestone is not installed with this package, in PATH or at ${VARIABLE}; "
            "pip install freestone installs it on 64-bit Linux"
        )
    return os.path.abspath(found)


def _script_directories() -> list[str]:
    """Returns the directories in which pip can have put the program, the most likely first."""
    import sysconfig  # Imported late: this module is needed only to start a server.

    directories = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    if "posix_user" in sysconfig.get_scheme_names():
        directories.append(sysconfig.get_path("scripts", "posix_user"))
    # pip install --target DIR puts programs into DIR/bin.
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    directories.append(os.path.join(here, "bin"))
    return directories


def environment() -> dict[str, str]:
    """Returns the environment for a server."""
    return {key: value for key, value in os.environ.items() if key not in REMOVED_VARIABLES}
