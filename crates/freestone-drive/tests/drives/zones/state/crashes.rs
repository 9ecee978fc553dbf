//! Crashes at any moment, over disks that record the order of requests.

use std::sync::Arc;

use freestone_core::device::zoned::{ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{Blocking, Flags, Op};
use freestone_core::sync::Mutex;
use freestone_drive::zone::{StateLocation, Zones};
use freestone_testkit::{Model, Rng, TestDevice, scaled};

use super::{BLOCK, SIZE, STATE_BYTES, ZONE, ZONES, config, content, model_of, rows};

#[derive(Debug, Clone)]
enum Event {
    Write {
        disk: usize,
        offset: usize,
        data: Vec<u8>,
    },
    Flush {
        disk: usize,
    },
    /// From here on, a crash keeps the zone at this generation or a later one, with at least this
    /// number of blocks.
    Durable {
        zone: usize,
        generation: u64,
        blocks: u64,
    },
    /// From here on, the zone is offline after a crash.
    Offline {
        zone: usize,
    },
}

#[derive(Default)]
struct Log(Mutex<Vec<Event>>);

/// A disk that adds each of its writes and flushes to the log.
fn logging(number: usize, size: u64, log: &Arc<Log>) -> Arc<TestDevice> {
    let log = Arc::clone(log);
    let disk = TestDevice::over(Arc::new(Model::new(size as usize, BLOCK as u32)))
        .shaped(|geometry| (geometry.volatile_cache, geometry.volatile_media) = (true, false))
        .on_done(move |request, data| {
            let data = match request.op {
                Op::Write => data.to_vec(),
                Op::WriteZeroes => vec![0; request.len as usize],
                Op::Flush => return log.0.lock().push(Event::Flush { disk: number }),
                Op::Read | Op::Discard => return,
            };
            log.0.lock().push(Event::Write { disk: number, offset: request.offset as usize, data });
            assert!(!request.flags.contains(Flags::FUA), "with a state file FUA is a flush");
        });
    Arc::new(disk)
}

/// Returns the content of a disk after a crash at the end of the log: all flushed writes, and some
/// sectors of the other writes in any order.
fn image(log: &[Event], disk: usize, size: u64, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0; size as usize];
    let flushed = log.iter().rposition(|event| matches!(event, Event::Flush { disk: of } if *of == disk));
    let mut loose = Vec::new();
    for (at, event) in log.iter().enumerate() {
        if let Event::Write { disk: of, offset, data } = event
            && *of == disk
        {
            for (nth, sector) in data.chunks(512).enumerate() {
                let offset = offset + nth * 512;
                if flushed.is_some_and(|flushed| at < flushed) {
                    bytes[offset..offset + 512].copy_from_slice(sector);
                } else {
                    loose.push((offset, sector));
                }
            }
        }
    }
    // A random part of the unflushed writes survives, from none to all of them, and these are
    // applied in another order.
    let percent = rng.below(101) as u8;
    for at in (1..loose.len()).rev() {
        if rng.chance(50) {
            loose.swap(at, rng.below(at as u64 + 1) as usize);
        }
    }
    for (offset, sector) in loose {
        if rng.chance(percent) {
            bytes[offset..offset + 512].copy_from_slice(sector);
        }
    }
    bytes
}

/// Runs random operations on zones. Their data is on disk 0, and their state is on disk 1.
fn work(log: &Arc<Log>, seed: u64, rounds: u64) {
    let disk = |number, size| logging(number, size, log);
    let zones =
        Zones::new(disk(0, SIZE), config(), StateLocation::Device(disk(1, STATE_BYTES)), None).unwrap();
    let mut rng = Rng::new(seed);
    let mut generations = [1_u64; ZONES as usize];
    let mut written = [0_u64; ZONES as usize];
    let note = |event| log.0.lock().push(event);
    for _ in 0..rounds {
        let zone = rng.below(ZONES);
        let at = zone as usize;
        let start = zone * ZONE;
        let durable = |at: usize, generations: &[u64], written: &[u64]| Event::Durable {
            zone: at,
            generation: generations[at],
            blocks: written[at],
        };
        match rng.below(20) {
            0..=11 => {
                let blocks = 1 + rng.below(3);
                let data: Vec<u8> =
                    (0..blocks).flat_map(|nth| content(zone, generations[at], written[at] + nth)).collect();
                let flags = if rng.chance(20) { Flags::FUA } else { Flags::empty() };
                if zones.write_at(start + written[at] * BLOCK, &data, flags).is_ok() {
                    written[at] += blocks;
                    if flags == Flags::FUA {
                        note(durable(at, &generations, &written));
                    }
                }
            }
            12..=14 => {
                zones.flush().unwrap();
                for at in 0..ZONES as usize {
                    note(durable(at, &generations, &written));
                }
            }
            15..=17 => {
                // Writes after the reset belong to the next generation.
                if zones.zone_op(ZoneOp::Reset, start).is_ok() {
                    (generations[at], written[at]) = (generations[at] + 1, 0);
                    note(durable(at, &generations, &written));
                }
            }
            18 => {
                if zones.zone_op(ZoneOp::Finish, start).is_ok() {
                    note(durable(at, &generations, &written));
                }
            }
            _ if rng.chance(20) && zone == 0 => {
                zones.set_offline(start).unwrap();
                if rows(&zones)[0].condition == ZoneCondition::Offline {
                    note(Event::Offline { zone: at });
                } else {
                    (generations[at], written[at]) = (generations[at] + 1, 0);
                    note(durable(at, &generations, &written));
                }
            }
            _ => drop(zones.zone_op(ZoneOp::Close, start)),
        }
    }
}

