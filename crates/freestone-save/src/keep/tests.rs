//! Kept devices compared with models: round trips, crashes, damage, and loading concurrent with
//! writers.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::*;
use freestone_core::device::{Blocking as _, Device as _, Error, Flags};
use freestone_ram::ram::Config;
use freestone_testkit::effort;

mod damage;
#[cfg(debug_assertions)]
mod failures;
mod histories;
mod loading;
#[cfg(debug_assertions)]
mod lost;

const MIB: u64 = 1 << 20;
const PAGE: u64 = PAGE_BYTES as u64;

fn never() -> bool {
    false
}

/// A random number generator (xorshift) with a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % end
    }

    /// Returns a page of one of five kinds, for example same-filled or partly random.
    fn page(&mut self) -> Vec<u8> {
        let (kind, word) = (self.below(5), self.below(u64::MAX));
        let mut page = Vec::with_capacity(PAGE_BYTES);
        while page.len() < PAGE_BYTES {
            let eight = match kind {
                0 => [word as u8; 8],
                1 => word.to_ne_bytes(),
                2 => self.below(u64::MAX).to_ne_bytes(),
                _ if page.len() % 512 < 200 => self.below(u64::MAX).to_ne_bytes(),
                _ => *b"the same",
            };
            page.extend_from_slice(&eight);
        }
        page
    }
}

fn family() -> Family {
    Family::new(Config::default()).unwrap()
}

fn save(keep: &mut Keep, devices: &[(&str, &Ram)]) -> KeepReport {
    keep.save(devices, &never, &mut |_, _| {}).unwrap()
}

fn load(loading: &mut BackgroundLoad) {
    assert_eq!(loading.run(&never, &mut |_, _| {}), LoadOutcome::Complete);
}

fn content(ram: &Ram) -> Vec<u8> {
    let mut bytes = vec![0; ram.geometry().size as usize];
    ram.read_at(0, &mut bytes).unwrap();
    bytes
}

type Restored = (Keep, Vec<(String, Ram)>, BackgroundLoad);

fn restored(dir: &Path, family: &Family, bases: &[Base]) -> Restored {
    let mut keep = Keep::open(dir).unwrap();
    let (devices, loading) = keep.restore(family, bases, &never).unwrap();
    (keep, devices, loading)
}

fn named<'a>(devices: &'a [(String, Ram)], name: &str) -> &'a Ram {
    &devices.iter().find(|(other, _)| other == name).unwrap().1
}

fn borrowed(devices: &[(String, Ram)]) -> Vec<(&str, &Ram)> {
    devices.iter().map(|(name, ram)| (&**name, ram)).collect()
}

/// Returns the names and content of all files in a directory.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let rows = fs::read_dir(dir).unwrap().map(Result::unwrap);
    rows.map(|row| (row.file_name().into_string().unwrap(), fs::read(row.path()).unwrap())).collect()
}

#[test]
fn disk_restores_from_whole_file_and_increments() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kept");
    let ram = family().ram(8 * MIB).unwrap();
    let mut random = Random(1);
    for page in 0..1500 {
        ram.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
    }
    let mut keep = Keep::open(&path).unwrap();
    assert_eq!((keep.contents(), ram.unsaved_bytes()), (None, None));
    assert_eq!(save(&mut keep, &[("a", &ram)]).kind, SaveKind::Whole);
    assert_eq!(ram.unsaved_bytes(), Some(0));
    assert_eq!(save(&mut keep, &[("a", &ram)]).kind, SaveKind::Unchanged);
    for round in 0..3 {
        ram.write_at(5 * PAGE, &random.page(), Flags::empty()).unwrap();
        ram.write_at(1000 * PAGE + 512, &[round; 1024], Flags::empty()).unwrap();
        ram.discard(700 * PAGE, 9 * PAGE).unwrap();
        ram.write_zeroes(20 * PAGE + 512, PAGE, Flags::empty()).unwrap();
        let now = save(&mut keep, &[("a", &ram)]);
        assert_eq!((now.kind, now.pages), (SaveKind::Increment, if round == 0 { 13 } else { 4 }));
    }
    ram.grow(9 * MIB).unwrap();
    assert_eq!(save(&mut keep, &[("a", &ram)]).kind, SaveKind::Increment);
    let kept = keep.contents().unwrap();
    assert_eq!((kept.increments, kept.contents.devices[0].size), (4, 9 * MIB));
    assert!(kept.saved_at.elapsed().unwrap().as_secs() < 600);
    let before = content(&ram);
    assert!(matches!(Keep::open(&path), Err(KeepError::InUse(_))));
    drop(keep);
    assert_eq!(ram.unsaved_bytes(), None, "nobody wants to know any more");

    let (mut keep, devices, mut loading) = restored(&path, &family(), &[]);
    assert!(content(named(&devices, "a")) == before, "from the files");
    named(&devices, "a").write_at(8 * MIB, &random.page(), Flags::empty()).unwrap();
    let changed = content(named(&devices, "a"));
    assert_eq!(save(&mut keep, &borrowed(&devices)).kind, SaveKind::Increment, "before it is loaded");
    load(&mut loading);
    assert!(content(named(&devices, "a")) == changed);
    drop((keep, loading));

    let (mut keep, again, mut loading) = restored(&path, &family(), &[]);
    load(&mut loading);
    assert!(content(named(&again, "a")) == changed);
    keep.merge(&never, &mut |_, _| {}).unwrap();
    assert_eq!((keep.contents().unwrap().increments, files(&path).len()), (0, 1));
    named(&again, "a").write_at(0, &random.page(), Flags::empty()).unwrap();
    let changed = content(named(&again, "a"));
    assert_eq!(save(&mut keep, &borrowed(&again)).kind, SaveKind::Increment, "it continues the merged one");
    drop((keep, loading));
    let (mut keep, again, mut loading) = restored(&path, &family(), &[]);
    load(&mut loading);
    assert!(content(named(&again, "a")) == changed);
    keep.forget().unwrap();
    assert_eq!((keep.contents(), files(&path).len()), (None, 0));
}

