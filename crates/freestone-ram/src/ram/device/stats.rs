//! Statistics of a RAM disk, with the kernel's columns and meaning.

use super::{Inner, Ram};
use crate::ram::memory::groups::Groups;
use crate::ram::memory::layer::stored;
use crate::ram::memory::pages::Pages;
use crate::ram::memory::shared::SharedObjects;
use freestone_core::PAGE_BYTES;
use freestone_core::sync::Ordering;

/// The nine columns of the kernel's `mm_stat`, in the kernel's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MmStat {
    /// Uncompressed bytes of all stored pages, including same-filled pages; holes do not count.
    pub orig_data_size: u64,
    /// Bytes of all stored objects in memory. A huge page counts as 4096 bytes, a page that repeats
    /// a 32-bit pattern as 0, and one that repeats a 64-bit pattern as 8. A page that shares its object
    /// counts with the whole object, at most 4095 bytes.
    pub compr_data_size: u64,
    /// Bytes of the pool's pages; if several devices share the pool, the bytes charged to this
    /// device. As in the kernel, tables and metadata do not count: see [`MemoryOverhead`].
    pub mem_used_total: u64,
    /// Limit of `mem_used_total` in bytes: the device's own limit if it has one, else that of its
    /// family. 0 means no limit.
    pub mem_limit: u64,
    /// Maximum of `mem_used_total` so far in bytes, including the demand of refused writes. Equals
    /// `mem_used_total` if several devices share the pool.
    pub mem_used_max: u64,
    /// Number of pages that repeat one pattern of 32 or 64 bits.
    pub same_pages: u64,
    /// Number of the family's pool pages that compaction returned to the system.
    pub pages_compacted: u64,
    /// Number of pages stored uncompressed now.
    pub huge_pages: u64,
    /// Number of times that a page was stored uncompressed.
    pub huge_pages_since: u64,
}

/// The four columns of the kernel's `io_stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IoStat {
    /// Number of failed reads.
    pub failed_reads: u64,
    /// Number of failed writes.
    pub failed_writes: u64,
    /// Number of requests that were out of range or misaligned. (The kernel prints 0, as its block
    /// layer checks them.)
    pub invalid_io: u64,
    /// Number of pages freed by discard and write zeroes.
    pub notify_free: u64,
}

/// The two columns of the kernel's `debug_stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DebugStat {
    /// Number of times a write waited at the memory limit for an eviction. (In the kernel until
    /// 6.14: waits for a memory allocation.)
    pub writestall: u64,
    /// Number of times a discard or write zeroes waited for a page in flight from the backing
    /// device. (In the kernel: number of pages not freed because the slot was locked.)
    pub miss_free: u64,
}

/// Memory that a family (devices that share a memory pool) uses beyond its stored objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryOverhead {
    /// Bytes of the slot tables: leaves and directory nodes.
    pub leaves_bytes: u64,
    /// Bytes of the pool's back-references, from objects to their slots.
    pub backrefs_bytes: u64,
    /// Bytes of the pool's pages minus those of stored objects: rounding, free objects, ends of
    /// spans.
    pub pool_slack_bytes: u64,
    /// Bytes of span descriptors, of pool-wide arrays, and of the fingerprints of pages.
    pub metadata_bytes: u64,
    /// Bytes of the compression streams and of the readers of groups, of all CPUs. Families with the same algorithm and
    /// parameters share streams.
    pub streams_bytes: u64,
}

/// Statistics of the pages that a fork or snapshot stores itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OverStat {
    /// Uncompressed bytes of the device's own pages.
    pub own_bytes: u64,
    /// Bytes of family memory charged to the device.
    pub charged: u64,
    /// The device's own memory limit: maximum of `charged` in bytes; 0 means no limit.
    pub mem_limit: u64,
    /// Bytes of family memory guaranteed to the device.
    pub mem_min: u64,
    /// Number of pages whose objects moved to snapshots of this device, without a copy.
    pub handed_over: u64,
}

/// Indices into [`Inner::counters`].
pub(in crate::ram) mod counter {
    pub const FAILED_READS: usize = 0;
    pub const FAILED_WRITES: usize = 1;
    pub const INVALID_IO: usize = 2;
    pub const NOTIFY_FREE: usize = 3;
    pub const WRITESTALL: usize = 4;
    pub const MISS_FREE: usize = 5;
    pub const COUNT: usize = 6;
}

impl Ram {
    /// Returns the statistics of the kernel's `mm_stat`.
    pub fn mm_stat(&self) -> MmStat {
        self.0.mm_stat()
    }

    /// Returns the statistics of the kernel's `io_stat`.
    pub fn io_stat(&self) -> IoStat {
        self.0.io_stat()
    }

    /// Returns the statistics of the kernel's `debug_stat`.
    pub fn debug_stat(&self) -> DebugStat {
        self.0.debug_stat()
    }

    /// Returns statistics of the pages that a fork or snapshot stores itself, and of those that
    /// moved to snapshots of the device.
    pub fn over_stat(&self) -> OverStat {
        self.0.over_stat()
    }

    /// Returns the number of requests of this device that wait for free space now.
    pub fn waiting_requests(&self) -> u64 {
        self.0.limits.space.waiting_requests()
    }

    /// Returns the memory that the family uses beyond its stored objects, such as slot tables and
    /// compression streams.
    pub fn memory_overhead(&self) -> MemoryOverhead {
        memory(&self.0.pages)
    }
}

impl Inner {
    pub(in crate::ram) fn mm_stat(&self) -> MmStat {
        let (layer, pages) = (self.layer(), &self.pages);
        // A device alone in its family owns the whole pool; otherwise report the bytes charged to
        // it.
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

    pub(in crate::ram) fn io_stat(&self) -> IoStat {
        let get = |counter| self.counters.get(counter);
        IoStat {
            failed_reads: get(counter::FAILED_READS),
            failed_writes: get(counter::FAILED_WRITES),
            invalid_io: get(counter::INVALID_IO),
            notify_free: get(counter::NOTIFY_FREE),
        }
    }

    fn debug_stat(&self) -> DebugStat {
        let get = |counter| self.counters.get(counter);
        DebugStat { writestall: get(counter::WRITESTALL), miss_free: get(counter::MISS_FREE) }
    }

    fn over_stat(&self) -> OverStat {
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

/// Returns the memory that the family of `pages` uses beyond its stored objects.
fn memory(pages: &Pages) -> MemoryOverhead {
    let charged: u64 = pages.layers.all().iter().map(|layer| layer.get(stored::COMPRESSED_BYTES)).sum();
    let shared = pages.shared().map(SharedObjects::sizes).unwrap_or_default();
    let stored = charged.saturating_sub(shared.saved_stored);
    MemoryOverhead {
        leaves_bytes: pages.common.nodes.bytes(),
        backrefs_bytes: pages.pool.backrefs_bytes(),
        pool_slack_bytes: (pages.pool.pages() * PAGE_BYTES as u64).saturating_sub(stored),
        metadata_bytes: pages.pool.metadata_bytes()
            + shared.fingerprint_bytes
            + pages.store.as_ref().map_or(0, |store| store.copies_bytes()),
        streams_bytes: pages.codecs.bytes() + pages.groups().map_or(0, Groups::reader_bytes),
    }
}
