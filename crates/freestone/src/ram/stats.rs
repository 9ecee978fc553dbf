//! The RAM disk's numbers, with the kernel's columns and meaning.

use super::Inner;
use crate::PAGE_BYTES;
use crate::slot::{Kind, Word};

/// `mm_stat`: the nine columns of the kernel's file, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MmStat {
    /// Bytes of pages that hold something, uncompressed; same-filled pages count.
    pub orig_data_size: u64,
    /// Bytes of all objects as they are stored; a huge page counts whole, a same-filled one not at all (an 8-byte
    /// pattern counts 8).
    pub compr_data_size: u64,
    /// Bytes of the pool's pages. As in the kernel, tables and descriptions are not in it: see [`Memory`].
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

/// Counters of [`Inner::counters`], by index.
pub(super) mod counter {
    pub const PAGES_STORED: usize = 0;
    pub const COMPRESSED_BYTES: usize = 1;
    pub const SAME_PAGES: usize = 2;
    pub const HUGE_PAGES: usize = 3;
    pub const HUGE_PAGES_SINCE: usize = 4;
    pub const FAILED_READS: usize = 5;
    pub const FAILED_WRITES: usize = 6;
    pub const INVALID_IO: usize = 7;
    pub const NOTIFY_FREE: usize = 8;
    pub const PAGES_COMPACTED: usize = 9;
    pub const COUNT: usize = 10;
}

impl Inner {
    /// Counts that a slot went from `old` to `new`.
    #[inline]
    pub(super) fn account(&self, old: Word, new: Word) {
        let delta = |f: fn(Word) -> bool| i64::from(f(new)) - i64::from(f(old));
        let add = |counter, delta| {
            if delta != 0 {
                self.counters.add(counter, delta);
            }
        };
        add(counter::PAGES_STORED, delta(|w| w != Word::EMPTY));
        add(counter::COMPRESSED_BYTES, new.stored_bytes() as i64 - old.stored_bytes() as i64);
        add(counter::SAME_PAGES, delta(|w| matches!(w.kind(), Kind::Same | Kind::Pattern)));
        add(counter::HUGE_PAGES, delta(|w| w.kind() == Kind::Huge));
        add(counter::HUGE_PAGES_SINCE, i64::from(new.kind() == Kind::Huge));
    }

    /// Counts that pages left memory which had so many bytes; they are still stored.
    pub(super) fn account_spilled(&self, bytes: u64, huge: u64) {
        self.counters.add(counter::COMPRESSED_BYTES, -(bytes as i64));
        self.counters.add(counter::HUGE_PAGES, -(huge as i64));
    }

    /// Counts that a spilled page is in memory again; it was counted as stored all the time.
    pub(super) fn account_back(&self, word: Word) {
        self.counters.add(counter::COMPRESSED_BYTES, word.stored_bytes() as i64);
        self.counters.add(counter::SAME_PAGES, i64::from(matches!(word.kind(), Kind::Same | Kind::Pattern)));
        self.counters.add(counter::HUGE_PAGES, i64::from(word.kind() == Kind::Huge));
    }

    /// Bytes of all objects in memory.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.counters.get(counter::COMPRESSED_BYTES)
    }

    pub(super) fn mm_stat(&self) -> MmStat {
        let get = |counter| self.counters.get(counter);
        MmStat {
            orig_data_size: get(counter::PAGES_STORED) * PAGE_BYTES as u64,
            compr_data_size: get(counter::COMPRESSED_BYTES),
            mem_used_total: self.pool.pages() * PAGE_BYTES as u64,
            mem_limit: self.mem_limit(),
            mem_used_max: self.pool.pages_max() * PAGE_BYTES as u64,
            same_pages: get(counter::SAME_PAGES),
            pages_compacted: get(counter::PAGES_COMPACTED),
            huge_pages: get(counter::HUGE_PAGES),
            huge_pages_since: get(counter::HUGE_PAGES_SINCE),
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

    pub(super) fn memory(&self) -> Memory {
        let stored = self.counters.get(counter::COMPRESSED_BYTES);
        Memory {
            leaves_bytes: self.common.nodes.bytes(),
            backrefs_bytes: self.pool.backrefs_bytes(),
            pool_slack_bytes: (self.pool.pages() * PAGE_BYTES as u64).saturating_sub(stored),
            metadata_bytes: self.pool.metadata_bytes(),
            streams_bytes: self.codecs.bytes(),
        }
    }
}