#[test]
fn save_after_structural_change_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let family = family();
    let (a, b) = (family.ram(MIB).unwrap(), family.ram(MIB).unwrap());
    a.write_at(0, &[1; 4096], Flags::empty()).unwrap();
    let mut keep = Keep::open(dir.path()).unwrap();
    assert_eq!(save(&mut keep, &[("a", &a)]).kind, SaveKind::Whole);
    assert_eq!(save(&mut keep, &[("a", &a), ("b", &b)]).kind, SaveKind::Whole, "another disk");
    assert_eq!(save(&mut keep, &[("b", &b), ("a", &a)]).kind, SaveKind::Unchanged, "in any order");
    let snapshot = a.snapshot().unwrap();
    let devices: [(&str, &Ram); 3] = [("a", &a), ("b", &b), ("s", &snapshot)];
    assert_eq!(save(&mut keep, &devices).kind, SaveKind::Whole, "a snapshot");
    a.write_at(4096, &[2; 4096], Flags::empty()).unwrap();
    assert_eq!(keep.estimate(&devices).unwrap().kind, SaveKind::Increment);
    assert_eq!(save(&mut keep, &devices).kind, SaveKind::Increment);
    a.rewind().unwrap();
    assert_eq!(a.unsaved_bytes(), Some(0), "it holds nothing");
    a.write_at(8192, &[3; 4096], Flags::empty()).unwrap();
    assert_eq!(a.unsaved_bytes(), Some(4096));
    let estimate = keep.estimate(&devices).unwrap();
    assert!(estimate.kind == SaveKind::Whole && estimate.fits(), "{estimate:?}");
    assert_eq!(save(&mut keep, &devices).kind, SaveKind::Whole, "a rewind");
    b.reset().unwrap();
    b.write_at(0, &[4; 512], Flags::empty()).unwrap();
    assert_eq!(save(&mut keep, &devices).kind, SaveKind::Whole, "a reset");
    assert_eq!(files(dir.path()).len(), 1, "old files are gone");
    let all = [content(&a), content(&b), content(&snapshot)];
    drop(keep);
    let (_keep, devices, _loading) = restored(dir.path(), &self::family(), &[]);
    assert!(["a", "b", "s"].map(|name| content(named(&devices, name))) == all);
}

#[test]
fn cancelled_save_keeps_changes_for_next() {
    let dir = tempfile::tempdir().unwrap();
    let ram = family().ram(16 * MIB).unwrap();
    let mut random = Random(3);
    for page in 0..3000 {
        ram.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
    }
    let devices: [(&str, &Ram); 1] = [("a", &ram)];
    let mut keep = Keep::open(dir.path()).unwrap();
    let cancelled = keep.save(&devices, &|| true, &mut |_, _| {});
    assert!(matches!(cancelled, Err(KeepError::Save(SaveError::Cancelled))));
    assert_eq!(files(dir.path()).len(), 0);
    assert_eq!(save(&mut keep, &devices).kind, SaveKind::Whole);
    let mut all = 0;
    for after in 0..7 {
        for page in (after..3000).step_by(5) {
            ram.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
        }
        let asked = Cell::new(0);
        let cancel = || asked.replace(asked.get() + 1) >= after;
        let cancelled = keep.save(&devices, &cancel, &mut |_, _| {});
        if matches!(cancelled, Err(KeepError::Save(SaveError::Cancelled))) {
            all = all.max(ram.unsaved_bytes().unwrap());
            assert!(ram.unsaved_bytes().unwrap() >= 600 * PAGE);
        }
    }
    assert!(all >= 1200 * PAGE, "{all}: what was put back twice is all there");
    assert_eq!(save(&mut keep, &devices).kind, SaveKind::Increment);
    drop(keep);
    let (_keep, again, _loading) = restored(dir.path(), &family(), &[]);
    assert!(content(named(&again, "a")) == content(&ram));
}

