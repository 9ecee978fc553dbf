//! Sources of pages that are not loaded into memory yet (such as a saved file), and the device
//! through which requests read them.

use std::sync::{Arc, LazyLock};

use crate::codec::Page;
use crate::ram::geometry::{LOGICAL_BLOCK_BYTES, piece};
use crate::ram::memory::config::SetupError;
use crate::ram::memory::pages::Pages;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{
    self, Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result,
    TryResult, range_end,
};
use freestone_core::work_queue::WorkQueue;

const READ_THREADS: usize = 2;

static READS: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::with_threads("keep-read", READ_THREADS));

/// A page to be stored in a device, in the form in which a source provides it.
#[derive(Clone, Copy)]
pub enum Incoming<'a> {
    /// An empty slot, which reads from the parent.
    Parent,
    /// A page that repeats this 32-bit pattern.
    Same(u32),
    /// A page that repeats this 64-bit pattern.
    Pattern([u8; 8]),
    /// An object that the algorithm with this priority in the family (devices that share a memory
    /// pool) can decompress.
    Compressed {
        /// Priority of the algorithm, 0 to 3.
        priority: u8,
        /// The object as stored.
        object: &'a [u8],
    },
    /// A page to store uncompressed.
    Huge(&'a Page),
    /// Uncompressed content, to be compressed and stored like a written page.
    Page(&'a Page),
}

/// A source of pages that are not loaded yet. The pages of a source do not change.
pub trait Source: Send + Sync {
    /// Returns the length of the run from `page` on, up to `end`: the source has all pages of a run
    /// (true) or none (false). Must not wait: called with slots locked.
    fn run(&self, page: u64, end: u64) -> (u64, bool);

    /// Calls `take` with a page of the source. May wait for a disk.
    fn fetch(&self, page: u64, take: &mut dyn FnMut(Incoming<'_>) -> Result<()>) -> Result<()>;

    /// Returns true if a page that could not be read is lost for good, so that retries are useless.
    fn is_lost(&self, page: u64) -> bool;
}

/// Returns the first page in `[slot, end)` that the source has; `None` if it has none.
pub(in crate::ram) fn next_in(source: &dyn Source, slot: u64, end: u64) -> Option<u64> {
    let mut slot = slot;
    while slot < end {
        match source.run(slot, end) {
            (_, true) => return Some(slot),
            (run, false) => slot += run.max(1),
        }
    }
    None
}

/// Starts the threads that read from sources for requests. All families share these threads.
pub(in crate::ram) fn start_reads() -> std::result::Result<(), SetupError> {
    READS.start().map_err(SetupError::Thread)
}

/// Returns the source as a device of `size` bytes.
pub(super) fn device_of(source: Arc<dyn Source>, pages: &Arc<Pages>, size: u64) -> Arc<dyn Device> {
    Arc::new(Handle(Arc::new(SourceDevice { source, pages: Arc::clone(pages), size })))
}

/// The pages of a source as a read-only device. Requests must read only pages that the source has.
struct SourceDevice {
    source: Arc<dyn Source>,
    pages: Arc<Pages>,
    size: u64,
}

/// Handle to a [`SourceDevice`]; requests in flight hold references to the inner device.
struct Handle(Arc<SourceDevice>);

impl SourceDevice {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let (slot, from, n) = piece(offset + done as u64, (into.len() - done) as u64);
            let mut page = [0; PAGE_BYTES];
            self.source.fetch(slot, &mut |incoming| self.pages.content(incoming, &mut page))?;
            into[done..][..n].copy_from_slice(&page[from..from + n]);
            done += n;
        }
        Ok(())
    }
}

impl Device for Handle {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.0.size,
            logical_block: LOGICAL_BLOCK_BYTES,
            physical_block: PAGE_BYTES as u32,
            io_min: PAGE_BYTES as u32,
            io_opt: PAGE_BYTES as u32,
            discard_granularity: PAGE_BYTES as u32,
            fast_zeroes: false,
            volatile_cache: false,
            padding: 0,
            volatile_media: false,
            rotational: false,
            max_request: 0,
            read_only: true,
            ignores_data: false,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, _: Buffer<'_>) -> device::Result<TryResult> {
        request.check_range(self.0.size, LOGICAL_BLOCK_BYTES)?;
        match request.op {
            Op::Read => Ok(TryResult::WouldBlock),
            Op::Flush => Ok(TryResult::Done),
            _ => Err(Error::ReadOnly),
        }
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        if request.op != Op::Read || buffer.len() as u64 != request.len {
            return done.complete(Err(Error::ReadOnly), buffer);
        }
        let device = Arc::clone(&self.0);
        READS.push(move || {
            let outcome = device.read(request.offset, &mut buffer);
            drop(device);
            done.complete(outcome, buffer);
        });
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        range_end(offset, len, self.0.size)?;
        row(Extent { offset, len, kind: ExtentKind::Data });
        Ok(len)
    }
}

impl Pages {
    /// Decompresses or expands an incoming page into `page`.
    pub(in crate::ram) fn content(&self, incoming: Incoming<'_>, page: &mut Page) -> Result<()> {
        match incoming {
            Incoming::Parent => page.fill(0),
            Incoming::Same(pattern) => page.as_chunks_mut().0.fill(pattern.to_ne_bytes()),
            Incoming::Pattern(pattern) => page.as_chunks_mut().0.fill(pattern),
            Incoming::Compressed { priority, object } => {
                return self.codecs.decompress(priority.into(), object, page);
            }
            Incoming::Huge(content) | Incoming::Page(content) => page.copy_from_slice(content),
        }
        Ok(())
    }
}
