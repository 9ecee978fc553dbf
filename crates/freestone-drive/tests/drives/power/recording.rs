//! The log of recorded writes: format, marks, points in time, and errors.

use std::path::Path;
use std::sync::Arc;

use freestone_core::device::{Blocking, Device, Error, Flags, Op};
use freestone_drive::power::log::{self, Reader, Writer};
use freestone_drive::power::{Config, Point, Power, RecordError};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng};

use crate::power::model::filled;

const SIZE: usize = 1 << 20;

fn recorded(path: &Path) -> (Arc<Model>, Power) {
    let model = Arc::new(Model::new(SIZE, 512));
    let config = Config { record: Some(Writer::create(path).unwrap()), ..Config::default() };
    (model.clone(), Power::new(model, config).unwrap())
}

fn all(device: &dyn Device) -> Vec<u8> {
    let mut data = vec![0; SIZE];
    device.read_at(0, &mut data).unwrap();
    data
}

/// Returns sector, number of sectors, flags, text and data of each entry. Parses the kernel's
/// dm-log-writes structures without the reader of this crate.
fn parse(bytes: &[u8]) -> Vec<(u64, u64, u64, String, Vec<u8>)> {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(word(0), 0x006a_7366_7773_6872);
    assert_eq!(word(8), 1);
    let count = word(16);
    let sector = u32::from_le_bytes(bytes[24..28].try_into().unwrap()) as usize;
    let mut at = sector;
    let mut entries = Vec::new();
    for _ in 0..count {
        let (first, sectors, flags, len) = (word(at), word(at + 8), word(at + 16), word(at + 24) as usize);
        let text = String::from_utf8(bytes[at + 32..at + 32 + len].to_vec()).unwrap();
        assert!(bytes[at + 32 + len..at + sector].iter().all(|&byte| byte == 0), "padding");
        at += sector;
        let data = if flags & 4 == 0 { sectors as usize * sector } else { 0 };
        entries.push((first, sectors, flags, text, bytes[at..at + data].to_vec()));
        at += data;
    }
    assert_eq!(at, bytes.len(), "the file ends with its last entry");
    entries
}

#[test]
fn every_entry_has_the_kernels_format() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let (_, device) = recorded(&path);
    device.write_at(512, &filled(1, 3), Flags::empty()).unwrap();
    device.write_at(4096, &filled(9, 1), Flags::FUA).unwrap();
    device.discard(8192, 1024).unwrap();
    device.write_zeroes(512, 512, Flags::empty()).unwrap();
    device.flush().unwrap();
    assert_eq!(device.mark("commit 17 acknowledged").unwrap(), 6);
    let longest = "x".repeat(512 - 33);
    assert_eq!(device.mark(&longest).unwrap(), 7);
    for bad in ["", "a\0b", &format!("{longest}x")] {
        assert!(matches!(device.mark(bad), Err(RecordError::BadMark { max: 479 })), "{bad:?}");
    }
    let status = device.recording().unwrap();
    assert_eq!((status.entries, status.bytes, status.stopped), (7, 13 * 512, None));
    // The file is read while the device still has it open, as after SIGKILL. The header of the file
    // is already correct.
    let entries = parse(&std::fs::read(&path).unwrap());
    let none = Vec::new;
    let expected = [
        (1, 3, 0, String::new(), filled(1, 3)),
        (8, 1, 2, String::new(), filled(9, 1)),
        (16, 2, 4, String::new(), none()),
        (1, 1, 0, String::new(), vec![0; 512]),
        (0, 0, 1, String::new(), none()),
        (0, 0, 8, "commit 17 acknowledged".into(), none()),
        (0, 0, 8, longest, none()),
    ];
    assert_eq!(entries, expected);
}

#[test]
fn long_ranges_are_split_for_replay_tools() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let model = Arc::new(Model::new(300 << 20, 4096));
    let config = Config { record: Some(Writer::create(&path).unwrap()), ..Config::default() };
    let device = Power::new(model, config).unwrap();
    device.discard(0, 300 << 20).unwrap();
    device.write_zeroes(4096, 20 << 20, Flags::empty()).unwrap();
    drop(device);
    let mut reader = Reader::open(&path).unwrap();
    let mut seen = Vec::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        if !entry.is_flush() {
            seen.push((entry.offset, entry.len, entry.is_discard()));
        }
    }
    let mib = 1 << 20;
    let expected = [
        (0, 128 * mib, true),
        (128 * mib, 128 * mib, true),
        (256 * mib, 44 * mib, true),
        (4096, 8 * mib, false),
        (4096 + 8 * mib, 8 * mib, false),
        (4096 + 16 * mib, 4 * mib, false),
    ];
    assert_eq!(seen, expected);
    let used = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap()) * 512;
    assert!(used < 1 << 20, "zeroes take {used} bytes of disk");
}

