//! Waiters for pages that are not in memory, and detection of sequential readers.

use super::Ram;
use super::job::Job;
use crate::spill::objects::Spilled;
use freestone_core::device::{Error, Result};
use freestone_core::sync::{Arc, AtomicU64, Mutex, Ordering};

/// Number of sequential readers tracked at once.
const READERS: usize = 8;

/// A page to read from the backing device.
pub(super) struct PageToRead {
    pub flight: u64,
    /// Location of the page, from its slot.
    pub spilled: Spilled,
}

impl AsRef<Spilled> for PageToRead {
    fn as_ref(&self) -> &Spilled {
        &self.spilled
    }
}

/// A request that waits for a slot in flight.
pub(super) enum Waiter {
    Page(Arc<Fetch>, Piece),
    /// Another request, to be retried; `is_own` if the page is the device's own and not its
    /// parent's.
    Retry {
        ram: Ram,
        job: Job,
        is_own: bool,
    },
}

/// A part of fetched content, and its place in a request's buffer.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub at: usize,
    pub from: usize,
    pub len: usize,
}

pub(super) struct Fetch {
    pub ram: Ram,
    pub state: Mutex<Fetching>,
}

/// State of a [`Fetch`]. Lock order: taken before a slot while pages are gathered, and with no slot
/// locked when they arrive.
pub(super) struct Fetching {
    pub job: Option<Job>,
    /// Bytes done once nothing is pending.
    pub bytes: u64,
    pub pending: usize,
    pub error: Option<Error>,
}

impl Fetch {
    /// Delivers or fails one pending piece; the last one continues the request. Bytes beyond
    /// `outcome` become zeroes.
    pub fn deliver(&self, piece: Option<Piece>, outcome: Result<&[u8]>) {
        let mut fetching = self.state.lock();
        match (outcome, piece, &mut fetching.job) {
            (Ok(content), Some(Piece { at, from, len }), Some(job)) => {
                let content = content.get(from..).unwrap_or_default();
                let (into, beyond) = job.buffer[at..at + len].split_at_mut(len.min(content.len()));
                into.copy_from_slice(&content[..into.len()]);
                beyond.fill(0);
            }
            (Err(error), ..) => fetching.error = fetching.error.or(Some(error)),
            _ => {}
        }
        fetching.pending -= 1;
        if fetching.pending > 0 {
            return;
        }
        let (Some(mut job), bytes, error) = (fetching.job.take(), fetching.bytes, fetching.error) else {
            return;
        };
        drop(fetching);
        match error {
            Some(error) => job.done.complete(Err(error), job.buffer),
            None if bytes == job.request.len => job.done.complete(Ok(()), job.buffer),
            None => {
                job.advance(bytes);
                self.ram.0.pages.keeper.resume(self.ram.clone(), job);
            }
        }
    }
}

/// Expected next pages of sequential readers.
#[derive(Default)]
pub(super) struct Readers {
    next: [AtomicU64; READERS],
    turn: AtomicU64,
}

impl Readers {
    /// Returns true if a read of `[first, end)` continues where an earlier one ended.
    pub fn is_sequential(&self, first: u64, end: u64) -> bool {
        // Relaxed: a guess. 0 is an unused entry.
        let known = self.next.iter().find(|next| first != 0 && next.load(Ordering::Relaxed) == first);
        // Relaxed: any entry may be replaced.
        let turn = || self.turn.fetch_add(1, Ordering::Relaxed) as usize % READERS;
        // Relaxed: as above.
        known.unwrap_or_else(|| &self.next[turn()]).store(end, Ordering::Relaxed);
        known.is_some()
    }
}
