//! Record of the pages of a device that changed since the record was created: a bitmap, allocated in pieces
//! on demand.
//!
//! Pinned writers set bits under the lock of the page's slot. The reader [freezes writers](super::Chain)
//! first, so that no more bits are set.

use crate::slot::MAX_SLOTS;
use crate::sync::{AtomicU32, AtomicU64, OnceLock, Ordering};

/// Number of pages in a bitmap word.
const WORD_PAGES: u64 = u64::BITS as u64;
/// Number of pages in a piece of the bitmap: 128 MiB of a device.
#[cfg(not(loom))]
const PIECE_PAGES: u64 = 1 << 15;
#[cfg(loom)]
const PIECE_PAGES: u64 = WORD_PAGES;
/// Number of entries in each of the three levels above the pieces.
#[cfg(not(loom))]
const FANOUT: u64 = 128;
#[cfg(loom)]
const FANOUT: u64 = 1;
const _: () = assert!(PIECE_PAGES * FANOUT * FANOUT * FANOUT >= MAX_SLOTS);

type Piece = Box<[AtomicU64]>;
type Level<T> = Box<[OnceLock<T>]>;

/// Bitmap of changed pages; see the module documentation.
pub struct Dirty {
    pieces: Level<Level<Level<Piece>>>,
    /// Number of bits set, that is, of changed pages.
    pages: AtomicU64,
    /// Unless 0, every page may have changed, regardless of the bits.
    everything: AtomicU32,
}

impl Default for Dirty {
    fn default() -> Self {
        Self::new()
    }
}

fn level<T>() -> Level<T> {
    (0..FANOUT).map(|_| OnceLock::new()).collect()
}

fn piece() -> Piece {
    (0..PIECE_PAGES / WORD_PAGES).map(|_| AtomicU64::new(0)).collect()
}

/// Returns the indices by which a page's piece is found, from the top level down.
fn path(page: u64) -> [usize; 3] {
    let piece = page / PIECE_PAGES;
    [piece / (FANOUT * FANOUT), piece / FANOUT % FANOUT, piece % FANOUT].map(|at| at as usize)
}

impl Dirty {
    /// Creates a record without changed pages.
    pub fn new() -> Self {
        let new = Self { pieces: level(), pages: AtomicU64::new(0), everything: AtomicU32::new(0) };
        // Loom models allocate the piece here, because OnceLock is not part of the modelled protocol.
        #[cfg(loom)]
        new.piece_or_new(0);
        new
    }

    /// Creates a record in which every page may have changed.
    pub fn everything() -> Self {
        let new = Self::new();
        new.set_everything();
        new
    }

    fn set_everything(&self) {
        // Relaxed: the reader has waited for the pins of all threads that set bits.
        self.everything.store(1, Ordering::Relaxed);
    }

    /// Returns true if every page may have changed.
    pub fn is_everything(&self) -> bool {
        // Relaxed: the reader has waited for the pins of all writers.
        self.everything.load(Ordering::Relaxed) != 0
    }

    /// Returns the number of changed pages. Changes in progress may be missing.
    pub fn pages(&self) -> u64 {
        // Relaxed: the reader has waited for the pins of all writers. While writers run, the number is a
        // statistic.
        self.pages.load(Ordering::Relaxed)
    }

    fn piece_or_new(&self, page: u64) -> &Piece {
        let [top, middle, low] = path(page);
        self.pieces[top].get_or_init(level)[middle].get_or_init(level)[low].get_or_init(piece)
    }

    fn piece(&self, page: u64) -> Option<&Piece> {
        let [top, middle, low] = path(page);
        self.pieces.get(top)?.get()?[middle].get()?[low].get()
    }

    /// Records that a page has changed or is about to change.
    // Not inlined, to keep the code of writers short while changes are not recorded.
    #[inline(never)]
    pub fn set(&self, page: u64) {
        self.add(page, 1 << (page % WORD_PAGES));
    }

