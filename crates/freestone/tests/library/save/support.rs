//! Disks with pages of all forms, and comparison of devices, for the save tests.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Device, Flags};
use freestone::ram::{Config, Family, Ram};
use freestone::save::{self, Base, BaseCheck, RestoreError, SaveReport};
use freestone_testkit::{Model, Rng, first_difference};

pub const PAGE: u64 = 4096;
pub const MIB: u64 = 1 << 20;

/// Returns a page that depends on seed and slot: a 32-bit pattern, a 64-bit pattern, compressible
/// data, or noise.
pub fn content(seed: u64, slot: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ slot);
    let mut page = vec![0; PAGE as usize];
    match rng.below(6) {
        0 => page.as_chunks_mut().0.fill((rng.word() as u32).to_le_bytes()),
        1 => page.as_chunks_mut().0.fill(rng.word().to_le_bytes()),
        2 => rng.fill(&mut page),
        3 => {}
        _ => text(&mut rng, &mut page),
    }
    page
}

/// Fills a page with random words, which compress better with a dictionary of such text.
pub fn text(rng: &mut Rng, page: &mut [u8]) {
    const WORDS: [&[u8]; 8] =
        [b"state=running ", b"user=", b"{\"id\":", b"\n", b"0x", b"queue", b" retry ", b"12:"];
    let mut at = 0;
    while at < page.len() {
        let word = WORDS[rng.below(8) as usize];
        let len = word.len().min(page.len() - at);
        page[at..at + len].copy_from_slice(&word[..len]);
        at += len;
        if at < page.len() {
            page[at] = b'a' + rng.below(26) as u8;
            at += 1;
        }
    }
}

pub fn write(ram: &Ram, slot: u64, seed: u64) {
    ram.write_at(slot * PAGE, &content(seed, slot), Flags::empty()).unwrap();
}

pub fn fill(ram: &Ram, slots: impl IntoIterator<Item = u64>, seed: u64) {
    for slot in slots {
        write(ram, slot, seed);
    }
}

pub fn image(device: &dyn Device) -> Vec<u8> {
    let mut all = vec![0xAA; device.geometry().size as usize];
    for (at, part) in (0..).step_by(MIB as usize).zip(all.chunks_mut(MIB as usize)) {
        device.read_at(at, part).unwrap();
    }
    all
}

#[track_caller]
pub fn assert_same(one: &dyn Device, other: &dyn Device) {
    let (one, other) = (image(one), image(other));
    assert_eq!(one.len(), other.len());
    if let Some(at) = first_difference(&one, &other) {
        panic!("page {} differs", at as u64 / PAGE);
    }
}

pub fn disk(config: Config, size: u64) -> Ram {
    Ram::new(Config { disksize: size, ..config }).unwrap()
}

pub fn family() -> Family {
    Family::new(Config::default()).unwrap()
}

pub fn save(devices: &[(&str, &Ram)], to: &Path) -> SaveReport {
    let mut last = (0, 0);
    let saved = save::save(devices, to, BaseCheck::default(), &mut |done, all| {
        assert!(done >= last.0 && done <= all && (last.1 == all || last == (0, 0)));
        last = (done, all);
    })
    .unwrap();
    assert_eq!(last.0, last.1);
    assert_eq!(std::fs::metadata(to).unwrap().len(), saved.file_bytes);
    saved
}

pub fn restore(
    from: &Path,
    family: &Family,
    bases: &[Base],
) -> std::result::Result<Vec<(String, Ram)>, RestoreError> {
    let mut last = (0, 0);
    let restored = save::restore(from, family, bases, &mut |done, all| {
        assert!(done >= last.0 && done <= all);
        last = (done, all);
    })?;
    assert_eq!(last.0, last.1);
    Ok(restored)
}

/// Restores a file that contains a single device.
pub fn restore_one(from: &Path, family: &Family, bases: &[Base]) -> Ram {
    let mut restored = restore(from, family, bases).unwrap();
    assert_eq!(restored.len(), 1);
    restored.remove(0).1
}

pub fn refused(from: &Path, bases: &[Base]) -> RestoreError {
    match restore(from, &family(), bases) {
        Ok(_) => panic!("it was taken"),
        Err(error) => error,
    }
}

#[track_caller]
pub fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < Duration::from_secs(300), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns a read-only base of forks: random content of `pages` pages and a half, so that its last page
/// is partial.
pub fn base_model(seed: u64, pages: u64) -> Arc<Model> {
    let mut bytes: Vec<u8> = (0..pages).flat_map(|slot| content(seed, slot)).collect();
    bytes.resize(bytes.len() + 2048, 0);
    Arc::new(Model::read_only(bytes, 512))
}
