//! A segment whose maps are in memory.

use crate::rt::sync::RwLock;
use crate::rt::sync::atomic::{AtomicBool, Ordering};

use crate::cache::Entry;
use crate::format::CHUNK_PAGES;
use crate::format::map::{Map, Place};

/// A map, and which of its chunks are open in the cache.
pub struct Loaded {
    pub map: Map,
    /// By the number of the chunk.
    pub entries: Box<[RwLock<Option<Entry>>]>,
}

/// The maps of a GiB of an image.
pub struct Segment {
    /// The youngest first.
    pub maps: Vec<Loaded>,
    is_used: AtomicBool,
}

impl Segment {
    /// From its maps, the oldest first.
    pub fn new(maps: Vec<Map>) -> Self {
        let load = |map: Map| {
            let entries = map.chunks().iter().map(|_| RwLock::new(None)).collect();
            Loaded { map, entries }
        };
        Self { maps: maps.into_iter().rev().map(load).collect(), is_used: AtomicBool::new(true) }
    }

    /// Where a page lies, and by which map.
    pub fn place(&self, page: usize) -> (usize, Place) {
        for (number, loaded) in self.maps.iter().enumerate() {
            match loaded.map.place(page) {
                Place::Below => {}
                place => return (number, place),
            }
        }
        (0, Place::Zero)
    }

    /// Where a page lies, and how many from it on, `most` at most, lie together: in a chunk one behind the
    /// other, or zeroes.
    pub fn run(&self, page: usize, most: usize) -> (usize, Place, usize) {
        let (map, place) = self.place(page);
        let youngest = self.maps.first().map(|loaded| &loaded.map);
        if let (0, Place::In { page: within, .. }, Some(Map::Full { .. })) = (map, place, youngest) {
            return (map, place, most.min(CHUNK_PAGES - within));
        }
        let more = (1..most).take_while(|more| follows(self.place(page + more), map, place, *more)).count();
        (map, place, 1 + more)
    }

    pub fn used(&self) {
        // Relaxed: a hint for what to forget. Looked at first, as the line is shared by all who read.
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it was used since this was asked last.
    pub fn was_used(&self) -> bool {
        // Relaxed: as above.
        self.is_used.swap(false, Ordering::Relaxed)
    }
}

/// Whether a page lies so many behind another.
fn follows((map, place): (usize, Place), first_map: usize, first: Place, more: usize) -> bool {
    match (first, place) {
        (Place::In { chunk, page }, Place::In { chunk: of, page: at }) => {
            map == first_map && chunk == of && at == page + more && at < CHUNK_PAGES
        }
        (Place::Zero, Place::Zero) => true,
        _ => false,
    }
}
