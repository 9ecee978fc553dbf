//! How an exception is made: begun under the chunk's lock, copied with nothing held, committed by
//! the store, landed.
//!
//! Whoever needs an exception takes a permit, then the slot, then a chunk of the COW device from
//! the store, and leaves the slot in flight. From there the copy runs by itself, piece by piece:
//! read from the origin, write to the COW device. After each answer of a device it goes on in the
//! origin's work queue. When the copy is written its permit is free; the store says when the
//! exception is durable, and then the slot lands and those who waited go on.
//!
//! A write to the snapshot that covers a chunk needs no copy: its data goes to the COW device
//! ("full-chunk optimisation").
//!
//! Lock order: slot, then the store's queue or the rights to copy; the gate's and the gatherers'
//! locks are taken with none of them held, except to note a waiter under the slot.

use std::sync::Arc;

use super::exceptions::Exception;
use super::gather::Waiter;
use super::loss::Loss;
use super::state::{COPY_PIECE_BYTES, Permit, Snap, counter};
use super::store::{Allocated, NoPlace};
use freestone_core::device::{Buffer, Completion, Flags, IoBuf, Op, Request, Result, Tried};
use freestone_core::handoff::{Put, try_put};

/// Step of a copy, for the log.
const READ: &str = "reading the origin";
/// Step of a copy, for the log.
const WRITE: &str = "writing the COW device";

/// An exception that was begun.
pub struct Begun {
    chunk: u64,
    place: Allocated,
    /// To copy for the snapshot whose exception it is.
    permit: Permit,
}

/// What came of asking for an exception.
pub enum Asked {
    /// It is complete.
    Complete,
    /// It is pending; the waiter hears of its end.
    Joined,
    /// The caller has begun it, and has to carry it out; the waiter hears of its end.
    Begun(Begun),
    /// Too many copies are in flight.
    Throttled,
    /// The COW device is full.
    Full,
    /// The snapshot is lost.
    Lost,
    /// No memory for the table.
    NoMemory,
}

impl Snap {
    /// Asks for the exception of a chunk, of which the caller has seen `seen`. A `permit` of this
    /// snapshot is used, or else one is asked for, only where a copy begins.
    pub fn ask(
        self: &Arc<Self>,
        chunk: u64,
        mut seen: Exception,
        waiter: impl FnOnce() -> Waiter,
        permit: &mut Option<Permit>,
    ) -> Asked {
        loop {
            match seen {
                Exception::At(_) | Exception::Merging(_) => return Asked::Complete,
                Exception::None if !permit.as_ref().is_some_and(|permit| permit.snap().is(self)) => {
                    *permit = self.permit();
                    if permit.is_none() {
                        return Asked::Throttled;
                    }
                }
                Exception::None | Exception::Pending => {}
            }
            let Ok(locked) = self.exceptions.lock(chunk) else { return Asked::NoMemory };
            match locked.now() {
                Exception::At(_) | Exception::Merging(_) => return Asked::Complete,
                Exception::Pending => {
                    locked.wait(waiter());
                    return Asked::Joined;
                }
                Exception::None => {
                    let own = permit.take_if(|permit| permit.snap().is(self));
                    // It was pending, and was given up meanwhile: ask again, with a permit.
                    let Some(own) = own else {
                        seen = Exception::None;
                        continue;
                    };
                    let place = match self.store.allocate() {
                        Ok(place) => place,
                        Err(NoPlace::Full) => return Asked::Full,
                        Err(NoPlace::Invalid) => {
                            // The store learns it a moment before the snapshot does.
                            self.fails();
                            return Asked::Lost;
                        }
                    };
                    self.gate.begin();
                    locked.begin(waiter());
                    return Asked::Begun(Begun { chunk, place, permit: own });
                }
            }
        }
    }

    /// The exception of a chunk is durable, or lost with the snapshot. On a thread where nothing
    /// may wait.
    fn landed(&self, chunk: u64, new: u64, committed: bool) {
        if !committed {
            self.lost();
        }
        let waiting = self.exceptions.land(chunk, committed.then_some(new));
        self.gate.end();
        for waiter in waiting {
            waiter.arrived(Ok(()));
        }
    }
}

impl Begun {
    fn snap(&self) -> &Arc<Snap> {
        self.permit.snap()
    }

    /// Copies the chunk from the origin.
    pub fn copy(self) {
        let snap = self.snap();
        let start = self.chunk * snap.chunk();
        // To the origin's present end, which may lie behind that of the snapshot.
        let len = snap.core.device.geometry().size.saturating_sub(start).min(snap.chunk());
        snap.counters.add(counter::COPIED, 1);
        match IoBuf::zeroed(len.min(COPY_PIECE_BYTES).next_multiple_of(snap.cow_block()) as usize) {
            Ok(buffer) => Copying { begun: self, at: 0, len, writing: false, buffer }.go(),
            Err(error) => self.copied(READ, Err(error)),
        }
    }

