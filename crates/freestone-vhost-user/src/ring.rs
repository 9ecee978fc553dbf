//! A split ring: what the driver made available, and what goes back to it.

use std::sync::atomic::{Ordering, fence};

use thiserror::Error;
use zerocopy::transmute;

use crate::memory::{Memory, RingPart, Unmapped};
use crate::wire::{DESCRIPTOR_BYTES, Descriptor, descriptor};

/// Largest size of a queue.
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// Descriptors of one chain, whether in the ring's table or in one of its own. Also what bounds a
/// chain that goes in circles.
pub const MAX_CHAIN: usize = 1024;

/// Flag of the available ring: the driver wants no notification.
const NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: the device wants none.
const NO_NOTIFY: u16 = 1;
/// Bytes before the entries of both rings.
const HEAD_BYTES: usize = 4;
const AVAIL_ENTRY_BYTES: usize = 2;
const USED_ENTRY_BYTES: usize = 8;

/// Why a queue ends: its driver has broken the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Broken {
    /// A ring is not in the memory.
    #[error("a ring is not in the frontend's memory, or not aligned")]
    Ring,
    /// More is available than the queue holds.
    #[error("more is available than the queue holds")]
    Available,
    /// A descriptor outside of the table.
    #[error("a descriptor is outside of its table")]
    Index,
    /// Too many descriptors, or a circle.
    #[error("a chain has too many descriptors")]
    Long,
    /// Indirect where it must not be.
    #[error("an indirect table is where none may be")]
    Indirect,
    /// What the device reads comes after what it writes.
    #[error("a chain has readable bytes behind writable ones")]
    Order,
    /// No header, or no status.
    #[error("a request has no header or no room for its status")]
    Short,
    /// A header, a table or a status outside of the memory.
    #[error("an address is not in the frontend's memory")]
    Memory,
}

impl From<Unmapped> for Broken {
    fn from(_: Unmapped) -> Self {
        Self::Memory
    }
}

/// Where the rings of a queue are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The table of descriptors.
    pub desc: u64,
    /// The available ring.
    pub avail: u64,
    /// The used ring.
    pub used: u64,
}

/// A buffer of the frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its address.
    pub addr: u64,
    /// Its length in bytes, not zero.
    pub len: u32,
}

/// The buffers of a chain, in order.
#[derive(Debug, Default)]
pub struct Chain {
    /// What the device reads, then what it writes.
    pub segments: Vec<Segment>,
    /// How many of them it reads.
    pub readable: usize,
}

/// A ring in use by a queue's thread.
#[derive(Debug)]
pub struct Ring {
    size: u16,
    event_idx: bool,
    indirect: bool,
    desc: RingPart,
    avail: RingPart,
    used: RingPart,
    /// The next entry of the available ring.
    pub next_avail: u16,
    /// The next entry of the used ring that is written.
    next_used: u16,
    /// Entries before this one are published.
    published: u16,
}

impl Ring {
    /// A ring of `size` entries, a power of two, which goes on at `next_avail`; what is used is where the ring
    /// says.
    pub fn new(
        memory: &Memory,
        addresses: &Addresses,
        size: u16,
        (event_idx, indirect): (bool, bool),
        next_avail: u16,
    ) -> Result<Self, Broken> {
        let entries = usize::from(size);
        let part = |addr, bytes, align| memory.ring_part(addr, bytes, align).ok_or(Broken::Ring);
        let desc = part(addresses.desc, entries * DESCRIPTOR_BYTES, 16)?;
        // Both rings have another number behind their entries.
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
        ring.want_no_notification();
        Ok(ring)
    }

    /// The same ring in other memory, where it may lie elsewhere.
    pub fn again(&self, memory: &Memory, addresses: &Addresses) -> Result<Self, Broken> {
        let mut ring =
            Self::new(memory, addresses, self.size, (self.event_idx, self.indirect), self.next_avail)?;
        (ring.next_used, ring.published) = (self.next_used, self.published);
        Ok(ring)
    }

