//! Push of one segment: reuses the maps of the parent image, adds a delta, or stores the whole segment.

use crate::rt::sync::OnceLock;
use crate::rt::sync::atomic::Ordering;
use std::collections::HashMap;

use freestone_core::device::Blocking as _;
use freestone_core::mutants::{self, Mutant};
use freestone_core::zeroes::are_zeroes;

use super::Work;
use super::changed::{OldSegment, own_pages, pages_with_data};
use crate::format::bitmap::Bitmap;
use crate::format::manifest::{DEPTH_MAX, MapRef};
use crate::format::map::{ChunkRef, Hashes, Map, PageHash, page_hash};
use crate::format::name::{Kind, Name};
use crate::format::{CHUNK_BYTES, CHUNK_PAGES, PAGE, SEGMENT_CHUNKS, SEGMENT_PAGES};
use crate::parallel;
use crate::store::{Error, MAPS, Result};

/// A segment is stored again as a whole if more than `1/REWRITE_PART` of its pages changed. Readers then need
/// one map, and neighbouring pages are in the same chunk.
const REWRITE_PART: usize = 3;

/// Push of one segment (1 GiB) of the device.
pub struct Task<'a> {
    pub work: &'a Work<'a>,
    /// Offset of the segment in the device, in bytes.
    pub start: u64,
    pub len: u64,
    pub threads: usize,
    /// Maps of the segment in the parent image, from the oldest to the youngest.
    pub parent: &'a [MapRef],
    /// Maps of the segment in the base image; `None` without a base image, or if the base image could not be
    /// read.
    pub base: Option<&'a [MapRef]>,
}

