from __future__ import annotations

from pathlib import Path

import pytest

import freestone
from freestone import KiB, MiB


def test_rewind_shows_the_base(server: freestone.Server, base: freestone.Snapshot) -> None:
    with server.fork(base) as fork:
        assert fork.base == "base"
        assert fork.size == 16 * MiB
        assert fork.read(0, 4) == b"bbbb"
        fork.write(0, b"changed")
        assert fork.read(0, 8) == b"changedb"
        fork.rewind()
        assert fork.read(0, 8) == b"b" * 8
        name = fork.name
    with pytest.raises(freestone.NoDeviceError):
        server.device(name)


def test_disk_reads_what_was_written(disk: freestone.Disk) -> None:
    data = bytes(range(256)) * 16
    disk.write(12345, data, fua=True)
    assert disk.read(12345, len(data)) == data
    disk.zero(12345, 100)
    assert disk.read(12345, 101) == bytes(100) + data[100:101]
    disk.trim(8192, 8 * KiB)
    disk.flush()
    assert disk.read(12345, 4) == bytes(4)
    extents = disk.extents()
    assert sum(extent.length for extent in extents) == disk.size
    assert not any(extent.is_hole for extent in extents if extent.offset == 16384)


def test_forks_are_numbered(server: freestone.Server, base: freestone.Snapshot) -> None:
    forks = server.forks(base, "job-%n", 3)
    assert [fork.name for fork in forks] == ["job-0", "job-1", "job-2"]
    for number, fork in enumerate(forks):
        fork.write(0, bytes([number]))
    assert [fork.read(0, 1)[0] for fork in forks] == [0, 1, 2]


def test_snapshots_of_several_disks(server: freestone.Server) -> None:
    data = server.create("data", "ram", disksize=MiB)
    log = server.create("log", "ram", disksize=MiB)
    both = server.snapshot({data: "data-1", "log": None})
    assert [each.origin for each in both] == ["data", "log"]
    assert both[0].name == "data-1"
    assert both[1].name.startswith("log-")
    data.write(0, b"new")
    assert both[0].read(0, 3) == bytes(3)
    log.write(0, b"later")
    fork = log.rewind_to(both[1])
    assert isinstance(fork, freestone.Fork)
    assert fork.read(0, 5) == bytes(5)


def test_template_gives_each_connection_a_disk(
    server: freestone.Server, base: freestone.Snapshot
) -> None:
    template = server.template(base, "any", ttl=60)
    assert isinstance(server.device("any"), freestone.Template)
    with template.open() as one, template.open() as two:
        one.write(0, b"1")
        assert two.read(0, 1) == b"b"
        assert one.read(0, 1) == b"1"


def test_changes_are_saved_and_applied(server: freestone.Server, tmp_path: Path) -> None:
    image, overlay = tmp_path / "a,b.img", tmp_path / "changes.qcow2"
    image.write_bytes(bytes(MiB))
    server.create("golden", "file", path=image, readonly=True)
    with server.fork("golden") as fork:
        fork.write(64 * KiB, b"x" * 4096)
        assert fork.changes() == [freestone.Change(64 * KiB, 4096, zero=False)]
        fork.save_changes(overlay)
        fork.rewind()
        assert fork.changes() == []
        fork.apply_changes(overlay)
        assert fork.read(64 * KiB, 1) == b"x"


def test_power_cut_repeats_from_its_seed(
    server: freestone.Server, base: freestone.Snapshot
) -> None:
    with server.fork(base, power_cut=True, seed=5) as fork:
        kept: list[bytes] = []
        for _ in range(2):
            fork.rewind()
            for block in range(16):
                fork.write(block * 4096, b"n" * 4096)
            cut = fork.power_cut(seed=42)
            assert cut.seed == 42
            assert cut.kept_blocks + cut.lost_blocks == 16
            kept.append(b"".join(fork.read(block * 4096, 1) for block in range(16)))
        assert kept[0] == kept[1]
        assert b"n" in kept[0]
        assert kept[0].count(b"n") < 16


