//! An image in object storage as a read-only device: what is read comes when it is needed, into a cache
//! on a local disk, and is verified before anybody sees it.
//!
//! What lies in the cache, in the kernel's memory, is read inline. Else the request goes to a reader, a
//! thread that may wait for the local disk; what is not in the cache is fetched by another thread, and
//! whoever else wants it meanwhile waits for the same fetch. No thread waits for a thread, and readers
//! never wait for the network: what is cached is served also while the store hangs.
//!
//! What cannot be fetched in time, or is not what its name says, answers [`Error::Media`], never zeroes;
//! the reason is logged and kept ([`Image::stat`]).
//!
//! **Locks**, outer first; none is held while the network is waited for. A segment's slot, then an
//! entry's, both for reading while pages are copied. The list of open files: those who take slots for
//! writing under it only try. The fetches, the readers' queue, a job's buffer: leaves, for a few
//! instructions or one copy.

mod described;
mod fetch;
mod fetches;
mod find;
mod job;
mod open_files;
mod queue;
mod segment;
mod stat;
mod streams;

use crate::rt::sync::Arc;
use crate::rt::time::Duration;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, Tried,
};

use crate::cache::Cache;
use crate::format::manifest::Manifest;
use crate::format::map::Place;
use crate::format::name::{Kind, Name};
use crate::format::{CHUNK_BYTES, PAGE, SEGMENT_BYTES, SEGMENT_PAGES};
use crate::objects::Until;
use crate::parallel;
use crate::store::{self, Store};
use described::Described;
use find::{Content, Found};
use job::Reader;
pub use stat::Stat;

/// Most bytes that one try reads.
const INLINE_MAX_BYTES: u64 = 256 << 10;
/// Smallest request in bytes.
const SECTOR_BYTES: u32 = 512;
/// How long a request waits for the store, where nothing else was said.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Chunks that a pull fetches at once.
const PULLED_AT_ONCE: usize = 32;

/// An image.
pub struct Image {
    reader: Arc<Reader>,
}

/// How it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// How long a fetch may take. A request waits about twice that at most, where many wait.
    pub timeout: Duration,
    /// Fetch what the trace of the image says, if it has one, before anybody asks for it.
    pub prefetch: bool,
}

impl Image {
    /// Opens an image by its name, which may lie in the cache. Without a cache only what is asked for is
    /// fetched, each time.
    ///
    /// # Errors
    /// What the store answers; the image is damaged.
    pub fn open(
        store: Arc<Store>,
        cache: Option<Arc<Cache>>,
        name: Name,
        config: Config,
        until: Until<'_>,
    ) -> store::Result<Self> {
        let described =
            Described { store: &store, cache: cache.as_deref(), kind: Kind::Manifest, name: &name, until };
        let parse = |bytes: &[u8]| Manifest::parse(bytes).ok();
        let manifest = described.read(
            parse,
            || store.manifest(&name, until),
            |cache, manifest| {
                // Without that it is read again.
                let _ = cache.keep_meta(&name, &manifest.bytes(), until);
            },
        )?;
        let reader = Reader::new(Content::new(store, cache, name, manifest, config));
        if config.prefetch {
            reader.follow_trace();
        }
        Ok(Self { reader })
    }

    /// Its name.
    pub fn name(&self) -> Name {
        self.reader.content.name
    }

    /// What it consists of.
    pub fn manifest(&self) -> &Manifest {
        &self.reader.content.manifest
    }

    /// Where it is read from.
    pub fn store(&self) -> &Arc<Store> {
        &self.reader.content.store
    }

    /// Where it is kept.
    pub fn cache(&self) -> Option<&Arc<Cache>> {
        self.reader.content.cache.as_ref()
    }

    /// What was read and fetched.
    pub fn stat(&self) -> Stat {
        self.reader.content.stats.stat()
    }

    /// Notes in the store which chunks were needed since this was opened, in their order: who opens the
    /// image from now on has them fetched. How many.
    ///
    /// # Errors
    /// Nothing was read yet; what the store answers.
    pub fn push_trace(&self, until: Until<'_>) -> store::Result<usize> {
        let touched = self.reader.content.touched();
        if touched.is_empty() {
            return Err(store::Error::Unread);
        }
        self.store().set_trace(&self.name(), &touched, until)?;
        Ok(touched.len())
    }

    /// Fetches all of it into the cache. `note` is told how many chunks are done, and of how many.
    ///
    /// # Errors
    /// There is no cache, or no room in it; what the store answers.
    pub fn pull(&self, note: &(dyn Fn(u64, u64) + Sync), until: Until<'_>) -> store::Result<()> {
        let content = &self.reader.content;
        let Some(cache) = &content.cache else {
            return Err(store::Error::Local("there is no cache to pull it into".into()));
        };
        content.retry_cache();
        let mut chunks = Vec::new();
        for number in 0..content.manifest.segment_count() {
            let segment = content.load(number, until)?;
            chunks.extend(segment.maps.iter().flat_map(|map| map.map.chunks().iter().copied()));
        }
        let need = chunks.iter().map(|_| (CHUNK_BYTES + PAGE) as u64).sum::<u64>();
        if need > cache.limit() {
            let why = format!("it takes {need} bytes, and the cache has {} at most", cache.limit());
            return Err(store::Error::Local(why));
        }
        let (total, done) = (chunks.len() as u64, crate::rt::sync::atomic::AtomicU64::new(0));
        note(0, total);
        parallel::for_each(PULLED_AT_ONCE, chunks.len(), |at| {
            until.check().map_err(|fault| store::Error::of("", fault))?;
            let name = &chunks[at].name;
            if cache.find(name).is_none() {
                content.fetch(name, until)?;
                if cache.find(name).is_none() {
                    let why = content.cache_failure().clone().unwrap_or_else(|| "no room is left".to_owned());
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
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry())?;
        let Buffer::Read(out) = buffer else {
            return Ok(if request.op == Op::Flush { Tried::Done } else { Tried::WouldBlock });
        };
        let most = request.len.min(INLINE_MAX_BYTES) as usize;
        let mut done = 0;
        while done < most {
            match self.reader.content.find(request.offset + done as u64, &mut out[done..most], &[], false) {
                Found::Read(more) => done += more,
                Found::Later | Found::Segment(_) | Found::Chunk { .. } => break,
            }
        }
        let done = done as u64 / u64::from(SECTOR_BYTES) * u64::from(SECTOR_BYTES);
        Ok(match done {
            0 => Tried::WouldBlock,
            all if all == request.len => Tried::Done,
            some => Tried::Partly(some),
        })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
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
        let until = Until::within(self.reader.content.config.timeout);
        let segment =
            self.reader.content.load(number, until).map_err(|error| self.reader.content.failed(&error))?;
        let kind = |page: usize| match segment.place(page) {
            (_, Place::In { .. }) => ExtentKind::Data,
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
        self.reader.ahead(offset, len);
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
