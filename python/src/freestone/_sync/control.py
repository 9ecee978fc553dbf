# Made by python/unasync.py from ../_async/control.py. Do not edit.
"""Connections to the control socket of a server."""

from __future__ import annotations

import threading
from typing import Any, Final

from freestone import _jsonrpc
from freestone._sync._io import connect_unix
from freestone._sync.stream import Stream
from freestone.errors import ConnectionLostError, ProtocolError, ServerEndedError, TimedOutError

#: Idle connections that are kept for the next calls. The server closes idle ones if others wait.
_MAX_IDLE: Final = 8
#: Longest wait for a connection, in seconds.
_CONNECT_TIMEOUT: Final = 10.0


class Control:
    """Calls methods of a server. May be used by several threads or tasks: each call has a
    connection to itself.

    Lock order: ``_lock`` alone. It guards ``_idle`` and ``_number``, and is never held while
    anything waits.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._number = 0

    def call(self, method: str, params: dict[str, Any], timeout: float) -> Any:
        """Returns the result of a method.

        A call that is interrupted or cancelled, or that has no answer within ``timeout`` seconds,
        closes its connection. The server then cancels the verb.
        """
        stream = self._take()
        if stream is None:
            stream = Stream(
                connect_unix(self.path, min(timeout, _CONNECT_TIMEOUT)), self.path
            )
        with self._lock:
            self._number += 1
            number = self._number
        try:
            line = _jsonrpc.request(number, method, params)
            stream.begin(timeout)
            stream.send(line)
            answer = stream.receive_line(_jsonrpc.MAX_RESPONSE_BYTES)
            stream.end()
        except BaseException as error:
            stream.close()
            if isinstance(error, ConnectionLostError):
                message = f"{self.path}: the server ended or closed the connection during {method}"
                raise ServerEndedError(message) from error
            if isinstance(error, TimedOutError):
                raise TimedOutError(
                    f"{method}: the server did not answer within {timeout:g} s"
                ) from None
            raise
        try:
            result = _jsonrpc.result(number, answer)
        except ProtocolError:
            stream.close()
            raise
        except BaseException:
            self._put(stream)
            raise
        self._put(stream)
        return result

    def _take(self) -> Stream | None:
        """Returns a kept connection that can be used, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                stream = self._idle.pop()
            if stream.is_idle:
                return stream
            stream.close()

    def _put(self, stream: Stream) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(stream)
                return
        stream.close()

    def close(self) -> None:
        """Closes the kept connections."""
        with self._lock:
            streams, self._idle = self._idle, []
        for stream in streams:
            stream.close()
