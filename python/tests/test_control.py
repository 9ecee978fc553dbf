"""The control connection against servers that violate its protocol."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import freestone
from freestone import _jsonrpc
from freestone._sync.control import Control
from nbd_servers import FakeServer


def answer(**fields: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, **fields}).encode() + b"\n"


@pytest.mark.parametrize(
    ("sent", "kind", "message"),
    [
        (b"", freestone.ServerEndedError, "during stat"),
        (b'{"jsonrpc"', freestone.ServerEndedError, "during stat"),
        (b"HTTP/1.1 400 Bad Request\r\n", freestone.ProtocolError, "not JSON"),
        (b"\xff\xfe\n", freestone.ProtocolError, "not JSON"),
        (b"[" * 100000 + b"\n", freestone.ProtocolError, "not JSON"),
        (b"[]\n", freestone.ProtocolError, "not an object"),
        (b"7\n", freestone.ProtocolError, "not an object"),
        (answer(), freestone.ProtocolError, "another request"),
        (answer(id=2, result={}), freestone.ProtocolError, "another request"),
        (answer(error="x"), freestone.ProtocolError, "not an object"),
        (answer(error={"code": 1}), freestone.ProtocolError, "without a message"),
        (answer(error={"code": -32603, "message": "m"}), freestone.FreestoneError, "m"),
    ],
)
def test_violations(tmp_path: Path, sent: bytes, kind: type[Exception], message: str) -> None:
    with FakeServer(tmp_path / "c", [sent]) as fake:
        control = Control(str(fake.path))
        with pytest.raises(kind, match=message):
            control.call("stat", {}, 5)
        control.close()


def test_line_without_an_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jsonrpc, "MAX_RESPONSE_BYTES", 100_000)
    with FakeServer(tmp_path / "c", [b"x" * 300_000]) as fake:
        control = Control(str(fake.path))
        with pytest.raises(freestone.ProtocolError, match="more than 100000 bytes"):
            control.call("stat", {}, 5)
        control.close()


def test_silent_server_meets_the_deadline(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "c", [b""], stays=True) as fake:
        control = Control(str(fake.path))
        began = time.monotonic()
        with pytest.raises(freestone.TimedOutError, match=r"stat: .*0\.2 s"):
            control.call("stat", {}, 0.2)
        assert time.monotonic() - began < 5
        control.close()


def test_results_without_their_fields(tmp_path: Path) -> None:
    results: list[object] = [{"server": {"addresses": []}}, None, {"devices": 7}, {"forks": []}]
    with FakeServer(tmp_path / "c", [answer(result=results[0])]) as fake:
        server = freestone.connect(fake.path)
        assert server.nbd is None
        server.close()
    for number, (result, method) in enumerate(zip(results[1:], ("list", "list", "fork"))):
        path = tmp_path / f"c{number}"
        answers = [answer(result=results[0]), answer(id=2, result=result)]
        with FakeServer(path, answers, by_line=True) as fake:
            server = freestone.connect(fake.path)
            with pytest.raises(freestone.ProtocolError, match="without"):
                if method == "list":
                    server.devices()
                else:
                    server.fork("base")
            server.close()


def test_random_bytes(tmp_path: Path) -> None:
    answers = [os.urandom(200) + b"\n" for _ in range(50)]
    with FakeServer(tmp_path / "c", answers) as fake:
        for _ in answers:
            control = Control(str(fake.path))
            with pytest.raises(freestone.FreestoneError):
                control.call("stat", {}, 5)
            control.close()
