//! What is in flight, noted in memory that outlives the connection, as QEMU's description has it: the
//! frontend keeps it, and hands it to the next server, which does again what was begun and not
//! answered, in the order in which it was begun.
//!
//! A server may be killed between any two of its stores. So a request is noted before it is begun,
//! and those that a publication answers are chained before it; who finds another used index than was
//! noted last takes the chained ones for answered.

use std::os::fd::OwnedFd;

use freestone_core::mutants::{self, Mutant};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::disk::MAX_QUEUES;
use crate::memory::{MapError, Memory, RingPart};
use crate::ring::MAX_QUEUE_SIZE;
use crate::wire::{InflightArea, MemRegion};

/// Each queue's part begins at a multiple of this.
const ALIGN: usize = 64;
/// In front of the entries of a queue: features, version, entries, and the two below.
const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Where the numbers are in the head.
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_BATCH_AT: usize = 12;
const USED_AT: usize = 14;
/// Where they are in an entry: whether it is in flight, the next of its batch, when it was begun.
const IN_FLIGHT_AT: usize = 0;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
/// The only version.
const VERSION: u16 = 1;

/// The memory, for all queues.
#[derive(Debug)]
pub struct Inflight {
    memory: Memory,
    queues: usize,
    size: u16,
}

/// One queue's part, used by its thread.
#[derive(Debug)]
pub struct Notes {
    part: RingPart,
    size: u16,
    counter: u64,
    /// Answered, and not published yet.
    answered: Vec<u16>,
}

fn queue_bytes(size: u16) -> usize {
    (HEAD_BYTES + usize::from(size) * ENTRY_BYTES).next_multiple_of(ALIGN)
}

/// Where the entry of a chain is.
fn entry(head: u16) -> usize {
    HEAD_BYTES + usize::from(head) * ENTRY_BYTES
}

/// Whether there are so many queues of such a size.
fn is_possible(queues: u16, size: u16) -> bool {
    (1..=MAX_QUEUES).contains(&usize::from(queues)) && (1..=MAX_QUEUE_SIZE).contains(&size)
}

