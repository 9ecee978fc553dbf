//! Tests of requests: effect on the image, flags, errors, and changes of the image's size.

use std::fs;
use std::os::unix::fs::FileExt as _;

use freestone_core::device::{Blocking as _, Device as _, Error, Extent, ExtentKind, Flags};

use crate::harness::{Cluster, wait_for};

const SIZE: u64 = 8 << 20;

#[test]
fn written_data_is_in_the_image() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    device.write_at(512, &[7; 1024], Flags::empty()).unwrap();
    device.write_at(SIZE - 512, &[8; 512], Flags::empty()).unwrap();
    device.flush().unwrap();
    let content = fs::read(cluster.file("rbd.vm")).unwrap();
    assert!(content[512..1536] == [7; 1024] && content[SIZE as usize - 512..] == [8; 512]);
    assert!(content[..512] == [0; 512] && content[1536] == 0);
}

#[test]
fn fua_write_is_followed_by_flush() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    device.write_at(0, &[1; 512], Flags::empty()).unwrap();
    assert_eq!(cluster.operations(), ["write 0 512 0"]);
    device.write_at(0, &[2; 512], Flags::FUA).unwrap();
    device.write_zeroes(0, 4096, Flags::FUA).unwrap();
    device.write_zeroes(4096, 4096, Flags::MAY_FREE).unwrap();
    device.discard(0, SIZE).unwrap();
    device.flush().unwrap();
    let all = cluster.operations();
    let rest = [
        "write 0 512 0",
        "flush 0 0 0",
        "zeroes 0 4096 1",
        "flush 0 0 0",
        "zeroes 4096 4096 0",
        "discard 0 8388608 0",
        "flush 0 0 0",
    ];
    assert_eq!(all[1..], rest);
}

#[test]
fn image_ending_within_block_is_fully_accessible() {
    let cluster = Cluster::new(SIZE - 100);
    let device = cluster.open();
    let geometry = device.geometry();
    assert_eq!((geometry.size, geometry.padding), (SIZE, 100));
    device.write_at(SIZE - 1024, &[7; 1024], Flags::FUA).unwrap();
    assert_eq!(cluster.operations()[0], format!("write {} 924 0", SIZE - 1024));
    let mut data = [1; 512];
    device.read_at(SIZE - 512, &mut data).unwrap();
    assert!(data[..412] == [7; 412] && data[412..] == [0; 100]);
    device.write_zeroes(SIZE - 512, 512, Flags::empty()).unwrap();
    device.read_at(SIZE - 512, &mut data).unwrap();
    assert_eq!(data, [0; 512]);
    assert_eq!(device.extents(SIZE - 512, 512, &mut |_| true), Ok(512));
    assert_eq!(fs::metadata(cluster.file("rbd.vm")).unwrap().len(), SIZE - 100);
}

#[test]
fn errors_are_mapped_and_described() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    for (call, errno, error, sentence) in [
        ("write", 28, Error::NoSpace, "a write of 512 bytes at 1024: the cluster or the pool is full"),
        ("write", 122, Error::NoSpace, "full"),
        ("write", 30, Error::ReadOnly, "cannot be written"),
        ("write", 1, Error::Media, "does not allow"),
        ("write", 2, Error::Media, "the image or its pool is gone"),
        ("write", 12, Error::NoMemory, "memory"),
        ("write", 110, Error::Media, "did not answer in time"),
        ("write", 108, Error::Media, "blocklisted"),
        // librbd refuses to start the request.
        ("begin-write", 5, Error::Media, "a write of 512 bytes at 1024"),
    ] {
        cluster.control(&format!("fail {call} {errno}\n"));
        assert_eq!(device.write_at(1024, &[1; 512], Flags::empty()), Err(error), "{call} {errno}");
        let receiver = device.last_error().unwrap();
        assert!(receiver.contains(sentence), "{receiver}");
    }
    cluster.control("fail flush 5\n");
    assert_eq!(device.flush(), Err(Error::Media));
    assert_eq!(device.write_at(0, &[1; 512], Flags::FUA), Err(Error::Media));
    assert_eq!(device.read_at(0, &mut [0; 512]), Ok(()));
    cluster.control("");
    device.write_at(0, &[1; 512], Flags::FUA).unwrap();
}

