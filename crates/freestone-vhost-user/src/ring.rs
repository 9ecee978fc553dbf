//! A split virtqueue: reads available chains and adds completed ones to the used ring.

use std::sync::atomic::{Ordering, fence};

use thiserror::Error;
use zerocopy::transmute;

use crate::memory::{Memory, RingPart, UnmappedAddress};
use crate::wire::{DESCRIPTOR_BYTES, Descriptor, descriptor};

/// Maximum size of a queue in entries.
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// Maximum number of descriptors of a chain, in the ring's table or an indirect one. The limit also
/// ends cyclic chains.
pub const MAX_CHAIN: usize = 1024;

/// Flag of the available ring: the driver requests no notifications.
const NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: the device requests no notifications.
const NO_NOTIFY: u16 = 1;
/// Size in bytes of the flags and the index, which precede the entries of both rings.
const HEAD_BYTES: usize = 4;
const AVAIL_ENTRY_BYTES: usize = 2;
const USED_ENTRY_BYTES: usize = 8;

/// A protocol violation of the driver, which ends the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RingError {
    /// A ring is not in the frontend's memory, or is not aligned.
    #[error("a ring is not in the frontend's memory, or not aligned")]
    Ring,
    /// More chains are available than the queue has entries.
    #[error("more is available than the queue holds")]
    Available,
    /// A descriptor index is outside its table.
    #[error("a descriptor is outside of its table")]
    Index,
    /// A chain is too long or cyclic.
    #[error("a chain has too many descriptors")]
    ChainTooLong,
    /// An indirect table is malformed or not allowed.
    #[error("an indirect table is malformed or not allowed")]
    Indirect,
    /// A readable segment follows a writable one.
    #[error("a chain has readable segments after writable ones")]
    SegmentOrder,
    /// A request has no complete header or no status byte.
    #[error("a request has no header or no room for its status")]
    RequestTooShort,
    /// A header, table or status is outside the frontend's memory.
    #[error("an address is not in the frontend's memory")]
    Memory,
}

impl From<UnmappedAddress> for RingError {
    fn from(_: UnmappedAddress) -> Self {
        Self::Memory
    }
}

/// Addresses of a queue's descriptor table and rings in the frontend's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
}

/// A segment of a chain, in the frontend's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub addr: u64,
    /// Length in bytes, not zero.
    pub len: u32,
}

/// The segments of a chain, in order.
#[derive(Debug, Default)]
pub struct Chain {
    /// Segments that the device reads, followed by those it writes.
    pub segments: Vec<Segment>,
    /// Number of segments that the device reads.
    pub readable: usize,
}

/// A mapped ring, used by the queue's thread.
#[derive(Debug)]
pub struct Ring {
    size: u16,
    event_idx: bool,
    indirect: bool,
    desc: RingPart,
    avail: RingPart,
    used: RingPart,
    /// Index of the next entry to take from the available ring.
    pub next_avail: u16,
    /// Index of the next entry to write to the used ring.
    next_used: u16,
    published: u16,
}

impl Ring {
    /// Maps a ring with `size` entries, a power of two, and continues at `next_avail`. The used
    /// index is read from the ring.
    pub fn new(
        memory: &Memory,
        addresses: &Addresses,
        size: u16,
        (event_idx, indirect): (bool, bool),
        next_avail: u16,
    ) -> Result<Self, RingError> {
        let entries = usize::from(size);
        let part = |addr, bytes, align| memory.ring_part(addr, bytes, align).ok_or(RingError::Ring);
        let desc = part(addresses.desc, entries * DESCRIPTOR_BYTES, 16)?;
        // Both rings have an event index of two bytes after their entries.
        let avail = part(addresses.avail, HEAD_BYTES + entries * AVAIL_ENTRY_BYTES + 2, 2)?;
        let used = part(addresses.used, HEAD_BYTES + entries * USED_ENTRY_BYTES + 2, 4)?;
        let next_used = used.load(2);
        let ring = Self {
            size,
            event_idx,
            indirect,
            desc,
            avail,
            used,
            next_avail,
            next_used,
            published: next_used,
        };
        ring.disable_notifications();
        Ok(ring)
    }

    /// Maps the ring again after the frontend's memory changed. The indices do not change.
    pub fn remap(&self, memory: &Memory, addresses: &Addresses) -> Result<Self, RingError> {
        let mut ring =
            Self::new(memory, addresses, self.size, (self.event_idx, self.indirect), self.next_avail)?;
        (ring.next_used, ring.published) = (self.next_used, self.published);
        Ok(ring)
    }

