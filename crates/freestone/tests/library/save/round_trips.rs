//! Saved devices are restored: every kind of device, every form of page, and into families (devices
//! that share memory) with other settings.

use std::sync::Arc;
use std::time::Duration;

use freestone::codec::{Algorithm, Params};
use freestone::device::{Blocking, Device, Error, Flags};
use freestone::ram::{Config, Family, ForkConfig, Ram, RecompressOptions, Secondary};
use freestone::save::{self, Base, BaseCheck, DeviceKind, RestoreError, SaveError};
use freestone_testkit::{Model, Rng};

use crate::save::support::*;

fn zstd() -> Config {
    Config { comp_algorithm: Algorithm::Zstd, ..Config::default() }
}

#[test]
fn disk_is_restored_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    let old = disk(Config::default(), 64 * MIB);
    fill(&old, 0..3000, 1);
    // Writes pages far apart, and the last page of the disk.
    fill(&old, [5000, 9000, 16383], 2);
    old.write_at(7 * PAGE + 512, &[3; 512], Flags::empty()).unwrap();
    let saved = save(&[("ram0", &old)], &file);
    assert_eq!(saved.pages, 3003);
    let contents = save::inspect(&file).unwrap();
    assert_eq!(contents, save::verify(&file, &mut |_, _| {}).unwrap());
    assert_eq!((contents.pages, contents.file_bytes), (3003, saved.file_bytes));
    let device = &contents.devices[0];
    assert_eq!((device.name.as_str(), device.size, device.kind), ("ram0", 64 * MIB, DeviceKind::Disk));
    assert_eq!((device.base, device.comp_algorithm), (None, Algorithm::Lz4));

    let new = restore_one(&file, &family(), &[]);
    assert_same(&old, &new);
    let (was, is) = (old.mm_stat(), new.mm_stat());
    assert_eq!(
        (is.orig_data_size, is.compr_data_size, is.same_pages, is.huge_pages),
        (was.orig_data_size, was.compr_data_size, was.same_pages, was.huge_pages)
    );
    assert!(!new.is_snapshot() && !new.is_fork());
    // The restored device can be changed like any disk.
    fill(&new, 100..200, 9);
    new.discard(0, 50 * PAGE).unwrap();
    assert!(image(&new)[100 * PAGE as usize..101 * PAGE as usize] == content(9, 100));
    // The save wrote the compressed pages as they are, without compressing them again.
    assert!(saved.file_bytes < was.compr_data_size + 3003 * 17 + 4096, "{saved:?} {was:?}");
    // A save takes an internal snapshot, which must be removed at the end.
    eventually("one layer", || old.family().stat().layers == 1);
    assert_eq!(old.snapshots(), 0);
}

#[test]
fn disk_is_restored_with_other_algorithms() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    for from in Algorithm::ALL {
        let old = disk(Config { comp_algorithm: from, ..Config::default() }, 4 * MIB);
        fill(&old, 0..800, 1);
        save(&[("ram0", &old)], &file);
        for to in Algorithm::ALL {
            let family = Family::new(Config { comp_algorithm: to, ..Config::default() }).unwrap();
            let new = restore_one(&file, &family, &[]);
            assert_same(&old, &new);
            let (was, is) = (old.mm_stat(), new.mm_stat());
            let is_lz4 = |a| matches!(a, Algorithm::Lz4 | Algorithm::Lz4hc);
            if from == to || is_lz4(from) && is_lz4(to) {
                assert_eq!(is.compr_data_size, was.compr_data_size, "{from} {to}");
            } else {
                // If the algorithm changes, pages have the size of newly written pages.
                let written = disk(Config { comp_algorithm: to, ..Config::default() }, 4 * MIB);
                fill(&written, 0..800, 1);
                assert_eq!(is.compr_data_size, written.mm_stat().compr_data_size, "{from} {to}");
            }
        }
    }
}

