//! Maps of a segment in memory.

use crate::rt::sync::RwLock;
use crate::rt::sync::atomic::{AtomicBool, Ordering};

use crate::cache::Entry;
use crate::format::CHUNK_PAGES;
use crate::format::map::{Map, Place};

/// A map, with the open cache files of its chunks.
pub struct Loaded {
    pub map: Map,
    /// Open file of each chunk, by the index of the chunk in the map.
    pub entries: Box<[RwLock<Option<Entry>>]>,
}

/// Maps of a segment (1 GiB) of an image.
pub struct Segment {
    /// Maps from the youngest to the oldest.
    pub maps: Vec<Loaded>,
    is_used: AtomicBool,
}

impl Segment {
    /// Creates a segment from its maps, from the oldest to the youngest.
    pub fn new(maps: Vec<Map>) -> Self {
        let load = |map: Map| {
            let entries = map.chunks().iter().map(|_| RwLock::new(None)).collect();
            Loaded { map, entries }
        };
        Self { maps: maps.into_iter().rev().map(load).collect(), is_used: AtomicBool::new(true) }
    }

    /// Returns the location of a page, and the index of its map.
    pub fn place(&self, page: usize) -> (usize, Place) {
        for (number, loaded) in self.maps.iter().enumerate() {
            match loaded.map.place(page) {
                Place::Below => {}
                place => return (number, place),
            }
        }
        (0, Place::Zero)
    }

    /// Returns the location of a page, and the number of consecutive pages, at most `most`, that follow each
    /// other in the same chunk or are zeroes.
    pub fn run(&self, page: usize, most: usize) -> (usize, Place, usize) {
        let (map, place) = self.place(page);
        let youngest = self.maps.first().map(|loaded| &loaded.map);
        if let (0, Place::In { page: within, .. }, Some(Map::Full { .. })) = (map, place, youngest) {
            return (map, place, most.min(CHUNK_PAGES - within));
        }
        let more = (1..most).take_while(|more| follows(self.place(page + more), map, place, *more)).count();
        (map, place, 1 + more)
    }

    pub fn mark_used(&self) {
        // Relaxed: a hint which maps to free. The load avoids writes to a cache line that all readers share.
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Returns true if the segment was used since the previous call.
    pub fn was_used(&self) -> bool {
        // Relaxed: a hint which maps to free.
        self.is_used.swap(false, Ordering::Relaxed)
    }
}

/// Returns true if a page lies `more` pages after `first` in the same chunk, or if both are zeroes.
fn follows((map, place): (usize, Place), first_map: usize, first: Place, more: usize) -> bool {
    match (first, place) {
        (Place::In { chunk, page }, Place::In { chunk: of, page: at }) => {
            map == first_map && chunk == of && at == page + more && at < CHUNK_PAGES
        }
        (Place::Zero, Place::Zero) => true,
        _ => false,
    }
}
