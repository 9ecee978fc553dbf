//! Dictionaries: what a compressor has seen before it sees the page.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest dictionary that is read or trained.
pub const DICTIONARY_BYTES_MAX: u64 = 1 << 20;
/// Smallest dictionary that is trained: the library makes none that is smaller.
const TRAINED_BYTES_MIN: usize = 256;

/// A compression dictionary. Its content is shared by its clones.
#[derive(Clone, PartialEq, Eq)]
pub struct Dictionary {
    /// The file that it was read from; none where it was trained here.
    path: Option<PathBuf>,
    bytes: Arc<[u8]>,
}

impl Dictionary {
    /// The content of a file: a dictionary of any kind that zstd takes, trained, or just typical
    /// content.
    pub(super) fn of_file(path: &Path, bytes: Vec<u8>) -> Self {
        Self { path: Some(path.into()), bytes: bytes.into() }
    }

    /// Trains a dictionary of at most `max_bytes` (never more than [`DICTIONARY_BYTES_MAX`]) on
    /// samples that lie one behind the other in `samples`, each as long as `sizes` says. Takes
    /// about a second of CPU for 8 MiB. `None` where the sizes do not add up to the samples, where
    /// there is too little to learn from (the library wants a good hundred times `max_bytes`, and
    /// takes less), or without memory.
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

    /// A dictionary of 1 to [`DICTIONARY_BYTES_MAX`] bytes that was trained elsewhere; `None` for
    /// another size.
    pub fn trained(bytes: &[u8]) -> Option<Self> {
        let fits = (1..=DICTIONARY_BYTES_MAX).contains(&(bytes.len() as u64));
        fits.then(|| Self { path: None, bytes: bytes.into() })
    }

    /// The file that it was read from; none where it was trained here.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The content.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The path; `(trained,N)` for one of N bytes that was trained here and has none.
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
    fn training_learns_what_samples_share() {
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
    fn what_cannot_be_trained_on_is_refused() {
        assert_eq!(Dictionary::train(b"abc", &[2], 4096), None);
        assert_eq!(Dictionary::train(b"abc", &[usize::MAX, 4], 4096), None);
        assert_eq!(Dictionary::train(b"", &[], 4096), None);
        assert_eq!(Dictionary::train(b"too short", &[9], 4096), None);
        assert_eq!(Dictionary::train(&[7; 8192], &[4096, 4096], 10), None);
    }
}