#[test]
fn write_during_a_flush_is_logged_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let disk = Arc::new(FaultyDisk::new(SIZE, 512));
    let config = Config { record: Some(Writer::create(&path).unwrap()), ..Config::default() };
    let device = Arc::new(Power::new(disk.clone(), config).unwrap());
    disk.fault(Some(Op::Flush), FaultSchedule::Always, FaultEffect::Hang);
    device.write_at(0, &filled(1, 1), Flags::empty()).unwrap();
    let flush = {
        let device = Arc::clone(&device);
        std::thread::spawn(move || device.flush())
    };
    disk.wait_held(1);
    device.write_at(512, &filled(2, 1), Flags::empty()).unwrap();
    disk.heal();
    flush.join().unwrap().unwrap();
    disk.fault(
        Some(Op::Flush),
        FaultSchedule::Always,
        FaultEffect::Fail(freestone_core::device::Error::Media),
    );
    device.flush().unwrap_err();
    disk.heal();
    device.mark("end").unwrap();
    let entries = parse(&std::fs::read(&path).unwrap());
    let flags: Vec<_> = entries.iter().map(|entry| (entry.0, entry.2)).collect();
    assert_eq!(flags, [(0, 0), (0, 1), (1, 0), (0, 8)], "and a failed flush stands nowhere");
}

/// If a cut fails and the result of a write during the cut is unknown, replaying the log still
/// gives the device's content.
#[test]
fn failed_cut_is_recorded_with_its_result() {
    use freestone_core::device::Error;
    for what in [FaultEffect::Fail(Error::Media), FaultEffect::FailDone(Error::Media), FaultEffect::Tear] {
        let mut errors = 0;
        for seed in 0..20 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("log");
            let disk = Arc::new(FaultyDisk::new(SIZE, 512));
            let config = Config { record: Some(Writer::create(&path).unwrap()), ..Config::default() };
            let device = Power::new(disk.clone(), config).unwrap();
            for at in (0..64).step_by(3) {
                device.write_at(at * 512, &filled(at + 1, 2), Flags::empty()).unwrap();
            }
            disk.fault(Some(Op::Write), FaultSchedule::At(disk.counts().writes + seed % 4), what);
            errors += u32::from(device.cut(seed).is_err());
            disk.heal();
            device.mark("end").unwrap();
            let mut reader = Reader::open(&path).unwrap();
            let entries = reader.entries();
            let replayed = Model::new(SIZE, 512);
            log::replay(&mut reader, entries, &replayed).unwrap();
            assert!(all(&replayed) == all(&device), "{what:?}, seed {seed}: the log tells another story");
        }
        assert!(errors > 10, "{what:?}: {errors} cuts failed");
    }
}

