# Made by python/unasync.py from ../_async/core.py. Do not edit.
"""What the objects of one server share: its connections, its address and its mounts."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any, Final, cast

from freestone import _keys, _process, _program, errors
from freestone._sync._io import run_program
from freestone._sync.connection import Connection, connect_nbd
from freestone._sync.control import Control

if TYPE_CHECKING:
    from freestone._sync.devices import Mount

#: Verbs that may run for as long as their data needs, within ``job_timeout``.
_JOBS: Final = frozenset(
    {
        "apply",
        "compact",
        "delta.apply",
        "delta.save",
        "merge",
        "power-cut",
        "pull",
        "push",
        "recompress",
        "remove",
        "reset",
        "restore",
        "save",
        "trace",
        "writeback",
    }
)


class Core:
    """Connections of one server object. May be used by several threads or tasks at a time.

    Lock order: ``_lock`` alone. It guards ``_connections``, and is never held while anything waits.
    """

    def __init__(
        self, program: str | os.PathLike[str] | None, call_timeout: float, job_timeout: float
    ) -> None:
        self.program = program
        self.call_timeout = call_timeout
        self.job_timeout = job_timeout
        self.control: Control | None = None
        self.process: _process.ServerProcess | None = None
        self.nbd: str | None = None
        self.mounts: dict[str, list[Mount]] = {}
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}

    @property
    def is_running(self) -> bool:
        """True between start and end, unless the process has ended by itself."""
        if self.process is not None and self.process.is_owner:
            return self.process.status() is None
        return self.control is not None

    def call(self, method: str, **params: Any) -> Any:
        """Calls a method; parameters that are None are omitted."""
        control = self.control
        if control is None:
            raise errors.NoServerError(f"{method}: the server is not started, or closed")
        timeout = self.job_timeout if method in _JOBS else self.call_timeout
        given = {name: value for name, value in params.items() if value is not None}
        return control.call(method, given, timeout)

    def list_of(self, field: str, method: str, **params: Any) -> list[dict[str, Any]]:
        """Calls a method and returns the list of objects in a field of its result."""
        result: Any = self.call(method, **params)
        found: Any = cast("dict[str, Any]", result).get(field) if isinstance(result, dict) else None
        if not isinstance(found, list):
            raise errors.ProtocolError(f"the server sent a result without {field}: {result!r:.200}")
        return cast("list[dict[str, Any]]", found)

    def first_of(self, field: str, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method and returns the first object of a list in its result."""
        found = self.list_of(field, method, **params)
        if not found:
            raise errors.ProtocolError(f"the server sent a result without any of {field}")
        return found[0]

    def address(self, nbd: str | None, publish: bool) -> str | None:
        """Returns the address at which to publish a device: ``nbd``, else the server's own."""
        if not publish:
            return None
        if nbd is None:
            return self.nbd
        kind, _, path = nbd.partition(":")
        return f"unix:{_keys.path_text(path)}" if kind == "unix" else nbd

    def connection(self, name: str, uri: str) -> Connection:
        """Returns the kept connection to a device, or a new one to its URI."""
        with self._lock:
            kept = self._connections.get(name)
        if kept is not None:
            if not kept.is_closed:
                return kept
            self.disconnect(name)
        opened = connect_nbd(uri, timeout=self.call_timeout)
        with self._lock:
            kept = self._connections.setdefault(name, opened)
        if kept is not opened:
            opened.close()  # Another thread or task was faster.
        return kept

    def disconnect(self, name: str) -> None:
        """Closes the kept connection to a device, which would prevent a rewind or a removal."""
        with self._lock:
            kept = self._connections.pop(name, None)
        if kept is not None:
            kept.close()

    def disconnect_all(self) -> None:
        """Closes all kept connections."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()
        if self.control is not None:
            self.control.close()
            self.control = None

    def run(self, *arguments: str, timeout: float) -> Any:
        """Runs a command of the program on this server and returns the result."""
        if self.control is None:
            raise errors.NoServerError(f"{arguments[0]}: the server is not started, or closed")
        program = _program.find(self.process.program if self.process is not None else self.program)
        command = [program, *arguments, "--json", "--control", self.control.path]
        status, out, err = run_program(command, _program.environment(), timeout)
        if status == 0:
            return json.loads(out) if out.strip() else None
        for line in err.splitlines():
            if line.startswith('{"error"'):
                raise errors.from_json(json.loads(line)["error"])
        raise errors.FreestoneError(f"freestone {arguments[0]} failed: {err.strip()[-1000:]}")