/// A file for so many queues of so many entries, and what the frontend is told of it.
///
/// # Errors
/// There is no such queue, or no memory.
pub fn create(asked: InflightArea) -> std::io::Result<(InflightArea, OwnedFd)> {
    let InflightArea { queues, size, .. } = asked;
    if !is_possible(queues, size) {
        return Err(std::io::Error::other(format!("{queues} queues of {size} entries are not served")));
    }
    let bytes = (usize::from(queues) * queue_bytes(size)) as u64;
    let file = memfd_create("freestone-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((InflightArea { bytes, offset: 0, queues, size, padding: [0; 4] }, file))
}

impl Inflight {
    /// What the frontend has kept.
    pub fn new(area: InflightArea, file: &OwnedFd) -> Result<Self, MapError> {
        let InflightArea { bytes, offset, queues, size, .. } = area;
        let needed = (usize::from(queues) * queue_bytes(size)) as u64;
        if !is_possible(queues, size) || needed > bytes {
            return Err(MapError::Range { guest: 0, size: bytes });
        }
        let region = MemRegion { guest: 0, size: needed, user: 0, offset };
        Ok(Self { memory: Memory::default().with(region, file)?, queues: queues.into(), size })
    }

    /// The part of a queue of so many entries; `None`: it has none.
    pub fn notes(&self, index: usize, size: u16) -> Option<Notes> {
        if index >= self.queues || size > self.size {
            return None;
        }
        let part = self.memory.ring_part(
            (index * queue_bytes(self.size)) as u64,
            HEAD_BYTES + usize::from(size) * ENTRY_BYTES,
            ALIGN as u64,
        )?;
        Some(Notes { part, size, counter: 0, answered: Vec::new() })
    }
}

impl Notes {
    fn is_in_flight(&self, head: u16) -> bool {
        // The byte beside it is nothing.
        self.part.load(entry(head) + IN_FLIGHT_AT) & 0xff != 0
    }

    /// Whether the file has lost pages.
    pub fn is_dead(&self) -> bool {
        self.part.is_dead()
    }

    /// What was begun and not answered, in the order in which it was begun; `None`: nothing was noted
    /// yet. `used` is the used index of the ring.
    pub fn recover(&mut self, used: u16) -> Option<Vec<u16>> {
        let known = self.part.load(VERSION_AT) == VERSION;
        if known {
            // The last publication was seen, and not noted any more.
            let mut answered = self.part.load(LAST_BATCH_AT);
            let count = used.wrapping_sub(self.part.load(USED_AT)).min(self.size);
            for _ in 0..count {
                if answered >= self.size {
                    break;
                }
                self.part.store(entry(answered) + IN_FLIGHT_AT, 0);
                answered = self.part.load(entry(answered) + NEXT_AT);
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

    /// A request is about to be begun.
    #[inline]
    pub fn begin(&mut self, head: u16) {
        let at = entry(head);
        self.part.set(at + COUNTER_AT, self.counter.to_ne_bytes());
        self.counter = self.counter.wrapping_add(1);
        self.part.store(at + IN_FLIGHT_AT, 1);
    }

    /// A request was answered; the driver does not see that yet.
    #[inline]
    pub fn answer(&mut self, head: u16) {
        self.answered.push(head);
    }

    /// All that was answered is about to be published.
    pub fn before_publish(&self) {
        for head in &self.answered {
            self.part.store(entry(*head) + NEXT_AT, self.part.load(LAST_BATCH_AT));
            self.part.store(LAST_BATCH_AT, *head);
        }
    }

    /// It was; the used index is `used` now.
    pub fn published(&mut self, used: u16) {
        for head in self.answered.drain(..) {
            let is_noted = mutants::on(Mutant::AnsweredInFlight);
            self.part.store(entry(head) + IN_FLIGHT_AT, is_noted.into());
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

    fn notes(area: InflightArea, file: &OwnedFd) -> Notes {
        Inflight::new(area, file).unwrap().notes(1, 8).unwrap()
    }

    #[test]
    fn what_was_begun_is_found_in_its_order_whenever_the_server_ends() {
        let (area, file) = area();
        let mut first = notes(area, &file);
        assert_eq!(first.recover(7), None, "nothing was noted yet");
        for head in [5, 2, 7, 0] {
            first.begin(head);
        }
        assert_eq!(notes(area, &file).recover(7), Some(vec![5, 2, 7, 0]));
        // Answered and not published: not answered.
        first.answer(2);
        first.answer(5);
        assert_eq!(notes(area, &file).recover(7), Some(vec![5, 2, 7, 0]));
        first.before_publish();
        assert_eq!(notes(area, &file).recover(7), Some(vec![5, 2, 7, 0]));
        // The used index says that it was published.
        let mut next = notes(area, &file);
        assert_eq!(next.recover(9), Some(vec![7, 0]));
        assert_eq!(next.recover(9), Some(vec![7, 0]));
        // What comes later is behind them.
        next.begin(5);
        next.begin(1);
        assert_eq!(notes(area, &file).recover(9), Some(vec![7, 0, 5, 1]));
        for head in [0, 1, 7, 5] {
            next.answer(head);
        }
        next.before_publish();
        next.published(13);
        assert_eq!(notes(area, &file).recover(13), Some(vec![]));
    }

    #[test]
    fn memory_that_was_written_to_is_bounded() {
        let (area, file) = area();
        let mut first = notes(area, &file);
        assert_eq!(first.recover(0), None);
        for head in 0..8 {
            first.begin(head);
            first.part.store(entry(head) + NEXT_AT, head);
        }
        first.part.store(LAST_BATCH_AT, 3);
        // A circle, and more than there are: one is taken for answered.
        let found = notes(area, &file).recover(60_000).unwrap();
        assert_eq!(found, [0, 1, 2, 4, 5, 6, 7]);
        first.part.store(LAST_BATCH_AT, 60_000);
        assert_eq!(notes(area, &file).recover(1).unwrap(), found, "no such entry");
    }

    #[test]
    fn sizes_that_are_not_served_are_refused() {
        for (queues, size) in [(0, 8), (65, 8), (1, 0), (1, 1025)] {
            assert!(create(InflightArea { bytes: 0, offset: 0, queues, size, padding: [0; 4] }).is_err());
        }
        let (area, file) = area();
        assert!(Inflight::new(InflightArea { queues: 3, ..area }, &file).is_err(), "more than the file has");
        assert!(Inflight::new(InflightArea { bytes: 1 << 20, queues: 3, ..area }, &file).is_err());
        let inflight = Inflight::new(area, &file).unwrap();
        assert!(inflight.notes(2, 8).is_none() && inflight.notes(0, 16).is_none());
    }
}
