//! Commands of a connection that are in flight.

use freestone_core::device::IoBuf;
use freestone_core::sync::Instant;

use crate::job::{Job, Piece};
use crate::ranges::ReceivedRanges;

/// Maximum number of commands in flight per connection.
pub const MAX_IN_FLIGHT: usize = 32;
/// Bits of a cookie that hold the slot; the others are a serial number.
const SLOT_BITS: u32 = 8;
const _: () = assert!(MAX_IN_FLIGHT <= 1 << SLOT_BITS);

/// A command that was sent or is being sent.
pub struct SentPiece {
    pub job: Box<Job>,
    /// The command.
    pub piece: Piece,
    /// Received ranges of a read.
    pub received: ReceivedRanges,
    /// First errno received.
    pub error: Option<u32>,
    /// Time of the last progress.
    pub since: Instant,
    cookie: u64,
}

/// Commands in flight, by cookie.
#[derive(Default)]
pub struct Table {
    slots: Vec<Option<SentPiece>>,
    used: usize,
    serial: u64,
}

impl Table {
    /// Adds a command and returns its cookie.
    pub fn add(&mut self, job: Box<Job>, piece: Piece) -> u64 {
        let slot = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.serial += 1;
        let cookie = self.serial << SLOT_BITS | slot as u64;
        let since = Instant::now();
        self.slots[slot] =
            Some(SentPiece { job, piece, received: ReceivedRanges::default(), error: None, since, cookie });
        self.used += 1;
        cookie
    }

    pub fn len(&self) -> usize {
        self.used
    }

    fn slot(cookie: u64) -> usize {
        (cookie & ((1 << SLOT_BITS) - 1)) as usize
    }

    /// Returns the command of a cookie.
    pub fn get(&mut self, cookie: u64) -> Option<&mut SentPiece> {
        self.slots.get_mut(Self::slot(cookie))?.as_mut().filter(|sent| sent.cookie == cookie)
    }

    /// Returns the buffer of the command's request.
    pub fn buffer(&mut self, cookie: u64) -> Option<&mut IoBuf> {
        self.get(cookie).map(|sent| &mut sent.job.buffer)
    }

    /// Removes the command of a cookie.
    pub fn take(&mut self, cookie: u64) -> Option<SentPiece> {
        self.get(cookie)?;
        self.used -= 1;
        self.slots[Self::slot(cookie)].take()
    }

    /// Returns the earliest time of last progress of all commands.
    pub fn oldest(&self) -> Option<Instant> {
        self.slots.iter().flatten().map(|sent| sent.since).min()
    }

    /// Removes all commands and returns their requests.
    pub fn drain(&mut self) -> impl Iterator<Item = Box<Job>> {
        self.used = 0;
        self.slots.drain(..).flatten().map(|sent| sent.job)
    }
}
