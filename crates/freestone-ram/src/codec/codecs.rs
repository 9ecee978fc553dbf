//! The algorithms of one disk: a primary one for writes, and up to three secondary ones for
//! recompression.

use std::sync::Arc;

use super::{Page, Streams};
use freestone_core::device::{Error, Result};
use freestone_core::sync::OnceLock;

/// Secondary algorithms have the priorities 1 to this.
pub const PRIORITIES: usize = 3;

/// A disk's algorithms by priority, which is also the number that a slot keeps of the one that made
/// its object: 0 is the primary. What was set stays: objects refer to it.
pub struct Codecs {
    primary: Arc<Streams>,
    secondary: [OnceLock<Arc<Streams>>; PRIORITIES],
}

/// Why a secondary algorithm could not be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// 0, or too high.
    #[error("priority {0} does not exist: secondary algorithms have 1 to {PRIORITIES}")]
    Range(usize),
    /// Algorithms stay for a disk's life.
    #[error("priority {0} has an algorithm already")]
    Taken(usize),
}

impl Codecs {
    /// A primary algorithm and no secondary one.
    pub fn new(primary: Arc<Streams>) -> Self {
        Self { primary, secondary: [const { OnceLock::new() }; PRIORITIES] }
    }

    /// Sets the secondary algorithm of a priority, 1 to [`PRIORITIES`], once.
    ///
    /// # Errors
    /// No such priority, or it is set.
    pub fn set(&self, priority: usize, streams: Arc<Streams>) -> std::result::Result<(), SetError> {
        let place = priority.checked_sub(1).and_then(|index| self.secondary.get(index));
        place.ok_or(SetError::Range(priority))?.set(streams).map_err(|_| SetError::Taken(priority))
    }

    /// The algorithm that new pages are compressed with.
    #[inline]
    pub fn primary(&self) -> &Streams {
        &self.primary
    }

    /// The algorithm of a priority, 0 for the primary; `None` where none is set.
    pub fn get(&self, priority: usize) -> Option<&Streams> {
        match priority {
            0 => Some(&self.primary),
            _ => self.secondary.get(priority - 1)?.get().map(|streams| &**streams),
        }
    }

    /// The secondary algorithms that are set, lowest priority first.
    pub fn secondary(&self) -> impl DoubleEndedIterator<Item = (usize, &Streams)> {
        (1..=PRIORITIES).filter_map(|priority| Some((priority, self.get(priority)?)))
    }

    /// Decompresses `object`, which algorithm number `algorithm` made, into `page`.
    ///
    /// # Errors
    /// [`Error::Media`]: the object is not what this algorithm made of a page, or there is no such algorithm.
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

    /// Bytes of all streams and dictionaries. Disks with the same algorithm and parameters share
    /// them.
    pub fn bytes(&self) -> u64 {
        self.primary.bytes() + self.secondary().map(|(_, streams)| streams.bytes()).sum::<u64>()
    }
}
