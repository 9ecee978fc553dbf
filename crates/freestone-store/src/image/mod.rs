//! An image in object storage as a read-only device. Data is fetched on first read into a cache on a local
//! disk, and verified before use.
//!
//! Cached data that is in the kernel's page cache is read inline. Other requests go to a reader thread, which
//! may wait for the local disk. Fetch threads read missing data from the store, once for all waiting
//! requests, and continue one request. No thread waits for another thread, and reader threads never wait for
//! the network. So cached data is available even if the store hangs.
//!
//! If data cannot be fetched in time or does not match its hash, the read fails with [`Error::Media`]. The
//! reason is logged and kept in [`Image::stat`].
//!
//! **Lock order**, outer first; no lock is held while waiting for the network. The slot of a segment, then
//! the slot of an open file, both read-locked while pages are copied. The list of open files: its holder only
//! try-locks slots for writing. The fetch queue, the queue of the readers and the buffer of a request are
//! innermost, held for a few instructions or one copy.

mod content;
mod description;
mod fetch;
mod fetches;
mod open_files;
mod queue;
mod reader;
mod segment;
mod stat;
mod streams;

use crate::rt::sync::Arc;
use crate::rt::time::Duration;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
};

use crate::cache::Cache;
use crate::format::manifest::Manifest;
use crate::format::map::PageLocation;
use crate::format::name::{Kind, Name};
use crate::format::{CHUNK_BYTES, PAGE, SEGMENT_BYTES, SEGMENT_PAGES};
use crate::objects::CallLimits;
use crate::parallel;
use crate::store::{self, Store};
use content::{Content, Lookup};
use description::Description;
use reader::Reader;
pub use stat::ImageStat;

/// Maximum number of bytes of an inline read.
const INLINE_MAX_BYTES: u64 = 256 << 10;
/// Logical block size in bytes, the unit of requests.
const SECTOR_BYTES: u32 = 512;
/// Default timeout of one fetch.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of concurrent fetches of a pull, which copies the whole image to the cache.
const PULL_FETCHES_MAX: usize = 32;

/// Read-only device with the content of an image.
pub struct Image {
    reader: Arc<Reader>,
}

/// Settings of an open image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Timeout of one fetch. If many requests wait, a request takes at most about twice as long.
    pub timeout: Duration,
    /// Whether to prefetch the chunks in the trace of the image, if the image has one.
    pub prefetch: bool,
}

impl Image {
    /// Opens the image with the name `name`. The manifest may be read from the cache. Without a cache, each
    /// read fetches the data that it needs.
    ///
    /// # Errors
    /// Errors of requests to the object store; the image is damaged.
    pub fn open(
        store: Arc<Store>,
        cache: Option<Arc<Cache>>,
        name: Name,
        config: Config,
        limits: CallLimits<'_>,
    ) -> store::Result<Self> {
        let description =
            Description { store: &store, cache: cache.as_deref(), kind: Kind::Manifest, name: &name, limits };
        let parse = |bytes: &[u8]| Manifest::parse(bytes).ok();
        let manifest = description.read(
            parse,
            || store.manifest(&name, limits),
            |cache, manifest| {
                // If the manifest cannot be cached, the next open fetches it again.
                let _ = cache.insert_meta(&name, &manifest.bytes(), limits);
            },
        )?;
        let reader = Reader::new(Content::new(store, cache, name, manifest, config));
        if config.prefetch {
            reader.follow_trace();
        }
        Ok(Self { reader })
    }

    /// Returns the name of the image.
    pub fn name(&self) -> Name {
        self.reader.content.name
    }

    /// Returns the manifest of the image.
    pub fn manifest(&self) -> &Manifest {
        &self.reader.content.manifest
    }

    /// Returns the image store that contains the image.
    pub fn store(&self) -> &Arc<Store> {
        &self.reader.content.store
    }

    /// Returns the local cache of the image, or `None` if the image was opened without one.
    pub fn cache(&self) -> Option<&Arc<Cache>> {
        self.reader.content.cache.as_ref()
    }

    /// Returns a snapshot of the counters of reads and fetches.
    pub fn stat(&self) -> ImageStat {
        self.reader.content.stats.stat()
    }

    /// Writes a trace of the image to the object store: the chunks used since this image was opened, in the
    /// order of first use. Later opens of the image can prefetch them. Returns the number of chunks.
    ///
    /// # Errors
    /// [`store::Error::NothingRead`] if nothing was read yet; errors of requests to the object store.
    pub fn push_trace(&self, limits: CallLimits<'_>) -> store::Result<usize> {
        let touched_chunks = self.reader.content.touched_chunks();
        if touched_chunks.is_empty() {
            return Err(store::Error::NothingRead);
        }
        self.store().set_trace(&self.name(), &touched_chunks, limits)?;
        Ok(touched_chunks.len())
    }

