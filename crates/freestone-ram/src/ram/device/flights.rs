//! Pages in flight from the backing device, the requests that wait for them, and detection of
//! sequential readers.

use super::Ram;
use crate::ram::memory::pages::Pages;
use crate::ram::waiting::job::Job;
use freestone_core::device::{Error, Result};
use freestone_core::log_limit::LogLimit;
use freestone_core::slot::{FlightId, Flights};
use freestone_core::sync::{Arc, AtomicU64, Mutex, Ordering};
use freestone_spill::objects::Spilled;
use freestone_spill::reads::ReadError;

/// Number of sequential readers of a family (devices that share a memory pool) tracked at once.
const READERS: usize = 8;

/// The pages of a family (devices that share a memory pool) that are being read from the backing
/// device.
pub(in crate::ram) struct FaultIn {
    pub pages: Arc<Pages>,
    pub flights: Flights<Waiter>,
    pub readers: Readers,
    /// Rate limits of log lines about failed reads; key `None` is for damaged pages.
    pub lines: LogLimit<Option<ReadError>>,
}

impl FaultIn {
    pub fn new(pages: Arc<Pages>) -> Self {
        Self { pages, flights: Flights::default(), readers: Readers::default(), lines: LogLimit::default() }
    }
}

/// A page to read from the backing device.
pub(in crate::ram) struct PageToRead {
    pub flight: FlightId,
    /// Location of the page on the device, from its slot.
    pub spilled: Spilled,
}

impl AsRef<Spilled> for PageToRead {
    fn as_ref(&self) -> &Spilled {
        &self.spilled
    }
}

/// A request that waits for a slot in flight from the backing device.
pub(in crate::ram) enum Waiter {
    Page(Arc<Fetch>, Piece),
    /// A change, to be retried when the page is available. `is_own` if the page is in the device's
    /// own slot and not its parent's.
    Retry {
        ram: Ram,
        job: Job,
        is_own: bool,
    },
}

/// A part of fetched content: `len` bytes from byte `from` of the content go to byte `at` of the
/// request's buffer.
#[derive(Clone, Copy)]
pub(in crate::ram) struct Piece {
    pub at: usize,
    pub from: usize,
    pub len: usize,
}

pub(in crate::ram) struct Fetch {
    pub ram: Ram,
    pub state: Mutex<Fetching>,
}

/// State of a [`Fetch`]. Lock order: before a slot while pages are gathered; no slot is locked when
/// pages arrive.
pub(in crate::ram) struct Fetching {
    pub job: Option<Job>,
    /// Bytes of the request that are complete when `pending` is 0.
    pub bytes: u64,
    pub pending: usize,
    pub error: Option<Error>,
}

impl Fetch {
    /// Copies the content of one pending piece to the request's buffer, or records its error. The
    /// last piece completes or continues the request. Bytes beyond the content become zeroes.
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
        freestone_core::trail::step!();
        let (Some(mut job), bytes, error) = (fetching.job.take(), fetching.bytes, fetching.error) else {
            return;
        };
        drop(fetching);
        match error {
            Some(error) => job.done.complete(Err(error), job.buffer),
            None if bytes == job.request.len => job.done.complete(Ok(()), job.buffer),
            None => {
                job.advance(bytes);
                self.ram.0.pages.keeper.resume(self.ram.to_waiting(job));
            }
        }
    }
}

/// Pages at which sequential readers are expected to continue.
#[derive(Default)]
pub(in crate::ram) struct Readers {
    next: [AtomicU64; READERS],
    turn: AtomicU64,
}

impl Readers {
    /// Returns true if a read of the pages `[first, end)` begins where an earlier read ended.
    pub fn is_sequential(&self, first: u64, end: u64) -> bool {
        // Relaxed: read-ahead is a guess. Entry 0 is unused.
        let known = self.next.iter().find(|next| first != 0 && next.load(Ordering::Relaxed) == first);
        // Relaxed: no harm if two threads replace the same entry.
        let turn = || self.turn.fetch_add(1, Ordering::Relaxed) as usize % READERS;
        // Relaxed: a lost update costs only read-ahead.
        known.unwrap_or_else(|| &self.next[turn()]).store(end, Ordering::Relaxed);
        known.is_some()
    }
}
