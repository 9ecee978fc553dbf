//! A COW device with larger logical blocks than the origin's, in the origin's blocks.
//!
//! While a snapshot is merged it plays the origin's part, and requests come in blocks of the
//! origin. What is less than a block of the COW device is read with the rest of that block, changed
//! and written. A write waits for those that came before it and touch the same blocks, since the
//! rest of a block would be written as it was before them.

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried, range_end,
};
use freestone_core::sync::Mutex;
use freestone_core::work_queue::WorkQueue;

/// A COW device that takes requests in the origin's smaller blocks.
pub struct Blocks(Arc<BlocksState>);

struct BlocksState {
    device: Arc<dyn Device>,
    /// Logical blocks in bytes: those of requests, and the device's own.
    small: u32,
    large: u32,
    work_queue: Arc<WorkQueue>,
    /// Lock order: innermost. No device is called under it.
    writes: Mutex<Vec<Turn>>,
}

/// A write that has not ended, in the order of arrival.
struct Turn {
    number: u64,
    /// The blocks that it touches, in bytes.
    start: u64,
    end: u64,
    /// The write, while it waits for earlier ones.
    job: Option<BlockWrite>,
}

struct BlockWrite {
    number: u64,
    /// What is left of it, and where that begins in the buffer.
    request: Request,
    from: usize,
    buffer: IoBuf,
    done: Completion,
}

impl Blocks {
    /// `small` is less than the device's logical block. What is read before it is written goes on
    /// from the work queue.
    pub fn new(device: Arc<dyn Device>, small: u32, work_queue: Arc<WorkQueue>) -> Self {
        let large = device.geometry().logical_block;
        Self(Arc::new(BlocksState { device, small, large, work_queue, writes: Mutex::default() }))
    }

    fn read(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let shared = &self.0;
        if shared.fits(&request) {
            return shared.device.submit(request, buffer, done);
        }
        let (start, end) = shared.whole(&request);
        let whole = match IoBuf::zeroed((end - start) as usize) {
            Ok(whole) => whole,
            Err(error) => return done.complete(Err(error), buffer),
        };
        let skip = (request.offset - start) as usize;
        let then = Completion::new(move |outcome, whole: IoBuf| {
            let len = buffer.len();
            buffer.copy_from_slice(&whole[skip..skip + len]);
            done.complete(outcome, buffer);
        });
        shared.device.submit(Request { offset: start, len: end - start, ..request }, whole, then);
    }

    fn write(&self, request: Request, buffer: IoBuf, done: Completion) {
        let shared = &self.0;
        let (start, end) = shared.whole(&request);
        let mut writes = shared.writes.lock();
        let number = writes.last().map_or(0, |last| last.number + 1);
        let job = BlockWrite { number, request, from: 0, buffer, done };
        let is_free = writes.iter().all(|other| !other.meets(start, end));
        let (goes, waits) = if is_free { (Some(job), None) } else { (None, Some(job)) };
        writes.push(Turn { number, start, end, job: waits });
        drop(writes);
        if let Some(job) = goes {
            shared.step(job);
        }
    }
}

impl Turn {
    fn meets(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
}

impl BlocksState {
    /// The blocks of the device that a request touches: where they begin and end.
    fn whole(&self, request: &Request) -> (u64, u64) {
        let large = u64::from(self.large);
        let end = request.offset + request.len;
        (request.offset - request.offset % large, end.next_multiple_of(large))
    }

    /// Whether the device can be given a request as it is.
    fn fits(&self, request: &Request) -> bool {
        (request.offset | request.len).is_multiple_of(self.large.into())
    }

