//! Bad blocks: ranges of sectors on which reads, writes, discards and write zeroes fail.
//!
//! Flushes and zone operations are not checked, as in the kernel. Nor are appends: where they go is
//! known only when they are done. So bad blocks lie below the zones, which write to them.

use std::sync::{Arc, PoisonError};

use thiserror::Error;

use freestone_core::device::{
    Buffer, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, Tried, Zoned,
};
use freestone_core::sync::{AtomicU64, Ordering, RwLock};

/// Ranges a device may have; neighbours are one.
pub const BAD_RANGES_MAX: usize = 512;
/// What the numbers of a range count, whatever the logical block.
const SECTOR_BYTES: u64 = 512;

/// How bad blocks behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BadConfig {
    /// `badblocks_once`: the range that failed a request is good again. (Only that: a request that
    /// touches two fails twice.)
    pub once: bool,
    /// `badblocks_partial_io`: the blocks before the first bad one are transferred before the
    /// request fails.
    pub partial_io: bool,
}

/// Why the ranges were not changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadError {
    /// Not of the form.
    #[error(
        "badblocks takes +FIRST-LAST or -FIRST-LAST in sectors of 512 bytes, such as +8-15, and got \"{0}\""
    )]
    Text(String),
    /// First and last sector are the wrong way round.
    #[error("badblocks: {first}-{last} ends before it begins")]
    Backwards {
        /// The first sector.
        first: u64,
        /// The last sector.
        last: u64,
    },
    /// The range is not on the device.
    #[error("badblocks: sector {last} is beyond the device, which has {sectors} sectors of 512 bytes")]
    Beyond {
        /// The last sector of the range.
        last: u64,
        /// How many there are.
        sectors: u64,
    },
    /// Too many ranges.
    #[error("badblocks: there would be more than {BAD_RANGES_MAX} separate ranges")]
    TooMany,
}

/// Sectors `first..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u64,
    end: u64,
}

/// A device with bad blocks; none at first.
pub struct BadBlocks {
    inner: Arc<dyn Device>,
    config: BadConfig,
    /// How many ranges there are: requests look at this first.
    count: AtomicU64,
    /// In order, with something good between each two. Lock order: innermost; held for a look or a
    /// change.
    ranges: RwLock<Vec<Range>>,
}

/// A request that touches a bad block.
struct Hit {
    /// Bytes before it that are transferred.
    before: u64,
    range: Range,
}

impl BadBlocks {
    /// A device without bad blocks so far.
    pub fn new(inner: Arc<dyn Device>, config: BadConfig) -> Self {
        Self { inner, config, count: AtomicU64::new(0), ranges: RwLock::default() }
    }

    /// The device below, whose blocks are all good: what a zone operation does to the data looks at
    /// no bad block, as in the kernel.
    pub(crate) fn below(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    /// Adds (`+8-15`) or takes away (`-8-15`) a range of sectors of 512 bytes, both ends included.
    /// It may overlap what is there already, or is not there.
    ///
    /// # Errors
    /// The text, a range that is not on the device, too many ranges; nothing is changed.
    pub fn change(&self, text: &str) -> std::result::Result<(), BadError> {
        self.change_all(&[text])
    }

    /// Makes several changes, one after the other: all of them, or none.
    ///
    /// # Errors
    /// As [`change`](Self::change), of the first that cannot be.
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

    /// The first and last sector, of 512 bytes, of every range, in order.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        ranges.iter().map(|range| (range.first, range.end - 1)).collect()
    }

    /// How many bytes of a read, write or discard would be transferred before it fails: whole
    /// blocks before the first bad one where `partial_io` is set, else 0. `None` where no bad block
    /// is touched.
    #[inline]
    pub fn verdict(&self, offset: u64, len: u64) -> Option<u64> {
        self.hit(offset, len).map(|hit| hit.before)
    }

    #[inline]
    fn hit(&self, offset: u64, len: u64) -> Option<Hit> {
        // Relaxed: a range that is added while a request runs may or may not meet it; who waits for
        // the addition to return, and then issues a request, has that order from elsewhere.
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

    /// The request fails because of this range.
    fn fail(&self, range: Range) -> Error {
        if self.config.once {
            let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
            // Where it was changed meanwhile it is no longer the one that failed.
            ranges.retain(|other| *other != range);
            self.publish(&ranges);
        }
        Error::Media
    }

    fn publish(&self, ranges: &[Range]) {
        // Relaxed: see `hit`; the ranges themselves are read under their lock.
        self.count.store(ranges.len() as u64, Ordering::Relaxed);
    }

    /// What a valid request hits.
    #[inline]
    fn checked(&self, request: &Request) -> Option<Hit> {
        if request.op == Op::Flush {
            return None;
        }
        let hit = self.hit(request.offset, request.len)?;
        // A request that is refused anyway fails for its own reason.
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

/// The ranges with another one, which swallows what it touches.
fn added(ranges: &[Range], new: Range) -> Vec<Range> {
    let (touched, mut kept): (Vec<Range>, Vec<Range>) =
        ranges.iter().partition(|range| range.first <= new.end && new.first <= range.end);
    let first = touched.first().map_or(new.first, |range| range.first.min(new.first));
    let end = touched.last().map_or(new.end, |range| range.end.max(new.end));
    kept.insert(kept.partition_point(|range| range.end < first), Range { first, end });
    kept
}

/// The ranges without what lies in `gone`.
fn removed(ranges: &[Range], gone: Range) -> Vec<Range> {
    let parts = ranges.iter().flat_map(|&Range { first, end }| {
        [Range { first, end: end.min(gone.first) }, Range { first: first.max(gone.end), end }]
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
        match self.checked(request) {
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
                    // The caller comes again with the rest.
                    other => Ok(other),
                }
            }
        }
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        match self.checked(&request) {
            None => self.inner.submit(request, buffer, done),
            Some(Hit { before: 0, range }) => done.complete(Err(self.fail(range)), buffer),
            Some(Hit { before, range }) => {
                // It fails in any case: the range is used up now, while this is at hand.
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
