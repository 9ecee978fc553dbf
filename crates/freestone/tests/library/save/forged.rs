//! Save files with valid checksums around invalid fields. The test forges them from the byte map of
//! `docs/reference/save-format.md`, without the library's writer. Restoring them must not cause a panic, a
//! hang or unbounded memory use.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use freestone::device::{Blocking as _, Device, Flags};
use freestone::ram::ForkConfig;
use freestone::save::{self, Base, RestoreError};
use freestone_testkit::{Rng, scaled};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::save::bad_files::{save_family, small_family};
use crate::save::support::*;

const HEADER: usize = 64;
const BLOCK: usize = 40;

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn set(bytes: &mut [u8], at: usize, sum: u64) {
    bytes[at..at + 8].copy_from_slice(&sum.to_le_bytes());
}

/// Returns the byte offsets of the blocks in a file, computed from the lengths that the file contains.
fn blocks(bytes: &[u8]) -> Vec<usize> {
    let mut at = HEADER + u32_at(bytes, 32).min(1 << 24);
    let mut found = Vec::new();
    while bytes.len() >= at + BLOCK {
        found.push(at);
        at += BLOCK + u32_at(bytes, at + 32);
    }
    found
}

/// Updates all checksums of a file, as far as its lengths allow.
fn seal(bytes: &mut [u8]) {
    let salt = u64::from_le_bytes(bytes[24..32].try_into().unwrap());
    let contents = u32_at(bytes, 32);
    if let Some(contents) = bytes.get(HEADER..HEADER + contents) {
        let sum = xxh3_64_with_seed(contents, salt);
        set(bytes, 48, sum);
    }
    let sum = xxh3_64_with_seed(&bytes[..56], 0);
    set(bytes, 56, sum);
    let mut digest = Xxh3::with_seed(salt);
    let found = blocks(bytes);
    for (number, &at) in found.iter().enumerate() {
        let end = at + BLOCK + u32_at(bytes, at + 32);
        if end > bytes.len() {
            break;
        }
        if number + 1 == found.len() && end == at + 72 {
            set(bytes, at + 64, digest.digest());
        }
        let sum = xxh3_64_with_seed(&bytes[at + 8..end], salt);
        set(bytes, at, sum);
        digest.update(&sum.to_le_bytes());
    }
}

#[test]
fn sealing_an_unchanged_file_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    save_family(&small_family(1).0, &file);
    let whole = std::fs::read(&file).unwrap();
    let mut sealed = whole.clone();
    seal(&mut sealed);
    assert!(whole == sealed);
    assert!(blocks(&whole).len() > 4);
}

#[test]
fn forged_fields_are_refused_or_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let (devices, base) = small_family(1);
    save_family(&devices, &file);
    let whole = std::fs::read(&file).unwrap();
    let found = blocks(&whole);
    let mut rng = Rng::new(11);
    let (mut taken, mut damaged) = (0, 0);
    for round in 0..scaled(8000) {
        let mut bytes = whole.clone();
        for _ in 0..=rng.below(2) {
            // Selects a field of the contents, of a block's header, or of the first records after that
            // header.
            let at = match rng.below(4) {
                0 => rng.below(HEADER as u64 + u32_at(&whole, 32) as u64) as usize,
                1 => found[rng.below(found.len() as u64) as usize] + rng.below(BLOCK as u64) as usize,
                2 => found[rng.below(found.len() as u64) as usize] + BLOCK + rng.below(200) as usize,
                _ => rng.below(whole.len() as u64) as usize,
            };
            let Some(byte) = bytes.get_mut(at) else { continue };
            *byte = match rng.below(4) {
                0 => *byte ^ 1 << rng.below(8),
                1 => byte.wrapping_add(1),
                2 => byte.wrapping_sub(1),
                _ => [0, 1, 0x0F, 0x7F, 0x80, 0xFF][rng.below(6) as usize],
            };
        }
        seal(&mut bytes);
        std::fs::write(&file, &bytes).unwrap();
        let restored =
            catch_unwind(AssertUnwindSafe(|| restore(&file, &family(), std::slice::from_ref(&base))));
        match restored {
            Err(_) => {
                let kept = std::env::temp_dir().join("forged-save");
                std::fs::write(&kept, &bytes).unwrap();
                panic!("round {round} panicked; see {}", kept.display());
            }
            Ok(Ok(restored)) => {
                taken += 1;
                assert!(restored.len() <= 4 && save::verify(&file, &mut |_, _| {}).is_ok());
            }
            Ok(Err(RestoreError::Damaged { .. })) => damaged += 1,
            Ok(Err(_)) => {}
        }
    }
    // Many forged files were accepted, and many were refused as damaged in spite of valid checksums.
    assert!(taken > scaled(300) && damaged > scaled(300), "{taken} taken, {damaged} damaged");
}

/// Devices that end inside a page need a newer file version. A file of an older version with such a device is
/// refused, and so is data beyond the device's end.
#[test]
fn data_beyond_the_end_of_a_device_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let base: Arc<dyn Device> = base_model(3, 4);
    // The file has every form of a page: a pattern of 32 bits, a pattern of 64 bits, compressed, and huge
    // (incompressible).
    let noise = {
        let mut noise = [0; PAGE as usize];
        Rng::new(4).fill(&mut noise);
        noise
    };
    let mut text = [b'-'; PAGE as usize];
    text[PAGE as usize - 1] = b'.';
    let mut pattern = [7; PAGE as usize];
    pattern.as_chunks_mut().0.fill([1_u8, 2, 3, 4, 5, 6, 7, 8]);
    for page in [[7; PAGE as usize], pattern, text, noise] {
        let config = ForkConfig { size: Some(8 * PAGE), ..ForkConfig::default() };
        let fork = family().fork(Arc::clone(&base), &config).unwrap();
        fork.write_at(7 * PAGE, &page, Flags::empty()).unwrap();
        save(&[("fork", &fork)], &file);
        let whole = std::fs::read(&file).unwrap();
        let given = [Base::Device(Arc::clone(&base))];
        assert_eq!(u32_at(&whole, 16), 1);
        let forged = |version: u8, size: u64| {
            let mut bytes = whole.clone();
            bytes[16] = version;
            bytes[HEADER + 32..][..8].copy_from_slice(&size.to_le_bytes());
            seal(&mut bytes);
            std::fs::write(&file, &bytes).unwrap();
            restore(&file, &family(), &given)
        };
        for version in [1, 2] {
            assert!(forged(version, 8 * PAGE).is_ok());
        }
        for (version, size) in [(1, 8 * PAGE - 512), (2, 8 * PAGE - 512), (2, 8 * PAGE - 1), (2, 7 * PAGE)] {
            let error = forged(version, size).err().expect("it was taken");
            assert!(matches!(error, RestoreError::Damaged { .. }), "{error}");
            let behind = error.to_string().contains("content beyond the end of its device");
            assert_eq!(behind, (version, size) == (2, 8 * PAGE - 512), "{error}");
        }
    }
    // The size of a RAM disk without a base is a whole number of pages in every version.
    let ram = disk(freestone::ram::Config::default(), MIB);
    save(&[("ram0", &ram)], &file);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[16] = 2;
    bytes[HEADER..][..8].copy_from_slice(&(MIB - 512).to_le_bytes());
    seal(&mut bytes);
    std::fs::write(&file, &bytes).unwrap();
    assert!(matches!(refused(&file, &[]), RestoreError::Damaged { .. }));
}
