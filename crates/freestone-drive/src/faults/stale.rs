//! What was there before: old content, kept for stale reads.
//!
//! Lock order: `kept` is innermost, held for copies of one request's blocks. Only devices with a
//! `stale` rule come here.

use std::collections::{HashMap, VecDeque};

use super::rules::Range;
use freestone_core::sync::Mutex;

/// Most old content that one device keeps, in bytes. Above it the block that has been kept longest
/// is dropped.
pub const OLD_BYTES_MAX: usize = 64 << 20;
/// Most that one request has kept, in bytes from its start: bounds what requests in flight take.
pub const OLD_REQUEST_BYTES_MAX: u64 = 4 << 20;

/// Old content by block.
pub struct Old {
    ranges: Vec<Range>,
    block: u64,
    blocks_max: usize,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    blocks: HashMap<u64, Box<[u8]>>,
    /// Blocks in the order in which they were first kept. One that was forgotten since may still
    /// stand here.
    order: VecDeque<u64>,
}

impl Old {
    /// For stale reads of these ranges.
    pub fn new(ranges: Vec<Range>, block: u32) -> Self {
        Self::with(ranges, block, OLD_BYTES_MAX)
    }

    fn with(ranges: Vec<Range>, block: u32, bytes_max: usize) -> Self {
        let blocks_max = bytes_max / block as usize;
        Self { ranges, block: u64::from(block), blocks_max, kept: Mutex::default() }
    }

    /// Whether what lies here is kept when it is overwritten.
    pub fn wants(&self, offset: u64, len: u64) -> bool {
        self.ranges.iter().any(|range| range.meets(offset, len))
    }

    /// Keeps `data`, which was at `offset` until it was overwritten. Of the bytes behind it up to
    /// `len` nothing is known any more.
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

    /// Puts what was before over what was read at `offset`; whether there was anything.
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

    fn old(blocks: usize) -> Old {
        Old::with(vec![Range { offset: 512, len: 1 << 20 }], 512, blocks * 512)
    }

    fn at(old: &Old, block: u64) -> Option<u8> {
        let mut data = [0xff; 512];
        old.recall(block * 512, &mut data).then_some(data[0])
    }

    #[test]
    fn what_was_there_last_comes_back() {
        let old = old(100);
        old.keep(0, &[1; 1536], 1536);
        old.keep(1024, &[2; 512], 512);
        assert_eq!(
            [0, 1, 2, 3].map(|block| at(&old, block)),
            [None, Some(1), Some(2), None],
            "block 0 is outside"
        );
    }

    #[test]
    fn it_is_bounded_and_the_oldest_goes() {
        let old = old(10);
        for block in 1..=1000 {
            old.keep(block * 512, &[block as u8; 512], 512);
            // Kept again and again: takes no more room.
            old.keep(block * 512, &[block as u8; 512], 512);
            let kept = old.kept.lock();
            assert!(kept.blocks.len() <= 10 && kept.order.len() <= 10);
        }
        for block in 1..=1000 {
            assert_eq!(at(&old, block), (block > 990).then_some(block as u8), "block {block}");
        }
    }

    #[test]
    fn what_is_not_known_any_more_is_forgotten() {
        let old = old(100);
        old.keep(512, &[1; 512 * 8], 512 * 8);
        old.keep(1024, &[2; 512], 2048);
        assert_eq!(
            (1..=8).map(|block| at(&old, block)).collect::<Vec<_>>(),
            [Some(1), Some(2), None, None, None, Some(1), Some(1), Some(1)]
        );
        // The length of a whole device takes no longer.
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
