//! Bad blocks: sector ranges in which reads, writes, discards and write zeroes fail.
//!
//! Flushes and zone operations are not checked, as in the kernel. Appends are not checked either,
//! since their location is unknown until they complete. So bad blocks lie below the zones layer,
//! which writes to them.

use std::sync::{Arc, PoisonError};

use thiserror::Error;

use freestone_core::device::{
    Buffer, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, Tried, Zoned,
};
use freestone_core::sync::{AtomicU64, Ordering, RwLock};

/// Maximum number of ranges; adjacent ranges are merged.
pub const BAD_RANGES_MAX: usize = 512;
/// Unit of range numbers, for any logical block.
const SECTOR_BYTES: u64 = 512;

/// Behavior of bad blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BadConfig {
    /// `badblocks_once`: a range becomes good after it failed one request. A request that touches
    /// two ranges fails twice.
    pub once: bool,
    /// `badblocks_partial_io`: transfers the blocks before the first bad one, then fails the
    /// request.
    pub partial_io: bool,
}

/// Errors from changing the ranges.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadError {
    /// The text does not match the syntax.
    #[error(
        "badblocks expects +FIRST-LAST or -FIRST-LAST in sectors of 512 bytes, such as +8-15, not \"{0}\""
    )]
    Text(String),
    /// The first sector is after the last one.
    #[error("badblocks: first sector {first} is after last sector {last}")]
    Backwards {
        /// First sector.
        first: u64,
        /// Last sector.
        last: u64,
    },
    /// The range exceeds the device.
    #[error("badblocks: sector {last} is beyond the device, which has {sectors} sectors of 512 bytes")]
    Beyond {
        /// Last sector of the range.
        last: u64,
        /// Number of sectors of the device.
        sectors: u64,
    },
    /// Too many ranges.
    #[error("badblocks: at most {BAD_RANGES_MAX} separate ranges are supported")]
    TooMany,
}

/// Sectors `first..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u64,
    end: u64,
}

/// Device with bad blocks, initially none.
pub struct BadBlocks {
    inner: Arc<dyn Device>,
    config: BadConfig,
    /// Number of ranges. Requests check this before they take the lock.
    count: AtomicU64,
    /// Sorted ranges, separated by good sectors. Lock order: innermost, held for a search or a
    /// change.
    ranges: RwLock<Vec<Range>>,
}

/// Bad range touched by a request.
struct Hit {
    /// Bytes to transfer before the failure.
    before: u64,
    range: Range,
}

impl BadBlocks {
    /// Wraps `inner` without bad blocks.
    pub fn new(inner: Arc<dyn Device>, config: BadConfig) -> Self {
        Self { inner, config, count: AtomicU64::new(0), ranges: RwLock::default() }
    }

    /// Returns the device below. Zone operations use it: they ignore bad blocks, as in the kernel.
    pub(crate) fn below(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    /// Adds (`+8-15`) or removes (`-8-15`) a range of 512-byte sectors, both ends included. The
    /// range may overlap existing ones.
    ///
    /// # Errors
    /// Invalid text, a range beyond the device, or too many ranges. Nothing is changed.
    pub fn change(&self, text: &str) -> std::result::Result<(), BadError> {
        self.change_all(&[text])
    }

    /// Applies several changes in order, or none of them.
    ///
    /// # Errors
    /// Those of [`change`](Self::change) for the first invalid text.
    pub fn change_all(&self, texts: &[impl AsRef<str>]) -> std::result::Result<(), BadError> {
        let sectors = self.inner.geometry().size / SECTOR_BYTES;
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let mut changed = ranges.clone();
        for text in texts {
            let (bad, range) = parse(text.as_ref())?;
            if range.end > sectors {
                return Err(BadError::Beyond { last: range.end - 1, sectors });
            }
            changed = if bad { added(&changed, range) } else { removed(&changed, range) };
            if changed.len() > BAD_RANGES_MAX {
                return Err(BadError::TooMany);
            }
        }
        *ranges = changed;
        self.publish(&ranges);
        Ok(())
    }

    /// Returns the first and last 512-byte sector of every range, in order.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        ranges.iter().map(|range| (range.first, range.end - 1)).collect()
    }

    /// Returns how many bytes of a read, write or discard would be transferred before it fails, or
    /// `None` without a bad block. With `partial_io` these are the blocks before the first bad one,
    /// else 0.
    #[inline]
    pub fn verdict(&self, offset: u64, len: u64) -> Option<u64> {
        self.hit(offset, len).map(|hit| hit.before)
    }

    #[inline]
    fn hit(&self, offset: u64, len: u64) -> Option<Hit> {
        // Relaxed: a concurrent request may miss a new range. A caller that issues a request after
        // the change returned has that order from elsewhere.
        if self.count.load(Ordering::Relaxed) == 0 { None } else { self.find(offset, len) }
    }

