//! A save reads evicted pages from the backing device and leaves them there. Saving and restoring
//! also work with little memory.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Device, Error, Flags, Op};
use freestone::file::File;
use freestone::ram::{Config, Family, ForkConfig, IdleSelection, Ram, Writeback};
use freestone::save::{self, Base, BaseCheck, SaveError};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng, scaled};

use crate::save::support::*;

fn config(dir: &Path, pages: u64, mem_limit: u64, compressed_writeback: bool) -> Config {
    let backing = File::open_for_writeback(dir.join("spill"), Some(2 * pages * PAGE)).unwrap();
    Config { mem_limit, ..Config::default() }.backed_by(Arc::new(backing), compressed_writeback)
}

fn spill(ram: &Ram) -> u64 {
    ram.mark_idle(IdleSelection::All);
    ram.writeback(&Writeback::Idle).unwrap().pages
}

#[test]
fn evicted_pages_are_saved_and_stay_evicted() {
    for packed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        let old = disk(config(dir.path(), 4096, 0, packed), 16 * MIB);
        fill(&old, 0..4000, 1);
        assert!(spill(&old) > 1500);
        // Some pages are in memory and some are evicted, and they are mixed.
        fill(&old, (0..4000).step_by(7), 2);
        let (before, mm) = (old.backing().unwrap().spilled_pages, old.mm_stat());
        assert!(before > 1500);
        let saved = save(&[("ram0", &old)], &file);
        assert_eq!(saved.pages, 4000);
        assert_eq!(old.backing().unwrap().spilled_pages, before, "packed: {packed}");
        assert_eq!(old.mm_stat().compr_data_size, mm.compr_data_size);
        let new = restore_one(&file, &family(), &[]);
        assert_same(&old, &new);
        // In the plain layout, evicted pages are uncompressed on the backing device, but the save
        // file has them compressed.
        let plain = disk(Config::default(), 16 * MIB);
        fill(&plain, 0..4000, 1);
        fill(&plain, (0..4000).step_by(7), 2);
        assert_eq!(new.mm_stat().compr_data_size, plain.mm_stat().compr_data_size);
    }
}

#[test]
fn save_keeps_idle_marks() {
    let dir = tempfile::tempdir().unwrap();
    let old = disk(config(dir.path(), 1024, 0, true), 4 * MIB);
    fill(&old, 0..1000, 1);
    let idle = old.mark_idle(IdleSelection::All);
    save(&[("ram0", &old)], &dir.path().join("disk"));
    let huge_or_compressed = old.writeback(&Writeback::Idle).unwrap().pages;
    assert!(huge_or_compressed > 400 && huge_or_compressed <= idle);
    let left = old.mm_stat().compr_data_size;
    assert!(left <= 8 * 1000, "all but patterns went: {left}");
}

#[test]
fn evicted_pages_of_forks_and_snapshots_are_saved() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("family");
    let family_of = Family::new(config(dir.path(), 8192, 0, true)).unwrap();
    let origin = family_of.ram(8 * MIB).unwrap();
    fill(&origin, 0..1500, 1);
    spill(&origin);
    let golden = origin.snapshot().unwrap();
    fill(&origin, (0..1500).step_by(2), 2);
    let fork = golden.fork(&ForkConfig::default()).unwrap();
    fill(&fork, (0..1500).step_by(3), 3);
    spill(&fork);
    spill(&origin);
    save(&[("origin", &origin), ("fork", &fork)], &file);
    let restored = restore(&file, &family(), &[]).unwrap();
    let new = |name: &str| &restored.iter().find(|(other, _)| other == name).unwrap().1;
    assert_same(&origin, new("origin"));
    assert_same(&fork, new("fork"));
}

#[test]
fn disk_larger_than_memory_is_restored() {
    for packed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (file, old) = (dir.path().join("disk"), disk(Config::default(), 64 * MIB));
        fill(&old, 0..12000, 1);
        save(&[("ram0", &old)], &file);
        let limit = 6 * MIB;
        let tight = Family::new(config(dir.path(), 16384, limit, packed)).unwrap();
        let new = restore_one(&file, &tight, &[]);
        assert!(tight.stat().mem_used_total <= limit, "{:?}", tight.stat());
        assert_same(&old, &new);
        assert_eq!(new.io_stat().failed_writes, 0);
        // The restored disk, most of which is evicted again, can be saved again.
        save(&[("ram0", &new)], &file);
        assert_same(&old, &restore_one(&file, &family(), &[]));
    }
    // Without a backing device, the restore runs out of memory and fails. The failed restore leaves
    // no layers or memory in use.
    let dir = tempfile::tempdir().unwrap();
    let (file, old) = (dir.path().join("disk"), disk(Config::default(), 64 * MIB));
    fill(&old, 0..4000, 1);
    save(&[("ram0", &old)], &file);
    let small = Family::new(Config { mem_limit: MIB, ..Config::default() }).unwrap();
    let error = restore(&file, &small, &[]).err().unwrap();
    let matches = matches!(error, save::RestoreError::Store { error: Error::NoSpace, .. });
    assert!(matches, "{error}");
    eventually("it is gone", || small.stat().layers == 0 && small.stat().mem_used_total == 0);
}