#[test]
fn empty_and_zeroed_disks_are_restored() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    let empty = disk(Config::default(), 16 << 40);
    assert_eq!(save(&[("e", &empty)], &file).pages, 0);
    let new = restore_one(&file, &family(), &[]);
    assert_eq!((new.geometry().size, new.mm_stat().orig_data_size), (16 << 40, 0));
    let zeroes = disk(Config::default(), 512 * MIB);
    let chunk = vec![0; MIB as usize];
    for at in 0..512 {
        zeroes.write_at(at * MIB, &chunk, Flags::empty()).unwrap();
    }
    let saved = save(&[("z", &zeroes)], &file);
    assert_eq!(saved.pages, 131_072);
    assert!(saved.file_bytes < 4096, "runs of one pattern take one record: {saved:?}");
    let new = restore_one(&file, &family(), &[]);
    assert_eq!(new.mm_stat().same_pages, 131_072);
}

#[test]
fn fork_saves_only_its_own_pages() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("fork");
    let config = ForkConfig { size: Some(16 * MIB), ..ForkConfig::default() };
    let old = family().fork(base_model(7, 2000), &config).unwrap();
    fill(&old, (0..1500).step_by(3), 1);
    old.discard(2 * PAGE, 100 * PAGE).unwrap();
    old.write_at(2000 * PAGE + 1024, &[5; 512], Flags::empty()).unwrap();
    // A discard stores nothing for a page of the base that is already zeroes.
    let bare = (2..102).filter(|&slot| content(7, slot).iter().all(|&byte| byte == 0)).count() as u64;
    let own = 102 - bare + (102..1500).step_by(3).count() as u64 - 1 + 1;
    for check in [BaseCheck::Sampled, BaseCheck::Whole] {
        let saved = save::save(&[("f", &old)], &file, check, &mut |_, _| {}).unwrap();
        assert!((own - 3..own + 3).contains(&saved.pages), "{} of {own}", saved.pages);
        let contents = save::inspect(&file).unwrap();
        assert_eq!((contents.devices[0].kind, contents.devices[0].base), (DeviceKind::Fork, Some(0)));
        assert_eq!(contents.bases[0].size, 2000 * PAGE + 2048);
        let new = restore_one(&file, &family(), &[Base::Device(base_model(7, 2000))]);
        assert_same(&old, &new);
        assert!(new.is_fork());
        assert_eq!(new.over_stat().own_bytes, old.over_stat().own_bytes);
        new.rewind().unwrap();
        assert!(image(&new)[..PAGE as usize] == content(7, 0));

        // Restoring a fork over a missing or different base fails.
        assert!(matches!(refused(&file, &[]), RestoreError::BaseMissing { .. }));
        let other = Base::Device(base_model(8, 2000));
        let error = refused(&file, std::slice::from_ref(&other));
        assert!(matches!(&error, RestoreError::BaseMismatch { device, .. } if device == "f"), "{error}");
        let longer = Base::Device(base_model(7, 2001));
        assert!(matches!(refused(&file, std::slice::from_ref(&longer)), RestoreError::BaseMismatch { .. }));
        // If several bases are given, the right one is used.
        let right = Base::Device(base_model(7, 2000));
        assert_same(&old, &restore_one(&file, &family(), &[longer, other, right]));
    }
    // A changed byte of a large base is detected only if the whole base is checked.
    let changed = base_model(7, 2000);
    changed.fill(1234 * PAGE + 512, &[1; 512]);
    assert!(matches!(refused(&file, &[Base::Device(changed)]), RestoreError::BaseMismatch { .. }));
}

#[test]
fn samples_detect_changes_at_both_ends_of_a_base() {
    let large = |at: Option<u64>| {
        let model = Model::new(48 << 20, 512);
        if let Some(at) = at {
            model.write_at(at, &[1; 512], Flags::empty()).unwrap();
        }
        save::BaseIdentity::of(&model, BaseCheck::Sampled).unwrap()
    };
    let plain = large(None);
    assert_eq!(plain, large(None));
    for at in [0, 1024, (1 << 20) - 512, (48 << 20) - 512, (48 << 20) - 65536] {
        assert_ne!(plain, large(Some(at)), "{at}");
    }
}