/// A random page in a hundred changes: the increment must be little larger than the bytes of these
/// pages.
#[test]
fn increment_size_is_close_to_changed_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let ram = family().ram(64 * MIB).unwrap();
    let mut random = Random(4);
    let mut half = |page: &mut Vec<u8>| {
        page.clear();
        while page.len() < PAGE_BYTES {
            let word = if page.len() % 1024 < 400 { random.below(u64::MAX) } else { 7 };
            page.extend_from_slice(&word.to_ne_bytes());
        }
        random.below(64 * MIB / PAGE)
    };
    let mut page = Vec::new();
    for at in 0..64 * MIB / PAGE {
        half(&mut page);
        ram.write_at(at * PAGE, &page, Flags::empty()).unwrap();
    }
    let devices: [(&str, &Ram); 1] = [("a", &ram)];
    let mut keep = Keep::open(dir.path()).unwrap();
    save(&mut keep, &devices);
    let per_page = ram.mm_stat().compr_data_size / (64 * MIB / PAGE);
    let mut changed = std::collections::HashSet::new();
    for _ in 0..64 * MIB / PAGE / 100 {
        let at = half(&mut page);
        ram.write_at(at * PAGE, &page, Flags::empty()).unwrap();
        changed.insert(at);
    }
    let estimate = keep.estimate(&devices).unwrap();
    let now = save(&mut keep, &devices);
    assert_eq!((now.kind, now.pages), (SaveKind::Increment, changed.len() as u64));
    let bytes = changed.len() as u64 * per_page;
    assert!(now.file_bytes * 10 <= bytes * 13, "{} bytes for {bytes}", now.file_bytes);
    let is_near = |estimate: u64, real: u64| estimate * 10 >= real * 9 && estimate * 2 <= real * 3;
    assert!(is_near(estimate.bytes, now.file_bytes), "{estimate:?} for {now:?}");
}

#[test]
fn merge_if_due_keeps_content() {
    let dir = tempfile::tempdir().unwrap();
    let ram = family().ram(4 * MIB).unwrap();
    let mut random = Random(5);
    let devices: [(&str, &Ram); 1] = [("a", &ram)];
    let mut keep = Keep::open(dir.path()).unwrap();
    for page in 0..1024 {
        ram.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
    }
    save(&mut keep, &devices);
    let mut merges = 0;
    for round in 0..60 {
        ram.write_at(round * PAGE, &random.page(), Flags::empty()).unwrap();
        if round % 3 == 0 {
            ram.discard((200 + round) * PAGE, PAGE).unwrap();
        }
        save(&mut keep, &devices);
        let cancelled = keep.merge_if_due(&|| true, &mut |_, _| {});
        assert_eq!(cancelled.is_err(), keep.is_merge_due());
        merges += u32::from(keep.merge_if_due(&never, &mut |_, _| {}).unwrap().is_some());
        assert!(files(dir.path()).len() <= INCREMENTS_MAX + 1);
    }
    assert_eq!(merges, 3, "after each 17 increments");
    // Changing many pages at once makes the increment exceed half of the whole file.
    for page in 0..700 {
        ram.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
    }
    save(&mut keep, &devices);
    assert!(keep.merge_if_due(&never, &mut |_, _| {}).unwrap().is_some());
    // The merged file is a regular saved file, which `restore` can read.
    let path = dir.path().join(files(dir.path()).keys().next().unwrap());
    let plain = crate::save::restore(&path, &family(), &[], &mut |_, _| {}).unwrap();
    assert!(content(&plain[0].1) == content(&ram));
    drop(keep);
    let (_keep, again, mut loading) = restored(dir.path(), &family(), &[]);
    load(&mut loading);
    assert!(content(named(&again, "a")) == content(&ram));
    assert_eq!(named(&again, "a").mm_stat().orig_data_size, ram.mm_stat().orig_data_size);
}
