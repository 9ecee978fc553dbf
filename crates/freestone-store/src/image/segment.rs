//! A segment whose maps are in memory.

use crate::rt::sync::RwLock;
use crate::rt::sync::atomic::{AtomicBool, Ordering};

use crate::cache::Entry;
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
