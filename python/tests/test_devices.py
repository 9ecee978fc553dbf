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
