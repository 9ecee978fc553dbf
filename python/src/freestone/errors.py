"""Exceptions of the package.

A request that the server refuses raises the subclass of :class:`FreestoneError` that belongs to its
``errno``. Reads and writes over NBD raise :class:`OSError` with the errno of the reply instead, as
reads and writes of a file do.
"""

from __future__ import annotations

import errno as _numbers
from typing import Any, Final, cast

__all__ = [
    "AddressError",
    "BusyError",
    "ConnectionLostError",
    "ExistsError",
    "FreestoneError",
    "InvalidError",
    "IoError",
    "JobCancelledError",
    "NoDeviceError",
    "NoServerError",
    "NoSpaceError",
    "NotPermittedError",
    "NotSupportedError",
    "OutOfMemoryError",
    "PageRangeError",
    "ProtocolError",
    "ReadOnlyError",
    "ServerEndError",
    "ServerEndedError",
    "ServerStartError",
    "TimedOutError",
    "TooManyActiveZonesError",
    "TooManyOpenZonesError",
]

#: JSON-RPC code of a verb that was understood and failed.
FAILED: Final = -32000
#: JSON-RPC code of invalid parameters.
INVALID_PARAMS: Final = -32602


class FreestoneError(Exception):
    """A request failed.

    Attributes:
        message: One sentence that names the device and the reason.
        code: JSON-RPC code of the error: -32602 for invalid parameters, -32000 for a verb that
            failed, and the others that the reference of the control socket lists.
        errno: Number of the error as in the module ``errno``, or None for an error without one.
        errno_name: Name of the error, such as ``EBUSY``, or None.
        data: Details from the server; ``writeback``, for example, adds the work that was done
            before it failed.
    """

    _errno_name: str | None = None

    def __init__(
        self,
        message: str,
        *,
        code: int = FAILED,
        errno_name: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.errno_name = errno_name or self._errno_name
        self.errno: int | None = None
        if self.errno_name is not None:
            self.errno = getattr(_numbers, self.errno_name, None)
        self.data: dict[str, Any] = data if data is not None else {}

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructor has keyword-only parameters, which the default of Exception does not pass.
        return _restore, (type(self), self.message, self.errno, self.__dict__)


def _restore(
    kind: type[FreestoneError], message: str, number: int | None, fields: dict[str, Any]
) -> FreestoneError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    error.args = (message,)
    # Classes that are also an OSError keep the number outside of the dictionary.
    error.errno = number
    return error


class InvalidError(FreestoneError, ValueError):
    """A parameter or the value of a key is invalid (EINVAL)."""

    _errno_name = "EINVAL"


class NoDeviceError(FreestoneError, LookupError):
    """The device, job, tag or store does not exist, or the device has no backing device or address
    (ENODEV).
    """

    _errno_name = "ENODEV"


class ExistsError(FreestoneError):
    """The name is taken, or the file exists and is not replaced (EEXIST)."""

    _errno_name = "EEXIST"


class BusyError(FreestoneError):
    """Clients, other devices or another verb use the device, file or disk (EBUSY)."""

    _errno_name = "EBUSY"


class NotSupportedError(FreestoneError):
    """This kind of device does not support the operation (EOPNOTSUPP)."""

    _errno_name = "EOPNOTSUPP"


class ReadOnlyError(FreestoneError):
    """The device is read-only (EROFS)."""

    _errno_name = "EROFS"


class NotPermittedError(FreestoneError, PermissionError):
    """The operation is not allowed, at the read-only control socket or for this user (EPERM)."""

    _errno_name = "EPERM"


class IoError(FreestoneError):
    """The device could not be set up, or a disk below it failed (EIO)."""

    _errno_name = "EIO"


class AddressError(FreestoneError):
    """The server cannot listen at the address (EADDRNOTAVAIL)."""

    _errno_name = "EADDRNOTAVAIL"


class NoSpaceError(FreestoneError):
    """A limit of the server, a disk, a backing device or ``mem_limit`` leaves no room (ENOSPC)."""

    _errno_name = "ENOSPC"


class TimedOutError(FreestoneError, TimeoutError):
    """A request, an operation of the server or a store did not finish in time (ETIMEDOUT)."""

    _errno_name = "ETIMEDOUT"


class PageRangeError(FreestoneError):
    """A page is beyond the end of the device (ERANGE)."""

    _errno_name = "ERANGE"


class OutOfMemoryError(FreestoneError):
    """The server cannot allocate memory or a thread (ENOMEM)."""

    _errno_name = "ENOMEM"


class TooManyOpenZonesError(FreestoneError):
    """The limit of open zones is reached (ETOOMANYREFS)."""

    _errno_name = "ETOOMANYREFS"


class TooManyActiveZonesError(FreestoneError):
    """The limit of active zones is reached (EOVERFLOW)."""

    _errno_name = "EOVERFLOW"


class JobCancelledError(FreestoneError):
    """The job was cancelled: by a verb, or because the server shuts down (ECANCELED)."""

    _errno_name = "ECANCELED"


class NoServerError(FreestoneError, ConnectionError):
    """No server answers at the control socket (ECONNREFUSED)."""

    _errno_name = "ECONNREFUSED"


class ServerEndedError(FreestoneError, ConnectionError):
    """The server ended, or closed the connection, during a request (EIO). The request may have had
    its effect.
    """

    _errno_name = "EIO"


class ServerStartError(FreestoneError):
    """The program did not start or did not get ready.

    Attributes:
        stderr: Messages of the program, at most the last 64 KiB.
        status: Exit status of the program, negative for a signal, or None if it did not end.
    """

    def __init__(self, message: str, *, stderr: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.stderr = stderr
        self.status = status


class ServerEndError(FreestoneError):
    """The server ended by itself or with an error, so that content may be lost.

    Attributes:
        stderr: Messages of the program, at most the last 64 KiB.
        status: Exit status of the program, negative for a signal.
    """

    def __init__(self, message: str, *, stderr: str = "", status: int = 1) -> None:
        super().__init__(message)
        self.stderr = stderr
        self.status = status


class ConnectionLostError(FreestoneError, ConnectionError):
    """The NBD connection ended, or is closed (ESHUTDOWN). A request in flight may have had its
    effect.
    """

    _errno_name = "ESHUTDOWN"


class ProtocolError(FreestoneError):
    """A server violated its protocol. The connection is closed."""


_BY_NAME: Final[dict[str, type[FreestoneError]]] = {
    "EINVAL": InvalidError,
    "ENODEV": NoDeviceError,
    "EEXIST": ExistsError,
    "EBUSY": BusyError,
    "EOPNOTSUPP": NotSupportedError,
    "EROFS": ReadOnlyError,
    "EPERM": NotPermittedError,
    "EIO": IoError,
    "EADDRNOTAVAIL": AddressError,
    "ENOSPC": NoSpaceError,
    "ETIMEDOUT": TimedOutError,
    "ERANGE": PageRangeError,
    "ENOMEM": OutOfMemoryError,
    "ETOOMANYREFS": TooManyOpenZonesError,
    "EOVERFLOW": TooManyActiveZonesError,
    "ECANCELED": JobCancelledError,
    "ECONNREFUSED": NoServerError,
}


def from_json(error: object) -> FreestoneError:
    """Returns the exception for the error object of a JSON-RPC response, or :class:`ProtocolError`
    if it is none.
    """
    if not isinstance(error, dict):
        return ProtocolError(f"the server sent an error that is not an object: {error!r:.200}")
    fields = cast("dict[str, Any]", error)
    message, code, data = fields.get("message"), fields.get("code"), fields.get("data")
    if not isinstance(message, str) or not isinstance(code, int):
        return ProtocolError(f"the server sent an error without a message: {error!r:.200}")
    details = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    name = details.get("errno")
    if isinstance(name, str):
        kind = _BY_NAME.get(name, FreestoneError)
        return kind(message, code=code, errno_name=name, data=details)
    return FreestoneError(message, code=code, data=details)
