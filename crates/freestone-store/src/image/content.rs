//! Content of an image: locates its pages, and reads those that are in memory or in the cache.

use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::rt::time::{Duration, Instant};
use std::collections::{HashSet, VecDeque};

use freestone_core::device;
use freestone_core::log_limit::LogLimit;
use freestone_core::sync::{Mutex, RwLock};

use super::description::{Description, LOCK_WAIT};
use super::segment::Segment;
use super::stat::ImageCounters;
use super::{Config, open_files};
use crate::cache::{Cache, ReadOutcome};
use crate::format::manifest::Manifest;
use crate::format::map::{Map, PageLocation};
use crate::format::name::{Kind, Name};
use crate::format::{CHUNK_PAGES, PAGE, SEGMENT_BYTES, SEGMENT_PAGES, UNIT_PAGES};
use crate::objects::CallLimits;
use crate::store::{CHUNKS_MAX, Error, Result, Store};

/// Maximum number of segments of an image whose maps are in memory. The maps of a segment use 75 to 600 KiB.
const SEGMENTS_MAX: usize = 1024;
/// Timeout for adding a chunk to the cache.
const KEEP_MAX: Duration = Duration::from_secs(5);
/// Time after a failed write to the cache during which nothing is added to the cache.
const CACHE_PAUSE: Duration = Duration::from_secs(30);

/// Pages of a chunk that were fetched from the object store.
#[derive(Clone)]
pub struct FetchedPages {
    pub name: Name,
    /// Index in the chunk of the first of these pages.
    pub first: usize,
    /// True if these are all stored pages of the chunk. Later pages are then zeroes.
    pub is_all: bool,
    pub pages: Arc<Vec<u8>>,
}

/// Result of a lookup of pages with [`Content::find`].
pub enum Lookup {
    /// The number of bytes that were read.
    Read(usize),
    /// The lookup must be repeated with `wait` set, as it may have to wait for the disk.
    Retry,
    /// The maps of the segment with this number must be loaded first.
    Segment(u32),
    /// `count` pages of the chunk, from index `first` on, must be fetched.
    Chunk { name: Name, first: usize, count: usize },
}

/// An open image, with its maps and cache.
pub struct Content {
    pub store: Arc<Store>,
    pub cache: Option<Arc<Cache>>,
    pub name: Name,
    pub manifest: Manifest,
    pub config: Config,
    segments: Box<[RwLock<Option<Arc<Segment>>>]>,
    /// Numbers of the segments whose maps are in memory. The front is the first candidate to be freed.
    loaded: Mutex<VecDeque<u32>>,
    is_closed: AtomicBool,
    /// Time of the last failed write to the cache: milliseconds after `since`, plus 1. 0 if the last write
    /// succeeded.
    cache_failed: AtomicU64,
    /// Error text of the last failed write to the cache.
    pub cache_failure: Mutex<Option<String>>,
    since: Instant,
    pub stats: ImageCounters,
    touched_chunks: Mutex<TouchedChunks>,
    log: LogLimit<()>,
}

/// Names of the chunks that were read, in the order of their first use.
#[derive(Default)]
struct TouchedChunks {
    order: Vec<Name>,
    known: HashSet<Name>,
}

impl Content {
    pub fn new(
        store: Arc<Store>,
        cache: Option<Arc<Cache>>,
        name: Name,
        manifest: Manifest,
        config: Config,
    ) -> Arc<Self> {
        Arc::new(Self {
            segments: (0..manifest.segment_count()).map(|_| RwLock::new(None)).collect(),
            store,
            cache,
            name,
            manifest,
            config,
            loaded: Mutex::default(),
            is_closed: AtomicBool::new(false),
            cache_failed: AtomicU64::new(0),
            cache_failure: Mutex::default(),
            since: Instant::now(),
            stats: ImageCounters::default(),
            touched_chunks: Mutex::default(),
            log: LogLimit::default(),
        })
    }

    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Counts and logs a failed read or fetch. Returns the error for users of the device: `Gone` if the image
    /// is closed, else `Media`.
    pub fn record_failure(&self, error: &Error) -> device::Error {
        if self.is_closed() {
            return device::Error::Gone;
        }
        let why = error.to_string();
        if let Some(held_back) = self.log.admit(()) {
            tracing::warn!("{}: {why}{held_back}", self.store.url());
        }
        self.stats.failed(why);
        device::Error::Media
    }

