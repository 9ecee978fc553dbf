//! Byte-granular access of one user to a device.

use super::chain::{self, Chain, UserState, patch};
use super::pieces::{Piece, cover, pieces};
use super::range_locks::{Range, User};
use super::shared::{Shared, start_thread};
use crate::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult, range_end,
};
use crate::handoff::try_result;
use crate::sync::Arc;
use crate::workers::{Costs, Workers};

/// Largest logical block of a device, in bytes.
const MAX_BLOCK_BYTES: usize = 4096;

/// Byte-granular access to a device for one user, who makes one call at a time.
pub struct Bytes {
    shared: Arc<Shared>,
    user: User,
    state: Arc<UserState>,
    /// Mask of the bits of an offset or length that are zero for whole blocks. 0 for zoned devices, whose
    /// requests pass through unchanged.
    mask: u64,
}

impl Bytes {
    /// Creates a byte-granular user of `device`.
    pub fn new(device: Arc<dyn Device>) -> Self {
        let zoned = device.geometry().zones.is_some();
        let shared = Shared::for_device(device);
        let mask = if zoned { 0 } else { shared.block - 1 };
        Self { user: shared.locks.user(), state: Arc::default(), mask, shared }
    }

    /// Returns the geometry that users of a device see: the exact size without padding, and logical blocks of
    /// one byte. The geometry of a zoned device is unchanged.
    pub fn user_geometry(mut geometry: Geometry) -> Geometry {
        if geometry.zones.is_none() {
            geometry.size -= u64::from(geometry.padding);
            geometry.padding = 0;
            geometry.logical_block = 1;
        }
        geometry
    }

    /// Returns the geometry that users of this device see.
    pub fn geometry(&self) -> Geometry {
        Self::user_geometry(self.shared.device.geometry())
    }

    /// Tries a request like [`Device::try_io`].
    #[inline]
    pub fn try_io(&mut self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        crate::trail::step!();
        if (request.offset | request.len) & self.mask != 0 {
            return self.try_parts(request, buffer);
        }
        if matches!(request.op, Op::Read | Op::Flush) {
            return self.shared.device.try_io(request, buffer);
        }
        if !self.user.mark(&self.shared.locks) {
            return self.try_locked(request, buffer);
        }
        let tried = self.shared.device.try_io(request, buffer);
        self.user.unmark();
        tried
    }

    /// Returns the maximum number of bytes that a submitted request allocates in addition to its buffer.
    pub fn extra_bytes(&self, request: &Request) -> usize {
        let whole = (request.offset | request.len) & self.mask == 0;
        if whole { 0 } else { 3 * self.shared.block as usize }
    }

