//! The in-flight log of the vhost-user protocol. The log lies in memory that the frontend keeps
//! across connections. After a crash the next server repeats the requests that were begun but not
//! completed, in the order in which they were begun.
//!
//! A server may be killed between any two stores. The log therefore records a request before the
//! request begins. Before completions are published, the log links the completed requests into a
//! batch. If the ring's used index differs from the one in the log, recovery treats the linked
//! requests as completed.

use std::os::fd::OwnedFd;

use freestone_core::mutants::{self, Mutant};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::disk::MAX_QUEUES;
use crate::memory::{MapError, Memory, RingPart};
use crate::ring::MAX_QUEUE_SIZE;
use crate::wire::{InflightArea, MemRegion};

/// Alignment in bytes of each queue's part of the log.
const ALIGN: usize = 64;
/// Size in bytes of the header of a queue's log: features, version, number of entries, last batch
/// head and used index.
const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Offsets in bytes of fields in the header.
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_BATCH_AT: usize = 12;
const USED_AT: usize = 14;
/// Offsets in bytes of fields in an entry: the in-flight flag, the next entry of the batch, and the
/// counter of begun requests.
const IN_FLIGHT_AT: usize = 0;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
const VERSION: u16 = 1;

#[derive(Debug)]
pub struct InflightLog {
    memory: Memory,
    queues: usize,
    size: u16,
}

/// The in-flight log of one queue, used by the queue's thread.
#[derive(Debug)]
pub struct QueueLog {
    part: RingPart,
    size: u16,
    counter: u64,
    /// Heads of the chains that are completed but not published.
    completed: Vec<u16>,
}

fn queue_bytes(size: u16) -> usize {
    (HEAD_BYTES + usize::from(size) * ENTRY_BYTES).next_multiple_of(ALIGN)
}

fn entry(head: u16) -> usize {
    HEAD_BYTES + usize::from(head) * ENTRY_BYTES
}

/// Returns true if the server supports a log for `queues` queues of `size` entries.
fn is_possible(queues: u16, size: u16) -> bool {
    (1..=MAX_QUEUES).contains(&usize::from(queues)) && (1..=MAX_QUEUE_SIZE).contains(&size)
}

