//! Simulated power cuts of zoned devices, and their extents.

use std::sync::Arc;

use freestone_core::device::zoned::{ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{Blocking, Device, Error, ExtentKind, Flags};
use freestone_drive::null::{self, Memory};
use freestone_drive::power::{self, Power};
use freestone_drive::zone::{StateLocation, Zones};
use freestone_testkit::{Rng, scaled};

use super::{BLOCK, BLOCKS, SIZE, STATE_BYTES, ZONE, ZONES, config, content, model_of, rows};

#[test]
fn power_cuts() {
    let mut pointers_in_between = 0;
    for seed in 0..scaled(200) {
        let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
        let power = Arc::new(Power::new(memory, power::Config::default()).unwrap());
        let state = (seed % 2 == 1).then(|| model_of(&vec![0; STATE_BYTES as usize]));
        let state = state.map_or(StateLocation::Volatile, StateLocation::Device);
        let zones = Zones::new(Arc::clone(&power) as _, config(), state, None).unwrap();
        let mut rng = Rng::new(seed);
        for generation in 1..4 {
            let before = rows(&zones);
            let mut durable = [0; ZONES as usize];
            let mut written: Vec<u64> =
                before.iter().map(|row| (row.write_pointer - row.start) / BLOCK).collect();
            durable.copy_from_slice(&written);
            for _ in 0..40 {
                let zone = rng.below(ZONES);
                let at = zone as usize;
                if written[at] < BLOCKS {
                    let flags = if rng.chance(10) { Flags::FUA } else { Flags::empty() };
                    let data = content(zone, 1, written[at]);
                    zones.write_at(zone * ZONE + written[at] * BLOCK, &data, flags).unwrap();
                    written[at] += 1;
                    if flags == Flags::FUA {
                        durable[at] = written[at];
                    }
                }
                if rng.chance(5) {
                    zones.flush().unwrap();
                    durable.copy_from_slice(&written);
                }
            }
            zones.power_cut(&power, seed * 7 + generation).unwrap();
            for (at, row) in rows(&zones).iter().enumerate() {
                let pointer = (row.write_pointer - row.start) / BLOCK;
                assert!((durable[at]..=written[at]).contains(&pointer), "seed {seed}: {row:?}");
                pointers_in_between += u64::from(pointer > durable[at] && pointer < written[at]);
                let expected = match pointer {
                    0 => ZoneCondition::Empty,
                    BLOCKS => ZoneCondition::Full,
                    _ => ZoneCondition::Closed,
                };
                assert_eq!(row.condition, expected, "seed {seed}: {row:?}");
                let mut found = vec![0; ZONE as usize];
                zones.read_at(row.start, &mut found).unwrap();
                let data: Vec<u8> = (0..pointer).flat_map(|nth| content(at as u64, 1, nth)).collect();
                assert!(found.starts_with(&data), "seed {seed}: {row:?} exceeds the data");
                assert!(found[data.len()..].iter().all(|&byte| byte == 0xFF), "seed {seed}");
            }
        }
    }
    assert!(pointers_in_between > 10);
}

#[test]
fn same_seed_cuts_the_same() {
    let run = |seed| {
        let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
        let power = Arc::new(Power::new(memory, power::Config::default()).unwrap());
        let zones = Zones::new(Arc::clone(&power) as _, config(), StateLocation::Volatile, None).unwrap();
        zones.write_at(0, &vec![5; BLOCK as usize], Flags::empty()).unwrap();
        zones.zone_op(ZoneOp::Finish, 0).unwrap();
        for zone in 1..ZONES {
            zones.write_at(zone * ZONE, &vec![5; 10 * BLOCK as usize], Flags::empty()).unwrap();
        }
        zones.power_cut(&power, seed).unwrap();
        let rows = rows(&zones);
        // A finished zone survives the power cut, whatever the seed.
        assert_eq!((rows[0].condition, rows[0].write_pointer), (ZoneCondition::Full, ZONE));
        rows
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn extents_beyond_a_write_pointer_are_data() {
    let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
    let zones = Zones::new(memory, config(), StateLocation::Volatile, None).unwrap();
    zones.write_zeroes(0, BLOCK, Flags::MAY_FREE).unwrap();
    let mut kinds = Vec::new();
    zones
        .extents(0, ZONE, &mut |row| {
            kinds.push((row.offset, row.kind == ExtentKind::Data));
            true
        })
        .unwrap();
    assert_eq!(kinds, [(0, false), (BLOCK, true)]);
    assert_eq!(zones.extents(0, SIZE + BLOCK, &mut |_| true), Err(Error::OutOfRange));
}
