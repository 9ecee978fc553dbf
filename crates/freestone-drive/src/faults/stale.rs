//! Content that writes replaced, kept so that stale reads can return it.
//!
//! Used only by devices with a `stale` rule. Lock order: `kept` is the innermost lock, held while
//! the blocks of one request are copied.

use std::collections::{HashMap, VecDeque};

use super::rules::Range;
use freestone_core::sync::Mutex;

/// Maximum old content kept per device, in bytes. A new block beyond it replaces the oldest one.
pub const OLD_BYTES_MAX: usize = 64 << 20;
/// Maximum old content kept per request, in bytes from its start. Limits the memory that requests
/// in flight use.
pub const OLD_REQUEST_BYTES_MAX: u64 = 4 << 20;

/// Old content of a device, per logical block.
pub struct OldContent {
    ranges: Vec<Range>,
    block: u64,
    blocks_max: usize,
    kept: Mutex<KeptBlocks>,
}

#[derive(Default)]
struct KeptBlocks {
    blocks: HashMap<u64, Box<[u8]>>,
    /// Numbers of the kept blocks in the order of their first insertion. Removed blocks may still
    /// be in it.
    order: VecDeque<u64>,
}

impl OldContent {
    /// Creates an empty store of old content for stale reads in `ranges`. `block` is the logical
    /// block in bytes.
    pub fn new(ranges: Vec<Range>, block: u32) -> Self {
        Self::with(ranges, block, OLD_BYTES_MAX)
    }

    fn with(ranges: Vec<Range>, block: u32, bytes_max: usize) -> Self {
        let blocks_max = bytes_max / block as usize;
        Self { ranges, block: u64::from(block), blocks_max, kept: Mutex::default() }
    }

    /// Returns true if a `stale` rule covers a part of this byte range, so its old content must be
    /// kept.
    pub fn wants(&self, offset: u64, len: u64) -> bool {
        self.ranges.iter().any(|range| range.overlaps(offset, len))
    }

    /// Keeps `data`, the old content at `offset`. The old content of the remaining bytes up to
    /// `len` is unknown, so content kept earlier for these bytes is dropped.
    pub fn keep(&self, offset: u64, data: &[u8], len: u64) {
        let block = self.block as usize;
        let first = offset / self.block;
        let kept = &mut *self.kept.lock();
        for (index, old) in (first..).zip(data.chunks_exact(block)) {
            if !self.wants(index * self.block, self.block) {
                continue;
            }
            if let Some(there) = kept.blocks.get_mut(&index) {
                there.copy_from_slice(old);
                continue;
            }
            while kept.order.len() >= self.blocks_max {
                let Some(oldest) = kept.order.pop_front() else { break };
                kept.blocks.remove(&oldest);
            }
            kept.blocks.insert(index, old.into());
            kept.order.push_back(index);
        }
        let unknown = first + data.len() as u64 / self.block..(offset + len) / self.block;
        if unknown.end - unknown.start > kept.blocks.len() as u64 {
            kept.blocks.retain(|index, _| !unknown.contains(index));
        } else {
            for index in unknown {
                kept.blocks.remove(&index);
            }
        }
        if kept.order.len() > 2 * kept.blocks.len() {
            kept.order.retain(|index| kept.blocks.contains_key(index));
        }
    }

    /// Copies kept old content over the data read at `offset`. Returns true if any block of the
    /// range was kept.
    pub fn recall(&self, offset: u64, data: &mut [u8]) -> bool {
        let kept = self.kept.lock();
        let mut any = false;
        for (index, out) in (offset / self.block..).zip(data.chunks_exact_mut(self.block as usize)) {
            if let Some(old) = kept.blocks.get(&index) {
                out.copy_from_slice(old);
                any = true;
            }
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old(blocks: usize) -> OldContent {
        OldContent::with(vec![Range { offset: 512, len: 1 << 20 }], 512, blocks * 512)
    }

    fn at(old: &OldContent, block: u64) -> Option<u8> {
        let mut data = [0xff; 512];
        old.recall(block * 512, &mut data).then_some(data[0])
    }

    #[test]
    fn recall_returns_last_overwritten_content() {
        let old = old(100);
        old.keep(0, &[1; 1536], 1536);
        old.keep(1024, &[2; 512], 512);
        assert_eq!(
            [0, 1, 2, 3].map(|block| at(&old, block)),
            [None, Some(1), Some(2), None],
            "block 0 is outside of the range"
        );
    }

    #[test]
    fn kept_blocks_are_limited_and_oldest_dropped() {
        let old = old(10);
        for block in 1..=1000 {
            old.keep(block * 512, &[block as u8; 512], 512);
            // Keeping the same block again must not evict another block.
            old.keep(block * 512, &[block as u8; 512], 512);
            let kept = old.kept.lock();
            assert!(kept.blocks.len() <= 10 && kept.order.len() <= 10);
        }
        for block in 1..=1000 {
            assert_eq!(at(&old, block), (block > 990).then_some(block as u8), "block {block}");
        }
    }

    #[test]
    fn unknown_content_is_dropped() {
        let old = old(100);
        old.keep(512, &[1; 512 * 8], 512 * 8);
        old.keep(1024, &[2; 512], 2048);
        assert_eq!(
            (1..=8).map(|block| at(&old, block)).collect::<Vec<_>>(),
            [Some(1), Some(2), None, None, None, Some(1), Some(1), Some(1)]
        );
        // A huge unknown range must not be walked block by block.
        old.keep(0, &[], 1 << 60);
        assert!((0..20).all(|block| at(&old, block).is_none()));
        assert_eq!(old.kept.lock().order.len(), 0);
        for round in 0..1000 {
            old.keep(512, &[1; 512], 512);
            old.keep(512, &[], 512);
            assert!(old.kept.lock().order.len() <= 4, "round {round}");
        }
    }
}
