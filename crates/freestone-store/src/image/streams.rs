//! Detection of sequential reads, and the size of their prefetch window.

use std::collections::VecDeque;

use crate::format::CHUNK_BYTES;
use freestone_core::sync::Mutex;

/// Maximum number of streams (sequential reads) that are tracked at the same time.
const STREAMS: usize = 8;
/// Largest prefetch window of a stream, in chunks.
const STREAM_CHUNKS_MAX: u64 = 32;

/// Number of cache misses of a stream before prefetching starts. After one chunk the next one is often not
/// needed: in half of the cases during the boot of a guest.
const STREAM_WAITS: u32 = 2;

/// A sequence of sequential reads, counted in blocks of the length of a chunk.
struct Stream {
    next: u64,
    /// Number of cache misses of the stream.
    waits: u32,
}

impl Stream {
    /// Records a cache miss of the stream at `block`. Returns the number of blocks after it to prefetch.
    fn record_miss(&mut self, block: u64) -> u64 {
        let doubled = self.waits.checked_sub(STREAM_WAITS).map(|more| 1_u64.checked_shl(more));
        let ahead = doubled.map_or(0, |ahead| ahead.unwrap_or(STREAM_CHUNKS_MAX).min(STREAM_CHUNKS_MAX));
        self.waits = self.waits.saturating_add(1);
        self.next = block + 1 + ahead;
        ahead
    }
}

/// Streams (sequential reads) of an image, most recently used first.
#[derive(Default)]
pub struct Streams(Mutex<VecDeque<Stream>>);

impl Streams {
    /// Records a cache miss at byte `offset`, and returns the end offset of the range to prefetch. The window
    /// is empty for the first two misses of a stream, and then doubles from one chunk.
    pub fn record_miss(&self, offset: u64) -> u64 {
        let block = CHUNK_BYTES as u64;
        let number = offset / block;
        let mut streams = self.0.lock();
        let known = streams.iter().position(|stream| stream.next == number);
        let known = known.and_then(|at| streams.remove(at));
        streams.truncate(STREAMS - 1);
        let mut stream = known.unwrap_or(Stream { next: number, waits: 0 });
        let ahead = stream.record_miss(number);
        streams.push_front(stream);
        (number + 1 + ahead) * block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetch_window_grows_only_for_streams() {
        let (streams, block) = (Streams::default(), CHUNK_BYTES as u64);
        // End of the range in blocks: empty windows for the first two misses, then 1, 2, 4, up to 32.
        let mut at = 100;
        for window in [0, 0, 1, 2, 4, 8, 16, 32, 32] {
            assert_eq!(streams.record_miss(at * block + 5), (at + 1 + window) * block);
            at += 1 + window;
            // A cache miss at an unrelated offset starts a new stream without a prefetch window.
            assert_eq!(streams.record_miss((at + 1_000) * block), (at + 1_001) * block);
        }
    }
}
