//! Making an exception: start it under the lock of the chunk's slot, copy without locks, commit it
//! in the exception store, finish.
//!
//! A request takes a permit, locks the slot, allocates a chunk of the COW device and sets the slot
//! in flight. Then the copy runs piece by piece: read the origin, write the COW device. After each
//! completion the copy continues on the origin's work queue. After the last write the permit is
//! released. When the store reports the exception as durable, the slot is no longer in flight and
//! the waiters continue.
//!
//! A write to the snapshot that covers a whole chunk needs no copy: its data is written to the COW
//! device directly ("full-chunk optimisation").
//!
//! Lock order: slot, then the store's queue or the permits. The locks of gates and wait groups are
//! not taken under these locks, except to add a waiter under the slot.

use std::sync::Arc;

use crate::cow::exceptions::Exception;
use crate::cow::state::loss::Loss;
use crate::cow::state::permits::{COPY_PIECE_BYTES, Permit};
use crate::cow::state::wait_group::Waiter;
use crate::cow::state::{Snap, counter};
use crate::cow::store::{AllocateError, Allocated};
use freestone_core::device::{Buffer, Completion, Flags, IoBuf, Op, Request, Result, TryResult};
use freestone_core::handoff::{PutResult, try_put};

/// Name of the read step in log messages.
const READ: &str = "reading the origin";
/// Name of the write step in log messages.
const WRITE: &str = "writing the COW device";

/// Exception that was set pending; the owner of this value must copy or write the chunk.
pub struct StartedException {
    chunk: u64,
    allocated: Allocated,
    /// Permit of the snapshot that owns the exception.
    permit: Permit,
}

pub enum RequestResult {
    Complete,
    /// The exception is pending already; the waiter is notified when it ends.
    Joined,
    /// The exception was started, and the caller must copy or write the chunk. The waiter is
    /// notified when the exception ends.
    Started(StartedException),
    /// Too many copies are in flight, so no permit was available.
    Throttled,
    Full,
    Lost,
    /// The machine has no memory for the table of exceptions.
    NoMemory,
}

impl Snap {
    /// Requests the exception of a chunk that the caller saw in state `seen`. Uses `permit` if it
    /// belongs to this snapshot, otherwise acquires a permit, but only to start a copy.
    pub fn request_exception(
        self: &Arc<Self>,
        chunk: u64,
        mut seen: Exception,
        waiter: impl FnOnce() -> Waiter,
        permit: &mut Option<Permit>,
    ) -> RequestResult {
        loop {
            match seen {
                Exception::Complete(_) | Exception::Merging(_) => return RequestResult::Complete,
                Exception::None if !permit.as_ref().is_some_and(|permit| permit.snap().is_same(self)) => {
                    *permit = self.try_permit();
                    if permit.is_none() {
                        return RequestResult::Throttled;
                    }
                }
                Exception::None | Exception::Pending => {}
            }
            let Ok(locked) = self.exceptions.lock(chunk) else { return RequestResult::NoMemory };
            match locked.state() {
                Exception::Complete(_) | Exception::Merging(_) => return RequestResult::Complete,
                Exception::Pending => {
                    locked.add_waiter(waiter());
                    return RequestResult::Joined;
                }
                Exception::None => {
                    let own_permit = permit.take_if(|permit| permit.snap().is_same(self));
                    // The exception was pending and was cancelled meanwhile: try again, with a
                    // permit.
                    let Some(own_permit) = own_permit else {
                        seen = Exception::None;
                        continue;
                    };
                    let allocated = match self.store.allocate() {
                        Ok(allocated) => allocated,
                        Err(AllocateError::Full) => return RequestResult::Full,
                        Err(AllocateError::Invalid) => {
                            // The store becomes invalid shortly before the snapshot is marked
                            // invalid.
                            self.mark_invalid();
                            return RequestResult::Lost;
                        }
                    };
                    self.gate.begin();
                    locked.set_pending(waiter());
                    return RequestResult::Started(StartedException { chunk, allocated, permit: own_permit });
                }
            }
        }
    }

    /// Finishes an exception that is durable, or lost with the snapshot. Runs on the store's
    /// thread, on which no call may wait.
    fn finish_exception(&self, chunk: u64, new: u64, committed: bool) {
        if !committed {
            self.finish_loss();
        }
        let waiting = self.exceptions.end_pending(chunk, committed.then_some(new));
        self.gate.end();
        for waiter in waiting {
            waiter.notify(Ok(()));
        }
    }
}

impl StartedException {
    fn snap(&self) -> &Arc<Snap> {
        self.permit.snap()
    }

    pub fn copy(self) {
        let snap = self.snap();
        let start = self.chunk * snap.chunk();
        // Copied up to the origin's current end, which may be beyond the snapshot's end.
        let len = snap.core.device.geometry().size.saturating_sub(start).min(snap.chunk());
        snap.counters.add(counter::COPIED, 1);
        match IoBuf::zeroed(len.min(COPY_PIECE_BYTES).next_multiple_of(snap.cow_block()) as usize) {
            Ok(buffer) => ChunkCopy { started: self, at: 0, len, writing: false, buffer }.resume(),
            Err(error) => self.finish_copy(READ, Err(error)),
        }
    }

