//! Page table: directories over leaves of slots, in three levels.
//!
//! ```text
//! root (in the table) --> directory node (512 leaves, 1 GiB) --> leaf (512 slots, 2 MiB) --> slot (one page)
//! ```
//!
//! An entry is 0 if it is empty, otherwise the number of its node plus one. An entry changes from 0 to a node
//! once, by compare-and-swap, and stays until the table is dropped, so lookups take no lock. Lookups never
//! allocate nodes: a device of any size that was only read uses only its root.
//!
//! A bit of a leaf's entry marks a leaf created for pages that are stored in the slots themselves
//! (same-filled), without pool objects. Leaves of this kind count against memory limits. The bit is set once.

use super::lock::{SlotGuard, lock};
use super::nodes::{FANOUT_BITS, Nodes};
use super::root::{Record, Root, Roots};
use super::word::Word;
use crate::device::Result;
use crate::kill_points::{self, KillPoint};
use crate::parking::Parking;
use crate::sync::{Arc, AtomicU64, Ordering};
use crate::word_lock::Word as _;

/// Number of slots in a leaf.
pub const LEAF_SLOTS: u64 = 1 << FANOUT_BITS;
const ROOT_SLOTS: u64 = 1 << (2 * FANOUT_BITS);
const LEAF_MASK: u64 = LEAF_SLOTS - 1;

/// Maximum number of slots: 2^36 pages of 4 KiB are 256 TiB.
#[cfg(not(loom))]
pub const MAX_SLOTS: u64 = 1 << 36;
/// Maximum number of slots in loom models.
#[cfg(loom)]
pub const MAX_SLOTS: u64 = 8;
/// Bit of a leaf's entry that marks a leaf of same-filled pages. The bit is above the bits of a node's
/// number.
pub(super) const SAME_FILLED_LEAF: u64 = 1 << 63;
pub(super) const ROOT_ENTRIES: usize = (MAX_SLOTS / ROOT_SLOTS) as usize;

/// State shared by the page tables of a family (a base and its forks): nodes and waiting threads.
pub struct Common {
    /// Allocator of directory and leaf nodes.
    pub nodes: Nodes,
    /// Roots, if another process may adopt the tables.
    pub(super) roots: Option<Roots>,
    /// Threads that wait for slot locks.
    pub parking: Parking,
    /// Number of leaves that were [created for same-filled pages](Table::same_filled_leaf), or contain only such
    /// pages.
    pub same_filled_leaves: Arc<AtomicU64>,
    /// 1 while tables that are dropped stay in their files, because their adoption can still fail; otherwise 0.
    pub(super) leaves_tables: AtomicU64,
}

impl Common {
    /// Creates the state for a new family.
    ///
    /// # Errors
    /// Errors of `memfd_create(2)`.
    pub fn new() -> rustix::io::Result<Self> {
        Ok(Self::with(Nodes::new()?, None))
    }

    pub(super) fn with(nodes: Nodes, roots: Option<Roots>) -> Self {
        let same_filled_leaves = Arc::new(AtomicU64::new(0));
        Self {
            nodes,
            roots,
            parking: Parking::default(),
            same_filled_leaves,
            leaves_tables: AtomicU64::new(0),
        }
    }
}

/// Page table of one device.
pub struct Table {
    id: u32,
    pub(super) root: Root,
    /// Index from which on all root entries are empty. Walks stop at this index.
    root_end: AtomicU64,
    pub(super) common: Arc<Common>,
}

/// The slots of a leaf, for one page each.
#[derive(Clone, Copy)]
pub struct Leaf<'a> {
    words: &'a [AtomicU64],
    parking: &'a Parking,
}

impl Table {
    /// Creates an empty table. `id` identifies the table in the pool's back-references and must be unique in
    /// the family.
    pub fn new(id: u32, common: Arc<Common>) -> Result<Self> {
        let root = match &common.roots {
            Some(roots) => roots.alloc(ROOT_ENTRIES)?,
            None => Root::new(ROOT_ENTRIES)?,
        };
        Ok(Self::with(id, root, 0, common))
    }

    pub(super) fn with(id: u32, root: Root, end: u64, common: Arc<Common>) -> Self {
        Self { id, root, root_end: AtomicU64::new(end), common }
    }

    /// Returns the record of the table for a process that adopts it; `None` if no process can.
    pub fn record(&self) -> Option<&Record> {
        Some(self.common.roots.as_ref()?.record(self.root.unit()?))
    }

