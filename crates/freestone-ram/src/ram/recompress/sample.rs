//! State of [automatic recompression](super::auto) between its steps.

use super::cursor::Cursor;
use super::space::{ClassCompaction, RecompressSpace};
use crate::codec::Streams;
use freestone_core::slot::Word;
use freestone_core::sync::thread::JoinHandle;

/// Maximum pages of a training sample: 8 MiB, for which the training takes half a second of CPU
/// time.
pub(super) const SAMPLE_PAGES: usize = 2048;

#[derive(Default)]
pub(super) struct AutoState {
    pub cursor: Cursor,
    pub sample: Sample,
    pub training: Option<JoinHandle<Option<Streams>>>,
    pub retry_ms: u64,
    pub space: RecompressSpace,
    pub compaction: ClassCompaction,
}

/// A uniform random sample (reservoir sampling) of the pages passed to [`offer`](Self::offer).
#[derive(Default)]
pub(super) struct Sample {
    /// Table id of the layer, and slot, of each sampled page.
    pub pages: Vec<(u32, u64)>,
    pub seen: u64,
    pub bytes: u64,
    random: u64,
}

impl Sample {
    pub fn offer(&mut self, page: (u32, u64), word: Word) {
        self.seen += 1;
        self.bytes += word.stored_bytes() as u64;
        if self.pages.len() < SAMPLE_PAGES {
            self.pages.push(page);
            return;
        }
        // splitmix64: a fast generator, random enough for a fair sample.
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (self.random ^ self.random >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        let at = (mixed ^ mixed >> 31) % self.seen;
        if let Some(place) = self.pages.get_mut(at as usize) {
            *place = page;
        }
    }
}
