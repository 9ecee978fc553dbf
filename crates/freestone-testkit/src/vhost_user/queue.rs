//! The driver of one virtqueue of a simulated virtual machine.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frontend::protocol_error;
use super::machine_config::MachineConfig;
use super::memory::{GuestMemory, new_eventfd};
use super::wire::{self, GUEST, NEXT, TABLE, WRITE};

/// Number of ring descriptors per slot. A request with more than two data pieces needs an indirect
/// table.
const PER_SLOT: u16 = 4;
/// Maximum number of data pieces of a request with an indirect table.
const PIECES_MAX: u64 = 8;
/// Offsets in bytes of the available ring, the used ring and the slots, from the start of the
/// queue's memory.
const AVAIL_AT: u64 = 0x1000;
const USED_AT: u64 = 0x2000;
const SLOTS_AT: u64 = 0x3000;
/// Size in bytes of a slot without its data: header, status, sector of an append, and indirect
/// table.
const SLOT_BYTES: u64 = 256;
const STATUS_AT: u64 = 16;
const APPENDED_AT: u64 = 24;
const TABLE_AT: u64 = 32;
const SECTOR_BYTES: u64 = 512;
/// Initial value of a status byte, which is not a valid status.
const NO_STATUS: u8 = 0xee;

/// Data of a request, and its direction.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// The request has no data.
    None,
    /// Data that the device reads from the guest.
    Out(&'a [u8]),
    /// Number of bytes that the device writes to the guest.
    In(usize),
    /// Data that the device reads and appends to a zone. The device returns the sector of the data.
    Append(&'a [u8]),
}

/// A request to submit to a queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueRequest<'a> {
    /// Request type, a constant of [`wire`].
    pub kind: u32,
    /// Offset on the disk in bytes.
    pub offset: u64,
    /// Data of the request.
    pub data: Data<'a>,
    /// Number of descriptors among which the data is divided, limited to the possible number.
    pub pieces: u64,
}

/// A completed request of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueCompletion {
    /// Slot of the request, as returned by [`Queue::begin`].
    pub slot: u16,
    /// Status that the device returned, a constant of [`wire`].
    pub status: u8,
    /// Bytes read by the request, or the sector of an append. Empty unless the request succeeded.
    pub data: Vec<u8>,
}

/// A queue with a fixed number of slots, each for one request in flight.
#[derive(Debug)]
pub struct Queue {
    memory: Arc<GuestMemory>,
    shape: MachineConfig,
    /// Offset in bytes of the queue's part of the guest memory.
    at: u64,
    /// Eventfds: `kick` notifies the server, and the server notifies the driver through `call`.
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    next: u16,
    seen: u16,
    free: Vec<u16>,
    /// Number of notifications from the server that were read from `call`.
    notifications: AtomicU64,
    /// For each slot in flight: address and length in bytes of the data that the device returns.
    gets: Vec<Option<(u64, usize)>>,
}

impl Queue {
    /// Returns the number of bytes of guest memory that a queue of this shape needs.
    pub(super) fn bytes(shape: &MachineConfig) -> u64 {
        let slots = u64::from(shape.slots);
        (SLOTS_AT + slots * (SLOT_BYTES + shape.slot_bytes)).next_multiple_of(4096)
    }

    /// Returns the number of entries in each ring.
    pub(super) fn size(shape: &MachineConfig) -> u16 {
        (shape.slots * PER_SLOT).next_power_of_two()
    }

    pub(super) fn new(memory: &Arc<GuestMemory>, shape: MachineConfig, index: u16) -> io::Result<Self> {
        let at = u64::from(index) * Self::bytes(&shape);
        Ok(Self {
            memory: Arc::clone(memory),
            shape,
            at,
            kick: new_eventfd()?,
            call: new_eventfd()?,
            next: 0,
            seen: 0,
            notifications: AtomicU64::new(0),
            free: (0..shape.slots).rev().collect(),
            gets: vec![None; shape.slots.into()],
        })
    }

    /// Returns the offsets of the descriptor table, the used ring and the available ring in the
    /// guest memory.
    pub(super) fn places(&self) -> [u64; 3] {
        [self.at, self.at + USED_AT, self.at + AVAIL_AT]
    }

    /// Returns the index in the used ring up to which the server has published completions.
    pub(super) fn used(&self) -> u16 {
        self.memory.word(self.at + USED_AT + 2)
    }