    /// Returns the id given to [`new`](Self::new).
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Returns the leaf that contains a slot, or `None` if the leaf does not exist.
    #[inline]
    pub fn leaf(&self, slot: u64) -> Option<Leaf<'_>> {
        crate::trail::step!();
        let directory = self.existing(&self.root[(slot >> (2 * FANOUT_BITS)) as usize])?;
        let words = self.existing(&directory[(slot >> FANOUT_BITS & LEAF_MASK) as usize])?;
        Some(Leaf { words, parking: &self.common.parking })
    }

    /// Returns the leaf that contains a slot, allocating the leaf if necessary.
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
        // Release: pairs with the Acquire in `end`. The index is raised first, so that a walk never misses an
        // existing entry.
        self.root_end.fetch_max(root + 1, Ordering::Release);
        let directory = self.make(&self.root[root as usize])?;
        let words = self.make(&directory[(slot >> FANOUT_BITS & LEAF_MASK) as usize])?;
        Ok(Leaf { words, parking: &self.common.parking })
    }

    /// Returns the leaf of a slot like [`leaf_or_new`](Self::leaf_or_new). If this call allocates the leaf,
    /// it counts as a leaf of same-filled pages.
    pub fn same_filled_leaf(&self, slot: u64) -> Result<Leaf<'_>> {
        if let Some(leaf) = self.leaf(slot) {
            return Ok(leaf);
        }
        let leaf = self.make_leaf(slot)?;
        self.count_as_same_filled(slot);
        Ok(leaf)
    }

    /// Counts the existing leaf of a slot as a leaf of same-filled pages until the table is dropped.
    pub fn count_as_same_filled(&self, slot: u64) {
        let Some(directory) = self.existing(&self.root[(slot >> (2 * FANOUT_BITS)) as usize]) else {
            return;
        };
        let entry = &directory[(slot >> FANOUT_BITS & LEAF_MASK) as usize];
        let set_bit =
            |node: u64| (node != 0 && node & SAME_FILLED_LEAF == 0).then_some(node | SAME_FILLED_LEAF);
        // Release: a thread that loads the changed entry must still see the node that `make` released.
        // Relaxed on failure: the node is not accessed.
        if entry.fetch_update(Ordering::Release, Ordering::Relaxed, set_bit).is_ok() {
            // Relaxed: a counter, which orders no other data.
            self.common.same_filled_leaves.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn existing(&self, entry: &AtomicU64) -> Option<&[AtomicU64]> {
        // Acquire: pairs with the Release in `make`, which stored the node.
        let node = entry.load(Ordering::Acquire);
        (node != 0).then(|| self.common.nodes.get((node - 1) as u32).as_slice())
    }

    fn make(&self, entry: &AtomicU64) -> Result<&[AtomicU64]> {
        if let Some(words) = self.existing(entry) {
            return Ok(words);
        }
        let node = self.common.nodes.alloc()?;
        // Release: pairs with the Acquire in `existing`. Acquire on failure: pairs with the Release of the
        // thread that stored its node first.
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

    /// Returns the first slot in `[from, end)` whose leaf exists, or `None`. Skips absent leaves and
    /// directories as a whole.
    pub fn next_present(&self, from: u64, end: u64) -> Option<u64> {
        let mut slot = from;
        let end = end.min(self.end());
        while slot < end {
            match self.existing(&self.root[(slot >> (2 * FANOUT_BITS)) as usize]) {
                None => slot = (slot | (ROOT_SLOTS - 1)) + 1,
                Some(directory) => {
                    // Acquire: pairs with the Release in `make`, which stored the node.
                    if directory[(slot >> FANOUT_BITS & LEAF_MASK) as usize].load(Ordering::Acquire) != 0 {
                        return Some(slot);
                    }
                    slot = (slot | LEAF_MASK) + 1;
                }
            }
        }
        None
    }

    /// Returns the number of leaves of a table whose leaves were allocated in order.
    pub fn leaves_in_order(&self) -> u64 {
        let is_present = |leaf: &u64| self.next_present(leaf * LEAF_SLOTS, (leaf + 1) * LEAF_SLOTS).is_some();
        (0..MAX_SLOTS / LEAF_SLOTS).take_while(is_present).count() as u64
    }

    /// Returns the exclusive end of the slots that can have leaves.
    fn end(&self) -> u64 {
        // Acquire: pairs with the Release in make_leaf.
        self.root_end.load(Ordering::Acquire) << (2 * FANOUT_BITS)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // Relaxed: the thread that adopts the tables drops them, or has handed them on.
        if self.common.leaves_tables.load(Ordering::Relaxed) != 0 {
            return;
        }
        let (mut nodes, mut same_filled) = (Vec::new(), 0);
        let end = (self.end() >> (2 * FANOUT_BITS)) as usize;
        for entry in &self.root[..end] {
            if let Some(directory) = self.existing(entry) {
                // Acquire: pairs with the Release in `make`, which stored the node.
                let leaves = directory.iter().map(|leaf| leaf.load(Ordering::Acquire));
                for leaf in leaves.filter(|&leaf| leaf != 0) {
                    same_filled += u64::from(leaf & SAME_FILLED_LEAF != 0);
                    nodes.push((leaf - 1) as u32);
                }
                // Acquire: pairs with the Release in `make`, which stored the node.
                nodes.push((entry.load(Ordering::Acquire) - 1) as u32);
            }
        }
        self.common.nodes.free(nodes);
        kill_points::pass(KillPoint::NodesFreed);
        if let (Some(roots), Some(unit)) = (&self.common.roots, self.root.unit()) {
            roots.free(unit);
        }
        // Relaxed: a counter, which orders no other data.
        self.common.same_filled_leaves.fetch_sub(same_filled, Ordering::Relaxed);
    }
}

impl<'a> Leaf<'a> {
    /// Locks a slot of this leaf.
    #[inline]
    pub fn lock(&self, slot: u64) -> SlotGuard<'a> {
        lock(&self.words[(slot & LEAF_MASK) as usize], self.parking)
    }

    /// Returns the word that a slot had at some time during the call, without locking the slot. For reports
    /// and prefetching; the word's object must not be accessed.
    #[inline]
    pub fn peek(&self, slot: u64) -> Word {
        // Relaxed: the value is not used to access an object.
        Word::from_bits(self.words[(slot & LEAF_MASK) as usize].load(Ordering::Relaxed))
    }
}
