//! Submitted requests that have parts of blocks.

use std::collections::VecDeque;
use std::sync::PoisonError;

use super::holds::Range;
use super::pieces::{Piece, cover, pieces};
use super::shared::{Held, Shared, can_wait, later};
use crate::device::{Buffer, Completion, Error, Flags, IoBuf, Op, Request, Result, Tried};
use crate::sync::{Arc, RwLock, RwLockReadGuard};
use crate::workers::Costs;

/// Whether the user is gone. Lock order: held, shared with others, while a piece is begun, which the
/// device takes over and returns soon, and while a worker tries one; under it what the device takes,
/// and the holds' locks.
#[derive(Default)]
pub struct Life(RwLock<bool>);

impl Life {
    /// Nothing more is begun when this has returned.
    pub fn end(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Hands a request to the device, unless the user is gone.
    pub fn submit(&self, shared: &Shared, request: Request, buffer: IoBuf, done: Completion) {
        let ended = self.read();
        if !*ended {
            return shared.device.submit(request, buffer, done);
        }
        drop(ended);
        done.complete(Err(Error::Gone), buffer);
    }

    /// Does a request as far as it goes without waiting, and submits what is left, unless the user
    /// is gone.
    pub fn work(
        &self,
        shared: Arc<Shared>,
        costs: &Costs,
        request: Request,
        mut buffer: IoBuf,
        done: Completion,
    ) {
        let began = costs.begin();
        let ended = self.read();
        let outcome = if *ended { Err(Error::Gone) } else { try_all(&shared, request, &mut buffer) };
        let outcome = match outcome {
            Ok(None) => {
                costs.learn(&request, began);
                Ok(())
            }
            Ok(Some(rest)) => {
                // A read is done again as a whole, as its data must lie in one buffer. A write is
                // not: who has seen the begin of it, and then what another wrote there, must not
                // see it again.
                let buffer = if request.op == Op::Write && rest.len < request.len {
                    IoBuf::copy_of(&buffer[(request.len - rest.len) as usize..])
                } else {
                    Ok(buffer)
                };
                let rest = if request.op == Op::Read { request } else { rest };
                match buffer {
                    Ok(buffer) => return shared.device.submit(rest, buffer, done),
                    Err(error) => return done.complete(Err(error), IoBuf::empty()),
                }
            }
            Err(error) => Err(error),
        };
        drop(ended);
        // Who is answered may be the last user of the device.
        drop(shared);
        done.complete(outcome, buffer);
    }

    fn read(&self) -> RwLockReadGuard<'_, bool> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does what can be done without waiting; returns what is left.
fn try_all(shared: &Shared, request: Request, buffer: &mut IoBuf) -> Result<Option<Request>> {
    let mut rest = request;
    loop {
        let from = (request.len - rest.len) as usize;
        let part = Buffer::rest(request.op, buffer, from);
        match shared.device.try_io(&rest, part)? {
            Tried::Done => return Ok(None),
            Tried::Partly(bytes) => rest = rest.rest(bytes),
            Tried::WouldBlock => return Ok(Some(rest)),
        }
    }
}

/// Reads the blocks that a range touches into one buffer, which becomes the range's.
pub fn read(shared: &Shared, request: Request, buffer: IoBuf, done: Completion) {
    // Before the other is made: a request has one buffer at a time.
    drop(buffer);
    let (start, end) = cover(request.offset, request.len, shared.block);
    let covering = Request { offset: start, len: end - start, ..request };
    let cut = Completion::new(move |outcome: Result<()>, mut buffer: IoBuf| {
        let (from, len) = ((request.offset - start) as usize, request.len as usize);
        if outcome.is_ok() && buffer.len() as u64 == end - start {
            buffer.copy_within(from..from + len, 0);
            buffer.show(len);
        }
        done.complete(outcome, buffer);
    });
    match IoBuf::zeroed((end - start) as usize) {
        Ok(buffer) => shared.device.submit(covering, buffer, cut),
        Err(error) => cut.complete(Err(error), IoBuf::empty()),
    }
}

/// A write, or write zeroes, of pieces that are done one after the other.
pub struct Chain {
    shared: Arc<Shared>,
    life: Arc<Life>,
    op: Op,
    flags: Flags,
    /// What is not yet done, each with its data.
    left: VecDeque<(Piece, IoBuf)>,
    done: Completion,
}

impl Chain {
    /// Begins it.
    pub fn start(shared: &Arc<Shared>, life: &Arc<Life>, request: Request, buffer: IoBuf, done: Completion) {
        match can_wait().and_then(|()| cut(request, buffer, shared.block)) {
            Ok(left) => {
                let (shared, life) = (Arc::clone(shared), Arc::clone(life));
                Self { shared, life, op: request.op, flags: request.flags, left, done }.go_on();
            }
            Err(error) => done.complete(Err(error), IoBuf::empty()),
        }
    }

    fn go_on(mut self) {
        let Some((piece, data)) = self.left.pop_front() else { return self.answer(Ok(())) };
        let (start, end) = cover(piece.offset, piece.len, self.shared.block);
        let shared = Arc::clone(&self.shared);
        shared.with_hold(Range { start, end, part: !piece.whole }, move |held| {
            if piece.whole {
                let request = Request::new(self.op, piece.offset, piece.len);
                self.write(request, data, held);
            } else {
                self.read_block(piece, data, held);
            }
        });
    }

    fn read_block(self, piece: Piece, data: IoBuf, held: Held) {
        let block = Request::read(piece.offset - piece.offset % self.shared.block, self.shared.block);
        let buffer = match IoBuf::zeroed(block.len as usize) {
            Ok(buffer) => buffer,
            Err(error) => return self.answer(Err(error)),
        };
        let (shared, life) = (Arc::clone(&self.shared), Arc::clone(&self.life));
        let read = Completion::new(move |outcome, mut buffer| {
            // A device that hands back another buffer has no data to change.
            let sound =
                outcome.and(if buffer.len() as u64 == block.len { Ok(()) } else { Err(Error::Media) });
            if let Err(error) = sound {
                drop(held);
                return self.answer(Err(error));
            }
            patch(&mut buffer, &piece, &data);
            later(move || self.write(Request::write(block.offset, block.len), buffer, held));
        });
        life.submit(&shared, block, buffer, read);
    }

    fn write(self, request: Request, buffer: IoBuf, held: Held) {
        // A part of a block that is zeroed is a write, and that knows of no holes.
        let allowed = if request.op == Op::Write { Flags::FUA } else { Flags::all() };
        let request = request.with(self.flags & allowed);
        let (shared, life) = (Arc::clone(&self.shared), Arc::clone(&self.life));
        let written = Completion::new(move |outcome, _| {
            drop(held);
            if outcome.is_err() || self.left.is_empty() {
                self.answer(outcome);
            } else {
                later(move || self.go_on());
            }
        });
        life.submit(&shared, request, buffer, written);
    }

    fn answer(self, outcome: Result<()>) {
        let Self { done, shared, .. } = self;
        // Who is answered may be the last user of the device.
        drop(shared);
        done.complete(outcome, IoBuf::empty());
    }
}

/// Puts new bytes into a block; zeroes where there is no data.
pub fn patch(block: &mut [u8], piece: &Piece, data: &[u8]) {
    let from = (piece.offset % block.len() as u64) as usize;
    let place = &mut block[from..from + piece.len as usize];
    if data.is_empty() {
        place.fill(0);
    } else {
        place.copy_from_slice(data);
    }
}

/// The pieces of a request with their data. That of whole blocks stays in the buffer: beside it
/// there are at most two parts of blocks, with a block each while they are changed.
fn cut(request: Request, mut buffer: IoBuf, block: u64) -> Result<VecDeque<(Piece, IoBuf)>> {
    let mut left = VecDeque::with_capacity(3);
    let has_data = request.op == Op::Write;
    let mut middle = None;
    for piece in pieces(request.offset, request.len, block) {
        let from = (piece.offset - request.offset) as usize;
        let data = if piece.whole && has_data {
            middle = Some((left.len(), from..from + piece.len as usize));
            IoBuf::empty()
        } else if has_data {
            IoBuf::copy_of(&buffer[from..from + piece.len as usize])?
        } else {
            IoBuf::empty()
        };
        left.push_back((piece, data));
    }
    if let Some((at, place)) = middle {
        let len = place.len();
        buffer.copy_within(place, 0);
        buffer.show(len);
        left[at].1 = buffer;
    }
    Ok(left)
}
