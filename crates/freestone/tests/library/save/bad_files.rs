//! Save files that are foreign, newer, truncated, stale or damaged are refused with a clear error.

use std::path::Path;

use freestone::ram::{Config, ForkConfig, Ram};
use freestone::save::{self, Base, RestoreError};
use freestone_testkit::{Rng, scaled};

use crate::save::support::*;

/// Returns devices of every kind in one family (a disk, its snapshots and forks, which share
/// memory), and the base of its fork. The save file of the family has a few dozen KiB.
pub fn small_family(seed: u64) -> (Vec<(String, Ram)>, Base) {
    let family = family();
    let disk = family.ram(MIB).unwrap();
    fill(&disk, 0..12, seed);
    let golden = disk.snapshot().unwrap();
    fill(&disk, 5..9, seed + 1);
    let fork = golden.fork(&ForkConfig { size: Some(2 * MIB), ..ForkConfig::default() }).unwrap();
    fill(&fork, [3, 300], seed + 2);
    let base = Base::Device(base_model(seed + 3, 20));
    let Base::Device(device) = &base else { unreachable!() };
    let over = family.fork(std::sync::Arc::clone(device), &ForkConfig::default()).unwrap();
    fill(&over, 1..5, seed + 4);
    let named = [("disk", disk), ("golden", golden), ("fork", fork), ("over", over)];
    (named.into_iter().map(|(name, ram)| (name.to_owned(), ram)).collect(), base)
}

pub fn save_family(devices: &[(String, Ram)], to: &Path) {
    let devices: Vec<(&str, &Ram)> = devices.iter().map(|(name, ram)| (name.as_str(), ram)).collect();
    save(&devices, to);
}

#[test]
fn foreign_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let mut noise = vec![0; 100_000];
    Rng::new(1).fill(&mut noise);
    for bytes in [&b""[..], b"x", b"QFI\xfb\0\0\0\x03", &noise, &[0; 5000], b"\x89Freestone SAVE\n and so on"]
    {
        std::fs::write(&file, bytes).unwrap();
        let error = refused(&file, &[]);
        assert!(matches!(error, RestoreError::Foreign(_)), "{error}");
        assert!(matches!(save::inspect(&file), Err(RestoreError::Foreign(_))));
    }
    assert!(matches!(refused(dir.path(), &[]), RestoreError::Foreign(_)));
    assert!(matches!(refused(&dir.path().join("nothing"), &[]), RestoreError::Read { .. }));
}

#[test]
fn newer_version_is_refused_with_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let ram = disk(Config::default(), MIB);
    save(&[("ram0", &ram)], &file);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[16..20].copy_from_slice(&5_u32.to_le_bytes());
    std::fs::write(&file, &bytes).unwrap();
    let error = refused(&file, &[]);
    assert!(matches!(error, RestoreError::Newer { version: 5, .. }));
    let message = error.to_string();
    assert!(
        message
            .ends_with("was saved by a newer Freestone, in version 5 of the format; this one reads up to 4"),
        "{message}"
    );
}

#[test]
fn truncated_file_is_not_complete() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let (devices, base) = small_family(1);
    save_family(&devices, &file);
    let whole = std::fs::read(&file).unwrap();
    for len in (0..whole.len()).filter(|len| len % 97 == 0 || *len < 700 || len + 700 > whole.len()) {
        std::fs::write(&file, &whole[..len]).unwrap();
        let error = refused(&file, std::slice::from_ref(&base));
        let right = matches!(error, RestoreError::Incomplete(_)) || len == 0;
        assert!(right, "{len} of {} bytes: {error}", whole.len());
        assert!(save::inspect(&file).is_err());
    }
    // A file with extra bytes after its end is refused as well.
    let mut longer = whole.clone();
    longer.extend_from_slice(&whole);
    for len in [whole.len() + 1, whole.len() + 72, longer.len()] {
        std::fs::write(&file, &longer[..len]).unwrap();
        refused(&file, std::slice::from_ref(&base));
    }
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(restore(&file, &family(), &[base]).unwrap().len(), 4);
}

/// Blocks that did not reach the disk before a power loss contain zeroes, or the content of an
/// older file. A file with such blocks is refused.
#[test]
fn file_with_stale_blocks_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let (devices, base) = small_family(1);
    save_family(&devices, &file);
    let old = std::fs::read(&file).unwrap();
    // Saves the same content again. The two files differ only in their salt and checksums.
    save_family(&devices, &file);
    let new = std::fs::read(&file).unwrap();
    assert_eq!(old.len(), new.len());
    let zeroes = vec![0; new.len()];
    for under in [&old, &zeroes] {
        for unit in [512, 4096] {
            for at in (0..new.len()).step_by(unit) {
                let end = (at + unit).min(new.len());
                let mut mixed = new.clone();
                mixed[at..end].copy_from_slice(&under[at..end]);
                if mixed != new {
                    std::fs::write(&file, &mixed).unwrap();
                    refused(&file, std::slice::from_ref(&base));
                }
                let mut rest = under.clone();
                rest[at..end].copy_from_slice(&new[at..end]);
                if rest != new && rest != old {
                    std::fs::write(&file, &rest).unwrap();
                    refused(&file, std::slice::from_ref(&base));
                }
            }
        }
    }
}

/// Any change of a file is detected, or the restored content equals the saved content.
#[test]
fn random_changes_are_detected() {
    let dir = tempfile::tempdir().unwrap();
    let (file, other_file) = (dir.path().join("file"), dir.path().join("other"));
    let (devices, base) = small_family(1);
    save_family(&devices, &file);
    save_family(&small_family(100).0, &other_file);
    let (whole, other) = (std::fs::read(&file).unwrap(), std::fs::read(&other_file).unwrap());
    let mut rng = Rng::new(7);
    let mut unchanged = 0;
    for round in 0..scaled(6000) {
        let mut bytes = whole.clone();
        let len = bytes.len() as u64;
        // Prefers the start and the end of the file, where lengths and counts are.
        let place = |rng: &mut Rng| match rng.below(3) {
            0 => rng.below(400.min(len)) as usize,
            1 => (len - 1 - rng.below(300)) as usize,
            _ => rng.below(len) as usize,
        };
        for _ in 0..=rng.below(3) {
            let (at, to) = (place(&mut rng), place(&mut rng));
            let span = (1 << rng.below(13)).min(bytes.len() - at.max(to));
            match rng.below(7) {
                0 => bytes[at] ^= 1 << rng.below(8),
                1 => bytes[at] = [0, 1, 0x7F, 0x80, 0xFF][rng.below(5) as usize],
                2 => bytes.copy_within(at..at + span, to),
                3 => bytes[at..at + span].fill(0),
                4 => {
                    let span = span.min(other.len().saturating_sub(at));
                    bytes[at..at + span].copy_from_slice(&other[at.min(other.len() - span)..][..span]);
                }
                5 => drop(bytes.splice(at..at, other[..span.min(other.len())].iter().copied())),
                _ => drop(bytes.drain(at..at + span)),
            }
            if bytes.len() < whole.len() {
                bytes.resize(whole.len(), 0);
            }
        }
        std::fs::write(&file, &bytes).unwrap();
        let taken = restore(&file, &family(), std::slice::from_ref(&base)).is_ok();
        assert_eq!(taken, bytes == whole, "round {round}: taken {taken}");
        unchanged += u32::from(taken);
    }
    assert!(unchanged < scaled(3000), "{unchanged}");
}
