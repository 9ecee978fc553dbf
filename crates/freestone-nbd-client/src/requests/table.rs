//! Commands of a connection that are in flight.

use freestone_core::device::IoBuf;
use freestone_core::sync::Instant;

use crate::requests::job::{Job, Piece};
use crate::requests::ranges::ReceivedRanges;

/// Maximum number of commands in flight per connection.
pub const MAX_IN_FLIGHT: usize = 32;
/// Number of low bits of a cookie that hold the slot. The other bits are a serial number.
const SLOT_BITS: u32 = 8;
const _: () = assert!(MAX_IN_FLIGHT <= 1 << SLOT_BITS);

/// A command that was sent or is being sent.
pub struct SentPiece {
    pub job: Box<Job>,
    /// The NBD command.
    pub piece: Piece,
    /// Received byte ranges of a read.
    pub received: ReceivedRanges,
    /// First errno received in a reply; `None` without an error.
    pub error: Option<u32>,
    /// Time at which data of the command was last sent, or its reply was last received.
    pub last_progress: Instant,
    cookie: u64,
}

/// Commands in flight, by cookie.
#[derive(Default)]
pub struct CommandTable {
    slots: Vec<Option<SentPiece>>,
    used: usize,
    serial: u64,
}

impl CommandTable {
    /// Adds a command and returns its cookie.
    pub fn add(&mut self, job: Box<Job>, piece: Piece) -> u64 {
        let slot = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.serial += 1;
        let cookie = self.serial << SLOT_BITS | slot as u64;
        let last_progress = Instant::now();
        self.slots[slot] = Some(SentPiece {
            job,
            piece,
            received: ReceivedRanges::default(),
            error: None,
            last_progress,
            cookie,
        });
        self.used += 1;
        cookie
    }

    pub fn len(&self) -> usize {
        self.used
    }

    fn slot(cookie: u64) -> usize {
        (cookie & ((1 << SLOT_BITS) - 1)) as usize
    }

    /// Returns the command of a cookie, or None if it is not in flight.
    pub fn get(&mut self, cookie: u64) -> Option<&mut SentPiece> {
        self.slots.get_mut(Self::slot(cookie))?.as_mut().filter(|sent| sent.cookie == cookie)
    }

    /// Returns the data buffer of the command's request, or None if the command is not in flight.
    pub fn buffer(&mut self, cookie: u64) -> Option<&mut IoBuf> {
        self.get(cookie).map(|sent| &mut sent.job.buffer)
    }

    /// Removes and returns the command of a cookie, or returns None if it is not in flight.
    pub fn take(&mut self, cookie: u64) -> Option<SentPiece> {
        self.get(cookie)?;
        self.used -= 1;
        self.slots[Self::slot(cookie)].take()
    }

    /// Returns the earliest time of last progress of all commands, or None if none is in flight.
    pub fn oldest(&self) -> Option<Instant> {
        self.slots.iter().flatten().map(|sent| sent.last_progress).min()
    }

    /// Removes all commands and returns their requests.
    pub fn drain(&mut self) -> impl Iterator<Item = Box<Job>> {
        self.used = 0;
        self.slots.drain(..).flatten().map(|sent| sent.job)
    }
}
