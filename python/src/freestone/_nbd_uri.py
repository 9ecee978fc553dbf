"""NBD URIs: ``nbd://HOST[:PORT]/EXPORT``, ``nbd+unix:///EXPORT?socket=PATH``."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from freestone.errors import InvalidError

DEFAULT_PORT: Final = 10809


class NbdUri(NamedTuple):
    """A parsed URI. ``socket`` is the path of a Unix socket, or None for TCP."""

    export: str
    socket: str | None
    host: str
    port: int
    is_tls: bool


def parse(uri: str) -> NbdUri:
    """Returns the parts of an NBD URI.

    Raises:
        InvalidError: The text is not an NBD URI.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("nbd", "nbds", "nbd+unix", "nbds+unix"):
        raise InvalidError(f"{uri}: not an NBD URI; nbd:// and nbd+unix:// are known")
    export = unquote(parts.path[1:]) if parts.path.startswith("/") else ""
    is_tls = parts.scheme.startswith("nbds")
    if parts.scheme.endswith("+unix"):
        sockets = parse_qs(parts.query).get("socket", [])
        if len(sockets) != 1:
            raise InvalidError(f"{uri}: ?socket=PATH is missing")
        return NbdUri(export, sockets[0], "", 0, is_tls)
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise InvalidError(f"{uri}: {error}") from error
    if not parts.hostname:
        raise InvalidError(f"{uri}: the host is missing")
    return NbdUri(export, None, parts.hostname, port, is_tls)
