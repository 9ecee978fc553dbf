//! The driver of one virtqueue.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frontend::wrong;
use super::memory::{Memory, event};
use super::shape::Shape;
use super::wire::{self, GUEST, NEXT, TABLE, WRITE};

/// Ring descriptors per slot. More than two data pieces need an indirect table.
const PER_SLOT: u16 = 4;
/// Maximum number of data pieces with an indirect table.
const PIECES_MAX: u64 = 8;
/// Offsets of the rings and slots of a queue.
const AVAIL_AT: u64 = 0x1000;
const USED_AT: u64 = 0x2000;
const SLOTS_AT: u64 = 0x3000;
/// Bytes of a slot for header, status, sector of an append, and table.
const SLOT_BYTES: u64 = 256;
const STATUS_AT: u64 = 16;
const APPENDED_AT: u64 = 24;
const TABLE_AT: u64 = 32;
const SECTOR_BYTES: u64 = 512;
/// Not a valid device status.
const NO_STATUS: u8 = 0xee;

/// Data of a request.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// None.
    None,
    /// Data to the device.
    Out(&'a [u8]),
    /// Bytes to read from the device.
    In(usize),
    /// Data to append; the device returns its position.
    Append(&'a [u8]),
}

/// A request.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Request type, a constant of [`wire`].
    pub kind: u32,
    /// Offset in bytes.
    pub offset: u64,
    /// Data.
    pub data: Data<'a>,
    /// Number of descriptors for the data, limited to what is possible.
    pub pieces: u64,
}

/// A completed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Slot returned by [`Queue::begin`].
    pub slot: u16,
    /// Status, a constant of [`wire`].
    pub status: u8,
    /// Data read, or the sector of an append.
    pub data: Vec<u8>,
}

/// A queue with a fixed number of slots for one request each.
#[derive(Debug)]
pub struct Queue {
    memory: Arc<Memory>,
    shape: Shape,
    /// Offset of the queue's part of the memory.
    at: u64,
    /// Eventfds for notifications to and from the server.
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    next: u16,
    seen: u16,
    free: Vec<u16>,
    /// Number of notifications from the server, as far as they were read.
    told: AtomicU64,
    /// Per slot in flight: address and length of the data from the device.
    gets: Vec<Option<(u64, usize)>>,
}

impl Queue {
    /// Returns the memory that a queue of this shape needs, in bytes.
    pub(super) fn bytes(shape: &Shape) -> u64 {
        let slots = u64::from(shape.slots);
        (SLOTS_AT + slots * (SLOT_BYTES + shape.slot_bytes)).next_multiple_of(4096)
    }

    /// Returns the number of ring entries.
    pub(super) fn size(shape: &Shape) -> u16 {
        (shape.slots * PER_SLOT).next_power_of_two()
    }

    pub(super) fn new(memory: &Arc<Memory>, shape: Shape, index: u16) -> io::Result<Self> {
        let at = u64::from(index) * Self::bytes(&shape);
        Ok(Self {
            memory: Arc::clone(memory),
            shape,
            at,
            kick: event()?,
            call: event()?,
            next: 0,
            seen: 0,
            told: AtomicU64::new(0),
            free: (0..shape.slots).rev().collect(),
            gets: vec![None; shape.slots.into()],
        })
    }

    /// Returns the offsets of the descriptor table, used ring and available ring.
    pub(super) fn places(&self) -> [u64; 3] {
        [self.at, self.at + USED_AT, self.at + AVAIL_AT]
    }

    /// Returns the used index, as published by the server.
    pub(super) fn used(&self) -> u16 {
        self.memory.word(self.at + USED_AT + 2)
    }

    /// Returns the number of notifications by the server; each costs it a system call.
    pub fn told(&self) -> u64 {
        self.hush();
        self.told.load(Ordering::SeqCst)
    }

    /// Returns the number of requests in flight.
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

    /// Returns the descriptor chain of a request.
    fn chain(&self, slot: u16, asked: &Asked<'_>) -> Vec<(u64, u64, u16)> {
        let (own, data) = (self.slot_at(slot), self.data_at(slot));
        let (len, flags) = match asked.data {
            Data::None => (0, 0),
            Data::Out(bytes) | Data::Append(bytes) => (bytes.len() as u64, 0),
            Data::In(len) => (len as u64, WRITE),
        };
        let has_more = matches!(asked.data, Data::Append(_));
        let most = if self.shape.indirect { PIECES_MAX } else { 2 - u64::from(has_more) };
        // Pieces of whole sectors; the last one has the rest.
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

    /// Submits a request if a slot is free, and returns the slot.
    ///
    /// # Panics
    /// If the data exceeds a slot.
    pub fn begin(&mut self, asked: Asked<'_>) -> Option<u16> {
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
                // A pattern that shows bytes which were not read.
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

    /// Makes a chain available, and kicks the server unless it has suppressed notifications.
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

    /// Notifies the server.
    pub fn kick(&self) {
        // A write to a full counter fails, but the kick is pending then.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Takes a completed request.
    ///
    /// # Errors
    /// The used entry does not belong to a request in flight.
    pub fn answer(&mut self) -> io::Result<Option<Answer>> {
        if self.used() == self.seen {
            if self.shape.event_idx {
                // Requests a notification for the next entry. Checked again below, as one may have
                // arrived just before.
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
            return Err(wrong(format!("an answer to descriptor {head}, which is not in flight")));
        };
        self.seen = self.seen.wrapping_add(1);
        self.free.push(slot);
        let (mut status, mut data) = ([0], Vec::new());
        self.memory.get(self.slot_at(slot) + STATUS_AT, &mut status);
        if status == [wire::OK] {
            // A zone report may return less data; all other reads fill the buffer.
            data.resize((len as usize).saturating_sub(1).min(room), 0);
            self.memory.get(from, &mut data);
        }
        if status == [NO_STATUS] || status == [wire::OK] && len as usize != 1 + data.len() {
            return Err(wrong(format!("status {status:?} with {len} bytes, {room} were asked for")));
        }
        Ok(Some(Answer { slot, status: status[0], data }))
    }

    /// Waits for a notification. Returns false if none arrived in time.
    ///
    /// # Errors
    /// System error.
    pub fn wait(&self, patience: Duration) -> io::Result<bool> {
        let mut fds = [PollFd::from_borrowed_fd(self.call.as_fd(), PollFlags::IN)];
        let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
        let told = poll(&mut fds, Some(&patience))? > 0;
        self.hush();
        Ok(told)
    }

    /// Reads and counts pending notifications.
    pub(super) fn hush(&self) {
        let mut count = [0; 8];
        // An empty counter means that none is pending.
        if rustix::io::read(&self.call, &mut count).is_ok() {
            self.told.fetch_add(u64::from_ne_bytes(count), Ordering::SeqCst);
        }
    }
}
