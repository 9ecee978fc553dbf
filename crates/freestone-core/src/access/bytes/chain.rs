//! Submitted requests with partial blocks, which run as a chain of pieces.

use std::collections::VecDeque;

use super::pieces::{Piece, cover, pieces};
use super::range_locks::Range;
use super::shared::{RangeGuard, Shared, run_later, start_thread};
use crate::device::{Buffer, Completion, Error, Flags, IoBuf, Op, Request, Result, TryResult};
use crate::sync::{Arc, RwLock};
use crate::workers::Costs;

/// Records whether the user, a `Bytes`, was dropped.
///
/// Lock order: read-locked while a piece is submitted, which returns soon, and while a worker tries a
/// request. The device's locks and the range locks are taken under this lock.
#[derive(Default)]
pub struct UserState(RwLock<bool>);

impl UserState {
    /// Marks the user as dropped. After the return, no further request of the user starts.
    pub fn close(&self) {
        *self.0.write() = true;
    }

    /// Submits a request to the device, or completes it with [`Error::Gone`] if the user was dropped.
    pub fn submit(&self, shared: &Shared, request: Request, buffer: IoBuf, done: Completion) {
        let ended = self.0.read();
        if !*ended {
            return shared.device.submit(request, buffer, done);
        }
        drop(ended);
        done.complete(Err(Error::Gone), buffer);
    }

