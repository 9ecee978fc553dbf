//! The device interface, which every device implements and every export uses.
//!
//! A caller first *tries* a request inline ([`Device::try_io`]), and *submits* the part that would have to
//! wait ([`Device::submit`]). So RAM hits never switch threads, and waiting requests occupy no thread.
//!
//! Buffers are contiguous: codecs need whole pages, exports receive into one buffer, and a submitted request
//! owns one allocation, which is aligned for `O_DIRECT`. Devices work on whole logical blocks;
//! [`bytes`](crate::bytes) converts other ranges.

mod blocking;
mod buffer;
mod changes;
mod completion;
#[cfg(not(loom))]
mod count;
#[cfg(not(loom))]
mod disk;
mod drop_signal;
mod error;
#[cfg(not(loom))]
mod failures;
mod geometry;
mod layer;
mod request;
pub mod zoned;

pub use blocking::Blocking;
pub use buffer::{IO_ALIGN_BYTES, IoBuf};
pub use changes::{Change, Changes};
pub use completion::Completion;
#[cfg(not(loom))]
pub use count::{
    Counter, Counting, IoStats, Latency, LimitSuspension, OpCounts, OpStats, PerCounter, REQUEST_SPANS,
    StatSource, Sum, Tally, span_requests,
};
#[cfg(not(loom))]
pub use disk::Disk;
pub use drop_signal::{DropObserver, DropSignal};
pub use error::{Error, Result};
#[cfg(not(loom))]
pub use failures::{FailureKind, Failures};
pub use geometry::{Extent, ExtentKind, Geometry};
pub use layer::{forward_device, forward_zoned};
#[cfg(not(loom))]
pub use request::range_end;
pub use request::{Buffer, Flags, Op, Request};
pub use zoned::{Zone, ZoneGeometry, Zoned};

/// Progress of a tried request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TryResult {
    /// The whole request is complete.
    Done,
    /// A part is complete: this number of bytes from the start, at least one logical block and less than the
    /// whole request. The device stopped to bound its work; the caller tries the rest after other work.
    Partly(u64),
    /// Nothing was done, because the request would have to wait. The caller must submit the request.
    WouldBlock,
}

/// A block device.
///
/// # Requirements for implementations
/// * **Check** every request with [`Request::check`] against the current geometry before any effect.
/// * **`try_io`** runs on the caller's thread, does bounded work, and never waits for a disk, a timer, I/O of
///   another request, or a change of the whole device (such as a snapshot being taken, or memory that a
///   removed device frees). Instead it returns [`TryResult::WouldBlock`], and the submitted request waits. Short
///   waits for another thread's slot lock are allowed. Progress is reported from the start of the request,
///   and only for bytes that are complete.
/// * **`submit`** takes ownership of request, buffer and completion, and returns soon. Each completion is
///   called exactly once, even if the disk under the device fails or the device is removed ([`Error::Gone`]).
///   A slow request does not delay others that it does not overlap, and waiting requests occupy no thread.
/// * **A failed write** leaves every logical block with its old or its new content, and never modifies blocks
///   outside the range. Writes to zones are all or nothing.
/// * **Ordering:** a read that begins after the completion of a write to the same bytes returns the data of
///   that or a later write. Overlapping requests in flight take effect in any order, block by block. Requests
///   to one zone start in the order in which a caller issued them.
/// * **Larger blocks** than those of a lower device (such as a snapshot whose origin has larger blocks than
///   its COW device): atomicity after a failed write, and the order of overlapping requests, then apply to
///   blocks of the lower device.
/// * **Flush** covers every write completed before the flush was issued, by any client on any connection.
///   [`Flags::FUA`] makes one write durable before its completion.
/// * **Growing** is allowed at any time, shrinking is not. If the file of a device shrinks, the device
///   returns [`Error::Media`] and continues to work.
///
/// # Guarantees for implementations
/// * For reads and writes the length of the buffer is the length of the request. Other operations have no
///   buffer.
/// * The caller holds no lock of Freestone, is not pinned, and does not call `try_io` from a completion.
/// * After `Partly(n)` the caller continues with [`Request::rest`], or gives up.
pub trait Device: Send + Sync {
    /// Returns sizes, alignments and properties. Must be cheap, as exports call this for each request.
    fn geometry(&self) -> Geometry;

    /// Executes as much of the request as possible at once, on the caller's thread.
    ///
    /// # Errors
    /// The request failed and will have no further effect. Earlier blocks may have been written.
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult>;

    /// Starts a request. `buffer.len()` is `request.len` for reads and writes; otherwise the buffer is empty.
    /// The completion may run before `submit` returns.
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion);

    /// Reports the extents of `[offset, offset + len)` in order and without gaps, at least one. Stops if
    /// `row` returns false, at the end of the range, or when the device has done enough work for one call.
    /// Returns the number of bytes described.
    ///
    /// Neighbouring extents may be of the same kind. Extents are aligned to logical blocks if the range is.
    /// May read metadata from a disk. `row` must not wait or call the device.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] (also if `len` is zero), [`Error::Media`].
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64>;

    /// Hints that the range will be read soon. Never waits.
    fn prefetch(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Returns the zone operations, or `None` for a device without zones.
    fn zoned(&self) -> Option<&dyn Zoned> {
        None
    }

    /// Returns the changes of a fork or snapshot, or `None` for other devices.
    fn changes(&self) -> Option<&dyn Changes> {
        None
    }
}