    /// Fetches the whole image into the cache. `note` receives the number of chunks that are already cached,
    /// and the total number of chunks.
    ///
    /// # Errors
    /// There is no cache, or the cache is too small; errors of requests to the object store.
    pub fn pull(&self, note: &(dyn Fn(u64, u64) + Sync), limits: CallLimits<'_>) -> store::Result<()> {
        let content = &self.reader.content;
        let Some(cache) = &content.cache else {
            return Err(store::Error::Local("there is no cache to pull it into".into()));
        };
        content.retry_cache();
        let mut chunks = Vec::new();
        for number in 0..content.manifest.segment_count() {
            let segment = content.load(number, limits)?;
            chunks.extend(segment.maps.iter().flat_map(|map| map.map.chunks().iter().copied()));
        }
        let need = chunks.iter().map(|_| (CHUNK_BYTES + PAGE) as u64).sum::<u64>();
        if need > cache.limit() {
            let why = format!("it takes {need} bytes, and the cache has {} at most", cache.limit());
            return Err(store::Error::Local(why));
        }
        let (total, done) = (chunks.len() as u64, crate::rt::sync::atomic::AtomicU64::new(0));
        note(0, total);
        parallel::for_each(PULL_FETCHES_MAX, chunks.len(), |at| {
            limits.check().map_err(|fault| store::Error::of("", fault))?;
            let name = &chunks[at].name;
            if cache.find(name).is_none() {
                content.fetch(name, limits)?;
                if cache.find(name).is_none() {
                    let why =
                        content.cache_failure.lock().clone().unwrap_or_else(|| "no room is left".to_owned());
                    return Err(store::Error::Local(format!("{}: {why}", cache.dir().display())));
                }
            }
            note(done.fetch_add(1, crate::rt::sync::atomic::Ordering::SeqCst) + 1, total);
            Ok::<(), store::Error>(())
        })
    }
}

impl Device for Image {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.reader.content.manifest.size,
            padding: 0,
            logical_block: SECTOR_BYTES,
            physical_block: PAGE as u32,
            io_min: PAGE as u32,
            io_opt: CHUNK_BYTES as u32,
            max_request: 0,
            discard_granularity: 0,
            fast_zeroes: false,
            volatile_cache: false,
            volatile_media: false,
            rotational: false,
            read_only: true,
            ignores_data: false,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        freestone_core::trail::step!();
        request.check(&self.geometry())?;
        let Buffer::Read(out) = buffer else {
            return Ok(if request.op == Op::Flush { TryResult::Done } else { TryResult::WouldBlock });
        };
        let most = request.len.min(INLINE_MAX_BYTES) as usize;
        let mut done = 0;
        while done < most {
            match self.reader.content.find(request.offset + done as u64, &mut out[done..most], &[], false) {
                Lookup::Read(more) => done += more,
                Lookup::Retry | Lookup::Segment(_) | Lookup::Chunk { .. } => break,
            }
        }
        let done = done as u64 / u64::from(SECTOR_BYTES) * u64::from(SECTOR_BYTES);
        Ok(match done {
            0 => TryResult::WouldBlock,
            all if all == request.len => TryResult::Done,
            some => TryResult::Partly(some),
        })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        freestone_core::trail::step!();
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        if request.op != Op::Read {
            return done.complete(Ok(()), buffer);
        }
        if buffer.len() as u64 != request.len {
            return done.complete(Err(Error::Misaligned), buffer);
        }
        self.reader.begin(&request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let size = self.geometry().size;
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::OutOfRange);
        }
        let number = (offset / SEGMENT_BYTES) as u32;
        let start = u64::from(number) * SEGMENT_BYTES;
        let end = (offset + len).min(start + SEGMENT_BYTES);
        let limits = CallLimits::within(self.reader.content.config.timeout);
        let segment = self
            .reader
            .content
            .load(number, limits)
            .map_err(|error| self.reader.content.record_failure(&error))?;
        let kind = |page: usize| match segment.place(page) {
            (_, PageLocation::In { .. }) => ExtentKind::Data,
            _ => ExtentKind::Hole,
        };
        let mut at = offset;
        while at < end {
            let first = ((at - start) / PAGE as u64) as usize;
            let of = kind(first);
            let pages = (first..SEGMENT_PAGES).take_while(|page| kind(*page) == of).count();
            let next = end.min(start + ((first + pages) * PAGE) as u64);
            if !row(Extent { offset: at, len: next - at, kind: of }) {
                return Ok(next - offset);
            }
            at = next;
        }
        Ok(end - offset)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.reader.prefetch(offset, len);
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.reader.close();
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("name", &self.reader.content.name).finish_non_exhaustive()
    }
}
