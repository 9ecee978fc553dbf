"""JSON-RPC 2.0, one message a line, as the control socket speaks it."""

from __future__ import annotations

import json
from typing import Any, Final, cast

from freestone.errors import InvalidError, ProtocolError, from_json

#: Longest request line that the server accepts, in bytes.
MAX_REQUEST_BYTES: Final = 1 << 20
#: Longest response line that is read, in bytes. The list of 65,536 devices has about 40 MiB.
MAX_RESPONSE_BYTES: Final = 256 << 20


def request(number: int, method: str, params: dict[str, Any]) -> bytes:
    """Returns the line of a request."""
    message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    try:
        line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InvalidError(f"{method}: the parameters are not JSON: {error}") from error
    if len(line) > MAX_REQUEST_BYTES:
        raise InvalidError(
            f"{method}: the request has {len(line)} bytes; the server accepts {MAX_REQUEST_BYTES}"
        )
    return line


def result(number: int, line: bytes) -> Any:
    """Returns the result in a response line, or raises the error in it."""
    try:
        message: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server sent a line that is not JSON: {line[:200]!r}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"the server sent a response that is not an object: {line[:200]!r}")
    response = cast("dict[str, Any]", message)
    if "error" in response:
        raise from_json(response["error"])
    if response.get("id") != number or "result" not in response:
        raise ProtocolError(f"the server sent a response to another request: {line[:200]!r}")
    return response["result"]