    /// Reads the image at byte `offset` from memory or the cache, and fills at least the first byte of `out`.
    /// `got` are pages that were fetched for this request. If `wait` is false, the lookup never waits for the
    /// disk.
    pub fn find(&self, offset: u64, out: &mut [u8], got: &[FetchedPages], wait: bool) -> Lookup {
        freestone_core::trail::step!();
        let number = offset / SEGMENT_BYTES;
        let slot = self.segments[number as usize].read();
        let Some(segment) = &*slot else { return Lookup::Segment(number as u32) };
        segment.mark_used();
        let page = (offset % SEGMENT_BYTES) as usize / PAGE;
        let within = offset as usize % PAGE;
        // A lookup reads either a part of one page, or several whole pages.
        let most = if within == 0 { (out.len() / PAGE).max(1) } else { 1 }.min(SEGMENT_PAGES - page);
        let (map, place, count) = segment.run(page, most);
        let bytes = (count * PAGE - within).min(out.len());
        let out = &mut out[..bytes];
        let PageLocation::In { chunk, page: first } = place else {
            out.fill(0);
            return Lookup::Read(bytes);
        };
        let loaded = &segment.maps[map];
        let name = loaded.map.chunks()[chunk].name;
        if let Some((got, pages)) = got.iter().find_map(|got| Some((got, got.pages_from(&name, first)?))) {
            let bytes = bytes.min(pages.saturating_mul(PAGE) - within);
            got.copy(first, within, &mut out[..bytes]);
            return Lookup::Read(bytes);
        }
        let needed = || Lookup::Chunk { name, first, count };
        if let Some(outcome) = read(&loaded.entries[chunk], first, within, out, wait) {
            return match outcome {
                ReadOutcome::Done => Lookup::Read(bytes),
                ReadOutcome::WouldBlock => Lookup::Retry,
                ReadOutcome::Damaged if !wait => Lookup::Retry,
                ReadOutcome::Damaged => {
                    *loaded.entries[chunk].write() = None;
                    if let Some(cache) = &self.cache {
                        cache.discard(&name);
                    }
                    needed()
                }
            };
        }
        if !wait {
            return Lookup::Retry;
        }
        let Some(entry) = self.cache.as_ref().and_then(|cache| cache.find(&name)) else { return needed() };
        ImageCounters::add(&self.stats.cache_hits, 1);
        self.touch(name);
        open_files::keep(segment, map, chunk, entry);
        match read(&loaded.entries[chunk], first, within, out, wait) {
            Some(ReadOutcome::Done) => Lookup::Read(bytes),
            // The file was closed again or is damaged. The next lookup handles either case.
            _ => Lookup::Retry,
        }
    }

    /// Returns the number of the segment at byte `offset`, if its maps are not in memory.
    pub fn missing_segment(&self, offset: u64) -> Option<u32> {
        let number = offset / SEGMENT_BYTES;
        let slot = self.segments[number as usize].read();
        slot.is_none().then_some(number as u32)
    }

    /// Records the use of a chunk for the trace of the image.
    pub fn touch(&self, name: Name) {
        let mut touched_chunks = self.touched_chunks.lock();
        if touched_chunks.order.len() < CHUNKS_MAX && touched_chunks.known.insert(name) {
            touched_chunks.order.push(name);
        }
    }

    /// Returns the names of the used chunks in the order of their first use.
    pub fn touched_chunks(&self) -> Vec<Name> {
        self.touched_chunks.lock().order.clone()
    }

