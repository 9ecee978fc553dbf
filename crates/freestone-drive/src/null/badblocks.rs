//! Layer with bad blocks: sector ranges in which reads, writes, discards and write zeroes fail.
//!
//! Flushes and zone operations are not checked, as in the kernel. Appends are not checked either,
//! since their location is unknown until they complete. So this layer lies under the zones layer,
//! which turns appends into writes.

use std::sync::Arc;

use thiserror::Error;

use freestone_core::device::{
    Buffer, Completion, Device, Error, IoBuf, Op, Request, Result, TryResult, forward_device,
};
use freestone_core::sync::{AtomicU64, Ordering, RwLock};

/// Maximum number of bad ranges of a device. Adjacent ranges are merged and count as one.
pub const BAD_RANGES_MAX: usize = 512;
/// Size in bytes of a sector, the unit of the ranges, whatever the logical block is.
const SECTOR_BYTES: u64 = 512;

/// Behavior of requests that touch bad blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BadBlocksConfig {
    /// `badblocks_once`: a bad range becomes good after one failed request. A request that touches
    /// two ranges fails, and its retry fails again.
    pub once: bool,
    /// `badblocks_partial_io`: the blocks before the first bad block are transferred before the
    /// request fails.
    pub partial_io: bool,
}

/// Errors from changing the bad ranges.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadBlocksError {
    /// The text is neither `+FIRST-LAST` nor `-FIRST-LAST`.
    #[error(
        "badblocks expects +FIRST-LAST or -FIRST-LAST in sectors of 512 bytes, such as +8-15, not \"{0}\""
    )]
    Text(String),
    /// The first sector is after the last one.
    #[error("badblocks: first sector {first} is after last sector {last}")]
    ReversedRange {
        /// First sector of the range.
        first: u64,
        /// Last sector of the range.
        last: u64,
    },
    /// The range ends beyond the device.
    #[error("badblocks: sector {last} is beyond the device, which has {sectors} sectors of 512 bytes")]
    OutOfRange {
        /// Last sector of the range.
        last: u64,
        /// Number of 512-byte sectors of the device.
        sectors: u64,
    },
    /// The change would result in more than [`BAD_RANGES_MAX`] ranges.
    #[error("badblocks: at most {BAD_RANGES_MAX} separate ranges are supported")]
    TooMany,
}

/// Range of bad sectors, `first..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u64,
    end: u64,
}

/// Device whose bad blocks fail requests. Initially no block is bad.
pub struct BadBlocks {
    inner: Arc<dyn Device>,
    config: BadBlocksConfig,
    /// Number of bad ranges. If it is 0, requests do not take the lock.
    count: AtomicU64,
    /// Sorted bad ranges, separated by good sectors. Lock order: innermost, held for a search or a
    /// change.
    ranges: RwLock<Vec<Range>>,
}

/// First bad range that a request touches.
struct Hit {
    /// Number of bytes to transfer before the request fails.
    before: u64,
    range: Range,
}

impl BadBlocks {
    /// Wraps `inner`, initially without bad blocks.
    pub fn new(inner: Arc<dyn Device>, config: BadBlocksConfig) -> Self {
        Self { inner, config, count: AtomicU64::new(0), ranges: RwLock::default() }
    }

    /// Returns the device under this layer. Zone operations call that device directly, since they
    /// ignore bad blocks, as in the kernel.
    pub(crate) fn below(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    /// Adds (`+8-15`) or removes (`-8-15`) a range of bad 512-byte sectors, both ends included. The
    /// range may overlap existing bad ranges.
    ///
    /// # Errors
    /// The text is invalid, the range is beyond the device, or there would be too many ranges.
    /// Nothing is changed.
    pub fn change(&self, text: &str) -> std::result::Result<(), BadBlocksError> {
        self.change_all(&[text])
    }

    /// Applies several changes of the bad ranges in order, or none of them if one is invalid.
    ///
    /// # Errors
    /// The same errors as [`change`](Self::change), for the first invalid text.
    pub fn change_all(&self, texts: &[impl AsRef<str>]) -> std::result::Result<(), BadBlocksError> {
        let mut ranges = self.ranges.write();
        *ranges = self.changed(&ranges, texts)?;
        self.publish(&ranges);
        Ok(())
    }

    /// Checks whether [`change_all`](Self::change_all) would accept the changes, without applying
    /// any.
    pub fn check_all(&self, texts: &[impl AsRef<str>]) -> std::result::Result<(), BadBlocksError> {
        let ranges = self.ranges.read();
        self.changed(&ranges, texts).map(drop)
    }

    /// Returns `ranges` with the changes of `texts` applied.
    fn changed(
        &self,
        ranges: &[Range],
        texts: &[impl AsRef<str>],
    ) -> std::result::Result<Vec<Range>, BadBlocksError> {
        let sectors = self.inner.geometry().size / SECTOR_BYTES;
        let mut changed = ranges.to_vec();
        for text in texts {
            let (bad, range) = parse(text.as_ref())?;
            if range.end > sectors {
                return Err(BadBlocksError::OutOfRange { last: range.end - 1, sectors });
            }
            changed = if bad { added(&changed, range) } else { removed(&changed, range) };
            if changed.len() > BAD_RANGES_MAX {
                return Err(BadBlocksError::TooMany);
            }
        }
        Ok(changed)
    }

    /// Returns the first and last 512-byte sector of every bad range, in ascending order.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let ranges = self.ranges.read();
        ranges.iter().map(|range| (range.first, range.end - 1)).collect()
    }

