//! A drive in plain memory: `memory_backed=1`.
//!
//! What was never written takes nothing, and reads do not change that. A request locks the pages
//! that it copies, and nothing wider; a page's lock covers its copy, so every logical block is read
//! as it was before a write or after it.

use super::pages::{PAGE, Pages};
use super::{Config, SetupError};
use freestone_core::client_log;
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result,
    Tried, range_end,
};
use freestone_core::pin::{self, Swap};
use freestone_core::slot::MAX_SLOTS;
use freestone_core::zeroes::{ZEROES, ZEROES_BYTES};

/// Largest device in bytes: 256 TiB. Of that, 1 TiB can be written, counted in regions of 2 MiB
/// that hold anything.
pub const MEMORY_BYTES_MAX: u64 = MAX_SLOTS * PAGE;

/// Bytes that one try copies, to keep its work bounded: some 200 us, or a millisecond where the
/// memory is new.
const TRY_BYTES_MAX: u64 = 1 << 20;
/// The same for zeroes that take memory, which are written like data.
const ZEROES_TRY_BYTES_MAX: u64 = 256 << 10;
/// Regions of 2 MiB that one try discards, and gives back to the system where that is due: up to
/// two milliseconds.
const TRY_LEAVES: u32 = 4;
/// Regions of 2 MiB that one call describes.
const EXTENT_LEAVES: u32 = 64;

/// A drive that keeps its data uncompressed in memory.
///
/// Discarded pages keep their memory for the next writes, up to 16 MiB and an eighth of what holds
/// data; what is more goes back to the system. A write that finds no memory is [`Error::NoMemory`].
pub struct Memory {
    geometry: Geometry,
    pages: Swap<Pages>,
}

impl Memory {
    /// An empty drive.
    ///
    /// # Errors
    /// The configuration; no memory for its tables.
    pub fn new(config: Config) -> std::result::Result<Self, SetupError> {
        let geometry = config.geometry(MEMORY_BYTES_MAX)?;
        Ok(Self { geometry, pages: Swap::new(Box::new(Pages::new()?)) })
    }

    /// Bytes of memory that it takes, tables and kept memory included.
    pub fn used_bytes(&self) -> u64 {
        pin::pinned(|pin| self.pages.load(pin).used_bytes())
    }

    /// Wipes it. Nobody is held up: requests in flight finish on the old content, whose memory is
    /// free when this returns.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; nothing was wiped.
    pub fn reset(&self) -> Result<()> {
        let pages = Pages::new().map_err(|error| {
            // What a request may fail with cannot name the reason.
            client_log!(error, "a null device cannot be wiped: {error}");
            Error::NoMemory
        })?;
        drop(self.pages.replace(Box::new(pages)));
        Ok(())
    }

    /// What one try does of `len` bytes.
    fn bounded(&self, len: u64) -> u64 {
        match self.geometry.max_request {
            0 => len,
            most => len.min(u64::from(most)),
        }
    }
}

impl Device for Memory {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry)?;
        let &Request { op, flags, offset, .. } = request;
        let len = self.bounded(request.len);
        let copied = len.min(TRY_BYTES_MAX);
        let cleared = || {
            pin::pinned(|pin| {
                let pages = self.pages.load(pin);
                let end = pages.clear(offset, offset + len, TRY_LEAVES);
                pages.give_back(TRY_LEAVES + 1);
                end - offset
            })
        };
        let done = match (op, buffer) {
            (Op::Read, Buffer::Read(into)) if into.len() as u64 == request.len => {
                pin::pinned(|pin| self.pages.load(pin).read(offset, &mut into[..copied as usize]));
                copied
            }
            (Op::Write, Buffer::Write(data)) if data.len() as u64 == request.len => {
                pin::pinned(|pin| self.pages.load(pin).write(offset, &data[..copied as usize]))?;
                copied
            }
            (Op::Read | Op::Write, _) => return Err(Error::Misaligned),
            // Not offered: a hint that is not taken.
            (Op::Discard, _) if self.geometry.discard_granularity == 0 => request.len,
            (Op::Discard, _) => cleared(),
            (Op::WriteZeroes, _) if flags.contains(Flags::MAY_FREE) => cleared(),
            (Op::WriteZeroes, _) => {
                let all = len.min(ZEROES_TRY_BYTES_MAX) as usize;
                pin::pinned(|pin| {
                    let pages = self.pages.load(pin);
                    (0..all).step_by(ZEROES_BYTES).try_for_each(|at| {
                        pages.write(offset + at as u64, &ZEROES.0[..ZEROES_BYTES.min(all - at)])
                    })
                })?;
                all as u64
            }
            (Op::Flush, _) => 0,
        };
        Ok(if done == request.len { Tried::Done } else { Tried::Partly(done) })
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let (mut rest, mut at) = (request, 0);
        let outcome = loop {
            let part = match rest.op {
                Op::Read => buffer.get_mut(at..).map_or(Buffer::None, Buffer::Read),
                Op::Write => buffer.get(at..).map_or(Buffer::None, Buffer::Write),
                _ => Buffer::None,
            };
            match self.try_io(&rest, part) {
                Ok(Tried::Partly(bytes)) => {
                    rest = rest.rest(bytes);
                    at += bytes as usize;
                }
                Ok(_) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        done.complete(outcome, buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = range_end(offset, len, self.geometry.size)?;
        let runs = pin::pinned(|pin| runs(self.pages.load(pin), offset, end));
        let mut given = 0;
        for run in runs {
            given += run.len;
            if !row(run) {
                break;
            }
        }
        Ok(given)
    }
}

/// What lies in `[offset, end)`, or in the first part of it.
fn runs(pages: &Pages, offset: u64, end: u64) -> Vec<Extent> {
    let mut runs: Vec<Extent> = Vec::new();
    let mut add = |from: u64, to: u64, kind| match runs.last_mut() {
        Some(last) if last.kind == kind => last.len += to - from,
        _ => runs.push(Extent { offset: from, len: to - from, kind }),
    };
    let mut at = offset;
    for _ in 0..EXTENT_LEAVES {
        let present = pages.next_leaf(at, end);
        if present > at {
            add(at, present, ExtentKind::Hole);
        }
        at = present;
        let leaf_end = Pages::leaf_end(at).min(end);
        while at < leaf_end {
            let next = (at / PAGE + 1).saturating_mul(PAGE).min(leaf_end);
            add(at, next, if pages.has_data(at) { ExtentKind::Data } else { ExtentKind::Hole });
            at = next;
        }
        if at == end {
            break;
        }
    }
    runs
}