    #[cold]
    fn find(&self, offset: u64, len: u64) -> Option<Hit> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let (first, end) = (offset / SECTOR_BYTES, offset.saturating_add(len).div_ceil(SECTOR_BYTES));
        let range = *ranges.get(ranges.partition_point(|range| range.end <= first))?;
        if range.first >= end {
            return None;
        }
        let block = u64::from(self.inner.geometry().logical_block);
        let good_end = range.first * SECTOR_BYTES / block * block;
        let before = if self.config.partial_io { good_end.saturating_sub(offset) } else { 0 };
        Some(Hit { before, range })
    }

    /// Returns the error for a request that failed in `range`.
    fn fail(&self, range: Range) -> Error {
        if self.config.once {
            let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
            // A range that was changed meanwhile is not removed.
            ranges.retain(|other| *other != range);
            self.publish(&ranges);
        }
        Error::Media
    }

    fn publish(&self, ranges: &[Range]) {
        // Relaxed: see `hit`. The lock protects the ranges themselves.
        self.count.store(ranges.len() as u64, Ordering::Relaxed);
    }

    /// Returns the bad range of a valid request.
    #[inline]
    fn find_hit(&self, request: &Request) -> Option<Hit> {
        if request.op == Op::Flush {
            return None;
        }
        let hit = self.hit(request.offset, request.len)?;
        // An invalid request fails with its own error instead.
        request.check(&self.inner.geometry()).is_ok().then_some(hit)
    }
}

fn parse(text: &str) -> std::result::Result<(bool, Range), BadError> {
    let wrong = || BadError::Text(text.chars().take(64).collect());
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u64>().ok()).flatten()
    };
    let (bad, numbers) = match text.trim().split_at_checked(1) {
        Some(("+", numbers)) => (true, numbers),
        Some(("-", numbers)) => (false, numbers),
        _ => return Err(wrong()),
    };
    let (first, last) = numbers.split_once('-').ok_or_else(wrong)?;
    let (Some(first), Some(last)) = (number(first), number(last)) else { return Err(wrong()) };
    if first > last {
        return Err(BadError::Backwards { first, last });
    }
    let end = last.checked_add(1).ok_or_else(wrong)?;
    Ok((bad, Range { first, end }))
}

/// Returns the ranges with `new` added and merged with its neighbours.
fn added(ranges: &[Range], new: Range) -> Vec<Range> {
    let (touched, mut others): (Vec<Range>, Vec<Range>) =
        ranges.iter().partition(|range| range.first <= new.end && new.first <= range.end);
    let first = touched.first().map_or(new.first, |range| range.first.min(new.first));
    let end = touched.last().map_or(new.end, |range| range.end.max(new.end));
    others.insert(others.partition_point(|range| range.end < first), Range { first, end });
    others
}

/// Returns the ranges without the sectors in `cut`.
fn removed(ranges: &[Range], cut: Range) -> Vec<Range> {
    let parts = ranges.iter().flat_map(|&Range { first, end }| {
        [Range { first, end: end.min(cut.first) }, Range { first: first.max(cut.end), end }]
    });
    parts.filter(|range| range.first < range.end).collect()
}

impl Device for BadBlocks {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        match self.find_hit(request) {
            None => self.inner.try_io(request, buffer),
            Some(Hit { before: 0, range }) => Err(self.fail(range)),
            Some(Hit { before, range }) => {
                let part = Request { len: before, ..*request };
                let buffer = match buffer {
                    Buffer::Read(into) => into.get_mut(..before as usize).map_or(Buffer::None, Buffer::Read),
                    Buffer::Write(data) => data.get(..before as usize).map_or(Buffer::None, Buffer::Write),
                    Buffer::None => Buffer::None,
                };
                match self.inner.try_io(&part, buffer)? {
                    Tried::Done => Err(self.fail(range)),
                    // The caller retries the rest.
                    other => Ok(other),
                }
            }
        }
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        match self.find_hit(&request) {
            None => self.inner.submit(request, buffer, done),
            Some(Hit { before: 0, range }) => done.complete(Err(self.fail(range)), buffer),
            Some(Hit { before, range }) => {
                // The request fails in any case, so a one-time range is used up now.
                let error = self.fail(range);
                let full = buffer.len();
                buffer.show(before as usize);
                let done = Completion::new(move |outcome, mut buffer| {
                    buffer.show(full);
                    done.complete(outcome.and(Err(error)), buffer);
                });
                self.inner.submit(Request { len: before, ..request }, buffer, done);
            }
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.inner.prefetch(offset, len);
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.inner.zoned()
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.inner.changes()
    }
}
