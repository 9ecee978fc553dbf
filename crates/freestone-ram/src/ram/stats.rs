//! Statistics of a RAM disk, with the kernel's columns and meaning.

use super::Inner;
use super::layer::stored;
use super::pages::Pages;
use freestone_core::PAGE_BYTES;
use freestone_core::sync::Ordering;

/// The nine columns of the kernel's `mm_stat`, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MmStat {
    /// Uncompressed bytes of all pages that are not holes, including same-filled pages.
    pub orig_data_size: u64,
    /// Bytes of all objects as stored. A huge page counts in full, a same-filled page 0 (an 8-byte
    /// pattern counts 8).
    pub compr_data_size: u64,
    /// Bytes of the pool's pages; if several devices share the pool, the bytes charged to this one.
    /// As in the kernel, without tables and metadata: see [`Memory`].
    pub mem_used_total: u64,
    /// Limit of `mem_used_total` in bytes; 0 means no limit.
    pub mem_limit: u64,
    /// Maximum of `mem_used_total` so far, including the demand of refused writes.
    pub mem_used_max: u64,
    /// Pages that repeat one pattern.
    pub same_pages: u64,
    /// Pages that compaction returned to the system.
    pub pages_compacted: u64,
    /// Pages stored uncompressed now.
    pub huge_pages: u64,
    /// Pages ever stored uncompressed.
    pub huge_pages_since: u64,
}

/// The four columns of the kernel's `io_stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IoStat {
    /// Failed reads.
    pub failed_reads: u64,
    /// Failed writes.
    pub failed_writes: u64,
    /// Requests out of range or misaligned. (The kernel prints 0, as its block layer checks them.)
    pub invalid_io: u64,
    /// Pages freed by discard and write zeroes.
    pub notify_free: u64,
}

/// The two columns of the kernel's `debug_stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DebugStat {
    /// Number of times a write waited at the limit for an eviction. (In the kernel until 6.14:
    /// waits for a memory allocation.)
    pub writestall: u64,
    /// Number of times a discard waited for a page in flight. (In the kernel: pages not freed
    /// because the slot was locked.)
    pub miss_free: u64,
}

/// Memory used beyond the stored objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Slot table: leaves and directory nodes.
    pub leaves_bytes: u64,
    /// Back-references of the pool.
    pub backrefs_bytes: u64,
    /// Pool pages minus stored bytes: rounding, free objects, ends of spans.
    pub pool_slack_bytes: u64,
    /// Span descriptors and pool-wide arrays.
    pub metadata_bytes: u64,
    /// Compression streams of all CPUs; shared by disks with the same algorithm and parameters.
    pub streams_bytes: u64,
}

/// What a fork or snapshot stores itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OverStat {
    /// Uncompressed bytes of the device's own pages.
    pub own_bytes: u64,
    /// Bytes of family memory charged to the device.
    pub charged: u64,
    /// Cap on `charged`; 0 means no cap.
    pub mem_limit: u64,
    /// Guaranteed bytes.
    pub mem_min: u64,
    /// Pages whose objects moved to snapshots of this device, without a copy.
    pub handed_over: u64,
}

/// Indices into [`Inner::counters`].
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
        // A device alone in its family owns the whole pool; otherwise use its charge.
        let alone = pages.layers.is_only_active(layer.id());
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
            mem_min: self.limits.guarantee(),
            handed_over: layer.get(stored::HANDED_OVER),
        }
    }
}

/// Returns the memory that a family uses beyond its stored objects.
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
