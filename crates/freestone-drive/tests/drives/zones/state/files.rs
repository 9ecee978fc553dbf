//! State in files and on devices: restarts, and state that is refused.

use std::fs;
use std::sync::Arc;

use freestone_core::device::zoned::{ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{Blocking, Device, Error, Flags};
use freestone_drive::null::{self, Memory};
use freestone_drive::zone::{Config, SetupError, StateError, StateLocation, Zones};
use freestone_image::file::{self, File};

use super::{SIZE, STATE_BYTES, config, model_of, rows};

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }
    fn state(&self) -> std::path::PathBuf {
        self.dir.path().join("disk.zones")
    }
    fn open(&self, config: Config) -> std::result::Result<Zones, SetupError> {
        let path = self.dir.path().join("disk");
        let size = 8 << 20;
        let file = File::open(&file::Config { size: Some(size), ..file::Config::new(path) }).unwrap();
        Zones::new(Arc::new(file), config, StateLocation::File(&self.state()), None)
    }
}

fn file_config() -> Config {
    Config { zone_size: 1 << 20, zone_nr_conv: 1, ..Config::default() }
}

#[test]
fn restart_restores_all_zones() {
    use ZoneCondition::{Closed, Empty, Full, NotWritePointer, Offline, ReadOnly};
    let place = Place::new();
    let data = vec![7; 64 << 10];
    {
        let zones = place.open(file_config()).unwrap();
        assert!(!zones.geometry().volatile_media && zones.geometry().volatile_cache);
        for zone in 1..7 {
            zones.write_at(zone << 20, &data, Flags::empty()).unwrap();
        }
        zones.zone_op(ZoneOp::Finish, 2 << 20).unwrap();
        zones.zone_op(ZoneOp::Open, 3 << 20).unwrap();
        zones.zone_op(ZoneOp::Reset, 4 << 20).unwrap();
        zones.set_read_only(5 << 20).unwrap();
        zones.set_offline(6 << 20).unwrap();
        zones.zone_op(ZoneOp::Open, 7 << 20).unwrap();
    }
    let zones = place.open(file_config()).unwrap();
    let conditions: Vec<_> = rows(&zones).iter().map(|row| row.condition).collect();
    assert_eq!(conditions, [NotWritePointer, Closed, Full, Closed, Empty, ReadOnly, Offline, Empty]);
    let mut found = vec![0; data.len()];
    for zone in [1, 2, 3, 5] {
        zones.read_at(zone << 20, &mut found).unwrap();
        assert!(found == data, "zone {zone}");
    }
    zones.read_at(4 << 20, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 0xFF));
    zones.write_at((1 << 20) + (64 << 10), &data, Flags::FUA).unwrap();
    zones.wipe().unwrap();
    drop(zones);
    let zones = place.open(file_config()).unwrap();
    assert_eq!(zones.counts().empty, 7);
}

