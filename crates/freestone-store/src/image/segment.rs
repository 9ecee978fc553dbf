//! Maps of a segment (1 GiB of an image) in memory.

use crate::rt::sync::atomic::{AtomicBool, Ordering};
use freestone_core::sync::RwLock;

use crate::cache::Entry;
use crate::format::CHUNK_PAGES;
use crate::format::map::{Map, PageLocation};

/// Map of a segment in memory, with the open cache files of its chunks.
pub struct LoadedMap {
    pub map: Map,
    /// Open cache file of each chunk, by the index of the chunk in the map; `None` if the file is not open.
    pub entries: Box<[RwLock<Option<Entry>>]>,
}

/// All maps of one segment of an image, loaded in memory.
pub struct Segment {
    /// Maps from the youngest to the oldest.
    pub maps: Vec<LoadedMap>,
    is_used: AtomicBool,
}

impl Segment {
    /// Creates a segment from its maps, from the oldest to the youngest.
    pub fn new(maps: Vec<Map>) -> Self {
        let load = |map: Map| {
            let entries = map.chunks().iter().map(|_| RwLock::new(None)).collect();
            LoadedMap { map, entries }
        };
        Self { maps: maps.into_iter().rev().map(load).collect(), is_used: AtomicBool::new(true) }
    }

    /// Returns the index in `maps` of the map that locates a page of the segment, and the location.
    pub fn place(&self, page: usize) -> (usize, PageLocation) {
        for (number, loaded) in self.maps.iter().enumerate() {
            match loaded.map.place(page) {
                PageLocation::Below => {}
                place => return (number, place),
            }
        }
        (0, PageLocation::Zero)
    }

    /// Returns the index of the map and the location of a page, and the length of the run of pages that
    /// starts there. A run follows in the same chunk or is all zeroes, and has at most `most` pages.
    pub fn run(&self, page: usize, most: usize) -> (usize, PageLocation, usize) {
        let (map, place) = self.place(page);
        let youngest = self.maps.first().map(|loaded| &loaded.map);
        if let (0, PageLocation::In { page: within, .. }, Some(Map::Full { .. })) = (map, place, youngest) {
            return (map, place, most.min(CHUNK_PAGES - within));
        }
        let more = (1..most).take_while(|more| follows(self.place(page + more), map, place, *more)).count();
        (map, place, 1 + more)
    }

    pub fn mark_used(&self) {
        // Relaxed: the flag is only a hint which maps to free. The load avoids writes to a cache line that
        // all readers share.
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Returns true if the segment was used since the previous call.
    pub fn was_used(&self) -> bool {
        // Relaxed: the flag is only a hint which maps to free.
        self.is_used.swap(false, Ordering::Relaxed)
    }
}

/// Returns true if a page is `more` pages after `first` in the same chunk of the same map, or if both pages
/// are zeroes.
fn follows((map, place): (usize, PageLocation), first_map: usize, first: PageLocation, more: usize) -> bool {
    match (first, place) {
        (PageLocation::In { chunk, page }, PageLocation::In { chunk: of, page: at }) => {
            map == first_map && chunk == of && at == page + more && at < CHUNK_PAGES
        }
        (PageLocation::Zero, PageLocation::Zero) => true,
        _ => false,
    }
}
