//! The device contract: what every device implements and every export consumes.
//!
//! A request is first *tried* inline ([`Device::try_io`]); what could not be done without waiting
//! is *submitted* ([`Device::submit`]). Hits in RAM never change threads, and no thread is kept per
//! waiting request.

mod blocking;
mod buffer;
mod changes;
mod completion;
#[cfg(not(loom))]
mod counter;
#[cfg(not(loom))]
mod counting;
#[cfg(not(loom))]
mod counts;
#[cfg(not(loom))]
mod disk;
mod error;
#[cfg(not(loom))]
mod failures;
mod geometry;
#[cfg(not(loom))]
mod latency;
#[cfg(not(loom))]
mod limiting;
#[cfg(not(loom))]
mod probe;
mod request;
#[cfg(not(loom))]
mod sampling;
#[cfg(not(loom))]
mod tally;
#[cfg(not(loom))]
mod watched;
pub mod zoned;

pub use blocking::Blocking;
pub use buffer::{IO_ALIGN_BYTES, IoBuf};
pub use changes::{Change, Changes};
pub use completion::Completion;
#[cfg(not(loom))]
pub use counter::{Counter, Each};
#[cfg(not(loom))]
pub use counting::Counting;
#[cfg(not(loom))]
pub use counts::{Counted, OpCounts};
#[cfg(not(loom))]
pub use disk::Disk;
pub use error::{Error, Result};
#[cfg(not(loom))]
pub use failures::{Failed, Failures};
pub use geometry::{Extent, ExtentKind, Geometry};
#[cfg(not(loom))]
pub use latency::Latency;
#[cfg(not(loom))]
pub use limiting::Unlimited;
#[cfg(not(loom))]
pub use request::range_end;
pub use request::{Buffer, Flags, Op, Request};
#[cfg(not(loom))]
pub use tally::{Account, Sum, Tally, Told};
#[cfg(not(loom))]
pub use watched::{REQUEST_SPANS, span_requests};
pub use zoned::{Zone, ZoneGeometry, Zoned};

/// How far a tried request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tried {
    /// The whole request.
    Done,
    /// The first bytes of it, at least one logical block and less than the whole. The device
    /// stopped to keep its work bounded: try the rest again, when other work has had its turn.
    Partly(u64),
    /// Going on would have to wait, nothing of this call was done: submit the request.
    WouldBlock,
}

/// A block device.
///
/// # What an implementor must do
/// * **Check** every request with [`Request::check`] against its geometry of that moment, before
///   any effect.
/// * **`try_io`** runs on the caller's thread, does bounded work, and never waits for a disk, a
///   timer, another request's I/O or a change of the whole device (a snapshot that begins, memory
///   that a removed device gives back): then it is [`Tried::WouldBlock`], and the submitted request
///   waits. A short wait for another thread's hold on the same slot is allowed. It reports progress
///   from the start of the request; a byte is reported done only when it is.
/// * **`submit`** takes ownership of request, buffer and completion, returns soon, and answers each
///   completion exactly once, whatever happens to the disk below or to the device itself
///   ([`Error::Gone`]). One slow request does not hold up others that do not overlap it, and no
///   thread is kept per waiting request.
/// * **A failed write** leaves every logical block with either its old or its new content; blocks
///   outside the range are never touched. Writes to zones are all or nothing.
/// * **Ordering:** a read that begins after a write to the same bytes was answered returns that
///   write's data (or a later one's). Requests that overlap while both are in flight take effect in
///   any order, block by block; requests to one zone start in the order in which one caller issued
///   them.
/// * **Larger blocks** than those of a device below (a snapshot's, where its origin has larger ones
///   than its COW device): a block of the device below is what a failed write leaves old or new,
///   and what requests that overlap take in any order.
/// * **Flush** covers every write that was answered before the flush was issued, by whomever, on
///   whatever connection. [`Flags::FUA`] makes that one write durable before its answer.
/// * **Growing** is allowed at any time; shrinking is not, but a device over a file that shrank
///   underneath answers [`Error::Media`] and lives on.
///
/// # What an implementor may rely on
/// * The buffer's length is the request's, for reads and writes; other operations come without one.
/// * The caller holds no lock of the library and has no table pinned, and does not try again from
///   inside a completion.
/// * After `Partly(n)` the caller continues with [`Request::rest`], and may also give up.
pub trait Device: Send + Sync {
    /// Sizes, alignments, promises. Cheap: exports call it per request.
    fn geometry(&self) -> Geometry;

    /// Does as much of the request as is possible at once, on the caller's thread.
    ///
    /// # Errors
    /// The request failed; nothing more of it will happen. Earlier blocks of it may have been
    /// written.
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried>;

    /// Takes over a request. For reads and writes `buffer.len()` is `request.len`, else it is
    /// empty. The completion may run before `submit` returns.
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion);

    /// Describes what lies in `[offset, offset + len)`, in order and without gaps, until `row`
    /// returns false, the range ends, or the device has done enough for one call; at least one row
    /// is given. Returns how many bytes were described. Neighbouring extents of one kind may come
    /// as several rows; rows begin and end at logical blocks where the range does. May read
    /// metadata of a disk. `row` must not wait, and must not call the device.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] (also where `len` is zero), [`Error::Media`].
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64>;

    /// A hint that the range will be read soon. Never waits.
    fn prefetch(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// The zone operations, where the device has zones.
    fn zoned(&self) -> Option<&dyn Zoned> {
        None
    }

    /// What the device holds itself, where it was made from another.
    fn changes(&self) -> Option<&dyn Changes> {
        None
    }
}