    /// Stores `data`, or zeroes where there is none, as the whole chunk.
    ///
    /// # Errors
    /// No memory for the data: the exception is given up, as if it had not been asked for.
    pub fn write(self, op: Op, flags: Flags, len: u64, data: Option<&[u8]>) -> Result<()> {
        let snap = Arc::clone(self.snap());
        snap.counters.add(counter::FULL, 1);
        // A persistent store flushes the COW device before it writes the exception.
        let durable = snap.store.kind().is_persistent();
        let flags = if durable { flags - Flags::FUA } else { flags };
        let request = Request { op, flags, offset: self.place.byte(), len };
        let cow = snap.store.device();
        match try_put(&**cow, request, data) {
            Put::Done(outcome) => self.copied(WRITE, outcome),
            Put::Rest(request, from) => {
                let buffer = data.map_or(Ok(IoBuf::empty()), |data| IoBuf::copy_of(&data[from..]));
                let buffer = match buffer {
                    Ok(buffer) => buffer,
                    Err(error) => {
                        self.give_up();
                        return Err(error);
                    }
                };
                let work_queue = Arc::clone(&snap.core.work_queue);
                let done = move |outcome, _| work_queue.push(move || self.copied(WRITE, outcome));
                cow.submit(request, buffer, Completion::new(done));
            }
        }
        Ok(())
    }

    /// Nothing was stored: there is no exception, and whoever waits for it may begin it again.
    fn give_up(self) {
        let Self { chunk, place, permit } = self;
        let snap = Arc::clone(permit.snap());
        drop((place, permit));
        let waiting = snap.exceptions.land(chunk, None);
        snap.gate.end();
        for waiter in waiting {
            waiter.arrived(Ok(()));
        }
    }

    /// The chunk is on the COW device, or this `step` failed.
    fn copied(self, step: &'static str, outcome: Result<()>) {
        let Self { chunk, place, permit } = self;
        let snap = Arc::clone(permit.snap());
        drop(permit);
        if let Err(error) = outcome {
            // Accesses of the snapshot fail from now on; the store invalidates itself on disk
            // before those who wait go on.
            snap.lose(Loss::of(step, error));
        }
        let (new, landing) = (place.chunk(), Arc::clone(&snap));
        let landed =
            move |committed: std::result::Result<(), _>| landing.landed(chunk, new, committed.is_ok());
        snap.store.commit(place, chunk, outcome, landed);
    }
}

/// A copy under way.
struct Copying {
    begun: Begun,
    /// Bytes of the chunk that are done.
    at: u64,
    len: u64,
    /// The present piece was read.
    writing: bool,
    buffer: IoBuf,
}

impl Copying {
    fn piece(&self) -> u64 {
        (self.len - self.at).min(COPY_PIECE_BYTES)
    }

    fn go(mut self) {
        let snap = Arc::clone(self.begun.snap());
        let piece = self.piece();
        if !self.writing {
            self.buffer.show(piece as usize);
            let request = Request::read(self.begun.chunk * snap.chunk() + self.at, piece);
            match snap.core.device.try_io(&request, Buffer::Read(&mut self.buffer)) {
                Ok(Tried::Done) => self.was_read(),
                // Also where the first part was done: to read it again does no harm.
                Ok(_) => return self.submit_to(&snap.core.device, request),
                Err(error) => return self.begun.copied(READ, Err(error)),
            }
        }
        let request = Request::write(self.begun.place.byte() + self.at, self.buffer.len() as u64);
        match snap.store.device().try_io(&request, Buffer::Write(&self.buffer)) {
            Ok(Tried::Done) => self.was_written(),
            Ok(_) => self.submit_to(snap.store.device(), request),
            Err(error) => self.begun.copied(WRITE, Err(error)),
        }
    }

    fn submit_to(mut self, device: &Arc<dyn freestone_core::device::Device>, request: Request) {
        let buffer = std::mem::replace(&mut self.buffer, IoBuf::empty());
        let done = Completion::new(move |outcome: Result<()>, buffer| {
            let work_queue = Arc::clone(&self.begun.snap().core.work_queue);
            work_queue.push(move || self.complete(outcome, buffer));
        });
        device.submit(request, buffer, done);
    }

    fn complete(mut self, outcome: Result<()>, buffer: IoBuf) {
        self.buffer = buffer;
        match outcome {
            Err(error) => self.begun.copied(if self.writing { WRITE } else { READ }, Err(error)),
            Ok(()) if self.writing => self.was_written(),
            Ok(()) => {
                self.was_read();
                self.go();
            }
        }
    }

    fn was_read(&mut self) {
        self.writing = true;
        let piece = self.piece();
        // Only the end of the origin can lie inside a block of the COW device.
        self.buffer.show(piece.next_multiple_of(self.begun.snap().cow_block()) as usize);
        self.buffer[piece as usize..].fill(0);
    }

    fn was_written(mut self) {
        self.at += self.piece();
        self.writing = false;
        if self.at >= self.len {
            return self.begun.copied(WRITE, Ok(()));
        }
        // Other tasks run between two pieces.
        let work_queue = Arc::clone(&self.begun.snap().core.work_queue);
        work_queue.push(move || self.go());
    }
}