#[test]
fn every_point_can_be_visited_with_or_without_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let (model, device) = recorded(&path);
    let mut rng = Rng::new(4);
    let mut states = vec![all(&device)];
    for step in 0..60 {
        let at = rng.below(40) * 512;
        match rng.below(8) {
            0 => device.flush().unwrap(),
            1 => device.write_zeroes(at, 2048, Flags::empty()).unwrap(),
            2 => device.write_at(at, &filled(step * 100, 5), Flags::FUA).unwrap(),
            3 => drop(device.mark(&format!("step {step}")).unwrap()),
            _ => device.write_at(at, &filled(step * 100, 9), Flags::empty()).unwrap(),
        }
        states.push(all(&device));
    }
    device.mark("end").unwrap();
    let mut reader = Reader::open(&path).unwrap();
    assert_eq!(reader.entries(), 61);

    let epochs = reader.epochs().unwrap();
    assert_eq!(epochs.iter().map(|epoch| epoch.entries.end - epoch.entries.start).sum::<u64>(), 61);
    let mut outcomes = [0; 2];
    for epoch in &epochs {
        for point in epoch.points() {
            let fresh = Model::new(SIZE, 512);
            log::replay(&mut reader, point, &fresh).unwrap();
            let whole = &states[point.min(60) as usize];
            assert_eq!(&all(&fresh), whole, "point {point}");

            // Each unit has its content at some moment between the last flush and the point. If the
            // point is at a flush, there is only one such content.
            let flushed = if epoch.entries.end == point && point < 61 { point } else { epoch.entries.start };
            let between = &states[flushed as usize..=point.min(60) as usize];
            for unit in [512, 4096] {
                let again = Model::new(SIZE, 512);
                let cut = log::replay_cut(&mut reader, point, (point, unit as u64), &again).unwrap();
                outcomes[0] += cut.kept_blocks;
                outcomes[1] += cut.lost_blocks;
                for (at, found) in all(&again).chunks(unit).enumerate() {
                    let range = at * unit..(at + 1) * unit;
                    assert!(between.iter().any(|state| &state[range.clone()] == found), "{point}: unit {at}");
                }
            }
        }
    }
    assert!(outcomes.iter().all(|&count| count > 100), "{outcomes:?}");
    assert!(matches!(
        log::replay(&mut reader, 62, &*model),
        Err(log::Error::NoEntry { asked: 62, entries: 61 })
    ));

    // The device can visit recorded points forwards and backwards.
    let wipe = || model.write_zeroes(0, SIZE as u64, Flags::empty());
    let missing = device.visit(&Point::Mark("step 1000".into()), None, &wipe).unwrap_err();
    assert_eq!(missing.to_string(), "the log has no mark \"step 1000\"");
    assert_eq!(all(&device), states[60], "nothing happened");
    assert_eq!(device.recording().unwrap().stopped, None);
    for point in [30, 7, 60] {
        let visited = device.visit(&Point::Entry(point), None, &wipe).unwrap();
        assert_eq!((visited.entries, visited.cut), (point, None));
        assert_eq!(all(&device), states[point as usize]);
    }
    device.visit(&Point::Mark("end".into()), Some(3), &wipe).unwrap();
    // A visit ends the recording, so a later mark is refused.
    device.write_at(0, &filled(1, 1), Flags::empty()).unwrap();
    assert!(matches!(device.mark("late"), Err(RecordError::Stopped(_))));
    assert_eq!(Reader::open(&path).unwrap().entries(), 61);
}

/// Returns a power layer over `below` that has recorded two flushed writes to `path`.
fn with_two_writes(below: Arc<FaultyDisk>, path: &Path) -> Power {
    let config = Config { record: Some(Writer::create(path).unwrap()), ..Config::default() };
    let device = Power::new(below, config).unwrap();
    for sector in [1, 2] {
        device.write_at(sector * 512, &filled(sector, 1), Flags::empty()).unwrap();
        device.flush().unwrap();
    }
    device.mark("end").unwrap();
    device
}

#[test]
fn failed_visit_keeps_the_power_off() {
    let folder = tempfile::tempdir().unwrap();
    let below = Arc::new(FaultyDisk::new(SIZE, 512));
    let device = with_two_writes(below.clone(), &folder.path().join("log"));
    let whole = all(&device);
    let wipe = || below.write_zeroes(0, SIZE as u64, Flags::MAY_FREE);
    let fail = || {
        below.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        let failed = device.visit(&Point::Mark("end".into()), None, &wipe).unwrap_err();
        below.heal();
        assert!(matches!(failed, RecordError::HalfSetBack(_)), "{failed}");
        assert!(
            failed.to_string().starts_with("the power stays off, since the device is only partly restored: ")
        );
        assert!(device.is_partly_restored());
        // Neither cancelling a cut, failing held requests nor another cut turns the power on again.
        device.cancel_cut();
        device.fail_held_requests();
        device.cancel_cut();
        assert_eq!(device.cut(1), Err(Error::Media));
        assert_eq!(device.read_at(0, &mut [0; 512]), Err(Error::Gone));
        assert_eq!(device.write_at(0, &[1; 512], Flags::empty()), Err(Error::Gone));
    };
    fail();
    device.visit(&Point::Mark("end".into()), None, &wipe).unwrap();
    assert!(!device.is_partly_restored());
    assert_eq!(all(&device), whole);
    fail();
    device.reset(&wipe).unwrap();
    assert_eq!(all(&device), vec![0; SIZE]);
    fail();
    let unwiped = device.visit(&Point::Entry(0), None, &|| Err(Error::NoMemory)).unwrap_err();
    assert!(matches!(unwiped, RecordError::HalfSetBack(_)), "{unwiped}");
    assert_eq!(device.read_at(0, &mut [0; 512]), Err(Error::Gone));
}

