//! Opening of zone state with arbitrary content.
//!
//! An input is one byte of options, then the first 80 bytes each of the header and of the two copies of the
//! only group. Options correct the checksums of these parts. Properties:
//! * State that is refused was not written to.
//! * State that is opened has the zones that the reference parser finds, and opening changes no byte.
//! * The zones are usable: a flushed write is kept after reopening.

use std::sync::Arc;

use freestone::device::zoned::{Zone, ZoneCondition, Zoned};
use freestone::device::{Blocking, Device, Flags};
use freestone::zone::{Config, SetupError, StateError, StateLocation, Zones};
use freestone_testkit::Model;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const BLOCK: u64 = 512;
const ZONE: u64 = 16 * BLOCK;
const CAPACITY: u64 = 12 * BLOCK;
const ZONES: usize = 8;
const CONVENTIONAL: usize = 1;
const PART: usize = 80;
const PLACES: [usize; 3] = [0, 4096, 8192];

fn config() -> Config {
    Config {
        zone_size: ZONE,
        zone_capacity: CAPACITY,
        zone_nr_conv: CONVENTIONAL as u32,
        zone_max_open: 3,
        ..Config::default()
    }
}

/// Builds the zone state from an input. Returns None if the input is empty.
fn build(input: &[u8]) -> Option<Vec<u8>> {
    let (&options, parts) = input.split_first()?;
    let mut bytes = vec![0; 3 * 4096];
    for (at, part) in PLACES.into_iter().zip(parts.chunks(PART)) {
        bytes[at..at + part.len()].copy_from_slice(part);
    }
    if options & 1 != 0 {
        let checksum = xxh3_64_with_seed(&bytes[..64], 0);
        bytes[64..72].copy_from_slice(&checksum.to_le_bytes());
    }
    for (copy, bit) in [(1, 2), (2, 4)] {
        if options & bit != 0 {
            let checksum = checksum(&bytes, PLACES[copy]);
            bytes[PLACES[copy] + 8..][..8].copy_from_slice(&checksum.to_le_bytes());
        }
    }
    Some(bytes)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn checksum(bytes: &[u8], at: usize) -> u64 {
    xxh3_64_with_seed(&bytes[at + 16..at + 4096], word(bytes, 56) ^ word(bytes, at).rotate_left(32))
}

/// Reference parser: returns the condition and write pointer of each sequential zone, or None if the state is
/// invalid or belongs to other zones.
fn reference_zones(bytes: &[u8]) -> Option<Vec<(ZoneCondition, u64)>> {
    if bytes[..4096].iter().all(|&byte| byte == 0) {
        return Some(vec![(ZoneCondition::Empty, 0); ZONES - CONVENTIONAL]);
    }
    let halves = |at: usize| (word(bytes, at) as u32, (word(bytes, at) >> 32) as u32);
    let head = bytes.starts_with(b"freestone zones\n")
        && halves(16) == (1, BLOCK as u32)
        && word(bytes, 24) == ZONE * ZONES as u64
        && word(bytes, 32) == ZONE
        && word(bytes, 40) == CAPACITY
        && halves(48) == (ZONES as u32, CONVENTIONAL as u32)
        && word(bytes, 64) == xxh3_64_with_seed(&bytes[..64], 0);
    if !head {
        return None;
    }
    let good = |(copy, at): &(usize, usize)| {
        let sequence = word(bytes, *at);
        word(bytes, at + 8) == checksum(bytes, *at) && sequence % 2 == *copy as u64 && sequence < 1 << 62
    };
    let copies = [(0, PLACES[1]), (1, PLACES[2])].into_iter().filter(good);
    let (_, at) = copies.max_by_key(|(_, at)| word(bytes, *at))?;
    let mark = |zone: usize| {
        let mark = word(bytes, at + 16 + zone * 8);
        let pointer = (mark & ((1 << 41) - 1)) * 512;
        match mark >> 41 {
            0 if pointer == 0 => Some((ZoneCondition::Empty, 0)),
            0 if pointer < CAPACITY => Some((ZoneCondition::Closed, pointer)),
            1 if pointer == CAPACITY || pointer == ZONE => Some((ZoneCondition::Full, pointer)),
            2 if pointer == 0 => Some((ZoneCondition::ReadOnly, 0)),
            3 if pointer == 0 => Some((ZoneCondition::Offline, 0)),
            _ => None,
        }
    };
    // The write pointer marks of conventional zones must be 0.
    let conventional_ok = (0..CONVENTIONAL).all(|zone| word(bytes, at + 16 + zone * 8) == 0);
    (CONVENTIONAL..ZONES).map(mark).collect::<Option<_>>().filter(|_| conventional_ok)
}

fn open(data: &Arc<Model>, state: &Arc<Model>) -> Result<Zones, SetupError> {
    let state = StateLocation::Device(Arc::clone(state) as Arc<dyn Device>);
    Zones::new(Arc::clone(data) as Arc<dyn Device>, config(), state, None)
}

fn rows(zones: &Zones) -> Vec<Zone> {
    let mut rows = Vec::new();
    zones
        .report(0, &mut |row| {
            rows.push(row);
            true
        })
        .expect("zones can be reported");
    rows
}

fn content(device: &Model) -> Vec<u8> {
    let mut bytes = vec![0; device.geometry().size as usize];
    device.read_at(0, &mut bytes).expect("a device without faults");
    bytes
}

/// Checks one input. Returns true if the zone state was opened.
///
/// # Panics
/// Panics if a property does not hold.
pub fn check(input: &[u8]) -> bool {
    let Some(before) = build(input) else { return false };
    let expected = reference_zones(&before);
    let data = Arc::new(Model::new(ZONE as usize * ZONES, BLOCK as u32));
    let state = Arc::new(Model::new(before.len(), BLOCK as u32));
    state.write_at(0, &before, Flags::empty()).expect("a device without faults");
    let zones = match open(&data, &state) {
        Ok(zones) => zones,
        Err(error) => {
            assert!(matches!(&error, SetupError::State(_)), "{error}");
            assert!(!matches!(&error, SetupError::State(StateError::Io(_))), "{error}");
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
            assert!(expected.is_none(), "{text}");
            assert!(content(&state) == before, "{text}, but it was written to");
            return false;
        }
    };
    let expected = expected.expect("the reference parser refuses it");
    let found = rows(&zones);
    for (row, (condition, pointer)) in found[CONVENTIONAL..].iter().zip(&expected) {
        assert_eq!(row.condition, *condition, "{row:?}");
        if *condition == ZoneCondition::Closed {
            assert_eq!(row.write_pointer, row.start + pointer, "{row:?}");
        }
    }
    assert!(before[0] == 0 || content(&state) == before, "opening changed the state");
    // Write one block at the write pointer of the first writable zone.
    let is_writable = |row: &&Zone| matches!(row.condition, ZoneCondition::Empty | ZoneCondition::Closed);
    let written = found[CONVENTIONAL..].iter().find(is_writable).map(|row| {
        zones
            .write_at(row.write_pointer, &[7; BLOCK as usize], Flags::empty())
            .expect("the zone is writable");
        row.start
    });
    zones.flush().expect("a device without faults");
    let now = rows(&zones);
    drop(zones);
    let reopened = rows(&open(&data, &state).expect("the state that it wrote opens"));
    for (before, after) in now.iter().zip(&reopened) {
        let closed = |condition| match condition {
            ZoneCondition::ImplicitOpen | ZoneCondition::ExplicitOpen => ZoneCondition::Closed,
            other => other,
        };
        assert_eq!(closed(before.condition), after.condition, "{before:?} {after:?}");
        assert_eq!(before.write_pointer, after.write_pointer, "{before:?} {after:?}");
        assert!(Some(before.start) != written || after.condition != ZoneCondition::Empty, "{after:?}");
    }
    true
}