    fn add(&self, page: u64, bits: u64) {
        let word = &self.piece_or_new(page)[(page % PIECE_PAGES / WORD_PAGES) as usize];
        // Relaxed: the reader has waited for the pins of all writers. The load avoids atomic writes for pages
        // that change repeatedly.
        if word.load(Ordering::Relaxed) & bits == bits {
            return;
        }
        // Relaxed: the reader has waited for the pins of all writers.
        let new = bits & !word.fetch_or(bits, Ordering::Relaxed);
        // Relaxed: the reader has waited for the pins of all writers.
        self.pages.fetch_add(u64::from(new.count_ones()), Ordering::Relaxed);
    }

    /// Returns the first changed page at or after `page`, or `None` if there is none.
    pub fn next(&self, page: u64) -> Option<u64> {
        let mut page = page;
        while page < MAX_SLOTS {
            let Some(piece) = self.piece(page) else {
                page = self.end_of_hole(page);
                continue;
            };
            let first = (page % PIECE_PAGES / WORD_PAGES) as usize;
            let mut mask = u64::MAX << (page % WORD_PAGES);
            let start = page - page % PIECE_PAGES;
            for (at, word) in piece.iter().enumerate().skip(first) {
                // Relaxed: the reader has waited for the pins of all writers.
                let bits = word.load(Ordering::Relaxed) & mask;
                if bits != 0 {
                    return Some(start + at as u64 * WORD_PAGES + u64::from(bits.trailing_zeros()));
                }
                mask = u64::MAX;
            }
            page = start + PIECE_PAGES;
        }
        None
    }

    /// Returns the first page after the unallocated part of the bitmap that contains `page`.
    fn end_of_hole(&self, page: u64) -> u64 {
        let [top, middle, _] = path(page);
        let stride = match self.pieces[top].get().map(|level| level[middle].get()) {
            None => PIECE_PAGES * FANOUT * FANOUT,
            Some(None) => PIECE_PAGES * FANOUT,
            Some(Some(_)) => PIECE_PAGES,
        };
        (page / stride + 1) * stride
    }

    /// Adds the changes of an earlier record.
    pub fn merge(&self, taken: &Self) {
        if taken.is_everything() {
            self.set_everything();
        }
        let mut page = 0;
        while let Some(next) = taken.next(page) {
            let Some(piece) = taken.piece(next) else { return };
            // Relaxed: the reader has waited for the pins of all writers.
            let bits = piece[(next % PIECE_PAGES / WORD_PAGES) as usize].load(Ordering::Relaxed);
            self.add(next, bits);
            page = (next / WORD_PAGES + 1) * WORD_PAGES;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn all(dirty: &Dirty) -> Vec<u64> {
        std::iter::successors(dirty.next(0), |page| dirty.next(page + 1)).collect()
    }

    #[test]
    fn distant_pages_are_listed_in_order_and_counted_once() {
        let dirty = Dirty::new();
        assert_eq!((dirty.next(0), dirty.pages()), (None, 0));
        let pages = [0, 1, 63, 64, PIECE_PAGES - 1, PIECE_PAGES, PIECE_PAGES * FANOUT * 3 + 7, MAX_SLOTS - 1];
        for page in pages.iter().rev().chain(&pages) {
            dirty.set(*page);
        }
        assert_eq!((all(&dirty), dirty.pages()), (pages.to_vec(), pages.len() as u64));
        assert_eq!(dirty.next(65), Some(PIECE_PAGES - 1));
    }

    #[test]
    fn merge_keeps_later_changes() {
        let (taken, now) = (Dirty::new(), Dirty::new());
        for page in [3, 70, PIECE_PAGES * 5] {
            taken.set(page);
        }
        for page in [4, 70] {
            now.set(page);
        }
        now.merge(&taken);
        assert_eq!((all(&now), now.pages()), (vec![3, 4, 70, PIECE_PAGES * 5], 4));
        assert!(!now.is_everything());
        now.merge(&Dirty::everything());
        assert!(now.is_everything());
    }

    #[test]
    fn concurrent_neighbouring_sets_are_not_lost() {
        let dirty = Dirty::new();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let dirty = &dirty;
                scope.spawn(move || (0..4096).for_each(|at| dirty.set(at * 4 + thread)));
            }
        });
        assert_eq!((all(&dirty).len(), dirty.pages()), (4 * 4096, 4 * 4096));
    }
}
