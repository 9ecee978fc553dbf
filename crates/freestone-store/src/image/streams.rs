//! Reads one behind the other, and how much is fetched before them.

use std::collections::VecDeque;

use crate::format::CHUNK_BYTES;
use crate::rt::sync::{Mutex, PoisonError};

/// Streams of reads that are told apart, and the most that is fetched before one.
const STREAMS: usize = 8;
const STREAM_CHUNKS_MAX: u64 = 32;

/// Chunks of a stream that are waited for before more is fetched: of two that lie side by side the next is
/// seldom wanted (of a guest's boot every other one was not).
const STREAM_WAITS: u32 = 2;

/// Reads one behind the other, by blocks of a chunk's length.
struct Stream {
    next: u64,
    /// How often somebody waited.
    waits: u32,
}

impl Stream {
    /// Somebody is about to wait for a block of it: how many behind are fetched as well.
    fn waited(&mut self, block: u64) -> u64 {
        let doubled = self.waits.checked_sub(STREAM_WAITS).map(|more| 1_u64.checked_shl(more));
        let ahead = doubled.map_or(0, |ahead| ahead.unwrap_or(STREAM_CHUNKS_MAX).min(STREAM_CHUNKS_MAX));
        self.waits = self.waits.saturating_add(1);
        self.next = block + 1 + ahead;
        ahead
    }
}

/// The streams of an image, those that went on last first.
#[derive(Default)]
pub struct Streams(Mutex<VecDeque<Stream>>);

impl Streams {
    /// Somebody is about to wait for what lies there. Where two before it were waited for, what comes behind
    /// is to be fetched as well, twice as much each time: the end of that.
    pub fn missed(&self, offset: u64) -> u64 {
        let block = CHUNK_BYTES as u64;
        let number = offset / block;
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = streams.iter().position(|stream| stream.next == number);
        let known = known.and_then(|at| streams.remove(at));
        streams.truncate(STREAMS - 1);
        let mut stream = known.unwrap_or(Stream { next: number, waits: 0 });
        let ahead = stream.waited(number);
        streams.push_front(stream);
        (number + 1 + ahead) * block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_go_on_get_more_and_others_none() {
        let (streams, block) = (Streams::default(), CHUNK_BYTES as u64);
        // The end of what is fetched, in blocks: two alone, then 1, 2, 4 ... 32 behind one.
        let mut at = 100;
        for window in [0, 0, 1, 2, 4, 8, 16, 32, 32] {
            assert_eq!(streams.missed(at * block + 5), (at + 1 + window) * block);
            at += 1 + window;
            // Somebody else.
            assert_eq!(streams.missed((at + 1_000) * block), (at + 1_001) * block);
        }
    }
}