#[test]
fn fork_is_restored_over_an_equal_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("fork");
    let origin = disk(Config::default(), 4 * MIB);
    fill(&origin, 0..1024, 7);
    let base: Arc<dyn Device> = Arc::new(origin.snapshot().unwrap());
    let old = family().fork(base, &ForkConfig::default()).unwrap();
    fill(&old, 0..10, 1);
    assert_eq!(save(&[("f", &old)], &file).pages, 10);
    // Restores into the family of the base snapshot, and into another family.
    let snapshot = origin.snapshot().unwrap();
    fill(&origin, 0..1024, 8);
    for family in [origin.family(), family()] {
        let new = restore_one(&file, &family, &[Base::Snapshot(snapshot.clone())]);
        assert_same(&old, &new);
    }
}

#[test]
fn family_is_restored_with_shared_pages() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("family");
    let family_of = family();
    let disk = family_of.ram(8 * MIB).unwrap();
    fill(&disk, 0..1000, 1);
    let golden = disk.snapshot().unwrap();
    fill(&disk, 0..200, 2);
    let later = disk.snapshot().unwrap();
    fill(&disk, 100..300, 3);
    let config = ForkConfig { size: Some(16 * MIB), ..ForkConfig::default() };
    let forks: Vec<Ram> = (0..5).map(|_| golden.fork(&config).unwrap()).collect();
    for (seed, fork) in (10..).zip(&forks) {
        fill(fork, (0..1200).step_by(40), seed);
        fork.discard(1000 * PAGE, 50 * PAGE).unwrap();
    }
    let middle = forks[0].snapshot().unwrap();
    fill(&forks[0], 0..20, 20);
    let grandchild = middle.fork(&ForkConfig::default()).unwrap();
    fill(&grandchild, 500..520, 30);
    let over_base = family_of.fork(base_model(7, 100), &ForkConfig::default()).unwrap();
    fill(&over_base, 5..8, 40);
    let mut devices: Vec<(&str, &Ram)> =
        vec![("grandchild", &grandchild), ("disk", &disk), ("later", &later), ("over", &over_base)];
    let names = ["f0", "f1", "f2", "f3", "f4"];
    devices.extend(names.into_iter().zip(&forks));
    let saved = save(&devices, &file);
    // The snapshot golden is saved once for all its forks, and later and disk only with their
    // differences to golden. The snapshot middle is saved once, and f0 only with its later changes.
    // Ranges that the forks discarded are holes of golden, so their pages are not saved.
    let fork = 30 - 2;
    assert_eq!(saved.pages, 1000 + 200 + 200 + 5 * fork + 20 + 20 + 3);
    let contents = save::inspect(&file).unwrap();
    assert_eq!(contents.devices.len(), 9);
    let kind = |name: &str| contents.devices.iter().find(|device| device.name == name).unwrap().kind;
    assert_eq!(
        (kind("disk"), kind("later"), kind("f3")),
        (DeviceKind::Disk, DeviceKind::Snapshot, DeviceKind::Fork)
    );

    let family_to = family();
    let restored = restore(&file, &family_to, &[Base::Device(base_model(7, 100))]).unwrap();
    assert_eq!(restored.len(), 9);
    for (name, ram) in &restored {
        let (_, old) = devices.iter().find(|(other, _)| other == name).unwrap();
        assert_same(*old, ram);
        assert_eq!((ram.is_snapshot(), ram.is_fork()), (old.is_snapshot(), old.is_fork()), "{name}");
    }
    // Pages that the devices share exist only once in memory.
    let (was, is) = (family_of.stat(), family_to.stat());
    assert!(is.charged <= was.charged + was.charged / 50, "{was:?} {is:?}");
    let new = |name: &str| &restored.iter().find(|(other, _)| other == name).unwrap().1;
    assert_eq!(new("later").write_at(0, &[0; 512], Flags::empty()), Err(Error::ReadOnly));
    // A rewind returns the restored fork to its base.
    new("f1").rewind().unwrap();
    forks[1].rewind().unwrap();
    assert_same(&forks[1], new("f1"));
    drop(restored);
    eventually("all memory comes back", || {
        let stat = family_to.stat();
        stat.mem_used_total == 0 && stat.layers == 0
    });
}