    /// Returns the number of available chains not taken yet. Fails if it exceeds the queue size.
    #[inline]
    pub fn available(&self) -> Result<u16, RingError> {
        let ready = self.avail.load(2).wrapping_sub(self.next_avail);
        if ready > self.size { Err(RingError::Available) } else { Ok(ready) }
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    /// Returns the head descriptor of the next available chain, without [taking](Self::take) the
    /// chain.
    #[inline]
    pub fn next_head(&self) -> u16 {
        self.avail.load(HEAD_BYTES + self.slot(self.next_avail) * AVAIL_ENTRY_BYTES)
    }

    /// Reads the chain that starts at descriptor `head` into `chain`.
    pub fn chain(&self, head: u16, memory: &Memory, chain: &mut Chain) -> Result<(), RingError> {
        chain.segments.clear();
        chain.readable = 0;
        let mut left = MAX_CHAIN;
        let (mut index, mut count, mut table) = (head, self.size, None);
        loop {
            if index >= count {
                return Err(RingError::Index);
            }
            left = left.checked_sub(1).ok_or(RingError::ChainTooLong)?;
            let at = usize::from(index) * DESCRIPTOR_BYTES;
            let entry: Descriptor = transmute!(match table {
                None => self.desc.array::<DESCRIPTOR_BYTES>(at),
                Some(table) => memory.array(u64::checked_add(table, at as u64).ok_or(RingError::Memory)?)?,
            });
            let (flags, len) = (entry.flags.get(), entry.len.get());
            if flags & descriptor::INDIRECT != 0 {
                let whole = len as usize / DESCRIPTOR_BYTES;
                let fits =
                    (len as usize).is_multiple_of(DESCRIPTOR_BYTES) && (1..=MAX_CHAIN).contains(&whole);
                if !self.indirect || table.is_some() || flags & descriptor::NEXT != 0 || !fits {
                    return Err(RingError::Indirect);
                }
                (index, count, table) = (0, whole as u16, Some(entry.addr.get()));
                continue;
            }
            let segment = Segment { addr: entry.addr.get(), len };
            let is_read = flags & descriptor::WRITE == 0;
            if is_read && chain.readable != chain.segments.len() {
                return Err(RingError::SegmentOrder);
            }
            if len > 0 {
                chain.segments.push(segment);
                chain.readable += usize::from(is_read);
            }
            if flags & descriptor::NEXT == 0 {
                return Ok(());
            }
            index = entry.next.get();
        }
    }

    #[inline]
    pub fn take(&mut self) {
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Adds a chain to the used ring; `written` is the number of bytes that the device wrote to the
    /// chain. The driver sees the entry after [`publish`](Self::publish).
    pub fn push_used(&mut self, head: u16, written: u32) {
        let at = HEAD_BYTES + self.slot(self.next_used) * USED_ENTRY_BYTES;
        let entry: [u8; USED_ENTRY_BYTES] = transmute!([u32::from(head).to_le(), written.to_le()]);
        self.used.set(at, entry);
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline]
    pub fn used_index(&self) -> u16 {
        self.published
    }

    /// Returns the number of used entries not published yet.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Publishes the used entries. Returns true if the driver must be notified.
    pub fn publish(&mut self) -> bool {
        if self.unpublished() == 0 {
            return false;
        }
        let old = std::mem::replace(&mut self.published, self.next_used);
        self.used.store(2, self.next_used);
        // SeqCst: the driver sets its event index and then reads the used index; this code does the
        // reverse. At least one of both sees the other's store.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.avail.load(HEAD_BYTES + usize::from(self.size) * AVAIL_ENTRY_BYTES);
            // Notify if the entry that the driver waits for is among the new ones.
            self.next_used.wrapping_sub(event).wrapping_sub(1) < self.next_used.wrapping_sub(old)
        } else {
            self.avail.load(0) & NO_INTERRUPT == 0
        }
    }

    /// Disables notifications by the driver, because the queue polls the ring.
    pub fn disable_notifications(&self) {
        // With event indices the old index stays. The driver has passed it, so it does not notify.
        if !self.event_idx {
            self.used.store(0, NO_NOTIFY);
        }
    }

    /// Enables notifications by the driver before the queue sleeps. The caller must check for
    /// available chains again afterwards.
    pub fn enable_notifications(&self) {
        if self.event_idx {
            self.used.store(HEAD_BYTES + usize::from(self.size) * USED_ENTRY_BYTES, self.next_avail);
        } else {
            self.used.store(0, 0);
        }
        // SeqCst: as in `publish`, with the roles exchanged.
        fence(Ordering::SeqCst);
    }
}
