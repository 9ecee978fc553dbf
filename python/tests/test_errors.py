from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path

import pytest

import freestone
from freestone import MiB, errors

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "control.md"


def table_of_reference() -> list[str]:
    """Returns the names in the table of errnos of the reference of the control socket."""
    text = REFERENCE.read_text()
    table = text.partition("<!-- reference errno -->")[2].partition("<!-- /reference errno -->")[0]
    return re.findall(r"^\| (E[A-Z]+) \|", table, re.MULTILINE)


def test_each_errno_of_the_reference_has_a_class() -> None:
    names = table_of_reference()
    assert len(names) > 15
    classes: set[type[errors.FreestoneError]] = set()
    for name in names:
        error = errors.from_json(
            {"code": -32000, "message": "m", "data": {"errno": name, "pages": 7}}
        )
        assert type(error) is not errors.FreestoneError, name
        assert type(error).__name__ in freestone.__all__
        assert error.errno_name == name
        assert error.errno == getattr(errno, name)
        assert error.data["pages"] == 7
        assert str(error) == error.message == "m"
        # The class raised by itself, as the package does, has the same number.
        assert type(error)("m").errno == error.errno
        classes.add(type(error))
    assert len(classes) == len(names)


def test_unknown_errno_is_the_base_class() -> None:
    error = errors.from_json({"code": -32000, "message": "m", "data": {"errno": "ENEW"}})
    assert type(error) is errors.FreestoneError
    assert (error.errno_name, error.errno) == ("ENEW", None)
    error = errors.from_json({"code": -32601, "message": "m"})
    assert (error.code, error.errno_name, error.errno) == (-32601, None, None)


@pytest.mark.parametrize(
    "value", [None, 7, "text", [], {}, {"code": "x", "message": "m"}, {"code": 1}]
)
def test_error_that_is_no_object_is_a_violation(value: object) -> None:
    assert isinstance(errors.from_json(value), errors.ProtocolError)


def test_builtin_bases() -> None:
    assert issubclass(freestone.InvalidError, ValueError)
    assert issubclass(freestone.NoDeviceError, LookupError)
    assert issubclass(freestone.TimedOutError, TimeoutError)
    assert issubclass(freestone.NotPermittedError, PermissionError)
    for each in (
        freestone.NoServerError,
        freestone.ServerEndedError,
        freestone.ConnectionLostError,
    ):
        assert issubclass(each, ConnectionError)


def test_errors_are_pickled_with_their_fields() -> None:
    wanted = errors.from_json({"code": -32000, "message": "m", "data": {"errno": "EBUSY", "n": 1}})
    start = errors.ServerStartError("s", stderr="log", status=2)
    for error in (
        wanted,
        start,
        errors.TimedOutError("late"),
        errors.ServerEndError("e", status=-9),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)
        assert copy.errno == error.errno


def test_refusals_of_a_server(server: freestone.Server, base: freestone.Snapshot) -> None:
    with pytest.raises(freestone.InvalidError, match="disksize") as invalid:
        server.create("x", "ram", disksize="1")
    assert invalid.value.code == -32602
    with pytest.raises(freestone.InvalidError, match="unknown key"):
        server.create("x", "ram", disksize=MiB, colour="red")
    with pytest.raises(freestone.InvalidError, match="multiple of 1024"):
        server.create("x", "ram", disksize=MiB + 1)
    with pytest.raises(freestone.InvalidError, match="printable"):
        server.create("x,size=1M", "ram", disksize=MiB)
    with pytest.raises(freestone.ExistsError, match="base"):
        server.fork(base, "base")
    with pytest.raises(freestone.NoDeviceError, match="nothing"):
        server.device("nothing")
    with pytest.raises(freestone.NoDeviceError, match="nothing"):
        server.fork("nothing")
    with server.fork(base, "fork") as fork:
        with pytest.raises(freestone.BusyError, match="base"):
            base.remove()
        with pytest.raises(freestone.NotSupportedError, match="record"):
            fork.mark("m")
        with fork.open() as connection:
            connection.write(0, b"x")
            with pytest.raises(freestone.BusyError, match="connection"):
                fork.rewind()
            fork.rewind(force=True)
        with pytest.raises(freestone.AddressError):
            fork.publish("unix:/nowhere/nbd.sock")
        with pytest.raises(freestone.InvalidError):
            fork.get("colour")
    with pytest.raises(freestone.FreestoneError, match="unknown method") as unknown:
        server.call("bogus")
    assert unknown.value.code == -32601
    with pytest.raises(freestone.InvalidError, match="not JSON"):
        server.call("stat", name={1, 2})
    with pytest.raises(freestone.InvalidError, match="the server accepts"):
        server.call("stat", name="x" * (2 << 20))


def test_full_disk_is_an_oserror(server: freestone.Server) -> None:
    full = server.create("full", "ram", disksize=64 * MiB, mem_limit=MiB, comp_algorithm="store")

    def fill() -> None:
        for at in range(0, 64 * MiB, MiB):
            full.write(at, bytes(range(256)) * 4096)

    with pytest.raises(OSError, match=r"full.*write") as error:
        fill()
    assert error.value.errno == errno.ENOSPC
    assert full.read(0, 1) == bytes(1)