    /// Returns the maps of a segment. Loads them from the cache or the object store if necessary, so may wait
    /// for the network.
    pub fn load(&self, number: u32, limits: CallLimits<'_>) -> Result<Arc<Segment>> {
        freestone_core::trail::step!();
        let slot = &self.segments[number as usize];
        if let Some(segment) = &*slot.read() {
            return Ok(Arc::clone(segment));
        }
        let maps = self.manifest.maps(number).iter().map(|map| self.map(&map.map, limits));
        let segment = Arc::new(Segment::new(maps.collect::<Result<_>>()?));
        {
            let mut slot = slot.write();
            if let Some(segment) = &*slot {
                return Ok(Arc::clone(segment));
            }
            *slot = Some(Arc::clone(&segment));
        }
        self.free_unused_maps(number);
        Ok(segment)
    }

    fn map(&self, name: &Name, limits: CallLimits<'_>) -> Result<Map> {
        let description =
            Description { store: &self.store, cache: self.cache.as_deref(), kind: Kind::Map, name, limits };
        let keep = |cache: &Cache, map: &Map| {
            if self.cache().is_some() {
                self.record_cache_result(cache.insert_meta(name, &map.bytes(), limits));
            }
        };
        description.read(Map::parse, || self.store.map(name, limits), keep)
    }

    /// Adds `newest` to the loaded segments. If these are more than [`SEGMENTS_MAX`], frees the maps of
    /// segments that were not used lately.
    fn free_unused_maps(&self, newest: u32) {
        let mut loaded = self.loaded.lock();
        loaded.push_back(newest);
        for looks in 0.. {
            if loaded.len() <= SEGMENTS_MAX {
                return;
            }
            let Some(number) = loaded.pop_front() else { return };
            let Some(mut slot) = self.segments[number as usize].try_write() else {
                loaded.push_back(number);
                if looks > 2 * SEGMENTS_MAX {
                    return;
                }
                continue;
            };
            if looks <= SEGMENTS_MAX && slot.as_ref().is_some_and(|segment| segment.was_used()) {
                loaded.push_back(number);
            } else {
                *slot = None;
            }
        }
    }

    /// Returns the names of the chunks with the pages of a byte range, except for chunks whose cache file is
    /// open. Skips segments whose maps are not loaded.
    pub fn chunks(&self, offset: u64, len: u64) -> Vec<Name> {
        let mut names = Vec::new();
        let end = offset.saturating_add(len).min(self.manifest.size);
        let (mut page, end) = (offset / PAGE as u64, end.div_ceil(PAGE as u64));
        while page < end {
            let number = (page / SEGMENT_PAGES as u64) as usize;
            let slot = self.segments[number].read();
            if let Some(segment) = &*slot
                && let (map, PageLocation::In { chunk, .. }) = segment.place(page as usize % SEGMENT_PAGES)
                && segment.maps[map].entries[chunk].try_read().is_some_and(|entry| entry.is_none())
            {
                let name = segment.maps[map].map.chunks()[chunk].name;
                if names.last() != Some(&name) {
                    names.push(name);
                }
            }
            page += 1;
        }
        names
    }

    /// Fetches a chunk from the object store and adds it to the cache. If another server has cached the chunk
    /// meanwhile, reads it from the cache instead.
    pub fn fetch(&self, name: &Name, limits: CallLimits<'_>) -> Result<FetchedPages> {
        freestone_core::trail::step!();
        let got = |pages| FetchedPages { name: *name, first: 0, is_all: true, pages: Arc::new(pages) };
        let Some(cache) = self.cache() else { return self.chunk(name, limits).map(got) };
        // The lock is released when the chunk is in the cache.
        let _lock = cache.lock_fetch(name, limits.at_most(LOCK_WAIT));
        if let Some(entry) = cache.find(name) {
            let mut pages = vec![0; entry.pages() * PAGE];
            if entry.read(0, &mut pages, true) == ReadOutcome::Done {
                ImageCounters::add(&self.stats.cache_hits, 1);
                return Ok(got(pages));
            }
            cache.discard(name);
        }
        let pages = self.chunk(name, limits)?;
        self.record_cache_result(cache.insert(name, &pages, limits.at_most(KEEP_MAX)));
        Ok(got(pages))
    }

    fn chunk(&self, name: &Name, limits: CallLimits<'_>) -> Result<Vec<u8>> {
        let pages = self.store.chunk(name, limits)?;
        ImageCounters::add(&self.stats.fetched, 1);
        ImageCounters::add(&self.stats.fetched_bytes, pages.len() as u64);
        Ok(pages)
    }