    /// Writes the whole chunk to the COW device: `data`, or zeroes if `data` is `None`.
    ///
    /// # Errors
    /// Out of memory for the data. The exception is cancelled.
    pub fn write(self, op: Op, flags: Flags, len: u64, data: Option<&[u8]>) -> Result<()> {
        let snap = Arc::clone(self.snap());
        snap.counters.add(counter::FULL, 1);
        // FUA is not needed, because a persistent store flushes the COW device before it writes the
        // entry of the exception.
        let durable = snap.store.kind().is_persistent();
        let flags = if durable { flags - Flags::FUA } else { flags };
        let request = Request { op, flags, offset: self.allocated.byte(), len };
        let cow = snap.store.device();
        match try_put(&**cow, request, data) {
            PutResult::Done(outcome) => self.finish_copy(WRITE, outcome),
            PutResult::Rest(request, from) => {
                let buffer = data.map_or(Ok(IoBuf::empty()), |data| IoBuf::copy_of(&data[from..]));
                let buffer = match buffer {
                    Ok(buffer) => buffer,
                    Err(error) => {
                        self.cancel();
                        return Err(error);
                    }
                };
                let work_queue = Arc::clone(&snap.core.work_queue);
                let done = move |outcome, _| work_queue.push(move || self.finish_copy(WRITE, outcome));
                cow.submit(request, buffer, Completion::new(done));
            }
        }
        Ok(())
    }

    /// Cancels the exception, of which nothing was stored. The waiters may start it again.
    fn cancel(self) {
        let Self { chunk, allocated, permit } = self;
        let snap = Arc::clone(permit.snap());
        drop((allocated, permit));
        let waiting = snap.exceptions.end_pending(chunk, None);
        snap.gate.end();
        for waiter in waiting {
            waiter.notify(Ok(()));
        }
    }

    /// Ends the copy after its last write, or after the step `step` failed, and commits the
    /// exception in the store.
    fn finish_copy(self, step: &'static str, outcome: Result<()>) {
        let Self { chunk, allocated, permit } = self;
        let snap = Arc::clone(permit.snap());
        drop(permit);
        if let Err(error) = outcome {
            // Later accesses to the snapshot fail. The store marks the COW device invalid before
            // the waiters continue.
            snap.lose(Loss::of(step, error));
        }
        let (new, landing) = (allocated.chunk(), Arc::clone(&snap));
        let on_commit = move |committed: std::result::Result<(), _>| {
            landing.finish_exception(chunk, new, committed.is_ok());
        };
        snap.store.commit(allocated, chunk, outcome, on_commit);
    }
}

struct ChunkCopy {
    started: StartedException,
    /// Number of bytes of the chunk that were copied.
    at: u64,
    len: u64,
    /// True if the current piece was read and must be written.
    writing: bool,
    buffer: IoBuf,
}

impl ChunkCopy {
    fn piece(&self) -> u64 {
        (self.len - self.at).min(COPY_PIECE_BYTES)
    }

    fn resume(mut self) {
        let snap = Arc::clone(self.started.snap());
        let piece = self.piece();
        if !self.writing {
            self.buffer.set_len(piece as usize);
            let request = Request::read(self.started.chunk * snap.chunk() + self.at, piece);
            match snap.core.device.try_io(&request, Buffer::Read(&mut self.buffer)) {
                Ok(TryResult::Done) => self.finish_read(),
                // After a partial read the whole piece is read again, which is harmless because the
                // chunk does not change.
                Ok(_) => return self.submit_to(&snap.core.device, request),
                Err(error) => return self.started.finish_copy(READ, Err(error)),
            }
        }
        let request = Request::write(self.started.allocated.byte() + self.at, self.buffer.len() as u64);
        match snap.store.device().try_io(&request, Buffer::Write(&self.buffer)) {
            Ok(TryResult::Done) => self.finish_write(),
            Ok(_) => self.submit_to(snap.store.device(), request),
            Err(error) => self.started.finish_copy(WRITE, Err(error)),
        }
    }

    fn submit_to(mut self, device: &Arc<dyn freestone_core::device::Device>, request: Request) {
        let buffer = std::mem::replace(&mut self.buffer, IoBuf::empty());
        let done = Completion::new(move |outcome: Result<()>, buffer| {
            let work_queue = Arc::clone(&self.started.snap().core.work_queue);
            work_queue.push(move || self.complete(outcome, buffer));
        });
        device.submit(request, buffer, done);
    }

    fn complete(mut self, outcome: Result<()>, buffer: IoBuf) {
        self.buffer = buffer;
        match outcome {
            Err(error) => self.started.finish_copy(if self.writing { WRITE } else { READ }, Err(error)),
            Ok(()) if self.writing => self.finish_write(),
            Ok(()) => {
                self.finish_read();
                self.resume();
            }
        }
    }

    fn finish_read(&mut self) {
        self.writing = true;
        let piece = self.piece();
        // Pads the last piece with zeroes: only at the origin's end can a piece end within a block
        // of the COW device.
        self.buffer.set_len(piece.next_multiple_of(self.started.snap().cow_block()) as usize);
        self.buffer[piece as usize..].fill(0);
    }

    fn finish_write(mut self) {
        self.at += self.piece();
        self.writing = false;
        if self.at >= self.len {
            return self.started.finish_copy(WRITE, Ok(()));
        }
        // The next piece is a new task, so that other tasks of the queue run between two pieces.
        let work_queue = Arc::clone(&self.started.snap().core.work_queue);
        work_queue.push(move || self.resume());
    }
}