    /// Does the next part of a write for which no earlier one stands in the way, and of which
    /// something is left.
    fn step(self: &Arc<Self>, job: BlockWrite) {
        let large = u64::from(self.large);
        let Request { offset, len, flags, .. } = job.request;
        let inside = offset % large;
        if inside == 0 && len >= large {
            let len = len - len % large;
            let part = Request { len, ..job.request };
            let data = job.data(len).map_or(Ok(IoBuf::empty()), IoBuf::copy_of);
            return match data {
                Ok(data) => self.device.submit(part, data, self.after(job, len)),
                Err(error) => self.ended(job, Err(error)),
            };
        }
        let len = (large - inside).min(len);
        let block = match IoBuf::zeroed(large as usize) {
            Ok(block) => block,
            Err(error) => return self.ended(job, Err(error)),
        };
        let shared = Arc::clone(self);
        let patch = move |outcome: Result<()>, mut block: IoBuf| {
            if let Err(error) = outcome {
                return shared.ended(job, Err(error));
            }
            let part = &mut block[inside as usize..(inside + len) as usize];
            match job.data(len) {
                Some(data) => part.copy_from_slice(data),
                None => part.fill(0),
            }
            let write = Request::write(offset - inside, large).with(flags & Flags::FUA);
            let work_queue = Arc::clone(&shared.work_queue);
            work_queue.push(move || shared.device.submit(write, block, shared.after(job, len)));
        };
        self.device.submit(Request::read(offset - inside, large), block, Completion::new(patch));
    }

    /// What is done when the first `len` bytes of what is left are written.
    fn after(self: &Arc<Self>, mut job: BlockWrite, len: u64) -> Completion {
        let shared = Arc::clone(self);
        Completion::new(move |outcome: Result<()>, _| {
            if let Err(error) = outcome {
                return shared.ended(job, Err(error));
            }
            job.request = job.request.rest(len);
            job.from += len as usize;
            if job.request.len == 0 {
                return shared.ended(job, Ok(()));
            }
            let work_queue = Arc::clone(&shared.work_queue);
            work_queue.push(move || shared.step(job));
        })
    }

    /// Answers a write; writes that have no other to wait for go on.
    fn ended(self: &Arc<Self>, job: BlockWrite, outcome: Result<()>) {
        let mut writes = self.writes.lock();
        writes.retain(|turn| turn.number != job.number);
        let mut free = Vec::new();
        for at in 0..writes.len() {
            let Turn { start, end, .. } = writes[at];
            if writes[at].job.is_some() && writes[..at].iter().all(|before| !before.meets(start, end)) {
                free.extend(writes[at].job.take());
            }
        }
        drop(writes);
        for job in free {
            let shared = Arc::clone(self);
            self.work_queue.push(move || shared.step(job));
        }
        job.done.complete(outcome, job.buffer);
    }
}

impl BlockWrite {
    /// The data of the first `len` bytes of what is left; `None`: zeroes.
    fn data(&self, len: u64) -> Option<&[u8]> {
        if self.request.op == Op::Write { self.buffer.get(self.from..self.from + len as usize) } else { None }
    }
}

impl Device for Blocks {
    fn geometry(&self) -> Geometry {
        Geometry { logical_block: self.0.small, ..self.0.device.geometry() }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry())?;
        match request.op {
            Op::Flush => self.0.device.try_io(request, buffer),
            Op::Read if self.0.fits(request) => self.0.device.try_io(request, buffer),
            _ => Ok(Tried::WouldBlock),
        }
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        match request.op {
            Op::Flush => self.0.device.submit(request, buffer, done),
            Op::Read => self.read(request, buffer, done),
            Op::Write | Op::WriteZeroes | Op::Discard => self.write(request, buffer, done),
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = range_end(offset, len, self.geometry().size)?;
        let (start, whole_end) = self.0.whole(&Request::read(offset, len));
        let mut described = 0;
        self.0.device.extents(start, whole_end - start, &mut |extent| {
            let (from, to) = (extent.offset.max(offset), (extent.offset + extent.len).min(end));
            let more = row(Extent { offset: from, len: to - from, ..extent });
            described = to - offset;
            more
        })?;
        Ok(described)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.0.device.prefetch(offset, len);
    }
}