    /// Executes a request as far as possible without waiting and submits the rest. Completes the request with
    /// [`Error::Gone`] if the user was dropped.
    pub fn execute(
        &self,
        shared: Arc<Shared>,
        costs: &Costs,
        request: Request,
        mut buffer: IoBuf,
        done: Completion,
    ) {
        let began = costs.begin();
        let ended = self.0.read();
        let outcome = if *ended { Err(Error::Gone) } else { try_all(&shared, request, &mut buffer) };
        let outcome = match outcome {
            Ok(None) => {
                costs.record(&request, began);
                Ok(())
            }
            Ok(Some(rest)) => {
                // A read is repeated as a whole, because its data must be in one buffer. A write is not
                // repeated: a reader may have seen its first bytes, and then a later write to them. The
                // reader must not see these first bytes again.
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
        // The receiver of the completion may drop its reference to the device and expect it to be the last.
        drop(shared);
        done.complete(outcome, buffer);
    }
}

/// Executes a request as far as possible without waiting. Returns the remaining part, or `None` if the
/// request is complete.
fn try_all(shared: &Shared, request: Request, buffer: &mut IoBuf) -> Result<Option<Request>> {
    let mut rest = request;
    loop {
        let from = (request.len - rest.len) as usize;
        let part = Buffer::rest(request.op, buffer, from);
        match shared.device.try_io(&rest, part)? {
            TryResult::Done => return Ok(None),
            TryResult::Partly(bytes) => rest = rest.rest(bytes),
            TryResult::WouldBlock => return Ok(Some(rest)),
        }
    }
}

/// Reads the blocks that the request touches into one buffer, and cuts the buffer to the requested range.
pub fn read(shared: &Shared, request: Request, buffer: IoBuf, done: Completion) {
    // The request's buffer is freed before the larger one is allocated, so that only one exists at a time.
    drop(buffer);
    let (start, end) = cover(request.offset, request.len, shared.block);
    let covering = Request { offset: start, len: end - start, ..request };
    let cut = Completion::new(move |outcome: Result<()>, mut buffer: IoBuf| {
        let (from, len) = ((request.offset - start) as usize, request.len as usize);
        if outcome.is_ok() && buffer.len() as u64 == end - start {
            buffer.copy_within(from..from + len, 0);
            buffer.set_len(len);
        }
        done.complete(outcome, buffer);
    });
    match IoBuf::zeroed((end - start) as usize) {
        Ok(buffer) => shared.device.submit(covering, buffer, cut),
        Err(error) => cut.complete(Err(error), IoBuf::empty()),
    }
}

/// A write or write zeroes whose pieces run one after the other.
pub struct Chain {
    shared: Arc<Shared>,
    state: Arc<UserState>,
    op: Op,
    flags: Flags,
    remaining: VecDeque<(Piece, IoBuf)>,
    done: Completion,
}

impl Chain {
    pub fn start(
        shared: &Arc<Shared>,
        state: &Arc<UserState>,
        request: Request,
        buffer: IoBuf,
        done: Completion,
    ) {
        match start_thread().and_then(|()| cut(request, buffer, shared.block)) {
            Ok(remaining) => {
                let (shared, state) = (Arc::clone(shared), Arc::clone(state));
                Self { shared, state, op: request.op, flags: request.flags, remaining, done }
                    .start_next_piece();
            }
            Err(error) => done.complete(Err(error), IoBuf::empty()),
        }
    }

    fn start_next_piece(mut self) {
        let Some((piece, data)) = self.remaining.pop_front() else { return self.complete(Ok(())) };
        let (start, end) = cover(piece.offset, piece.len, self.shared.block);
        let shared = Arc::clone(&self.shared);
        shared.with_range_lock(Range { start, end, part: !piece.whole }, move |held| {
            if piece.whole {
                let request = Request::new(self.op, piece.offset, piece.len);
                self.write(request, data, held);
            } else {
                self.read_block(piece, data, held);
            }
        });
    }

    fn read_block(self, piece: Piece, data: IoBuf, held: RangeGuard) {
        let block = Request::read(piece.offset - piece.offset % self.shared.block, self.shared.block);
        let buffer = match IoBuf::zeroed(block.len as usize) {
            Ok(buffer) => buffer,
            Err(error) => return self.complete(Err(error)),
        };
        let (shared, state) = (Arc::clone(&self.shared), Arc::clone(&self.state));
        let read = Completion::new(move |outcome, mut buffer| {
            // A device that returns a buffer of another length has not read the block.
            let checked =
                outcome.and(if buffer.len() as u64 == block.len { Ok(()) } else { Err(Error::Media) });
            if let Err(error) = checked {
                drop(held);
                return self.complete(Err(error));
            }
            patch(&mut buffer, &piece, &data);
            run_later(move || self.write(Request::write(block.offset, block.len), buffer, held));
        });
        state.submit(&shared, block, buffer, read);
    }

    fn write(self, request: Request, buffer: IoBuf, held: RangeGuard) {
        // A partial block is zeroed by a write, to which only the flag FUA applies.
        let allowed = if request.op == Op::Write { Flags::FUA } else { Flags::all() };
        let request = request.with(self.flags & allowed);
        let (shared, state) = (Arc::clone(&self.shared), Arc::clone(&self.state));
        let written = Completion::new(move |outcome, _| {
            drop(held);
            if outcome.is_err() || self.remaining.is_empty() {
                self.complete(outcome);
            } else {
                run_later(move || self.start_next_piece());
            }
        });
        state.submit(&shared, request, buffer, written);
    }

    fn complete(self, outcome: Result<()>) {
        let Self { done, shared, .. } = self;
        // The receiver of the completion may drop its reference to the device and expect it to be the last.
        drop(shared);
        done.complete(outcome, IoBuf::empty());
    }
}

/// Overwrites the part of a block that `piece` covers with `data`, or with zeroes if `data` is empty.
pub fn patch(block: &mut [u8], piece: &Piece, data: &[u8]) {
    let from = (piece.offset % block.len() as u64) as usize;
    let place = &mut block[from..from + piece.len as usize];
    if data.is_empty() {
        place.fill(0);
    } else {
        place.copy_from_slice(data);
    }
}

/// Splits a request into pieces with their data. The data of whole blocks stays in the request's buffer; the
/// data of the partial blocks, at most two, is copied.
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
        buffer.set_len(len);
        left[at].1 = buffer;
    }
    Ok(left)
}