#[test]
fn mismatched_or_damaged_state_is_refused() {
    let place = Place::new();
    drop(place.open(file_config()).unwrap());
    let good = fs::read(place.state()).unwrap();
    let refused = |what: &str, config: Config, expected: &dyn Fn(&StateError) -> bool| {
        let before = fs::read(place.state()).unwrap();
        match place.open(config) {
            Err(SetupError::State(error)) => assert!(expected(&error), "{what}: {error}"),
            other => panic!("{what}: {other:?}"),
        }
        assert!(fs::read(place.state()).unwrap() == before, "{what}: the file was changed");
    };
    let other_size = Config { zone_size: 2 << 20, ..file_config() };
    refused("zone_size", other_size, &|error| {
        matches!(error, StateError::Geometry { what: "zone_size", .. })
    });
    let capacity = Config { zone_capacity: 1 << 19, ..file_config() };
    refused("capacity", capacity, &|error| {
        matches!(error, StateError::Geometry { what: "zone_capacity", .. })
    });
    let conventional = Config { zone_nr_conv: 2, ..file_config() };
    refused("conventional", conventional, &|error| {
        matches!(error, StateError::Geometry { what: "zone_nr_conv", .. })
    });

    let change = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] ^= byte;
        fs::write(place.state(), bytes).unwrap();
    };
    change(0, 1);
    refused("magic", file_config(), &|error| matches!(error, StateError::Foreign));
    change(16, 2);
    refused("a newer version", file_config(), &|error| matches!(error, StateError::Newer(3)));
    change(24, 1);
    refused("header", file_config(), &|error| matches!(error, StateError::Damaged(_)));
    fs::write(place.state(), vec![b'x'; good.len()]).unwrap();
    refused("another file", file_config(), &|error| matches!(error, StateError::Foreign));
    fs::write(place.state(), b"").unwrap();
    refused("an empty file", file_config(), &|error| matches!(error, StateError::Foreign));
    fs::write(place.state(), &good[..good.len() - 1]).unwrap();
    refused("a short file", file_config(), &|error| matches!(error, StateError::Damaged(_)));
    // A crash can leave one bad copy of the state. Two bad copies mean damage.
    for (copies, bad) in [(&[4096][..], false), (&[8192][..], false), (&[4096, 8192][..], true)] {
        let mut bytes = good.clone();
        for copy in copies {
            bytes[copy + 100] ^= 1;
        }
        fs::write(place.state(), bytes).unwrap();
        if bad {
            refused("both copies", file_config(), &|error| matches!(error, StateError::Damaged(_)));
        } else {
            drop(place.open(file_config()).unwrap());
        }
    }
    // A state file with one of its two copies from another file.
    let other = Place::new();
    drop(other.open(file_config()).unwrap());
    let mut bytes = good.clone();
    bytes[4096..].copy_from_slice(&fs::read(other.state()).unwrap()[4096..]);
    fs::write(place.state(), bytes).unwrap();
    refused("another file's copies", file_config(), &|error| matches!(error, StateError::Damaged(_)));

    // Only one device at a time may use a state file.
    fs::write(place.state(), &good).unwrap();
    let small = || Arc::new(Memory::new(null::Config::plain(8 << 20, 512)).unwrap());
    let first = Zones::new(small(), file_config(), StateLocation::File(&place.state()), None).map(drop);
    assert!(first.is_ok() || matches!(first, Err(SetupError::State(StateError::Geometry { .. }))));
    let zones = place.open(file_config()).unwrap();
    let second = Zones::new(
        Arc::new(Memory::new(null::Config::plain(8 << 20, zones.geometry().logical_block)).unwrap()),
        file_config(),
        StateLocation::File(&place.state()),
        None,
    );
    assert!(matches!(second, Err(SetupError::State(StateError::InUse))), "{second:?}");
    // Makes four zones active, one more than the limit of the next open.
    for zone in 1..5 {
        zones.write_at(zone << 20, &[1; 4096], Flags::empty()).unwrap();
    }
    drop(zones);
    // As after a crash between two parts of a flush, more zones are active than allowed. These
    // zones can continue, but no other zone can become active.
    let limited = Config { zone_max_active: 3, ..file_config() };
    let zones = place.open(limited).unwrap();
    assert_eq!(zones.counts().active(), 4);
    assert_eq!(zones.write_at(6 << 20, &[1; 4096], Flags::empty()), Err(Error::ZoneTooManyActive));
    zones.write_at((1 << 20) + 4096, &[1; 4096], Flags::empty()).unwrap();
    zones.zone_op(ZoneOp::Reset, 2 << 20).unwrap();
    zones.zone_op(ZoneOp::Finish, 3 << 20).unwrap();
    zones.write_at(6 << 20, &[1; 4096], Flags::empty()).unwrap();
}

#[test]
fn too_small_state_device_is_refused() {
    let zones = Zones::new(
        model_of(&vec![0; SIZE as usize]),
        config(),
        StateLocation::Device(model_of(&vec![0; 4096])),
        None,
    );
    assert!(matches!(
        zones,
        Err(SetupError::State(StateError::TooSmall { needed: STATE_BYTES, size: 4096 }))
    ));
}
