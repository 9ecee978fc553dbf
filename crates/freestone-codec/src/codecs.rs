//! The compression algorithms of one disk: a primary one for writes, and up to three secondary ones
//! for recompression.

use std::sync::Arc;

use super::{Page, Streams};
use freestone_core::device::{Error, Result};
use freestone_core::sync::OnceLock;

/// Number of secondary algorithms of a disk; their priorities are 1 to this number.
pub const PRIORITIES: usize = 3;

/// A disk's compression algorithms by priority. A slot stores the priority of the algorithm that
/// compressed its page; 0 is the primary one. An algorithm cannot be replaced, as stored pages
/// depend on it.
pub struct Codecs {
    primary: Arc<Streams>,
    secondary: [OnceLock<Arc<Streams>>; PRIORITIES],
}

/// Errors from [`Codecs::set`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// The priority is 0 or above [`PRIORITIES`].
    #[error("priority {0} does not exist: secondary algorithms have 1 to {PRIORITIES}")]
    Range(usize),
    /// The priority already has an algorithm, which cannot be replaced.
    #[error("priority {0} has an algorithm already")]
    Taken(usize),
}

impl Codecs {
    /// Creates a set of algorithms that contains only the primary one.
    pub fn new(primary: Arc<Streams>) -> Self {
        Self { primary, secondary: [const { OnceLock::new() }; PRIORITIES] }
    }

    /// Sets the secondary algorithm with priority 1 to [`PRIORITIES`]. Each priority can be set
    /// only once.
    ///
    /// # Errors
    /// Fails if the priority does not exist or already has an algorithm.
    pub fn set(&self, priority: usize, streams: Arc<Streams>) -> std::result::Result<(), SetError> {
        let place = priority.checked_sub(1).and_then(|index| self.secondary.get(index));
        place.ok_or(SetError::Range(priority))?.set(streams).map_err(|_| SetError::Taken(priority))
    }

    /// Returns the primary algorithm, which compresses newly written pages.
    #[inline]
    pub fn primary(&self) -> &Streams {
        &self.primary
    }

    /// Returns the algorithm with a priority (0: the primary one); `None` if it is not set.
    pub fn get(&self, priority: usize) -> Option<&Streams> {
        match priority {
            0 => Some(&self.primary),
            _ => self.secondary.get(priority - 1)?.get().map(|streams| &**streams),
        }
    }

    /// Returns the algorithm with the highest priority, and the priority: usually the one with the
    /// smallest results.
    pub fn strongest(&self) -> (usize, &Streams) {
        self.secondary().next_back().unwrap_or((0, &self.primary))
    }

    /// Iterates over the secondary algorithms with their priorities, lowest priority first.
    pub fn secondary(&self) -> impl DoubleEndedIterator<Item = (usize, &Streams)> {
        (1..=PRIORITIES).filter_map(|priority| Some((priority, self.get(priority)?)))
    }

    /// Decompresses `object`, compressed by the algorithm with priority `algorithm`, into `page`.
    ///
    /// # Errors
    /// [`Error::Media`] if the object is not a page compressed by this algorithm, or if the
    /// priority has no algorithm.
    #[inline]
    pub fn decompress(&self, algorithm: usize, object: &[u8], page: &mut Page) -> Result<()> {
        if algorithm == 0 {
            return self.primary.decompress(object, page);
        }
        self.decompress_secondary(algorithm, object, page)
    }

    fn decompress_secondary(&self, algorithm: usize, object: &[u8], page: &mut Page) -> Result<()> {
        self.get(algorithm).ok_or(Error::Media)?.decompress(object, page)
    }

    /// Returns the memory use of all streams and dictionaries in bytes. Disks with the same
    /// algorithm and parameters share this memory.
    pub fn bytes(&self) -> u64 {
        self.primary.bytes() + self.secondary().map(|(_, streams)| streams.bytes()).sum::<u64>()
    }
}
