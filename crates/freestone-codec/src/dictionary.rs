//! Compression dictionaries for zstd.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest dictionary that can be read or trained, in bytes.
pub const DICTIONARY_BYTES_MAX: u64 = 1 << 20;
/// Smallest dictionary that can be trained, in bytes: the minimum of libzstd.
const TRAINED_BYTES_MIN: usize = 256;

/// A compression dictionary. Clones share the content.
#[derive(Clone, PartialEq, Eq)]
pub struct Dictionary {
    /// File from which the dictionary was read; `None` if it was trained.
    path: Option<PathBuf>,
    bytes: Arc<[u8]>,
}

impl Dictionary {
    /// Creates a dictionary from the content of the file `path`. zstd accepts a trained dictionary
    /// or just typical content.
    pub(super) fn of_file(path: &Path, bytes: Vec<u8>) -> Self {
        Self { path: Some(path.into()), bytes: bytes.into() }
    }

    /// Trains a dictionary of at most `max_bytes` (limited to [`DICTIONARY_BYTES_MAX`]) on samples.
    /// `samples` contains the samples one after the other, and `sizes` contains their lengths.
    /// Training with 8 MiB of samples uses about a second of CPU time.
    ///
    /// Returns `None` if the sizes do not add up to the length of `samples`, if memory is short, or
    /// if there is too little data. (libzstd recommends 100 times `max_bytes` but accepts less.)
    pub fn train(samples: &[u8], sizes: &[usize], max_bytes: usize) -> Option<Self> {
        let total = sizes.iter().try_fold(0_usize, |sum, &size| sum.checked_add(size));
        let capacity = max_bytes.min(DICTIONARY_BYTES_MAX as usize);
        if total != Some(samples.len()) || capacity < TRAINED_BYTES_MIN || sizes.is_empty() {
            return None;
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(capacity).ok()?;
        zstd_safe::train_from_buffer(&mut bytes, samples, sizes).ok()?;
        Some(Self { path: None, bytes: bytes.into() })
    }

    /// Creates a dictionary from bytes that another process trained. Returns `None` unless there
    /// are 1 to [`DICTIONARY_BYTES_MAX`] bytes.
    pub fn trained(bytes: &[u8]) -> Option<Self> {
        let fits = (1..=DICTIONARY_BYTES_MAX).contains(&(bytes.len() as u64));
        fits.then(|| Self { path: None, bytes: bytes.into() })
    }

    /// Returns the file from which the dictionary was read; `None` if it was trained.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the content of the dictionary.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Prints the path, or `(trained,N)` for a trained dictionary of N bytes.
impl fmt::Display for Dictionary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => path.display().fmt(f),
            None => write!(f, "(trained,{})", self.bytes.len()),
        }
    }
}

impl fmt::Debug for Dictionary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({} bytes)", self.bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn train_finds_common_content() {
        let samples: Vec<u8> =
            (0..20_000_u32).flat_map(|n| format!("row {n}: state=ok\n").into_bytes()).collect();
        let samples = &samples[..samples.len() / 512 * 512];
        let sizes = vec![512; samples.len() / 512];
        let dictionary = Dictionary::train(samples, &sizes, 4096).unwrap();
        assert!((TRAINED_BYTES_MIN..=4096).contains(&dictionary.bytes().len()), "{dictionary:?}");
        assert!(dictionary.bytes().windows(8).any(|w| w == b"state=ok"));
        assert_eq!(dictionary.to_string(), format!("(trained,{})", dictionary.bytes().len()));
    }

    #[test]
    fn train_invalid_samples_returns_none() {
        assert_eq!(Dictionary::train(b"abc", &[2], 4096), None);
        assert_eq!(Dictionary::train(b"abc", &[usize::MAX, 4], 4096), None);
        assert_eq!(Dictionary::train(b"", &[], 4096), None);
        assert_eq!(Dictionary::train(b"too short", &[9], 4096), None);
        assert_eq!(Dictionary::train(&[7; 8192], &[4096, 4096], 10), None);
    }
}