#[test]
fn chain_saves_only_differences() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chain");
    let over_base = family().fork(base_model(7, 500), &ForkConfig::default()).unwrap();
    for origin in [disk(Config::default(), 8 * MIB), over_base] {
        let pages = origin.geometry().size / PAGE;
        let bases = if origin.is_fork() { vec![Base::Device(base_model(7, 500))] } else { Vec::new() };
        fill(&origin, (0..300).step_by(2), 1);
        let mut snapshots = Vec::new();
        for round in 1..6 {
            snapshots.push(origin.snapshot().unwrap());
            fill(&origin, (round * 10..pages.min(400)).step_by(17), round + 1);
            origin.discard(round * 30 * PAGE, 20 * PAGE).unwrap();
            origin.write_at(450 * PAGE + 512 * round, &[round as u8; 512], Flags::empty()).unwrap();
        }
        origin.grow(16 * MIB).unwrap();
        fill(&origin, 4000..4010, 9);
        // A snapshot in the middle was dropped. The removal of its layer may not be complete yet.
        drop(snapshots.remove(2));
        let names = ["a", "b", "c", "d"];
        // The devices are saved in an order that does not follow the chain.
        let mut devices: Vec<(&str, &Ram)> = vec![("live", &origin)];
        devices.extend(names.into_iter().zip(snapshots.iter().rev()));
        let saved = save(&devices, &file);
        assert!(saved.pages < 150 + 10 + 4 * (24 + 20 + 1) + 110, "{saved:?}");
        let to = family();
        let mut restored = restore(&file, &to, &bases).unwrap();
        assert_eq!(restored.len(), 5);
        while !restored.is_empty() {
            for (name, ram) in &restored {
                let (_, old) = devices.iter().find(|(other, _)| other == name).unwrap();
                assert_same(*old, ram);
                assert_eq!((ram.is_snapshot(), ram.is_fork()), (old.is_snapshot(), old.is_fork()), "{name}");
            }
            // Each restored device stays valid when others are dropped.
            drop(restored.remove(restored.len() / 2));
        }
        eventually("all memory comes back", || to.stat().mem_used_total == 0 && to.stat().layers == 0);
    }
}

#[test]
fn shared_named_snapshot_is_saved_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("family");
    let origin = disk(Config::default(), 4 * MIB);
    fill(&origin, 0..500, 1);
    let golden = origin.snapshot().unwrap();
    let fork = golden.fork(&ForkConfig::default()).unwrap();
    fill(&fork, 0..10, 2);
    assert_eq!(save(&[("fork", &fork), ("golden", &golden)], &file).pages, 510);
    let restored = restore(&file, &family(), &[]).unwrap();
    let names: Vec<&str> = restored.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["golden", "fork"]);
    assert_same(&restored[0].1, &golden);
    assert_same(&restored[1].1, &fork);
    let failed = save::save(&[("a", &golden), ("b", &golden)], &file, BaseCheck::Sampled, &mut |_, _| {});
    assert!(matches!(failed, Err(SaveError::DuplicateDevice(..))));
    let failed = save::save(&[("a", &fork), ("b", &fork)], &file, BaseCheck::Sampled, &mut |_, _| {});
    assert!(matches!(failed, Err(SaveError::DuplicateDevice(..))));
    for names in [["a", "a"], ["", "b"], [&*"x".repeat(256), "c"]] {
        let devices = [(names[0], &fork), (names[1], &golden)];
        let failed = save::save(&devices, &file, BaseCheck::Sampled, &mut |_, _| {});
        assert!(matches!(failed, Err(SaveError::DuplicateName(_) | SaveError::Name(_))), "{failed:?}");
    }
    let failed = save::save(&[], &file, BaseCheck::Sampled, &mut |_, _| {});
    assert!(matches!(failed, Err(SaveError::NoDevices)));
    // The failed saves have not changed the existing file.
    assert_eq!(restore(&file, &family(), &[]).unwrap().len(), 2);
}