    /// Submits a request like [`Device::submit`].
    pub fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        crate::trail::step!();
        let shared = &self.shared;
        let whole = (request.offset | request.len) & self.mask == 0;
        if whole && matches!(request.op, Op::Read | Op::Flush) {
            return shared.device.submit(request, buffer, done);
        }
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        match request.op {
            Op::Read => chain::read(shared, request, buffer, done),
            Op::Discard if !whole => {
                match pieces(request.offset, request.len, shared.block).find(|p| p.whole) {
                    Some(piece) => {
                        self.submit(
                            Request { offset: piece.offset, len: piece.len, ..request },
                            buffer,
                            done,
                        );
                    }
                    None => done.complete(Ok(()), buffer),
                }
            }
            _ if whole => {
                let range = blocks(&request);
                if let Some(held) = shared.try_lock_range(range) {
                    return shared.device.submit(request, buffer, held.release_before(done));
                }
                if let Err(error) = start_thread() {
                    return done.complete(Err(error), buffer);
                }
                let (target, state) = (Arc::clone(shared), Arc::clone(&self.state));
                shared.with_range_lock(range, move |held| {
                    state.submit(&target, request, buffer, held.release_before(done));
                });
            }
            _ => Chain::start(shared, &self.state, request, buffer, done),
        }
    }

    /// Passes the request to a worker, which executes as much as possible without waiting and submits the
    /// rest. If the workers are busy, the calling thread executes the request before this function returns.
    pub fn send_to_worker(
        &self,
        workers: &Workers,
        costs: &Arc<Costs>,
        request: Request,
        buffer: IoBuf,
        done: Completion,
    ) {
        if (request.offset | request.len) & self.mask != 0 {
            return self.submit(request, buffer, done);
        }
        let done = if matches!(request.op, Op::Read | Op::Flush) {
            done
        } else {
            // Checked before the request's range is computed, which could overflow otherwise.
            if let Err(error) = request.check(&self.geometry()) {
                return done.complete(Err(error), buffer);
            }
            match self.shared.try_lock_range(blocks(&request)) {
                Some(held) => held.release_before(done),
                None => return self.submit(request, buffer, done),
            }
        };
        let expensive = costs.is_expensive(&request);
        let (shared, state, costs) = (Arc::clone(&self.shared), Arc::clone(&self.state), Arc::clone(costs));
        let task = Box::new(move || state.execute(shared, &costs, request, buffer, done));
        if let Err(task) = workers.offer(task, expensive) {
            task();
        }
    }

    /// Reports extents like [`Device::extents`], for any byte range. Returns the number of bytes described.
    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.clipped(offset, len, |start, len, clip| {
            self.shared.device.extents(start, len, &mut |extent| {
                clip(extent.offset, extent.len)
                    .is_none_or(|(offset, len)| row(Extent { offset, len, kind: extent.kind }))
            })
        })
    }

    /// Reports changes like [`Changes::changes`], for any byte range. Returns the number of bytes described.
    ///
    /// # Errors
    /// Errors of the device; [`Error::Unsupported`] if the device is neither a fork nor a snapshot.
    pub fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        let changes: &dyn Changes = self.shared.device.changes().ok_or(Error::Unsupported)?;
        self.clipped(offset, len, |start, len, clip| {
            changes.changes(start, len, &mut |change| {
                clip(change.offset, change.len)
                    .is_none_or(|(offset, len)| row(Change { offset, len, own: change.own }))
            })
        })
    }

    /// Hints that the range will be read soon, like [`Device::prefetch`].
    pub fn prefetch(&self, offset: u64, len: u64) {
        let (start, end) = cover(offset, len, self.shared.block);
        self.shared.device.prefetch(start, end - start);
    }

    /// Calls `ask` for the blocks that a range touches, with a function that clips rows to the range. Returns
    /// the number of bytes of the range that were described.
    fn clipped(
        &self,
        offset: u64,
        len: u64,
        ask: impl FnOnce(u64, u64, &dyn Fn(u64, u64) -> Option<(u64, u64)>) -> Result<u64>,
    ) -> Result<u64> {
        let stop = range_end(offset, len, self.geometry().size)?;
        let (start, end) = cover(offset, len, self.shared.block);
        let described = ask(start, end - start, &|at, len| {
            let (from, to) = (at.max(offset), (at + len).min(stop));
            (from < to).then(|| (from, to - from))
        })?;
        Ok((start + described).min(stop).saturating_sub(offset))
    }

    /// Tries a write with its range locked, because a partial write is announced.
    #[cold]
    fn try_locked(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        // Checked before the range is computed, which could overflow otherwise.
        request.check(&self.shared.device.geometry())?;
        match self.shared.try_lock_range(blocks(request)) {
            Some(_held) => self.shared.device.try_io(request, buffer),
            None => Ok(TryResult::WouldBlock),
        }
    }

    #[cold]
    fn try_parts(&mut self, request: &Request, mut buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        let mut done = 0;
        for piece in pieces(request.offset, request.len, self.shared.block) {
            let range = done as usize..(done + piece.len) as usize;
            let part = Request { offset: piece.offset, len: piece.len, ..*request };
            let moved = match &mut buffer {
                Buffer::Read(out) if piece.whole => self.try_io(&part, Buffer::Read(&mut out[range]))?,
                Buffer::Read(out) => self.try_read_part(&piece, &mut out[range])?,
                Buffer::Write(data) if piece.whole => self.try_io(&part, Buffer::Write(&data[range]))?,
                Buffer::Write(data) => self.try_write_part(&piece, &data[range], request.flags)?,
                Buffer::None if piece.whole => self.try_io(&part, Buffer::None)?,
                Buffer::None if request.op == Op::Discard => TryResult::Done,
                Buffer::None => self.try_write_part(&piece, &[], request.flags)?,
            };
            match moved {
                TryResult::Done => done += piece.len,
                TryResult::Partly(bytes) => {
                    done += bytes;
                    break;
                }
                TryResult::WouldBlock => break,
            }
        }
        Ok(try_result(done, request.len))
    }

    fn try_read_part(&self, piece: &Piece, out: &mut [u8]) -> Result<TryResult> {
        let mut block = [0; MAX_BLOCK_BYTES];
        let block = &mut block[..self.shared.block as usize];
        let from = (piece.offset % self.shared.block) as usize;
        let start = piece.offset - from as u64;
        let tried =
            self.shared.device.try_io(&Request::read(start, self.shared.block), Buffer::Read(block))?;
        if tried == TryResult::Done {
            out.copy_from_slice(&block[from..from + out.len()]);
        }
        Ok(tried)
    }

    /// Tries to write a part of one block, or to zero it if `data` is empty, with the block locked.
    fn try_write_part(&self, piece: &Piece, data: &[u8], flags: Flags) -> Result<TryResult> {
        let size = self.shared.block;
        let start = piece.offset - piece.offset % size;
        let Some(_held) = self.shared.try_lock_range(Range { start, end: start + size, part: true }) else {
            return Ok(TryResult::WouldBlock);
        };
        let mut block = [0; MAX_BLOCK_BYTES];
        let block = &mut block[..size as usize];
        let device = &self.shared.device;
        if device.try_io(&Request::read(start, size), Buffer::Read(block))? != TryResult::Done {
            return Ok(TryResult::WouldBlock);
        }
        patch(block, piece, data);
        device.try_io(&Request::write(start, size).with(flags & Flags::FUA), Buffer::Write(block))
    }
}

/// Returns the range to lock for a write of whole blocks. The request must have been checked.
fn blocks(request: &Request) -> Range {
    Range { start: request.offset, end: request.offset + request.len, part: false }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.state.close();
    }
}
