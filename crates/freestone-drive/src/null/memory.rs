//! Null drive that stores data uncompressed in memory (`memory_backed=1`).
//!
//! Unwritten pages use no memory, and reading them allocates none. A request holds the locks of the
//! pages while it copies them. So a read sees each logical block either before or after a
//! concurrent write.

use super::pages::{PAGE, Pages};
use super::{Config, SetupError};
use freestone_core::client_log;
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult, range_end,
};
use freestone_core::pin::{self, Swap};
use freestone_core::slot::MAX_SLOTS;
use freestone_core::zeroes::{ZEROES, ZEROES_BYTES};

/// Size of the largest device in bytes, 256 TiB. At most 1 TiB of it can contain data, counted in
/// regions of 2 MiB.
pub const MEMORY_BYTES_MAX: u64 = MAX_SLOTS * PAGE;

/// Maximum number of bytes that one `try_io` copies, so that it takes about 200 us, or 1 ms for
/// newly allocated memory.
const TRY_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of bytes that one `try_io` fills with zeroes without `MAY_FREE`. Zeroes without
/// this flag are written like data and use memory.
const ZEROES_TRY_BYTES_MAX: u64 = 256 << 10;
/// Maximum number of 2 MiB regions that one `try_io` discards. With the return of memory to the
/// system, it takes at most 2 ms.
const TRY_LEAVES: u32 = 4;
/// Maximum number of 2 MiB regions with data that one call of `extents` describes.
const EXTENT_LEAVES: u32 = 64;

/// Null drive that stores data uncompressed in memory.
///
/// Discarded pages keep their memory for later writes, up to 16 MiB plus an eighth of the stored
/// data. Memory beyond that returns to the system. A write fails with [`Error::NoMemory`] if the
/// system is out of memory.
pub struct Memory {
    geometry: Geometry,
    pages: Swap<Pages>,
}

impl Memory {
    /// Creates an empty drive, which reads as zeroes.
    ///
    /// # Errors
    /// The configuration is invalid, the memory file could not be created, or memory for the page
    /// table is missing.
    pub fn new(config: Config) -> std::result::Result<Self, SetupError> {
        let geometry = config.geometry(MEMORY_BYTES_MAX)?;
        Ok(Self { geometry, pages: Swap::new(Box::new(Pages::new()?)) })
    }

    /// Returns the memory used in bytes, including page tables and discarded pages retained for
    /// later writes.
    pub fn used_bytes(&self) -> u64 {
        pin::pinned(|pin| self.pages.load(pin).used_bytes())
    }

    /// Returns true if nothing was written since the drive was created or erased.
    pub fn is_untouched(&self) -> bool {
        pin::pinned(|pin| self.pages.load(pin).is_untouched())
    }

    /// Erases the drive. Requests in flight finish on the old content. The old memory is free when
    /// this function returns.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if no memory file or table could be created. The content is then
    /// unchanged.
    pub fn reset(&self) -> Result<()> {
        let pages = Pages::new().map_err(|error| {
            // The returned error cannot carry the system's reason, so the reason is logged.
            client_log!(error, "resetting a null device failed: {error}");
            Error::NoMemory
        })?;
        drop(self.pages.replace(Box::new(pages)));
        Ok(())
    }

    /// Limits `len` to the maximum request size of the device (0: no limit).
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

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry)?;
        let &Request { op, flags, offset, .. } = request;
        let len = self.bounded(request.len);
        let copied = len.min(TRY_BYTES_MAX);
        let cleared = || {
            pin::pinned(|pin| {
                let pages = self.pages.load(pin);
                let end = pages.clear(offset, offset + len, TRY_LEAVES);
                pages.release_retained(TRY_LEAVES + 1);
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
            // The device does not support discards, so the hint is ignored and succeeds.
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
        Ok(if done == request.len { TryResult::Done } else { TryResult::Partly(done) })
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
                Ok(TryResult::Partly(bytes)) => {
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

/// Returns the extents of `[offset, end)`, or of its first part if it contains more than
/// [`EXTENT_LEAVES`] regions.
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