    /// Returns the number of notifications by the server. Each costs the server a system call.
    pub fn notifications(&self) -> u64 {
        self.count_notifications();
        self.notifications.load(Ordering::SeqCst)
    }

    /// Returns the number of requests in flight in this queue.
    pub fn in_flight(&self) -> usize {
        usize::from(self.shape.slots) - self.free.len()
    }

    fn slot_at(&self, slot: u16) -> u64 {
        self.at + SLOTS_AT + u64::from(slot) * SLOT_BYTES
    }

    fn data_at(&self, slot: u16) -> u64 {
        let slots = u64::from(self.shape.slots);
        self.at + SLOTS_AT + slots * SLOT_BYTES + u64::from(slot) * self.shape.slot_bytes
    }

    fn entry(&self, at: u64, (addr, len, flags): (u64, u64, u16), next: u16) {
        let mut entry = (GUEST + addr).to_le_bytes().to_vec();
        entry.extend((len as u32).to_le_bytes());
        entry.extend(flags.to_le_bytes());
        entry.extend(next.to_le_bytes());
        self.memory.put(at, &entry);
    }

    /// Returns the descriptors of a request: address, length in bytes and flags of each.
    fn chain(&self, slot: u16, asked: &QueueRequest<'_>) -> Vec<(u64, u64, u16)> {
        let (own, data) = (self.slot_at(slot), self.data_at(slot));
        let (len, flags) = match asked.data {
            Data::None => (0, 0),
            Data::Out(bytes) | Data::Append(bytes) => (bytes.len() as u64, 0),
            Data::In(len) => (len as u64, WRITE),
        };
        let has_more = matches!(asked.data, Data::Append(_));
        let most = if self.shape.indirect { PIECES_MAX } else { 2 - u64::from(has_more) };
        // Each piece consists of whole sectors, except that the last one has the rest.
        let pieces = asked.pieces.clamp(1, most);
        let each = (len / pieces).next_multiple_of(SECTOR_BYTES).max(SECTOR_BYTES);
        let mut chain = vec![(own, 16, 0)];
        let mut from = 0;
        while from < len {
            let part = each.min(len - from);
            chain.push((data + from, part, flags));
            from += part;
        }
        if has_more {
            chain.push((own + APPENDED_AT, 8, WRITE));
        }
        chain.push((own + STATUS_AT, 1, WRITE));
        chain
    }

    /// Submits a request. Returns its slot, or `None` if no slot is free.
    ///
    /// # Panics
    /// Panics if the data does not fit in a slot.
    pub fn begin(&mut self, asked: QueueRequest<'_>) -> Option<u16> {
        let slot = self.free.pop()?;
        let own = self.slot_at(slot);
        let mut header = wire::u32s(&[asked.kind.to_le(), 0]);
        header.extend((asked.offset / SECTOR_BYTES).to_le_bytes());
        self.memory.put(own, &header);
        self.memory.put(own + STATUS_AT, &[NO_STATUS]);
        let data = self.data_at(slot);
        let fits = |len: usize| assert!(len as u64 <= self.shape.slot_bytes, "larger than a slot");
        let gets = match asked.data {
            Data::Out(bytes) | Data::Append(bytes) => {
                fits(bytes.len());
                self.memory.put(data, bytes);
                if matches!(asked.data, Data::Append(_)) { (own + APPENDED_AT, 8) } else { (data, 0) }
            }
            Data::In(len) => {
                fits(len);
                // Fill the buffer with a pattern, so that bytes which the device does not return
                // are detected.
                self.memory.put(data, &vec![0xa5; len]);
                (data, len)
            }
            Data::None => (data, 0),
        };
        self.gets[usize::from(slot)] = Some(gets);
        self.describe(slot, &self.chain(slot, &asked));
        self.offer(slot * PER_SLOT);
        Some(slot)
    }

    fn describe(&self, slot: u16, chain: &[(u64, u64, u16)]) {
        let head = slot * PER_SLOT;
        let in_ring = self.at + 16 * u64::from(head);
        let (table, first) =
            if self.shape.indirect { (self.slot_at(slot) + TABLE_AT, 0) } else { (in_ring, head) };
        for (number, (addr, len, flags)) in (0_u16..).zip(chain) {
            let has_next = usize::from(number) + 1 < chain.len();
            let (flags, next) = if has_next { (flags | NEXT, first + number + 1) } else { (*flags, 0) };
            self.entry(table + 16 * u64::from(number), (*addr, *len, flags), next);
        }
        if self.shape.indirect {
            self.entry(in_ring, (table, 16 * chain.len() as u64, TABLE), 0);
        }
    }