    /// Fetches one unit of a chunk from the object store. Pages after the end of the chunk are zeroes.
    pub fn fetch_unit(&self, name: &Name, unit: usize, limits: CallLimits<'_>) -> Result<FetchedPages> {
        let mut pages = self.store.unit(name, unit, limits)?;
        ImageCounters::add(&self.stats.fetched, 1);
        ImageCounters::add(&self.stats.fetched_bytes, pages.len() as u64);
        pages.resize(UNIT_PAGES * PAGE, 0);
        Ok(FetchedPages { name: *name, first: unit * UNIT_PAGES, is_all: false, pages: Arc::new(pages) })
    }

    /// Returns the cache, or `None` if there is none or a write to it failed within the last [`CACHE_PAUSE`].
    pub fn cache(&self) -> Option<&Arc<Cache>> {
        let failed = self.cache_failed.load(Ordering::SeqCst);
        let now = self.since.elapsed().as_millis() as u64;
        self.cache.as_ref().filter(|_| failed == 0 || now >= failed - 1 + CACHE_PAUSE.as_millis() as u64)
    }

    /// Ends the [`CACHE_PAUSE`] after a failed write, because a user asked to fill the cache.
    pub fn retry_cache(&self) {
        self.cache_failed.store(0, Ordering::SeqCst);
        self.cache_failure.lock().take();
    }

    /// Records the outcome of a write to the cache. Returns the value of a successful write, or `None` after
    /// a failure.
    pub fn record_cache_result<T>(&self, outcome: std::io::Result<T>) -> Option<T> {
        match outcome {
            Ok(taken) => {
                self.cache_failed.store(0, Ordering::SeqCst);
                Some(taken)
            }
            Err(error) => {
                let dir = self.cache.as_ref().map(|cache| cache.dir().display().to_string());
                let dir = dir.unwrap_or_default();
                tracing::warn!("{dir}: nothing is cached for {CACHE_PAUSE:?}: {error}");
                *self.cache_failure.lock() = Some(error.to_string());
                let now = self.since.elapsed().as_millis() as u64;
                self.cache_failed.store(now + 1, Ordering::SeqCst);
                None
            }
        }
    }
}

/// Reads from an open cache file of a chunk, starting at byte `within` of page `first`. Returns `None` if the
/// file is not open.
fn read(
    entry: &RwLock<Option<crate::cache::Entry>>,
    first: usize,
    within: usize,
    out: &mut [u8],
    wait: bool,
) -> Option<ReadOutcome> {
    let entry = entry.read();
    let entry = entry.as_ref()?;
    if within == 0 && out.len().is_multiple_of(PAGE) {
        return Some(entry.read(first, out, wait));
    }
    // Checksums cover whole pages, but the first and the last page may be needed only in part.
    let mut at = 0;
    while at < out.len() {
        let page = (within + at) / PAGE;
        let skip = (within + at) % PAGE;
        let len = (PAGE - skip).min(out.len() - at);
        let mut whole = [0; PAGE];
        match entry.read(first + page, &mut whole, wait) {
            ReadOutcome::Done => out[at..at + len].copy_from_slice(&whole[skip..skip + len]),
            other => return Some(other),
        }
        at += len;
    }
    Some(ReadOutcome::Done)
}

impl FetchedPages {
    /// Returns the number of known pages of the chunk `name` from page `first` on, or `None` if none is
    /// known.
    fn pages_from(&self, name: &Name, first: usize) -> Option<usize> {
        if self.name != *name || first < self.first {
            return None;
        }
        let pages = if self.is_all { CHUNK_PAGES } else { self.pages.len() / PAGE };
        (self.first + pages).checked_sub(first).filter(|pages| *pages > 0)
    }

    fn copy(&self, first: usize, within: usize, out: &mut [u8]) {
        let start = (first - self.first) * PAGE + within;
        let there = self.pages.get(start..).unwrap_or_default();
        let len = there.len().min(out.len());
        out[..len].copy_from_slice(&there[..len]);
        out[len..].fill(0);
    }
}
