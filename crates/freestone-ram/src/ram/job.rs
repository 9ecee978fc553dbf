//! A submitted request with its progress.

use super::below::Below;
use super::device_space::WaitGuard;
use super::{PAGE, piece};
use crate::clock::now_ms;
use crate::codec::Page;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Completion, IoBuf, Op, Request};

pub(super) struct Job {
    pub request: Request,
    pub at: usize,
    pub buffer: IoBuf,
    pub done: Completion,
    pub last_try: bool,
    /// Last state of the family's removals that this request saw; see [removals](super::removals).
    pub ended: u64,
    pub began_ms: u64,
    /// Set while the request waits for space.
    pub waits: Option<WaitGuard>,
    /// Last space generation that this request saw; see
    /// [`SpaceWaiters`](super::space_waiters::SpaceWaiters).
    pub room: u64,
    /// What the request knows about its device's parent.
    pub below: Below,
}

impl Job {
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

    /// Marks the last attempt: the request fails if it finds no memory now.
    pub fn with_last_try(self) -> Self {
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

    /// Returns the data that the request writes into its current page: `len` bytes.
    pub fn part(&self, len: usize) -> Part<'_> {
        match (self.request.op, self.buffer.get(self.at..self.at + len)) {
            (Op::Write, Some(data)) => Part::Data(data),
            _ => Part::Zeroes(len),
        }
    }

    /// Returns true if the request needs the old content of its current page.
    pub fn needs_content(&self) -> bool {
        let (_, _, len) = piece(self.request.offset, self.request.len);
        matches!(self.request.op, Op::Write | Op::WriteZeroes) && len < PAGE_BYTES
    }
}

#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    Data(&'a [u8]),
    Zeroes(usize),
}

impl Part<'_> {
    /// Copies the data into the page, from byte `from` on.
    pub fn put(&self, from: usize, page: &mut Page) {
        match self {
            Self::Data(data) => page[from..from + data.len()].copy_from_slice(data),
            Self::Zeroes(len) => page[from..from + len].fill(0),
        }
    }
}