#[test]
fn recompressed_pages_are_saved_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let (file, dictionary) = (dir.path().join("disk"), dir.path().join("dictionary"));
    let mut typical = vec![0; 16384];
    text(&mut Rng::new(5), &mut typical);
    std::fs::write(&dictionary, &typical).unwrap();
    let params = Params::parse(&format!("level=9 dict={}", dictionary.display())).unwrap();
    let secondary = Secondary { algorithm: Algorithm::Zstd, params };
    let config = Config { recomp_algorithms: [None, Some(secondary), None], ..Config::default() };
    let old = disk(config.clone(), 8 * MIB);
    fill(&old, 0..2000, 1);
    let what = RecompressOptions { priority: Some(2), ..RecompressOptions::default() };
    assert!(old.recompress(&what).unwrap().shrunk > 300);
    // Overwrites some pages, so that the file has both recompressed pages and pages of the primary
    // algorithm.
    fill(&old, (0..2000).step_by(5), 2);
    save(&[("ram0", &old)], &file);
    let like = Family::new(config).unwrap();
    let new = restore_one(&file, &like, &[]);
    assert_same(&old, &new);
    assert_eq!(new.mm_stat().compr_data_size, old.mm_stat().compr_data_size);
    // Restoring needs no dictionary file, because the save file contains the dictionary.
    std::fs::remove_file(&dictionary).unwrap();
    for config in [Config::default(), zstd()] {
        let new = restore_one(&file, &Family::new(config).unwrap(), &[]);
        assert_same(&old, &new);
    }
}

#[test]
fn automatic_dictionary_is_saved() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    let config = Config { auto_recompress: Some(Duration::from_millis(1)), ..Config::default() };
    let old = disk(config.clone(), 64 * MIB);
    let mut page = [0; PAGE as usize];
    for slot in 0..3000 {
        text(&mut Rng::new(slot), &mut page);
        old.write_at(slot * PAGE, &page, Flags::empty()).unwrap();
    }
    eventually("pages are recompressed", || old.auto_recompress_stat().pages > 300);
    save(&[("ram0", &old)], &file);
    let learned = old.auto_recompress_stat().dictionary_bytes;
    assert!(learned > 0);
    let new = restore_one(&file, &Family::new(config).unwrap(), &[]);
    assert_eq!(new.auto_recompress_stat().dictionary_bytes, learned);
    assert_same(&old, &new);
    assert_same(&old, &restore_one(&file, &family(), &[]));
}

/// Devices keep their exact sizes. The forks and snapshots end inside a page, are at any position
/// of a chain, and are grown or not.
#[test]
fn sizes_are_restored_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let base: Arc<dyn Device> = base_model(9, 20);
    let size = 20 * PAGE + 2048;
    let fork = family().fork(Arc::clone(&base), &ForkConfig::default()).unwrap();
    fork.write_at(size - 512, &[1; 512], Flags::empty()).unwrap();
    let first = fork.snapshot().unwrap();
    fork.grow(size + 512).unwrap();
    let second = fork.snapshot().unwrap();
    fork.grow(size + PAGE).unwrap();
    fork.write_at(size + 512, &[2; 1024], Flags::empty()).unwrap();
    let over = first.fork(&ForkConfig::default()).unwrap();
    over.write_at(0, &[3; 512], Flags::empty()).unwrap();
    let devices = [("first", &first), ("second", &second), ("fork", &fork), ("over", &over)];
    save(&devices, &file);
    assert_eq!(std::fs::read(&file).unwrap()[16], 2);
    let contents = save::inspect(&file).unwrap();
    assert_eq!(contents.devices.iter().map(|device| device.size).min(), Some(size));
    let restored = restore(&file, &family(), &[Base::Device(base)]).unwrap();
    assert_eq!(restored.len(), 4);
    for (name, ram) in &restored {
        let (_, old) = devices.iter().find(|(known, _)| known == name).unwrap();
        assert_same(ram, *old);
    }
    // After a restored device grows, the new range reads as zeroes.
    let (_, over) = restored.iter().find(|(name, _)| name == "over").unwrap();
    over.grow(size + PAGE).unwrap();
    let mut end = [9; PAGE as usize];
    over.read_at(size, &mut end).unwrap();
    assert_eq!(end, [0; PAGE as usize]);
    // A family whose devices all have whole pages is saved in file version 1, which older programs
    // read.
    save(&[("ram0", &disk(Config::default(), MIB))], &file);
    assert_eq!(std::fs::read(&file).unwrap()[16], 1);
}
