//! Restoring of RAM devices from a file of `save` with arbitrary content.
//!
//! An input is one byte of options, then the file. An option corrects all checksums. Properties:
//! * Restoring returns an error of one sentence, or the devices that the file lists, with their sizes.
//! * A file with a wrong checksum is refused.
//! * The restored devices can be saved again, and that file restores to the same devices.

use std::path::Path;
use std::sync::Arc;

use freestone::device::{Blocking, Device};
use freestone::ram::{Config, Family, Ram};
use freestone::save::{self, Base, BaseCheck, RestoreError};
use freestone_testkit::Model;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::scratch::Scratch;

const HEADER: usize = 64;
const BLOCK: usize = 40;
/// Number of bytes that the check reads at the beginning and at the end of a device.
const LOOK_BYTES: u64 = 64 << 10;
/// Memory limit of the restored devices, in bytes.
const LIMIT_BYTES: u64 = 8 << 20;

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize
}

fn set(bytes: &mut [u8], at: usize, sum: u64) {
    bytes[at..at + 8].copy_from_slice(&sum.to_le_bytes());
}

/// Corrects all checksums of a saved file, as far as its lengths are valid.
fn seal(bytes: &mut [u8]) {
    if bytes.len() < HEADER {
        return;
    }
    let salt = u64::from_le_bytes(bytes[24..32].try_into().expect("eight bytes"));
    let contents = u32_at(bytes, 32);
    if let Some(contents) = bytes.get(HEADER..HEADER.saturating_add(contents)) {
        let sum = xxh3_64_with_seed(contents, salt);
        set(bytes, 48, sum);
    }
    let sum = xxh3_64_with_seed(&bytes[..56], 0);
    set(bytes, 56, sum);
    let mut digest = Xxh3::with_seed(salt);
    let mut at = HEADER.saturating_add(contents);
    while let Some(end) = bytes.get(at..).filter(|rest| rest.len() >= BLOCK) {
        let end = at + BLOCK + u32_at(end, 32);
        if end > bytes.len() {
            return;
        }
        if u32_at(bytes, at + 12) == 3 && end == at + 72 {
            let file_bytes = bytes.len() as u64;
            set(bytes, at + 56, file_bytes);
            set(bytes, at + 64, digest.digest());
        }
        let sum = xxh3_64_with_seed(&bytes[at + 8..end], salt);
        set(bytes, at, sum);
        digest.update(&sum.to_le_bytes());
        at = end;
    }
}

/// Returns the base device of the forks in a saved file.
pub fn base() -> Arc<dyn Device> {
    let content = (0..9 * 512).map(|at| (at / 100 % 251) as u8).collect();
    Arc::new(Model::read_only(content, 512))
}

fn restore(path: &Path) -> Result<Vec<(String, Ram)>, RestoreError> {
    let family = Family::new(Config { mem_limit: LIMIT_BYTES, ..Config::default() }).expect("a family");
    let mut last = 0;
    save::restore(path, &family, &[Base::Device(base())], &mut |done, all| {
        assert!(done >= last && done <= all);
        last = done;
    })
}

/// Reads up to [`LOOK_BYTES`] at the beginning and at the end of a device.
fn read_ends(device: &Ram) -> Vec<u8> {
    let size = device.geometry().size;
    let part = size.min(LOOK_BYTES);
    let mut bytes = vec![0; 2 * part as usize];
    let (begin, end) = bytes.split_at_mut(part as usize);
    device.read_at(0, begin).expect("what was restored can be read");
    device.read_at(size - part, end).expect("what was restored can be read");
    bytes
}

/// Checks one input. Returns true if the file was restored.
///
/// # Panics
/// Panics if a property does not hold.
pub fn check(scratch: &Scratch, input: &[u8]) -> bool {
    let Some((&options, file)) = input.split_first() else { return false };
    let mut bytes = file.to_vec();
    if options & 1 != 0 {
        seal(&mut bytes);
    }
    let path = scratch.file(&bytes);
    let contents = save::verify(path, &mut |_, _| {});
    let restored = match restore(path) {
        Ok(restored) => restored,
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
            return false;
        }
    };
    let contents = contents.expect("what is restored can be verified");
    let listed_sizes: Vec<_> = contents.devices.iter().map(|device| (&device.name, device.size)).collect();
    let restored_sizes: Vec<_> = restored.iter().map(|(name, ram)| (name, ram.geometry().size)).collect();
    assert_eq!(listed_sizes, restored_sizes);
    let mut sealed = bytes.clone();
    seal(&mut sealed);
    assert!(sealed == bytes, "checksums that do not fit");

    let second_path = scratch.beside();
    let devices: Vec<_> = restored.iter().map(|(name, ram)| (name.as_str(), ram)).collect();
    if devices.is_empty() {
        return true;
    }
    save::save(&devices, &second_path, BaseCheck::default(), &mut |_, _| {}).expect("it can be saved again");
    let other = restore(&second_path).expect("what was saved is restored");
    assert_eq!(other.len(), restored.len());
    for ((name, one), (other_name, other)) in restored.iter().zip(&other) {
        assert_eq!((name, one.geometry().size), (other_name, other.geometry().size));
        assert!(read_ends(one) == read_ends(other), "{name} is not the same");
    }
    true
}
