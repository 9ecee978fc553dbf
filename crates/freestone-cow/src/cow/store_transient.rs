//! A store without a record on disk: chunks are handed out one after the other, and lost with the
//! process.

use crossbeam_utils::CachePadded;

use super::Usage;
use super::format::Layout;
use super::status::SECTOR_BYTES;
use super::store_answers::NoPlace;
use freestone_core::sync::{AtomicU32, AtomicU64, Ordering};

/// A store without metadata (`store=N`). Without a lock: places have no order that anything depends
/// on.
pub struct Transient {
    layout: Layout,
    /// The first chunk that was never handed out. On a cache line of its own: every request reads
    /// what lies beside it.
    next_free: CachePadded<AtomicU64>,
    lost: AtomicU32,
}

impl Transient {
    pub fn new(layout: Layout) -> Self {
        Self { layout, next_free: CachePadded::new(AtomicU64::new(0)), lost: AtomicU32::new(0) }
    }

    pub fn is_valid(&self) -> bool {
        self.lost.load(Ordering::SeqCst) == 0
    }

    /// The snapshot is lost.
    pub fn lose(&self) {
        self.lost.store(1, Ordering::SeqCst);
    }

    /// Hands out a chunk of a device of `size` bytes.
    pub fn allocate(&self, size: u64) -> Result<u64, NoPlace> {
        let chunks = self.layout.chunks(size);
        let next = |free: u64| (free < chunks).then_some(free + 1);
        if !self.is_valid() {
            return Err(NoPlace::Invalid);
        }
        // Relaxed: it only has to be another chunk each time.
        self.next_free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_err(|_| NoPlace::Full)
    }

    pub fn usage(&self, size: u64) -> Usage {
        let sectors = self.layout.chunk() / SECTOR_BYTES;
        // Relaxed: a statistic.
        let allocated = self.next_free.load(Ordering::Relaxed);
        Usage { allocated: allocated * sectors, total: size / SECTOR_BYTES, metadata: 0 }
    }
}