impl Task<'_> {
    /// Pushes the segment, and returns its maps in the new image from the oldest to the youngest.
    pub fn push(&self) -> Result<Vec<MapRef>> {
        self.check()?;
        if let (Some(base_image), true) = (self.work.source.base_image, self.base == Some(self.parent))
            && own_pages(base_image.layers, self.start, self.len)?.count() == 0
        {
            return Ok(self.parent.to_vec());
        }
        let data = pages_with_data(self.work.source.device, self.start, self.len)?;
        if self.parent.is_empty() && (self.base.is_none_or(<[_]>::is_empty) || data.count() == 0) {
            return self.push_full(&data, &HashMap::new());
        }
        let store = self.work.store;
        let old = OldSegment::read(store, self.parent, self.work.limits)?;
        let now = self.hashes(&data, &old)?;
        let mut changed = Bitmap::default();
        let mut pages = 0;
        for (page, (now, old)) in now.iter().zip(&old.hashes).enumerate() {
            changed.set(page, now != old);
            pages += usize::from(*now != PageHash::default());
        }
        let count = changed.count();
        if count == 0 {
            return Ok(self.parent.to_vec());
        }
        let is_most = |count: usize| count.saturating_mul(REWRITE_PART) > pages.max(1);
        if self.parent.len() < DEPTH_MAX && !is_most(count) && !self.parent.is_empty() {
            self.work.changed_pages.fetch_add(count as u64, Ordering::SeqCst);
            let delta = self.push_delta(&changed, &now)?;
            return Ok([self.parent, &[delta]].concat());
        }
        if let Some(mut all_deltas) = old.held_by_deltas() {
            all_deltas.add(&changed);
            if !is_most(all_deltas.count()) {
                self.work.changed_pages.fetch_add(count as u64, Ordering::SeqCst);
                let delta = self.push_delta(&all_deltas, &now)?;
                return Ok(vec![self.parent[0].clone(), delta]);
            }
        }
        // The chunks of the old maps are known, so chunks with unchanged content are not sent again.
        let known =
            old.maps.iter().flat_map(|map| map.chunks().iter().map(|chunk| (chunk.name, chunk.stored)));
        self.push_full(&data, &known.collect())
    }

    fn check(&self) -> Result<()> {
        self.work.limits.check().map_err(|fault| Error::of(MAPS, fault))
    }

    /// Returns the number of pages of the segment. The last page may be only partly inside the device.
    fn pages(&self) -> usize {
        self.len.div_ceil(PAGE as u64) as usize
    }

    /// Reads consecutive pages of the segment, starting at `page`. Bytes after the end of the device are
    /// zeroes.
    fn read(&self, page: usize, out: &mut [u8]) -> Result<()> {
        let offset = (page * PAGE) as u64;
        let len = (out.len() as u64).min(self.len.saturating_sub(offset)) as usize;
        let device = self.work.source.device;
        // `self.len` excludes the padding that makes the size of the device a multiple of its block size.
        let block = device.geometry().logical_block as usize;
        let len = len.next_multiple_of(block).min(out.len());
        out[len..].fill(0);
        device.read_at(self.start + offset, &mut out[..len])?;
        Ok(())
    }

    /// Returns the hash of each page of the segment. Pages that no layer changed are not read: their hashes
    /// come from the base image.
    fn hashes(&self, data: &Bitmap, old: &OldSegment) -> Result<Vec<PageHash>> {
        let naming = &self.work.store.domain().naming;
        let (own, base) = match (self.work.source.base_image, self.base) {
            (Some(base_image), Some(maps)) => {
                let base = if maps == self.parent {
                    Some(old.hashes.clone())
                } else {
                    match OldSegment::read(self.work.store, maps, self.work.limits) {
                        Ok(base) => Some(base.hashes),
                        // A prune deleted parts of the base image, as no tag refers to this image.
                        Err(error) if error.is_missing() => None,
                        Err(error) => return Err(error),
                    }
                };
                match base {
                    Some(base) => (Some(own_pages(base_image.layers, self.start, self.len)?), base),
                    // Without the hashes of the base image, all pages of the segment with data are read.
                    None => (None, Vec::new()),
                }
            }
            _ => (None, Vec::new()),
        };
        let blocks: Vec<OnceLock<Vec<PageHash>>> = (0..SEGMENT_CHUNKS).map(|_| OnceLock::new()).collect();
        let is_own = |page| own.as_ref().is_none_or(|own| own.has(page));
        parallel::for_each(self.threads, self.pages().div_ceil(CHUNK_PAGES), |block| {
            self.check()?;
            let mut hashes = Vec::with_capacity(CHUNK_PAGES);
            let mut pages = vec![0; CHUNK_BYTES];
            let first = block * CHUNK_PAGES;
            let count = CHUNK_PAGES.min(self.pages() - first);
            let mut at = 0;
            while at < count {
                let wanted = |at: usize| is_own(first + at) && data.has(first + at);
                let run = (at..count).take_while(|at| wanted(*at)).count();
                if run == 0 {
                    let page = first + at;
                    hashes.push(if is_own(page) { PageHash::default() } else { base[page] });
                    at += 1;
                    continue;
                }
                let pages = &mut pages[..run * PAGE];
                self.read(first + at, pages)?;
                hashes.extend(pages.chunks(PAGE).map(|page| page_hash(naming, page)));
                at += run;
            }
            let _ = blocks[block].set(hashes);
            Ok::<(), Error>(())
        })?;
        let mut all: Vec<PageHash> =
            blocks.into_iter().flat_map(|block| block.into_inner().unwrap_or_default()).collect();
        all.resize(SEGMENT_PAGES, PageHash::default());
        Ok(all)
    }

    /// Stores the pages in `held` as a delta map with packed chunks.
    fn push_delta(&self, held: &Bitmap, hashes: &[PageHash]) -> Result<MapRef> {
        let (mut data, mut zero) = (held.clone(), Bitmap::default());
        for page in held.pages().filter(|page| hashes[*page] == PageHash::default()) {
            data.set(page, false);
            zero.set(page, true);
        }
        let pages: Vec<usize> = data.pages().collect();
        let chunks: Vec<OnceLock<ChunkRef>> =
            (0..pages.len().div_ceil(CHUNK_PAGES)).map(|_| OnceLock::new()).collect();
        let known = HashMap::new();
        parallel::for_each(self.threads, chunks.len(), |number| {
            self.check()?;
            let pages = &pages[number * CHUNK_PAGES..pages.len().min((number + 1) * CHUNK_PAGES)];
            let mut packed = vec![0; pages.len() * PAGE];
            let mut at = 0;
            while at < pages.len() {
                let run = (at..pages.len()).take_while(|next| pages[*next] - pages[at] == next - at).count();
                self.read(pages[at], &mut packed[at * PAGE..(at + run) * PAGE])?;
                at += run;
            }
            if mutants::on(Mutant::PackedPagesShifted) {
                packed.rotate_right(PAGE);
            }
            let sent = self.work.sent.send(self.work.store, &packed, &known, self.work.limits)?;
            let _ = chunks[number].set(sent);
            Ok::<(), Error>(())
        })?;
        let chunks: Vec<ChunkRef> = chunks.into_iter().filter_map(OnceLock::into_inner).collect();
        let hashes = pages.iter().map(|page| hashes[*page]).collect();
        self.push_map(&Map::delta(data, zero, chunks), hashes, held.count())
    }

    /// Stores all pages of the segment as a full map, without chunks of zeroes. Returns no map if all pages
    /// are zeroes.
    fn push_full(&self, data: &Bitmap, known: &HashMap<Name, u32>) -> Result<Vec<MapRef>> {
        let naming = &self.work.store.domain().naming;
        let stored_chunks: Vec<OnceLock<(ChunkRef, Vec<PageHash>)>> =
            (0..SEGMENT_CHUNKS).map(|_| OnceLock::new()).collect();
        parallel::for_each(self.threads, self.pages().div_ceil(CHUNK_PAGES), |number| {
            self.check()?;
            let first = number * CHUNK_PAGES;
            let count = CHUNK_PAGES.min(self.pages() - first);
            if !(first..first + count).any(|page| data.has(page)) {
                return Ok(());
            }
            let mut pages = vec![0; count * PAGE];
            self.read(first, &mut pages)?;
            if are_zeroes(&pages) {
                return Ok(());
            }
            let mut hashes: Vec<_> = pages.chunks(PAGE).map(|page| page_hash(naming, page)).collect();
            hashes.resize(CHUNK_PAGES, PageHash::default());
            let sent = self.work.sent.send(self.work.store, &pages, known, self.work.limits)?;
            let _ = stored_chunks[number].set((sent, hashes));
            Ok::<(), Error>(())
        })?;
        let stored_chunks: Vec<Option<(ChunkRef, Vec<PageHash>)>> =
            stored_chunks.into_iter().map(OnceLock::into_inner).collect();
        let chunks: Vec<Option<ChunkRef>> =
            stored_chunks.iter().map(|stored| stored.as_ref().map(|(chunk, _)| *chunk)).collect();
        let hashes: Vec<PageHash> =
            stored_chunks.into_iter().flatten().flat_map(|(_, hashes)| hashes).collect();
        if hashes.is_empty() {
            return Ok(Vec::new());
        }
        let pages = hashes.iter().filter(|hash| **hash != PageHash::default()).count();
        self.work.changed_pages.fetch_add(pages as u64, Ordering::SeqCst);
        Ok(vec![self.push_map(&Map::full(&chunks), hashes, pages)?])
    }

    fn push_map(&self, map: &Map, hashes: Vec<PageHash>, pages: usize) -> Result<MapRef> {
        let (store, limits) = (self.work.store, self.work.limits);
        let stored = map.chunks().iter().map(|chunk| u64::from(chunk.stored)).sum();
        let hashes = Hashes::new(hashes);
        Ok(MapRef {
            map: self.work.sent.send_meta(store, Kind::Map, &map.bytes(), limits)?,
            hashes: self.work.sent.send_meta(store, Kind::Hashes, hashes.bytes(), limits)?,
            pages: pages as u32,
            stored,
        })
    }
}