/// Opens the disks after a crash at the end of the log. Checks the zones against the events in the
/// log.
fn check(log: &[Event], seed: u64) {
    let context = format!("a crash after {} events, seed {seed}", log.len());
    let mut rng = Rng::new(seed ^ log.len() as u64);
    let data = image(log, 0, SIZE, &mut rng);
    let state = image(log, 1, STATE_BYTES, &mut rng);
    let zones = Zones::new(model_of(&data), config(), StateLocation::Device(model_of(&state)), None);
    let zones = zones.unwrap_or_else(|error| panic!("{context}: {error}"));
    let mut known = [Some((0, 0)); ZONES as usize];
    for event in log {
        match *event {
            Event::Durable { zone, generation, blocks } => known[zone] = Some((generation, blocks)),
            Event::Offline { zone } => known[zone] = None,
            _ => {}
        }
    }
    for (zone, row) in (0..ZONES).zip(rows(&zones)) {
        let context = format!("{context}: {row:?}, known {:?}", known[zone as usize]);
        let condition = row.condition;
        assert!(!matches!(condition, ZoneCondition::ImplicitOpen | ZoneCondition::ExplicitOpen), "{context}");
        if condition == ZoneCondition::Offline {
            assert_eq!(zone, 0, "{context}");
            continue;
        }
        let Some((generation, blocks)) = known[zone as usize] else {
            // The zone was offline. A call that makes it empty again may have run although the log
            // does not contain its completion yet.
            assert_eq!(condition, ZoneCondition::Empty, "{context}");
            continue;
        };
        let mut pointer = (row.write_pointer - row.start) / BLOCK;
        let finished = condition == ZoneCondition::Full && pointer == ZONE / BLOCK;
        let first =
            if pointer == 0 { &[][..] } else { &data[row.start as usize..(row.start + BLOCK) as usize] };
        let word = first.first_chunk::<8>().map_or(0, |word| u64::from_le_bytes(*word));
        if finished {
            // The write pointer of a finished zone does not show the end of its data. The data ends
            // at the first block of zeroes.
            let block =
                |at: u64| &data[(row.start + at * BLOCK) as usize..(row.start + (at + 1) * BLOCK) as usize];
            pointer = (0..pointer).find(|&at| block(at).iter().all(|&byte| byte == 0)).unwrap_or(pointer);
            assert!((pointer..ZONE / BLOCK).all(|at| block(at).iter().all(|&byte| byte == 0)), "{context}");
        }
        let found = word >> 16 & 0xFFFF_FFFF;
        if pointer > 0 {
            let expected: Vec<u8> = (0..pointer).flat_map(|at| content(zone, found, at)).collect();
            let mut bytes = vec![0; expected.len()];
            zones.read_at(row.start, &mut bytes).unwrap();
            assert!(bytes == expected, "{context}: the write pointer exceeds the data");
            assert!(found >= generation, "{context}: data of generation {found} has come back");
        }
        if pointer == 0 || found > generation {
            // The zone was reset and has a later generation. A reset must have started since, or no
            // durable data was lost.
            let begun = log
                .iter()
                .rev()
                .take_while(|event| !matches!(event, Event::Durable { zone: of, .. } if *of as u64 == zone));
            let reset = begun.into_iter().any(|event| matches!(event, Event::Write { disk: 1, .. }));
            assert!(blocks == 0 || reset || finished, "{context}: lost");
        } else {
            assert!(pointer >= blocks, "{context}: blocks that were durable are lost");
        }
    }
    // All zones are still usable after the crash.
    for row in rows(&zones) {
        if row.condition == ZoneCondition::Closed {
            zones.write_at(row.write_pointer, &content(9, 9, 9), Flags::FUA).unwrap();
        }
    }
}

#[test]
fn crash_at_any_moment_keeps_durable_data() {
    for seed in 1..=scaled(12).max(2) {
        let log = Arc::new(Log::default());
        work(&log, seed, 150);
        let log = log.0.lock().clone();
        // Until the state is complete on disk, an open creates it again or refuses it. From then on
        // it must be valid.
        let made =
            log.iter().enumerate().filter(|(_, event)| matches!(event, Event::Flush { disk: 1 })).nth(1);
        for events in made.unwrap().0 + 1..=log.len() {
            for round in 0..2 {
                check(&log[..events], seed * 100 + round);
            }
        }
    }
}

#[test]
fn crash_during_creation_of_the_state() {
    let log = Arc::new(Log::default());
    work(&log, 1, 0);
    let log = log.0.lock().clone();
    for events in 0..=log.len() {
        for seed in 0..50 {
            let mut rng = Rng::new(seed);
            let state = image(&log[..events], 1, STATE_BYTES, &mut rng);
            let memory = model_of(&vec![0; SIZE as usize]);
            let zones = Zones::new(memory, config(), StateLocation::Device(model_of(&state)), None).unwrap();
            assert_eq!(u64::from(zones.counts().empty), ZONES);
        }
    }
}