#[test]
fn device_grows_with_image() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    assert_eq!(device.geometry().size, SIZE);
    cluster.image("rbd.vm", 2 * SIZE);
    wait_for("it grows", || device.geometry().size == 2 * SIZE);
    device.write_at(2 * SIZE - 512, &[3; 512], Flags::empty()).unwrap();
    let mut data = [0; 512];
    device.read_at(2 * SIZE - 512, &mut data).unwrap();
    assert_eq!(data, [3; 512]);
    // The device ignores a new image size that ends within a block.
    cluster.image("rbd.vm", 2 * SIZE + 100);
    cluster.image("rbd.vm", 3 * SIZE);
    wait_for("it grows again", || device.geometry().size == 3 * SIZE);
}

#[test]
fn requests_beyond_shrunk_image_fail() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    cluster.image("rbd.vm", SIZE / 2);
    let end = |device: &freestone_rbd::Rbd| device.read_at(SIZE - 512, &mut [0; 512]);
    wait_for("it is noticed", || {
        end(&device) == Err(Error::Media) && cluster.log().iter().filter(|l| *l == "stat").count() > 1
    });
    assert_eq!(device.geometry().size, SIZE);
    assert_eq!(device.write_at(SIZE / 2 - 512, &[1; 1024], Flags::empty()), Err(Error::Media));
    device.write_at(SIZE / 2 - 512, &[1; 512], Flags::empty()).unwrap();
    let mut kind = None;
    device
        .extents(SIZE - 4096, 4096, &mut |extent| {
            kind = Some(extent.kind);
            true
        })
        .unwrap();
    assert_eq!(kind, Some(ExtentKind::Data));
}

#[test]
fn snapshot_is_read_only_with_old_content() {
    let cluster = Cluster::new(SIZE);
    cluster.image("rbd.vm@monday", SIZE / 2);
    let file = fs::File::options().write(true).open(cluster.file("rbd.vm@monday")).unwrap();
    file.write_all_at(&[9; 512], 4096).unwrap();
    let config = freestone_rbd::Config { snap: Some("monday".into()), ..cluster.config() };
    let device = freestone_rbd::Rbd::open(&config).unwrap();
    let geometry = device.geometry();
    assert!(geometry.read_only && geometry.size == SIZE / 2);
    let mut data = [0; 512];
    device.read_at(4096, &mut data).unwrap();
    assert_eq!(data, [9; 512]);
    assert_eq!(device.write_at(0, &data, Flags::empty()), Err(Error::ReadOnly));
    assert_eq!(cluster.operations(), ["read 4096 512 0"]);
}

#[test]
fn extents_report_holes() {
    let cluster = Cluster::new(SIZE);
    let device = cluster.open();
    device.write_at(2 << 20, &vec![1; 64 << 10], Flags::empty()).unwrap();
    let extents = |offset, len| {
        let mut all = Vec::new();
        let described = device.extents(offset, len, &mut |extent: Extent| {
            all.push((extent.offset, extent.len, extent.kind));
            true
        });
        assert_eq!(described, Ok(len));
        all
    };
    let end = (2 << 20) + (64 << 10);
    let all = [
        (0, 2 << 20, ExtentKind::Hole),
        (2 << 20, 64 << 10, ExtentKind::Data),
        (end, SIZE - end, ExtentKind::Hole),
    ];
    assert_eq!(extents(0, SIZE), all);
    // The query covers whole RADOS objects.
    assert_eq!(extents((2 << 20) + 512, 512), [((2 << 20) + 512, 512, ExtentKind::Data)]);
    assert_eq!(cluster.operations().last().map(String::as_str), Some("diff 2097152 1048576"));
    // If the allocation is unknown, the range is reported as data.
    cluster.control("fail diff 95\n");
    assert_eq!(extents(0, SIZE), [(0, SIZE, ExtentKind::Data)]);
}