#[test]
fn damaged_log_is_refused_before_the_first_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let below = Arc::new(FaultyDisk::new(SIZE, 512));
    let device = with_two_writes(below, &path);
    let whole = all(&device);
    let good = std::fs::read(&path).unwrap();
    let never = || -> freestone_core::device::Result<()> { panic!("nothing may be set back") };
    // Damaged logs: one is truncated inside the second write. In another one, the second write (to
    // sector 2) is moved beyond the end of the device.
    let second = 512 * 4;
    assert_eq!(good[second..second + 8], 2_u64.to_le_bytes());
    let mut beyond = good.clone();
    beyond[second..second + 8].copy_from_slice(&(SIZE as u64 / 512).to_le_bytes());
    for bad in [&good[..second + 600], &beyond] {
        std::fs::write(&path, bad).unwrap();
        for cut in [None, Some(1)] {
            let refused = device.visit(&Point::Entry(4), cut, &never).unwrap_err();
            assert!(matches!(refused, RecordError::Log(_)), "{refused}");
        }
        assert_eq!(all(&device), whole);
    }
    assert_eq!(device.recording().unwrap().stopped, None);
}

#[test]
fn interrupted_log_creation_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let entries = || std::fs::read_dir(folder.path()).unwrap().count();
    let writer = Writer::create(&path).unwrap();
    assert_eq!(entries(), 0, "a log without its head has no name");
    drop(writer);
    let model = Arc::new(Model::new(SIZE, 512));
    let (first, second) = (Writer::create(&path).unwrap(), Writer::create(&path).unwrap());
    let made = first.created_file().unwrap().unwrap();
    let device = Power::new(model.clone(), Config { record: Some(first), ..Config::default() }).unwrap();
    assert_eq!(Reader::open(&path).unwrap().entries(), 0);
    let refused = Power::new(model, Config { record: Some(second), ..Config::default() }).unwrap_err();
    assert!(refused.to_string().contains("exists"), "{refused}");
    drop(device);
    // Removing the log does not remove a file that another process created at the log's path.
    std::fs::rename(&path, folder.path().join("moved")).unwrap();
    std::fs::write(&path, "precious").unwrap();
    made.remove();
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn existing_log_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    std::fs::write(&path, "precious").unwrap();
    let refused = Writer::create(&path).unwrap_err();
    assert!(refused.to_string().contains("exists"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert!(Writer::create(&folder.path().join("no/such/folder")).is_err());

    let model = Arc::new(Model::new(SIZE, 512));
    let device = Power::new(model, Config::default()).unwrap();
    assert!(matches!(device.mark("x"), Err(RecordError::NotRecording)));
    assert_eq!(device.recording(), None);
}

#[test]
fn damaged_logs_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let (_, device) = recorded(&path);
    device.write_at(0, &filled(1, 4), Flags::empty()).unwrap();
    device.mark("m").unwrap();
    drop(device);
    let good = std::fs::read(&path).unwrap();
    let read = |bytes: &[u8]| -> Result<u64, log::Error> {
        let path = folder.path().join("bad");
        std::fs::write(&path, bytes).unwrap();
        let mut reader = Reader::open(&path)?;
        let target = Model::new(SIZE, 512);
        let entries = reader.entries();
        log::replay(&mut reader, entries, &target)?;
        Ok(entries)
    };
    assert_eq!(read(&good).unwrap(), 3, "a clean end flushes");
    for (at, byte) in [(0, 0), (8, 2), (24, 1), (25, 0), (26, 255)] {
        let mut bad = good.clone();
        bad[at] = byte;
        assert!(matches!(read(&bad), Err(log::Error::Foreign { .. })), "{at}");
    }
    for (at, byte) in
        [(16, 200), (512 + 7, 255), (512 + 8, 200), (512 + 15, 127), (3072 + 25, 2), (3072 + 31, 255)]
    {
        let mut bad = good.clone();
        bad[at] = byte;
        assert!(matches!(read(&bad), Err(log::Error::Damaged { .. })), "{at}");
    }
    for len in (0..good.len()).step_by(5) {
        assert!(read(&good[..len]).is_err(), "cut at {len}");
    }
    let mut beyond = good.clone();
    beyond[512 + 3] = 1;
    assert!(matches!(read(&beyond), Err(log::Error::Device { entry: 0, .. })));
    // A damaged byte anywhere in the log does not cause a panic.
    let mut rng = Rng::new(1);
    for _ in 0..500 {
        let mut bad = good.clone();
        for _ in 0..=rng.below(3) {
            let at = rng.below(3200) as usize;
            bad[at] = rng.word() as u8;
        }
        let _ = read(&bad);
    }
}