    /// Adds the descriptor chain at `head` to the available ring. Notifies the server unless it has
    /// suppressed notifications.
    fn offer(&mut self, head: u16) {
        let (avail, size) = (self.at + AVAIL_AT, Self::size(&self.shape));
        self.memory.put(avail + 4 + 2 * u64::from(self.next % size), &head.to_le_bytes());
        let before = self.next;
        self.next = self.next.wrapping_add(1);
        self.memory.set_word(avail + 2, self.next);
        let used = self.at + USED_AT;
        let is_wanted = if self.shape.event_idx {
            let event = self.memory.word(used + 4 + 8 * u64::from(size));
            self.next.wrapping_sub(event).wrapping_sub(1) < self.next.wrapping_sub(before)
        } else {
            self.memory.word(used) & 1 == 0
        };
        if is_wanted {
            self.kick();
        }
    }

    /// Notifies the server that requests may be available.
    pub fn kick(&self) {
        // A write to a full eventfd counter fails, but a notification is pending then.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Takes a completed request, or returns `None` if no request has completed.
    ///
    /// # Errors
    /// Fails if the entry in the used ring does not belong to a request in flight, or has an
    /// invalid status or length.
    pub fn take_completion(&mut self) -> io::Result<Option<QueueCompletion>> {
        if self.used() == self.seen {
            if self.shape.event_idx {
                // Request a notification for the next entry. Check the ring again below, since an
                // entry may have arrived just before.
                let size = u64::from(Self::size(&self.shape));
                self.memory.set_word(self.at + AVAIL_AT + 4 + 2 * size, self.seen);
            }
            if self.used() == self.seen {
                return Ok(None);
            }
        }
        let mut entry = [0; 8];
        let size = Self::size(&self.shape);
        self.memory.get(self.at + USED_AT + 4 + 8 * u64::from(self.seen % size), &mut entry);
        let [head, len] =
            [0, 4].map(|at| u32::from_le_bytes(entry[at..at + 4].try_into().expect("four bytes")));
        let slot = u16::try_from(head / u32::from(PER_SLOT)).unwrap_or(u16::MAX);
        let gets = self.gets.get_mut(usize::from(slot)).and_then(Option::take);
        let Some((from, room)) = gets.filter(|_| head % u32::from(PER_SLOT) == 0) else {
            return Err(protocol_error(format!("an answer to descriptor {head}, which is not in flight")));
        };
        self.seen = self.seen.wrapping_add(1);
        self.free.push(slot);
        let (mut status, mut data) = ([0], Vec::new());
        self.memory.get(self.slot_at(slot) + STATUS_AT, &mut status);
        if status == [wire::OK] {
            // The device may return less data than requested only for a zone report.
            data.resize((len as usize).saturating_sub(1).min(room), 0);
            self.memory.get(from, &mut data);
        }
        if status == [NO_STATUS] || status == [wire::OK] && len as usize != 1 + data.len() {
            return Err(protocol_error(format!("status {status:?} with {len} bytes, {room} were asked for")));
        }
        Ok(Some(QueueCompletion { slot, status: status[0], data }))
    }

    /// Waits for a notification by the server. Returns false if none arrives within `patience`.
    ///
    /// # Errors
    /// Fails if the poll fails.
    pub fn wait(&self, patience: Duration) -> io::Result<bool> {
        let mut fds = [PollFd::from_borrowed_fd(self.call.as_fd(), PollFlags::IN)];
        let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
        let notifications = poll(&mut fds, Some(&patience))? > 0;
        self.count_notifications();
        Ok(notifications)
    }

    /// Reads pending notifications from `call`, and adds them to the count.
    pub(super) fn count_notifications(&self) {
        let mut count = [0; 8];
        // The read fails if the eventfd counter is zero: no notification is pending.
        if rustix::io::read(&self.call, &mut count).is_ok() {
            self.notifications.fetch_add(u64::from_ne_bytes(count), Ordering::SeqCst);
        }
    }
}
