//! The RAM disk's numbers, with the kernel's columns and meaning.

use super::Inner;
use super::layer::stored;
use super::pages::Pages;
use freestone_core::PAGE_BYTES;
use freestone_core::sync::Ordering;

/// `mm_stat`: the nine columns of the kernel's file, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MmStat {
    /// Bytes of pages that hold something, uncompressed; same-filled pages count.
    pub orig_data_size: u64,
    /// Bytes of all objects as they are stored; a huge page counts whole, a same-filled one not at
    /// all (an 8-byte pattern counts 8).
    pub compr_data_size: u64,
    /// Bytes of the pool's pages; where several devices share the pool, what this one's objects
    /// take of it. As in the kernel, tables and descriptions are not in it: see [`Memory`].
    pub mem_used_total: u64,
    /// Largest allowed `mem_used_total` in bytes; 0 is no limit.
    pub mem_limit: u64,
    /// Largest `mem_used_total` so far, or asked for by a write that the limit refused.
    pub mem_used_max: u64,
    /// Pages that repeat one pattern.
    pub same_pages: u64,
    /// Pages that compaction has returned to the system.
    pub pages_compacted: u64,
    /// Pages stored uncompressed now.
    pub huge_pages: u64,
    /// Pages ever stored uncompressed.
    pub huge_pages_since: u64,
}

/// `io_stat`: the four columns of the kernel's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IoStat {
    /// Pages that could not be read.
    pub failed_reads: u64,
    /// Pages that could not be written.
    pub failed_writes: u64,
    /// Requests out of range or misaligned. (The kernel prints 0 since its block layer checks.)
    pub invalid_io: u64,
    /// Pages freed by discard and write zeroes.
    pub notify_free: u64,
}

/// `debug_stat`: the two columns of the kernel's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DebugStat {
    /// How often a write had to wait at the limit until pages had left memory. (In the kernel: how
    /// often one had to wait for memory to be allocated, until 6.14.)
    pub writestall: u64,
    /// How often a discard met a page that was on its way from a disk, and had to wait for it. (In
    /// the kernel: how often a page was not freed because its slot was locked.)
    pub miss_free: u64,
}

/// What the device takes from the machine beside `mem_used_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Slot table: leaves and directory nodes.
    pub leaves_bytes: u64,
    /// The pool's back-references.
    pub backrefs_bytes: u64,
    /// Pool pages less stored bytes: rounding, free places, ends of spans.
    pub pool_slack_bytes: u64,
    /// Descriptions of spans and pool-wide arrays.
    pub metadata_bytes: u64,
    /// Compression streams of all CPUs; disks with the same algorithm and parameters share them.
    pub streams_bytes: u64,
}

/// What a fork or snapshot holds itself, and how it came there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OverStat {
    /// Bytes of pages that the device holds itself, uncompressed.
    pub own_bytes: u64,
    /// Bytes that its objects take of the family's memory.
    pub charged: u64,
    /// The cap on that; 0 is none.
    pub mem_limit: u64,
    /// What of it is guaranteed.
    pub mem_min: u64,
    /// Pages that went to snapshots of this device as they were, without a copy.
    pub handed_over: u64,
}

/// Counters of [`Inner::counters`], by index.
pub(super) mod counter {
    pub const FAILED_READS: usize = 0;
    pub const FAILED_WRITES: usize = 1;
    pub const INVALID_IO: usize = 2;
    pub const NOTIFY_FREE: usize = 3;
    pub const WRITESTALL: usize = 4;
    pub const MISS_FREE: usize = 5;
    pub const COUNT: usize = 6;
}

impl Inner {
    pub(super) fn mm_stat(&self) -> MmStat {
        let (layer, pages) = (self.layer(), &self.pages);
        // A device that is alone has all of the pool; several are charged each for its own.
        let alone = pages.layers.is_alone(layer.id());
        let (cap, charged) = (self.limits.cap(), layer.charged());
        MmStat {
            orig_data_size: layer.get(stored::PAGES) * PAGE_BYTES as u64,
            compr_data_size: layer.get(stored::COMPRESSED_BYTES),
            mem_used_total: if alone { pages.pool.pages() * PAGE_BYTES as u64 } else { charged },
            mem_limit: if cap == u64::MAX { pages.mem_limit() } else { cap },
            mem_used_max: if alone { pages.pool.pages_max() * PAGE_BYTES as u64 } else { charged },
            same_pages: layer.get(stored::SAME_PAGES),
            // Relaxed: a statistic.
            pages_compacted: pages.compacted.load(Ordering::Relaxed),
            huge_pages: layer.get(stored::HUGE_PAGES),
            huge_pages_since: layer.get(stored::HUGE_PAGES_SINCE),
        }
    }

    pub(super) fn io_stat(&self) -> IoStat {
        let get = |counter| self.counters.get(counter);
        IoStat {
            failed_reads: get(counter::FAILED_READS),
            failed_writes: get(counter::FAILED_WRITES),
            invalid_io: get(counter::INVALID_IO),
            notify_free: get(counter::NOTIFY_FREE),
        }
    }

    pub(super) fn debug_stat(&self) -> DebugStat {
        let get = |counter| self.counters.get(counter);
        DebugStat { writestall: get(counter::WRITESTALL), miss_free: get(counter::MISS_FREE) }
    }

    pub(super) fn over_stat(&self) -> OverStat {
        let layer = self.layer();
        let cap = self.limits.cap();
        OverStat {
            own_bytes: layer.get(stored::PAGES) * PAGE_BYTES as u64,
            charged: layer.charged(),
            mem_limit: if cap == u64::MAX { 0 } else { cap },
            mem_min: self.limits.least(),
            handed_over: layer.get(stored::HANDED_OVER),
        }
    }
}

/// What a family takes beside the pool.
pub(super) fn memory(pages: &Pages) -> Memory {
    let stored: u64 = pages.layers.all().iter().map(|layer| layer.get(stored::COMPRESSED_BYTES)).sum();
    Memory {
        leaves_bytes: pages.common.nodes.bytes(),
        backrefs_bytes: pages.pool.backrefs_bytes(),
        pool_slack_bytes: (pages.pool.pages() * PAGE_BYTES as u64).saturating_sub(stored),
        metadata_bytes: pages.pool.metadata_bytes(),
        streams_bytes: pages.codecs.bytes(),
    }
}
