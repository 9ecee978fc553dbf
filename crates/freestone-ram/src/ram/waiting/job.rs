//! A submitted request, its progress, and its device.

use std::sync::Arc;

use super::device_space::{DeviceSpace, WaitGuard};
use super::parent_zeroes::ParentZeroes;
use crate::codec::Page;
use crate::ram::geometry::{PAGE, piece};
use freestone_core::PAGE_BYTES;
use freestone_core::clock::now_ms;
use freestone_core::device::{Completion, IoBuf, Op, Request};

pub(in crate::ram) struct Job {
    pub request: Request,
    pub at: usize,
    pub buffer: IoBuf,
    pub done: Completion,
    pub last_try: bool,
    /// Number of ended removals at this request's last attempt; see
    /// [`Removals::space_retry`](super::removals::Removals::space_retry).
    pub ended: u64,
    pub started_ms: u64,
    /// Counts the request as waiting for space. Kept until the request makes progress.
    pub waits: Option<WaitGuard>,
    /// Generation of freed space when this request last checked for space; see
    /// [`SpaceWaiters`](super::space_waiters::SpaceWaiters).
    pub space_generation: u64,
    /// Zeroes that the request has looked up in the parent of its device.
    pub below: ParentZeroes,
}

impl Job {
    pub fn new(request: Request, buffer: IoBuf, done: Completion) -> Self {
        let started_ms = now_ms();
        let below = ParentZeroes::default();
        Self {
            request,
            at: 0,
            buffer,
            done,
            last_try: false,
            ended: 0,
            started_ms,
            waits: None,
            space_generation: 0,
            below,
        }
    }

    /// Marks the next attempt as the last: the request fails if it finds no memory then.
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

    /// Returns the next `len` bytes that the request writes, all within its current page.
    pub fn part(&self, len: usize) -> Part<'_> {
        match (self.request.op, self.buffer.get(self.at..self.at + len)) {
            (Op::Write, Some(data)) => Part::Data(data),
            _ => Part::Zeroes(len),
        }
    }

    /// Returns true if the request needs the old content of its current page: it writes only a part
    /// of the page.
    pub fn needs_content(&self) -> bool {
        let (_, _, len) = piece(self.request.offset, self.request.len);
        matches!(self.request.op, Op::Write | Op::WriteZeroes) && len < PAGE_BYTES
    }
}

/// The device of a request that waits.
pub(in crate::ram) trait RequestOwner: Send + Sync {
    /// Returns the id of the device's present layer.
    fn layer_id(&self) -> u32;

    fn space(&self) -> &DeviceSpace;

    /// Runs a slice of a request of this device. Called on the work queue.
    fn resume_slice(self: Arc<Self>, job: Job);
}

/// A request that waits, with its device.
pub(in crate::ram) struct WaitingRequest {
    pub owner: Arc<dyn RequestOwner>,
    pub job: Job,
}

#[derive(Clone, Copy)]
pub(in crate::ram) enum Part<'a> {
    Data(&'a [u8]),
    Zeroes(usize),
}

impl Part<'_> {
    /// Copies the data or zeroes into `page`, from byte `from` on.
    pub fn put(&self, from: usize, page: &mut Page) {
        match self {
            Self::Data(data) => page[from..from + data.len()].copy_from_slice(data),
            Self::Zeroes(len) => page[from..from + len].fill(0),
        }
    }
}