    /// Entries that are available and not taken.
    #[inline]
    pub fn available(&self) -> Result<u16, Broken> {
        let ready = self.avail.load(2).wrapping_sub(self.next_avail);
        if ready > self.size { Err(Broken::Available) } else { Ok(ready) }
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    /// The number of the chain at the next entry, which stays the next one until it is
    /// [taken](Self::take).
    #[inline]
    pub fn next_head(&self) -> u16 {
        self.avail.load(HEAD_BYTES + self.slot(self.next_avail) * AVAIL_ENTRY_BYTES)
    }

    /// The chain of that number.
    pub fn chain(&self, head: u16, memory: &Memory, chain: &mut Chain) -> Result<(), Broken> {
        chain.segments.clear();
        chain.readable = 0;
        let mut left = MAX_CHAIN;
        let (mut index, mut count, mut table) = (head, self.size, None);
        loop {
            if index >= count {
                return Err(Broken::Index);
            }
            left = left.checked_sub(1).ok_or(Broken::Long)?;
            let at = usize::from(index) * DESCRIPTOR_BYTES;
            let entry: Descriptor = transmute!(match table {
                None => self.desc.array::<DESCRIPTOR_BYTES>(at),
                Some(table) => memory.array(u64::checked_add(table, at as u64).ok_or(Broken::Memory)?)?,
            });
            let (flags, len) = (entry.flags.get(), entry.len.get());
            if flags & descriptor::INDIRECT != 0 {
                let whole = len as usize / DESCRIPTOR_BYTES;
                let fits =
                    (len as usize).is_multiple_of(DESCRIPTOR_BYTES) && (1..=MAX_CHAIN).contains(&whole);
                if !self.indirect || table.is_some() || flags & descriptor::NEXT != 0 || !fits {
                    return Err(Broken::Indirect);
                }
                (index, count, table) = (0, whole as u16, Some(entry.addr.get()));
                continue;
            }
            let segment = Segment { addr: entry.addr.get(), len };
            let is_read = flags & descriptor::WRITE == 0;
            if is_read && chain.readable != chain.segments.len() {
                return Err(Broken::Order);
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

    /// The next entry is taken.
    #[inline]
    pub fn take(&mut self) {
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Gives a chain back, of which `written` bytes were written; not seen before it is
    /// [published](Self::publish).
    pub fn give(&mut self, head: u16, written: u32) {
        let at = HEAD_BYTES + self.slot(self.next_used) * USED_ENTRY_BYTES;
        let entry: [u8; USED_ENTRY_BYTES] = transmute!([u32::from(head).to_le(), written.to_le()]);
        self.used.set(at, entry);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Entries of the used ring that are published, modulo 2^16.
    #[inline]
    pub fn used_index(&self) -> u16 {
        self.published
    }

    /// Entries that wait to be published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Shows the driver what was given back; answers whether it wants to be told.
    pub fn publish(&mut self) -> bool {
        if self.unpublished() == 0 {
            return false;
        }
        let old = std::mem::replace(&mut self.published, self.next_used);
        self.used.store(2, self.next_used);
        // The driver says what it waits for, then looks at the used ring; here it is the other way
        // round, so one of both sees the other's.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.avail.load(HEAD_BYTES + usize::from(self.size) * AVAIL_ENTRY_BYTES);
            // Whether the entry that the driver waits for is among the new ones.
            self.next_used.wrapping_sub(event).wrapping_sub(1) < self.next_used.wrapping_sub(old)
        } else {
            self.avail.load(0) & NO_INTERRUPT == 0
        }
    }

    /// The queue looks at the ring by itself for now.
    pub fn want_no_notification(&self) {
        // With an event index, the old one stands: the driver does not reach it again.
        if !self.event_idx {
            self.used.store(0, NO_NOTIFY);
        }
    }

    /// The queue is about to sleep; what is available has to be looked at once more after this.
    pub fn want_notification(&self) {
        if self.event_idx {
            self.used.store(HEAD_BYTES + usize::from(self.size) * USED_ENTRY_BYTES, self.next_avail);
        } else {
            self.used.store(0, 0);
        }
        // As in `publish`, with the roles exchanged.
        fence(Ordering::SeqCst);
    }
}