def test_save_and_restore(server: freestone.Server, disk: freestone.Disk, tmp_path: Path) -> None:
    disk.write(0, b"saved")
    file = tmp_path / "disk.saved"
    disk.save(file)
    with pytest.raises(freestone.ExistsError):
        server.restore(file)
    disk.write(0, b"later")
    (copy,) = server.restore(file, "copy")
    with copy:
        assert copy.kind == "ram"
        assert copy.read(0, 5) == b"saved"
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    with pytest.raises(freestone.ExistsError):
        disk.save(other)
    disk.save(other, force=True)
    with pytest.raises(freestone.FreestoneError, match="none"):
        server.restore(tmp_path / "none")


def test_attributes(disk: freestone.Disk) -> None:
    assert disk.get("disksize") == 16 * MiB
    assert disk.set(mem_limit=8 * MiB, iops=1000) == {"mem_limit": 8 * MiB, "iops": 1000}
    assert disk.get("iops") == 1000
    disk.set(disksize=32 * MiB)
    assert disk.size == 32 * MiB
    with disk.open() as connection:
        assert connection.size == 32 * MiB
    with pytest.raises(freestone.FreestoneError, match="comp_algorithm"):
        disk.set(mem_limit=4 * MiB, comp_algorithm="zstd")
    # All are set, or none.
    assert disk.get("mem_limit") == 8 * MiB
    assert disk.stat()["name"] == "disk"


def test_exports(server: freestone.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with server.create("hidden", "ram", disksize=MiB, publish=False) as disk:
        with pytest.raises(freestone.NoDeviceError, match="publish"):
            _ = disk.uri
        assert disk.publish("unix:own.sock", max_clients=3) == disk.uri
        assert disk.uri == f"nbd+unix:///hidden?socket={tmp_path}/own.sock"
        disk.write(0, b"x")
        again = server.device("hidden")
        assert again.uri == disk.uri
        with disk.open() as connection:
            with pytest.raises(freestone.BusyError):
                disk.unpublish()
            disk.unpublish(force=True)
            with pytest.raises(OSError, match=r"."):
                connection.read(0, 1)
        with pytest.raises(freestone.NoDeviceError):
            _ = disk.uri
        # Reads publish the disk at the server's own address.
        assert disk.read(0, 1) == b"x"
        assert disk.uri.endswith("nbd.sock")
        disk.unpublish()
        disk.publish(read_only=True)
        with pytest.raises(PermissionError):
            disk.write(0, b"y")
        with pytest.raises(freestone.InvalidError):
            disk.publish("http://localhost")


def test_record_and_return_to_a_mark(server: freestone.Server, tmp_path: Path) -> None:
    log = tmp_path / "disk.log"
    with server.create("disk", "ram", disksize=MiB, power_cut=True, record=log) as disk:
        disk.write(0, b"one", fua=True)
        assert disk.mark("first") == 2
        disk.write(0, b"two", fua=True)
        cut = disk.power_cut(at="first")
        assert cut.entries == 2
        assert disk.read(0, 3) == b"one"
        assert disk.power_cut(at=3).entries == 3
        assert disk.read(0, 3) == b"two"
        later = disk.power_cut(after="5flushes")
        assert later.after == "5 flushes"
        disk.power_cut(after="none")
        with pytest.raises(freestone.FreestoneError, match="never"):
            disk.power_cut(at="never")


def test_reset_and_if_absent(server: freestone.Server, base: freestone.Snapshot) -> None:
    with server.create("null", "null", size=MiB, memory_backed=True) as null:
        null.write(0, b"x")
        null.reset()
        assert null.read(0, 1) == b"\0"
    with server.fork(base, "fork", if_absent=True, size=32 * MiB) as fork:
        assert fork.size == 32 * MiB
        fork.write(0, b"kept")
        with server.fork(base, "fork", if_absent=True, size=32 * MiB) as same:
            assert same.read(0, 4) == b"kept"
        # The block that did not create the fork has not removed it.
        assert fork.read(0, 4) == b"kept"
        with pytest.raises(freestone.ExistsError):
            server.fork(base, "fork", if_absent=True)
    snapshot = server.device("base")
    assert isinstance(snapshot, freestone.Snapshot)
    assert snapshot.origin == "disk"
    with snapshot.fork(publish=False) as unpublished:
        assert unpublished.read(0, 1) == b"b"
    assert snapshot.changes() == []
