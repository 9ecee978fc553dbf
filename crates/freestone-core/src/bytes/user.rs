//! Access of one user to a device.

use super::chain::{self, Chain, UserLife, patch};
use super::holds::{Range, User};
use super::pieces::{Piece, cover, pieces};
use super::shared::{Shared, start_thread};
use crate::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result,
    Tried, range_end,
};
use crate::handoff::progress;
use crate::sync::Arc;
use crate::workers::{Costs, Workers};

/// Largest block of a device in bytes.
const MAX_BLOCK_BYTES: usize = 4096;

/// Byte-granular access to a device for one user, who makes one call at a time.
pub struct Bytes {
    shared: Arc<Shared>,
    user: User,
    life: Arc<UserLife>,
    /// Bits of an offset or length that indicate a partial block. 0 for zoned devices.
    mask: u64,
}

impl Bytes {
    /// Creates a user of `device`.
    pub fn new(device: Arc<dyn Device>) -> Self {
        let zoned = device.geometry().zones.is_some();
        let shared = Shared::for_device(device);
        let mask = if zoned { 0 } else { shared.block - 1 };
        Self { user: shared.holds.user(), life: Arc::default(), mask, shared }
    }

    /// Returns the geometry for users of a device: its exact size, and blocks of one byte. The geometry of a
    /// zoned device is unchanged.
    pub fn told(mut geometry: Geometry) -> Geometry {
        if geometry.zones.is_none() {
            geometry.size -= u64::from(geometry.padding);
            geometry.padding = 0;
            geometry.logical_block = 1;
        }
        geometry
    }

    /// Returns the geometry for users of this device.
    pub fn geometry(&self) -> Geometry {
        Self::told(self.shared.device.geometry())
    }

    /// Tries a request like [`Device::try_io`].
    ///
    /// # Errors
    /// Errors of the device.
    #[inline]
    pub fn try_io(&mut self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if (request.offset | request.len) & self.mask != 0 {
            return self.try_parts(request, buffer);
        }
        if matches!(request.op, Op::Read | Op::Flush) {
            return self.shared.device.try_io(request, buffer);
        }
        if !self.user.mark(&self.shared.holds) {
            return self.try_held(request, buffer);
        }
        let tried = self.shared.device.try_io(request, buffer);
        self.user.unmark();
        tried
    }

    /// Returns the maximum bytes that a submitted request allocates in addition to its buffer.
    pub fn beside(&self, request: &Request) -> usize {
        let whole = (request.offset | request.len) & self.mask == 0;
        if whole { 0 } else { 3 * self.shared.block as usize }
    }

    /// Submits a request like [`Device::submit`].
    pub fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
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
                if let Some(held) = shared.try_hold(range) {
                    return shared.device.submit(request, buffer, held.release_before(done));
                }
                if let Err(error) = start_thread() {
                    return done.complete(Err(error), buffer);
                }
                let (target, life) = (Arc::clone(shared), Arc::clone(&self.life));
                shared.with_hold(range, move |held| {
                    life.submit(&target, request, buffer, held.release_before(done));
                });
            }
            _ => Chain::start(shared, &self.life, request, buffer, done),
        }
    }

    /// Passes the request to a worker, which executes as much as possible without waiting and submits the
    /// rest. If the workers are busy, the calling thread does this before the function returns.
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
            // Checked here, as the request's range is computed next.
            if let Err(error) = request.check(&self.geometry()) {
                return done.complete(Err(error), buffer);
            }
            match self.shared.try_hold(blocks(&request)) {
                Some(held) => held.release_before(done),
                None => return self.submit(request, buffer, done),
            }
        };
        let dear = costs.are_dear(&request);
        let (shared, life, costs) = (Arc::clone(&self.shared), Arc::clone(&self.life), Arc::clone(costs));
        let task = Box::new(move || life.execute(shared, &costs, request, buffer, done));
        if let Err(task) = workers.offer(task, dear) {
            task();
        }
    }

    /// Reports extents like [`Device::extents`], for any byte range.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.clipped(offset, len, |start, len, clip| {
            self.shared.device.extents(start, len, &mut |extent| {
                clip(extent.offset, extent.len)
                    .is_none_or(|(offset, len)| row(Extent { offset, len, kind: extent.kind }))
            })
        })
    }

    /// Reports changes like [`Changes::changes`], for any byte range.
    ///
    /// # Errors
    /// Errors of the device; [`Error::Unsupported`] if it is neither a fork nor a snapshot.
    pub fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        let changes: &dyn Changes = self.shared.device.changes().ok_or(Error::Unsupported)?;
        self.clipped(offset, len, |start, len, clip| {
            changes.changes(start, len, &mut |change| {
                clip(change.offset, change.len)
                    .is_none_or(|(offset, len)| row(Change { offset, len, own: change.own }))
            })
        })
    }

    /// Hints a later read like [`Device::prefetch`].
    pub fn prefetch(&self, offset: u64, len: u64) {
        let (start, end) = cover(offset, len, self.shared.block);
        self.shared.device.prefetch(start, end - start);
    }

    /// Calls `ask` for the blocks that a range touches, with a function that cuts rows to the range.
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

    /// Tries a write with a hold, because a partial write is announced.
    #[cold]
    fn try_held(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        // Checked before any wait, and before the range is computed.
        request.check(&self.shared.device.geometry())?;
        match self.shared.try_hold(blocks(request)) {
            Some(_held) => self.shared.device.try_io(request, buffer),
            None => Ok(Tried::WouldBlock),
        }
    }

    #[cold]
    fn try_parts(&mut self, request: &Request, mut buffer: Buffer<'_>) -> Result<Tried> {
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
                Buffer::None if request.op == Op::Discard => Tried::Done,
                Buffer::None => self.try_write_part(&piece, &[], request.flags)?,
            };
            match moved {
                Tried::Done => done += piece.len,
                Tried::Partly(bytes) => {
                    done += bytes;
                    break;
                }
                Tried::WouldBlock => break,
            }
        }
        Ok(progress(done, request.len))
    }

    fn try_read_part(&self, piece: &Piece, out: &mut [u8]) -> Result<Tried> {
        let mut block = [0; MAX_BLOCK_BYTES];
        let block = &mut block[..self.shared.block as usize];
        let from = (piece.offset % self.shared.block) as usize;
        let start = piece.offset - from as u64;
        let tried =
            self.shared.device.try_io(&Request::read(start, self.shared.block), Buffer::Read(block))?;
        if tried == Tried::Done {
            out.copy_from_slice(&block[from..from + out.len()]);
        }
        Ok(tried)
    }

    /// Modifies a partial block under a hold.
    fn try_write_part(&self, piece: &Piece, data: &[u8], flags: Flags) -> Result<Tried> {
        let size = self.shared.block;
        let start = piece.offset - piece.offset % size;
        let Some(_held) = self.shared.try_hold(Range { start, end: start + size, part: true }) else {
            return Ok(Tried::WouldBlock);
        };
        let mut block = [0; MAX_BLOCK_BYTES];
        let block = &mut block[..size as usize];
        let device = &self.shared.device;
        if device.try_io(&Request::read(start, size), Buffer::Read(block))? != Tried::Done {
            return Ok(Tried::WouldBlock);
        }
        patch(block, piece, data);
        device.try_io(&Request::write(start, size).with(flags & Flags::FUA), Buffer::Write(block))
    }
}

/// Returns the blocks of a checked write of whole blocks.
fn blocks(request: &Request) -> Range {
    Range { start: request.offset, end: request.offset + request.len, part: false }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.life.end();
    }
}
