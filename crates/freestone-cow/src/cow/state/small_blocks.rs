//! Adapter for a COW device with larger logical blocks than the origin's.
//!
//! A snapshot that is being merged serves the origin, so requests are aligned to the origin's
//! smaller blocks only. The adapter writes a part of a large block by read-modify-write. A write
//! waits for earlier writes to the same large blocks. Otherwise it would restore old data around
//! the bytes that it modifies.

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Extent, Flags, Geometry, IoBuf, Op, Request, Result, TryResult, range_end,
};
use freestone_core::overlap::OverlapTracker;
use freestone_core::sync::Mutex;
use freestone_core::work_queue::WorkQueue;

/// COW device that accepts requests in the origin's smaller blocks.
pub struct SmallBlocks(Arc<SmallBlocksState>);

struct SmallBlocksState {
    device: Arc<dyn Device>,
    /// Logical block size of the accepted requests, in bytes.
    small: u32,
    /// Logical block size of the COW device, in bytes.
    large: u32,
    work_queue: Arc<WorkQueue>,
    /// Unfinished writes by the blocks that they touch, with those that wait for earlier writes.
    /// Lock order: innermost; no device is called under this lock.
    writes: Mutex<OverlapTracker<BlockWrite>>,
}

struct BlockWrite {
    ticket: usize,
    /// Remaining part of the write. The data of this part starts at `from` in the buffer.
    request: Request,
    from: usize,
    buffer: IoBuf,
    done: Completion,
}

impl SmallBlocks {
    /// Wraps `device`, whose logical block is larger than `small` bytes. Read-modify-writes
    /// continue on `work_queue`.
    pub fn new(device: Arc<dyn Device>, small: u32, work_queue: Arc<WorkQueue>) -> Self {
        let large = device.geometry().logical_block;
        Self(Arc::new(SmallBlocksState { device, small, large, work_queue, writes: Mutex::default() }))
    }

    fn read(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let shared = &self.0;
        if shared.is_aligned(&request) {
            return shared.device.submit(request, buffer, done);
        }
        let (start, end) = shared.whole_blocks(&request);
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
        let (start, end) = shared.whole_blocks(&request);
        let mut writes = shared.writes.lock();
        let (ticket, ready) = writes.enter(start..end, true);
        let job = BlockWrite { ticket, request, from: 0, buffer, done };
        if !ready {
            return writes.store(ticket, job);
        }
        drop(writes);
        shared.run_step(job);
    }
}

impl SmallBlocksState {
    /// Returns the start and the exclusive end, in bytes, of the device's blocks that a request
    /// touches.
    fn whole_blocks(&self, request: &Request) -> (u64, u64) {
        let large = u64::from(self.large);
        let end = request.offset + request.len;
        (request.offset - request.offset % large, end.next_multiple_of(large))
    }

    /// Returns true if a request consists of whole logical blocks of the device.
    fn is_aligned(&self, request: &Request) -> bool {
        (request.offset | request.len).is_multiple_of(self.large.into())
    }

    /// Runs the next part of a write that has bytes left and does not wait for earlier writes.
    fn run_step(self: &Arc<Self>, job: BlockWrite) {
        let large = u64::from(self.large);
        let Request { offset, len, flags, .. } = job.request;
        let inside = offset % large;
        if inside == 0 && len >= large {
            let len = len - len % large;
            let part = Request { len, ..job.request };
            let data = job.data(len).map_or(Ok(IoBuf::empty()), IoBuf::copy_of);
            return match data {
                Ok(data) => self.device.submit(part, data, self.step_completion(job, len)),
                Err(error) => self.finish_write(job, Err(error)),
            };
        }
        let len = (large - inside).min(len);
        let block = match IoBuf::zeroed(large as usize) {
            Ok(block) => block,
            Err(error) => return self.finish_write(job, Err(error)),
        };
        let shared = Arc::clone(self);
        let patch = move |outcome: Result<()>, mut block: IoBuf| {
            if let Err(error) = outcome {
                return shared.finish_write(job, Err(error));
            }
            let part = &mut block[inside as usize..(inside + len) as usize];
            match job.data(len) {
                Some(data) => part.copy_from_slice(data),
                None => part.fill(0),
            }
            let write = Request::write(offset - inside, large).with(flags & Flags::FUA);
            let work_queue = Arc::clone(&shared.work_queue);
            work_queue.push(move || shared.device.submit(write, block, shared.step_completion(job, len)));
        };
        self.device.submit(Request::read(offset - inside, large), block, Completion::new(patch));
    }

    /// Returns the completion for a step that writes the first `len` remaining bytes of a write.
    fn step_completion(self: &Arc<Self>, mut job: BlockWrite, len: u64) -> Completion {
        let shared = Arc::clone(self);
        Completion::new(move |outcome: Result<()>, _| {
            if let Err(error) = outcome {
                return shared.finish_write(job, Err(error));
            }
            job.request = job.request.rest(len);
            job.from += len as usize;
            if job.request.len == 0 {
                return shared.finish_write(job, Ok(()));
            }
            let work_queue = Arc::clone(&shared.work_queue);
            work_queue.push(move || shared.run_step(job));
        })
    }

    /// Completes a write, and starts the waiting writes that overlap no earlier write any more.
    fn finish_write(self: &Arc<Self>, job: BlockWrite, outcome: Result<()>) {
        let mut free = Vec::new();
        self.writes.lock().finish(job.ticket, |_, waiting| free.extend(waiting.take()));
        for job in free {
            let shared = Arc::clone(self);
            self.work_queue.push(move || shared.run_step(job));
        }
        job.done.complete(outcome, job.buffer);
    }
}

impl BlockWrite {
    /// Returns the data of the first `len` remaining bytes, or `None` if the request has no data
    /// and writes zeroes.
    fn data(&self, len: u64) -> Option<&[u8]> {
        if self.request.op == Op::Write { self.buffer.get(self.from..self.from + len as usize) } else { None }
    }
}

impl Device for SmallBlocks {
    fn geometry(&self) -> Geometry {
        Geometry { logical_block: self.0.small, ..self.0.device.geometry() }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        match request.op {
            Op::Flush => self.0.device.try_io(request, buffer),
            Op::Read if self.0.is_aligned(request) => self.0.device.try_io(request, buffer),
            _ => Ok(TryResult::WouldBlock),
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
        let (start, whole_end) = self.0.whole_blocks(&Request::read(offset, len));
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