    /// Returns the number of bytes that a request would transfer before it fails on a bad block, or
    /// `None` if it touches no bad block. The number is 0 without `partial_io`.
    #[inline]
    pub fn bytes_before_bad(&self, offset: u64, len: u64) -> Option<u64> {
        self.hit(offset, len).map(|hit| hit.before)
    }

    #[inline]
    fn hit(&self, offset: u64, len: u64) -> Option<Hit> {
        // Relaxed: a concurrent request may miss a new range. Requests issued after the change
        // returned are ordered after it by the caller's own synchronization.
        if self.count.load(Ordering::Relaxed) == 0 { None } else { self.find(offset, len) }
    }

    #[cold]
    fn find(&self, offset: u64, len: u64) -> Option<Hit> {
        let ranges = self.ranges.read();
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

    /// Returns the error of a request that touched the bad `range`. With `once`, removes the range.
    fn fail(&self, range: Range) -> Error {
        if self.config.once {
            let mut ranges = self.ranges.write();
            // If the range was changed meanwhile, it no longer matches and is not removed.
            ranges.retain(|other| *other != range);
            self.publish(&ranges);
        }
        Error::Media
    }

    fn publish(&self, ranges: &[Range]) {
        // Relaxed: a concurrent request may still use the old count. The lock protects the ranges
        // themselves.
        self.count.store(ranges.len() as u64, Ordering::Relaxed);
    }

    /// Returns the first bad range that a valid request touches. Returns `None` for a flush or an
    /// invalid request.
    #[inline]
    fn find_hit(&self, request: &Request) -> Option<Hit> {
        if request.op == Op::Flush {
            return None;
        }
        let hit = self.hit(request.offset, request.len)?;
        // The device under this layer rejects an invalid request with a more specific error.
        request.check(&self.inner.geometry()).is_ok().then_some(hit)
    }
}

fn parse(text: &str) -> std::result::Result<(bool, Range), BadBlocksError> {
    let wrong = || BadBlocksError::Text(text.chars().take(64).collect());
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
        return Err(BadBlocksError::ReversedRange { first, last });
    }
    let end = last.checked_add(1).ok_or_else(wrong)?;
    Ok((bad, Range { first, end }))
}

/// Returns `ranges` with `new` added and merged with the ranges that it touches.
fn added(ranges: &[Range], new: Range) -> Vec<Range> {
    let (touched, mut others): (Vec<Range>, Vec<Range>) =
        ranges.iter().partition(|range| range.first <= new.end && new.first <= range.end);
    let first = touched.first().map_or(new.first, |range| range.first.min(new.first));
    let end = touched.last().map_or(new.end, |range| range.end.max(new.end));
    others.insert(others.partition_point(|range| range.end < first), Range { first, end });
    others
}

/// Returns `ranges` without the sectors of `cut`.
fn removed(ranges: &[Range], cut: Range) -> Vec<Range> {
    let parts = ranges.iter().flat_map(|&Range { first, end }| {
        [Range { first, end: end.min(cut.first) }, Range { first: first.max(cut.end), end }]
    });
    parts.filter(|range| range.first < range.end).collect()
}

impl Device for BadBlocks {
    forward_device!(|blocks| blocks.inner => geometry, extents;
        prefetch: below, zoned: below, changes: below);

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
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
                    TryResult::Done => Err(self.fail(range)),
                    // The request is not finished. The caller retries the rest, which then fails.
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
                // The request fails in any case, so a `once` range is removed already now.
                let error = self.fail(range);
                let full = buffer.len();
                buffer.set_len(before as usize);
                let done = Completion::new(move |outcome, mut buffer| {
                    buffer.set_len(full);
                    done.complete(outcome.and(Err(error)), buffer);
                });
                self.inner.submit(Request { len: before, ..request }, buffer, done);
            }
        }
    }
}
