//! The slot table: a directory of nodes over leaves of slots, like a page table of three levels.
//!
//! ```text
//! root (in the table) --> directory node (512 leaves, 1 GiB) --> leaf (512 slots, 2 MiB) --> slot (one page)
//! ```
//!
//! An entry is 0 where nothing lies below, else the node's number plus one. Entries go from 0 to a
//! number once, by compare-and-swap, and stay until the table is taken down, so a lookup takes no
//! lock. Looking never creates: a device of any size that was only read costs its root.
//!
//! A bit of a leaf's entry says that the leaf counts as one of marks: of words that are all there is
//! of their pages. It is set once.

use super::lock::{SlotGuard, lock};
use super::nodes::{FANOUT_BITS, Nodes};
use super::root::Root;
use super::word::Word;
use crate::device::Result;
use crate::parking::Parking;
use crate::sync::{Arc, AtomicU64, Ordering};
use crate::word_lock::Word as _;

/// Slots in a leaf.
pub const LEAF_SLOTS: u64 = 1 << FANOUT_BITS;
const ROOT_SLOTS: u64 = 1 << (2 * FANOUT_BITS);
const LOW: u64 = LEAF_SLOTS - 1;

/// Largest number of slots: 2^36 pages of 4 KiB are 256 TiB.
#[cfg(not(loom))]
pub const MAX_SLOTS: u64 = 1 << 36;
/// As many as a model needs.
#[cfg(loom)]
pub const MAX_SLOTS: u64 = 8;
/// Bit of a leaf's entry: the leaf counts as one of marks. Above the bits of a node's number.
const OF_MARKS: u64 = 1 << 63;
const ROOT_ENTRIES: usize = (MAX_SLOTS / ROOT_SLOTS) as usize;

/// What the tables of one family share: their nodes and their waiting threads.
pub struct Common {
    /// Directories and leaves.
    pub nodes: Nodes,
    /// Who waits for a slot.
    pub parking: Parking,
    /// Leaves that were [made for marks](Table::leaf_of_marks), or are full of them.
    pub leaves_of_marks: Arc<AtomicU64>,
}

impl Common {
    /// Nothing in use.
    ///
    /// # Errors
    /// Those of `memfd_create(2)`.
    pub fn new() -> rustix::io::Result<Self> {
        let leaves_of_marks = Arc::new(AtomicU64::new(0));
        Ok(Self { nodes: Nodes::new()?, parking: Parking::default(), leaves_of_marks })
    }
}

/// The slots of one device.
pub struct Table {
    id: u32,
    root: Root,
    /// Root entries at and above this index were never made: walks stop here.
    root_end: AtomicU64,
    common: Arc<Common>,
}

/// The slots of one leaf.
#[derive(Clone, Copy)]
pub struct Leaf<'a> {
    words: &'a [AtomicU64],
    parking: &'a Parking,
}

impl Table {
    /// An empty table. `id` names it in the pool's back-references and is not used twice in a
    /// family.
    pub fn new(id: u32, common: Arc<Common>) -> Result<Self> {
        Ok(Self { id, root: Root::new(ROOT_ENTRIES)?, root_end: AtomicU64::new(0), common })
    }