/// Creates a log file for the requested queues. Returns the description of the log for the
/// frontend, and the file.
///
/// # Errors
/// Fails if the number or size of queues is not supported, or if the file cannot be created.
pub fn create(asked: InflightArea) -> std::io::Result<(InflightArea, OwnedFd)> {
    let InflightArea { queues, size, .. } = asked;
    if !is_possible(queues, size) {
        return Err(std::io::Error::other(format!("{queues} queues of {size} entries are not supported")));
    }
    let bytes = (usize::from(queues) * queue_bytes(size)) as u64;
    let file = memfd_create("freestone-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((InflightArea { bytes, offset: 0, queues, size, padding: [0; 4] }, file))
}

impl InflightLog {
    /// Maps the in-flight log that the frontend has kept.
    pub fn new(area: InflightArea, file: &OwnedFd) -> Result<Self, MapError> {
        let InflightArea { bytes, offset, queues, size, .. } = area;
        let needed = (usize::from(queues) * queue_bytes(size)) as u64;
        if !is_possible(queues, size) || needed > bytes {
            return Err(MapError::Range { guest: 0, size: bytes });
        }
        let region = MemRegion { guest: 0, size: needed, user: 0, offset };
        Ok(Self { memory: Memory::default().with_region(region, file)?, queues: queues.into(), size })
    }

    /// Returns the log of the queue `index` with `size` entries, or `None` if the log does not
    /// cover the queue.
    pub fn queue_log(&self, index: usize, size: u16) -> Option<QueueLog> {
        if index >= self.queues || size > self.size {
            return None;
        }
        let part = self.memory.ring_part(
            (index * queue_bytes(self.size)) as u64,
            HEAD_BYTES + usize::from(size) * ENTRY_BYTES,
            ALIGN as u64,
        )?;
        Some(QueueLog { part, size, counter: 0, completed: Vec::new() })
    }
}

impl QueueLog {
    fn is_in_flight(&self, head: u16) -> bool {
        // The load covers two bytes; the second is padding.
        self.part.load(entry(head) + IN_FLIGHT_AT) & 0xff != 0
    }

    /// Returns true if the log's file was truncated and a lost page was accessed.
    pub fn is_dead(&self) -> bool {
        self.part.is_dead()
    }

    /// Returns the heads of the chains begun but not completed, in the order in which they were
    /// begun. Returns `None` if the log is new. `used` is the used index of the ring.
    pub fn recover(&mut self, used: u16) -> Option<Vec<u16>> {
        let known = self.part.load(VERSION_AT) == VERSION;
        if known {
            // A larger used index means that the last batch was published, but the server ended
            // before it cleared the entries.
            let mut completed = self.part.load(LAST_BATCH_AT);
            let count = used.wrapping_sub(self.part.load(USED_AT)).min(self.size);
            for _ in 0..count {
                if completed >= self.size {
                    break;
                }
                self.part.store(entry(completed) + IN_FLIGHT_AT, 0);
                completed = self.part.load(entry(completed) + NEXT_AT);
            }
        } else {
            for head in 0..self.size {
                self.part.store(entry(head) + IN_FLIGHT_AT, 0);
            }
            self.part.store(ENTRIES_AT, self.size);
            self.part.store(VERSION_AT, VERSION);
        }
        self.part.store(USED_AT, used);
        if !known {
            return None;
        }
        let mut begun = Vec::new();
        for head in (0..self.size).filter(|head| self.is_in_flight(*head)) {
            let counter = self.part.array(entry(head) + COUNTER_AT);
            begun.push((u64::from_ne_bytes(counter), head));
        }
        begun.sort_unstable();
        self.counter = begun.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Some(begun.into_iter().map(|(_, head)| head).collect())
    }

    /// Records that the request of chain `head` is about to begin.
    #[inline]
    pub fn begin(&mut self, head: u16) {
        let at = entry(head);
        self.part.set(at + COUNTER_AT, self.counter.to_ne_bytes());
        self.counter = self.counter.wrapping_add(1);
        self.part.store(at + IN_FLIGHT_AT, 1);
    }

    /// Records the completion of chain `head`, which is not published yet.
    #[inline]
    pub fn complete(&mut self, head: u16) {
        self.completed.push(head);
    }

    /// Links all unpublished completions into a batch that is about to be published.
    pub fn before_publish(&self) {
        for head in &self.completed {
            self.part.store(entry(*head) + NEXT_AT, self.part.load(LAST_BATCH_AT));
            self.part.store(LAST_BATCH_AT, *head);
        }
    }

    /// Clears the entries of the published completions. `used` is the new used index of the ring.
    pub fn after_publish(&mut self, used: u16) {
        for head in self.completed.drain(..) {
            let keeps_flag = mutants::on(Mutant::AnsweredInFlight);
            self.part.store(entry(head) + IN_FLIGHT_AT, keeps_flag.into());
        }
        self.part.store(USED_AT, used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area() -> (InflightArea, OwnedFd) {
        create(InflightArea { bytes: 0, offset: 0, queues: 2, size: 8, padding: [0; 4] }).unwrap()
    }

    fn queue_log(area: InflightArea, file: &OwnedFd) -> QueueLog {
        InflightLog::new(area, file).unwrap().queue_log(1, 8).unwrap()
    }

    #[test]
    fn recovery_returns_begun_requests_in_order() {
        let (area, file) = area();
        let mut first = queue_log(area, &file);
        assert_eq!(first.recover(7), None, "the log is new");
        for head in [5, 2, 7, 0] {
            first.begin(head);
        }
        assert_eq!(queue_log(area, &file).recover(7), Some(vec![5, 2, 7, 0]));
        // A completion that is not published does not count.
        first.complete(2);
        first.complete(5);
        assert_eq!(queue_log(area, &file).recover(7), Some(vec![5, 2, 7, 0]));
        first.before_publish();
        assert_eq!(queue_log(area, &file).recover(7), Some(vec![5, 2, 7, 0]));
        // The used index shows that the batch was published.
        let mut next = queue_log(area, &file);
        assert_eq!(next.recover(9), Some(vec![7, 0]));
        assert_eq!(next.recover(9), Some(vec![7, 0]));
        // New requests follow the old ones.
        next.begin(5);
        next.begin(1);
        assert_eq!(queue_log(area, &file).recover(9), Some(vec![7, 0, 5, 1]));
        for head in [0, 1, 7, 5] {
            next.complete(head);
        }
        next.before_publish();
        next.after_publish(13);
        assert_eq!(queue_log(area, &file).recover(13), Some(vec![]));
    }

    #[test]
    fn recovery_survives_corrupt_log() {
        let (area, file) = area();
        let mut first = queue_log(area, &file);
        assert_eq!(first.recover(0), None);
        for head in 0..8 {
            first.begin(head);
            first.part.store(entry(head) + NEXT_AT, head);
        }
        first.part.store(LAST_BATCH_AT, 3);
        // The links form a cycle and the count is too large: only one entry counts as completed.
        let found = queue_log(area, &file).recover(60_000).unwrap();
        assert_eq!(found, [0, 1, 2, 4, 5, 6, 7]);
        first.part.store(LAST_BATCH_AT, 60_000);
        assert_eq!(queue_log(area, &file).recover(1).unwrap(), found, "no such entry");
    }

    #[test]
    fn unsupported_log_sizes_are_refused() {
        for (queues, size) in [(0, 8), (65, 8), (1, 0), (1, 1025)] {
            assert!(create(InflightArea { bytes: 0, offset: 0, queues, size, padding: [0; 4] }).is_err());
        }
        let (area, file) = area();
        assert!(
            InflightLog::new(InflightArea { queues: 3, ..area }, &file).is_err(),
            "more than the file has"
        );
        assert!(InflightLog::new(InflightArea { bytes: 1 << 20, queues: 3, ..area }, &file).is_err());
        let inflight = InflightLog::new(area, &file).unwrap();
        assert!(inflight.queue_log(2, 8).is_none() && inflight.queue_log(0, 16).is_none());
    }
}
