//! Who waits for pages that are not in memory, and where readers are expected next.

use super::Ram;
use super::job::Job;
use crate::spill::objects::Spilled;
use freestone_core::device::{Error, Result};
use freestone_core::sync::{Arc, AtomicU64, Mutex, Ordering};

/// Sequential readers that are known at once.
const READERS: usize = 8;

/// A page that is to be read from the device.
pub(super) struct Wanted {
    pub flight: u64,
    /// As its slot had it.
    pub spilled: Spilled,
}

impl AsRef<Spilled> for Wanted {
    fn as_ref(&self) -> &Spilled {
        &self.spilled
    }
}

/// Who waits for a slot in flight.
pub(super) enum Waiter {
    /// A read that wants the page's content.
    Page(Arc<Fetch>, Piece),
    /// Another request, which will try again; for a page of the device's own, or for one that lies
    /// below it.
    Retry { ram: Ram, job: Job, is_own: bool },
}

/// A part of what is read, and where it goes in a request's buffer.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub at: usize,
    pub from: usize,
    pub len: usize,
}

/// A read that waits for pages.
pub(super) struct Fetch {
    pub ram: Ram,
    pub state: Mutex<Fetching>,
}

/// Lock order: `state` is taken before a slot while pages are gathered, and with no slot held when
/// they arrive.
pub(super) struct Fetching {
    pub job: Option<Job>,
    /// Bytes that are done when nothing is pending any more.
    pub bytes: u64,
    pub pending: usize,
    pub error: Option<Error>,
}

impl Fetch {
    /// Something that is pending has come, or failed; the last one carries the request on. What
    /// lies beyond the content is zeroes.
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

/// Where sequential readers are expected next.
#[derive(Default)]
pub(super) struct Readers {
    next: [AtomicU64; READERS],
    turn: AtomicU64,
}

impl Readers {
    /// Whether a read of `[first, end)` goes on where another ended.
    pub fn is_sequential(&self, first: u64, end: u64) -> bool {
        // Relaxed: a guess. 0 is nobody.
        let known = self.next.iter().find(|next| first != 0 && next.load(Ordering::Relaxed) == first);
        // Relaxed: whose place is taken does not matter.
        let turn = || self.turn.fetch_add(1, Ordering::Relaxed) as usize % READERS;
        // Relaxed: as above.
        known.unwrap_or_else(|| &self.next[turn()]).store(end, Ordering::Relaxed);
        known.is_some()
    }
}