    /// The name given to [`new`](Self::new).
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The leaf that holds `slot`, if there is one.
    #[inline]
    pub fn leaf(&self, slot: u64) -> Option<Leaf<'_>> {
        let directory = self.existing(&self.root[(slot >> (2 * FANOUT_BITS)) as usize])?;
        let words = self.existing(&directory[(slot >> FANOUT_BITS & LOW) as usize])?;
        Some(Leaf { words, parking: &self.common.parking })
    }

    /// The leaf that holds `slot`; made where it is absent.
    #[inline]
    pub fn leaf_or_new(&self, slot: u64) -> Result<Leaf<'_>> {
        match self.leaf(slot) {
            Some(leaf) => Ok(leaf),
            None => self.make_leaf(slot),
        }
    }

    #[cold]
    fn make_leaf(&self, slot: u64) -> Result<Leaf<'_>> {
        let root = slot >> (2 * FANOUT_BITS);
        // Release: pairs with the Acquire in `end`; raised first, so that a walk never misses an
        // entry that exists.
        self.root_end.fetch_max(root + 1, Ordering::Release);
        let directory = self.make(&self.root[root as usize])?;
        let words = self.make(&directory[(slot >> FANOUT_BITS & LOW) as usize])?;
        Ok(Leaf { words, parking: &self.common.parking })
    }

    /// As [`leaf_or_new`](Self::leaf_or_new), for a word that is all there is of its page: a leaf that
    /// is made counts as one of marks.
    pub fn leaf_of_marks(&self, slot: u64) -> Result<Leaf<'_>> {
        if let Some(leaf) = self.leaf(slot) {
            return Ok(leaf);
        }
        let leaf = self.make_leaf(slot)?;
        self.count_as_marks(slot);
        Ok(leaf)
    }

    /// Counts a leaf, if it exists, as one of marks until the table is taken down.
    pub fn count_as_marks(&self, slot: u64) {
        let Some(directory) = self.existing(&self.root[(slot >> (2 * FANOUT_BITS)) as usize]) else {
            return;
        };
        let entry = &directory[(slot >> FANOUT_BITS & LOW) as usize];
        let counts = |node: u64| (node != 0 && node & OF_MARKS == 0).then_some(node | OF_MARKS);
        // Release: who finds the node through this entry still needs what `make` released. Relaxed on
        // failure: the bit says nothing of the node.
        if entry.fetch_update(Ordering::Release, Ordering::Relaxed, counts).is_ok() {
            // Relaxed: the sum alone matters.
            self.common.leaves_of_marks.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn existing(&self, entry: &AtomicU64) -> Option<&[AtomicU64]> {
        // Acquire: pairs with the Release in `make`, which put the node there.
        let node = entry.load(Ordering::Acquire);
        (node != 0).then(|| self.common.nodes.get((node - 1) as u32).as_slice())
    }

    fn make(&self, entry: &AtomicU64) -> Result<&[AtomicU64]> {
        if let Some(words) = self.existing(entry) {
            return Ok(words);
        }
        let node = self.common.nodes.alloc()?;
        // Release: pairs with the Acquire in `existing`. Acquire on failure: pairs with the
        // winner's Release.
        let winner =
            match entry.compare_exchange(0, u64::from(node) + 1, Ordering::Release, Ordering::Acquire) {
                Ok(_) => node,
                Err(other) => {
                    self.common.nodes.free(vec![node]);
                    (other - 1) as u32
                }
            };
        Ok(self.common.nodes.get(winner))
    }

    /// The first slot at or after `from` and before `end` whose leaf exists, skipping what is
    /// absent in strides.
    pub fn next_present(&self, from: u64, end: u64) -> Option<u64> {
        let mut slot = from;
        let end = end.min(self.end());
        while slot < end {
            match self.existing(&self.root[(slot >> (2 * FANOUT_BITS)) as usize]) {
                None => slot = (slot | (ROOT_SLOTS - 1)) + 1,
                Some(directory) => {
                    // Acquire: as in `existing`.
                    if directory[(slot >> FANOUT_BITS & LOW) as usize].load(Ordering::Acquire) != 0 {
                        return Some(slot);
                    }
                    slot = (slot | LOW) + 1;
                }
            }
        }
        None
    }

    /// The first slot that no leaf can hold.
    fn end(&self) -> u64 {
        // Acquire: pairs with the Release in make_leaf.
        self.root_end.load(Ordering::Acquire) << (2 * FANOUT_BITS)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let (mut nodes, mut of_marks) = (Vec::new(), 0);
        let end = (self.end() >> (2 * FANOUT_BITS)) as usize;
        for entry in &self.root[..end] {
            if let Some(directory) = self.existing(entry) {
                // Acquire: as in `existing`.
                let leaves = directory.iter().map(|leaf| leaf.load(Ordering::Acquire));
                for leaf in leaves.filter(|&leaf| leaf != 0) {
                    of_marks += u64::from(leaf & OF_MARKS != 0);
                    nodes.push((leaf - 1) as u32);
                }
                // Acquire: as in `existing`.
                nodes.push((entry.load(Ordering::Acquire) - 1) as u32);
            }
        }
        self.common.nodes.free(nodes);
        // Relaxed: the sum alone matters.
        self.common.leaves_of_marks.fetch_sub(of_marks, Ordering::Relaxed);
    }
}

impl<'a> Leaf<'a> {
    /// Locks a slot of this leaf.
    #[inline]
    pub fn lock(&self, slot: u64) -> SlotGuard<'a> {
        lock(&self.words[(slot & LOW) as usize], self.parking)
    }

    /// What a slot held at some moment of the call, without its lock: to report, or to
    /// prefetch; never to touch what it points to.
    #[inline]
    pub fn peek(&self, slot: u64) -> Word {
        // Relaxed: the value is only looked at.
        Word::from_bits(self.words[(slot & LOW) as usize].load(Ordering::Relaxed))
    }
}