#[test]
fn chain_is_restored_with_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chain");
    let origin = disk(Config::default(), 32 * MIB);
    fill(&origin, 0..4000, 1);
    let first = origin.snapshot().unwrap();
    fill(&origin, (0..6000).step_by(2), 2);
    origin.discard(1000 * PAGE, 500 * PAGE).unwrap();
    let second = origin.snapshot().unwrap();
    fill(&origin, (0..6000).step_by(3), 3);
    let fork = first.fork(&ForkConfig::default()).unwrap();
    fill(&fork, (0..4000).step_by(5), 4);
    let devices = [("fork", &fork), ("origin", &origin), ("second", &second), ("first", &first)];
    save(&devices, &file);
    let tight = Family::new(config(dir.path(), 16384, 4 * MIB, true)).unwrap();
    let restored = restore(&file, &tight, &[]).unwrap();
    assert!(tight.stat().mem_used_total <= 4 * MIB);
    for (name, old) in devices {
        assert_same(old, &restored.iter().find(|(other, _)| other == name).unwrap().1);
    }
}

#[test]
fn hung_backing_device_fails_the_save() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    let backing = Arc::new(FaultyDisk::new(64 << 20, PAGE as u32));
    let config = Config { disksize: 16 * MIB, ..Config::default() };
    let old = Ram::new(config.backed_by(Arc::clone(&backing) as Arc<dyn Device>, true)).unwrap();
    fill(&old, 0..2000, 1);
    spill(&old);
    old.set_backing_timeout(Duration::from_millis(200));
    backing.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Hang);
    let began = Instant::now();
    let failed = save::save(&[("ram0", &old)], &file, BaseCheck::Sampled, &mut |_, _| {});
    assert!(matches!(failed, Err(SaveError::Page { .. })), "{failed:?}");
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    backing.heal();
    save(&[("ram0", &old)], &file);
    assert_same(&old, &restore_one(&file, &family(), &[]));
}

#[test]
fn unreadable_page_fails_the_save() {
    for packed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        let backing = Arc::new(FaultyDisk::new(64 << 20, PAGE as u32));
        let config = Config { disksize: 16 * MIB, ..Config::default() };
        let old = Ram::new(config.backed_by(Arc::clone(&backing) as Arc<dyn Device>, packed)).unwrap();
        fill(&old, 0..2000, 1);
        spill(&old);
        save(&[("ram0", &old)], &file);
        let good = std::fs::read(&file).unwrap();
        // If a single read of many pages fails, the save reads these pages again one by one.
        let next = backing.counts().reads + 1;
        backing.fault(Some(Op::Read), FaultSchedule::At(next), FaultEffect::Fail(Error::Media));
        save(&[("ram0", &old)], &file);
        assert!(backing.counts().reads > next + 1);
        assert_same_after_checksums(&good, &std::fs::read(&file).unwrap());
        let good = std::fs::read(&file).unwrap();
        // Only the packed layout has checksums, which detect corrupt pages.
        let whats = if packed {
            &[FaultEffect::Fail(Error::Media), FaultEffect::Corrupt][..]
        } else {
            &[FaultEffect::Fail(Error::Media)]
        };
        for what in whats {
            backing.fault(Some(Op::Read), FaultSchedule::Always, *what);
            let failed = save::save(&[("ram0", &old)], &file, BaseCheck::Sampled, &mut |_, _| {});
            assert!(matches!(failed, Err(SaveError::Page { .. })), "{failed:?}");
            assert!(std::fs::read(&file).unwrap() == good, "the old file stays");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
            backing.heal();
        }
        save(&[("ram0", &old)], &file);
        assert_same(&old, &restore_one(&file, &family(), &[]));
        assert_eq!(backing.violations(), [""; 0]);
    }
}

/// Checks that two saves of the same content differ only in their salt and checksums.
#[track_caller]
fn assert_same_after_checksums(one: &[u8], other: &[u8]) {
    assert_eq!(one.len(), other.len());
    assert_eq!(one[..24], other[..24]);
}

/// A restore waits for memory for the partial last page of a device, as it does for other pages.
#[test]
fn partial_last_page_waits_for_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let base: Arc<dyn Device> = base_model(6, 300);
    let fork = family().fork(Arc::clone(&base), &ForkConfig::default()).unwrap();
    let mut noise = vec![0; fork.geometry().size as usize];
    Rng::new(12).fill(&mut noise);
    fork.write_at(0, &noise, Flags::empty()).unwrap();
    save(&[("fork", &fork)], &file);
    // Whether memory is exhausted at exactly the last page depends on timing, so the restore is
    // repeated.
    for _ in 0..scaled(20) {
        let config = Config { mem_limit: 64 * PAGE, ..Config::default() };
        let small = Family::new(config.backed_by(Arc::new(Model::new(4 << 20, 4096)), true)).unwrap();
        let again = restore_one(&file, &small, &[Base::Device(Arc::clone(&base))]);
        assert_same(&again, &fork);
    }
}
