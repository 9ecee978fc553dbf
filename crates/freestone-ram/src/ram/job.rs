//! A submitted request, and how far it came.

use super::below::Below;
use super::device_room::Waits;
use super::{PAGE, piece};
use crate::clock::now_ms;
use crate::codec::Page;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Completion, IoBuf, Op, Request};

/// A submitted request, and how far it came.
pub(super) struct Job {
    pub request: Request,
    pub at: usize,
    pub buffer: IoBuf,
    pub done: Completion,
    pub last_try: bool,
    /// What was last said of [removals](super::removals::Removals::hope).
    pub ended: u64,
    pub began_ms: u64,
    /// Where there is no room.
    pub waits: Option<Waits>,
    /// How often [room](super::room_waiters::RoomWaiters::wait) had come.
    pub room: u64,
    /// What it knows of what lies below its device.
    pub below: Below,
}

impl Job {
    /// A request that has just been submitted.
    pub fn new(request: Request, buffer: IoBuf, done: Completion) -> Self {
        let began_ms = now_ms();
        let below = Below::default();
        Self {
            request,
            at: 0,
            buffer,
            done,
            last_try: false,
            ended: 0,
            began_ms,
            waits: None,
            room: 0,
            below,
        }
    }

    /// It fails if it finds no memory now.
    pub fn for_the_last_time(self) -> Self {
        Self { last_try: true, ..self }
    }

    pub fn advance(&mut self, bytes: u64) {
        self.request = self.request.rest(bytes);
        self.at += if self.buffer.is_empty() { 0 } else { bytes as usize };
        self.last_try = false;
        self.waits = None;
    }

    pub fn slot(&self) -> u64 {
        self.request.offset / PAGE
    }

    /// What it writes into the page at which it stands: `len` bytes.
    pub fn part(&self, len: usize) -> Part<'_> {
        match (self.request.op, self.buffer.get(self.at..self.at + len)) {
            (Op::Write, Some(data)) => Part::Data(data),
            _ => Part::Zeroes(len),
        }
    }

    /// Whether it needs the old content of the page at which it stands.
    pub fn needs_content(&self) -> bool {
        let (_, _, len) = piece(self.request.offset, self.request.len);
        matches!(self.request.op, Op::Write | Op::WriteZeroes) && len < PAGE_BYTES
    }
}

/// What is written into a part of a page.
#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    Data(&'a [u8]),
    Zeroes(usize),
}

impl Part<'_> {
    /// Puts it into the page, at `from`.
    pub fn put(&self, from: usize, page: &mut Page) {
        match self {
            Self::Data(data) => page[from..from + data.len()].copy_from_slice(data),
            Self::Zeroes(len) => page[from..from + len].fill(0),
        }
    }
}
