//! Shard of the volatile cache: versions of unflushed blocks, their order, and claims on ranges.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

#[derive(Debug, PartialEq, Eq)]
pub enum Content {
    /// Data of one block.
    Bytes(Box<[u8]>),
    Zeroes {
        /// True if the space of the zeroed block may be freed.
        free: bool,
    },
}

/// Kind of a block's content. Only adjacent blocks of one kind are written in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Bytes,
    Zeroes,
    Hole,
}

/// Bytes of cache capacity that a block of zeroes uses: about the size of its map entries.
pub const ZERO_COST_BYTES: u64 = 64;

impl Content {
    /// Returns the number of bytes of cache capacity that the content uses.
    pub fn cost(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Zeroes { .. } => ZERO_COST_BYTES,
        }
    }

    /// Copies the content to `out`, which is one block long.
    pub fn copy_to(&self, out: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => out.copy_from_slice(bytes),
            Self::Zeroes { .. } => out.fill(0),
        }
    }

    pub const fn kind(&self) -> Kind {
        match self {
            Self::Bytes(_) => Kind::Bytes,
            Self::Zeroes { free: false } => Kind::Zeroes,
            Self::Zeroes { free: true } => Kind::Hole,
        }
    }
}

/// Unflushed block, with at least one version.
#[derive(Debug)]
pub struct Block {
    /// Position in the order of eviction: the moment of the first version, or of the last failed
    /// write of the block. Less than the bound of every flush that must write the block.
    order: u64,
    /// A power cut cannot lose versions from before this moment, because another part of the unit
    /// from that time was already written.
    pub floor: u64,
    /// Versions of the block, each with its moment and content, oldest first.
    pub versions: Vec<(u64, Content)>,
}

impl Block {
    pub fn newest(&self) -> &Content {
        &self.versions[self.versions.len() - 1].1
    }
}

/// Range of blocks that is being written to the device under this layer. Claims never overlap, so
/// that older data cannot overwrite newer data.
#[derive(Debug)]
struct Claim {
    id: u64,
    blocks: Range<u64>,
}

/// Shard of the volatile cache. The shard's lock is held for map accesses and copies of at most one
/// region, never during calls of the device under this layer.
#[derive(Debug, Default)]
pub struct Shard {
    blocks: BTreeMap<u64, Block>,
    /// `(order, block number)` of every block.
    by_order: BTreeSet<(u64, u64)>,
    claims: Vec<Claim>,
}

impl Shard {
    /// Adds a version of `block` at the moment `now`, which must be later than all existing
    /// versions.
    pub fn push(&mut self, block: u64, now: u64, content: Content) {
        let entry = self.blocks.entry(block).or_insert_with(|| {
            self.by_order.insert((now, block));
            Block { order: now, floor: 0, versions: Vec::with_capacity(1) }
        });
        entry.versions.push((now, content));
    }

    /// Iterates over the unflushed blocks of `range`, in ascending order.
    pub fn range(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &Block)> {
        self.blocks.range(range).map(|(block, held)| (*block, held))
    }

    pub fn oldest(&self) -> Option<u64> {
        self.by_order.first().map(|(order, _)| *order)
    }

    /// Returns true if a claim overlaps `range`.
    pub fn is_claimed(&self, range: &Range<u64>) -> bool {
        self.claims.iter().any(|claim| claim.blocks.start < range.end && range.start < claim.blocks.end)
    }

    pub fn claim(&mut self, id: u64, blocks: Range<u64>) {
        self.claims.push(Claim { id, blocks });
    }

    pub fn release(&mut self, id: u64) {
        self.claims.retain(|claim| claim.id != id);
    }

    /// Returns the oldest unclaimed block from before `bound`, extended by adjacent unclaimed
    /// blocks of the same kind in its region of `region` blocks. Returns `None` if there is no such
    /// block.
    pub fn oldest_run(&self, bound: u64, region: u64) -> Option<Range<u64>> {
        let before = self.by_order.range(..(bound, 0));
        let (_, block) = before.into_iter().find(|(_, block)| !self.is_claimed(&(*block..block + 1)))?;
        Some(self.run_around(*block, region))
    }

    /// Returns the first unclaimed block of `range` from before `bound`, extended by adjacent
    /// unclaimed blocks of the same kind within its region and `range`. Returns `None` if there is
    /// no such block.
    pub fn first_run(&self, range: Range<u64>, bound: u64, region: u64) -> Option<Range<u64>> {
        let wanted =
            |block: &(&u64, &Block)| block.1.order < bound && !self.is_claimed(&(*block.0..block.0 + 1));
        let (block, _) = self.blocks.range(range.clone()).find(wanted)?;
        let run = self.run_around(*block, region);
        Some(run.start.max(range.start)..run.end.min(range.end))
    }

    /// Returns true if `range` contains unflushed blocks from before the moment `bound`.
    pub fn has_before(&self, range: Range<u64>, bound: u64) -> bool {
        self.blocks.range(range).any(|(_, block)| block.order < bound)
    }

    fn run_around(&self, block: u64, region: u64) -> Range<u64> {
        let start = block - block % region;
        let kind = self.blocks[&block].newest().kind();
        let fits = |at: u64| {
            let held = self.blocks.get(&at);
            held.is_some_and(|held| held.newest().kind() == kind) && !self.is_claimed(&(at..at + 1))
        };
        let first = (start..block).rev().take_while(|at| fits(*at)).last().unwrap_or(block);
        let end =
            (block + 1..start + region).take_while(|at| fits(*at)).last().map_or(block + 1, |at| at + 1);
        first..end
    }

    /// Removes the versions of `range` from before `bound`, because the device under this layer
    /// contains them or newer data. Returns the number of freed bytes of cache capacity.
    pub fn forget_before(&mut self, range: Range<u64>, bound: u64) -> u64 {
        let mut freed = 0;
        let mut empty = Vec::new();
        for (&number, block) in self.blocks.range_mut(range) {
            let old = block.versions.partition_point(|(moment, _)| *moment < bound);
            freed += block.versions.drain(..old).map(|(_, content)| content.cost()).sum::<u64>();
            if old == 0 {
                continue;
            }
            self.by_order.remove(&(block.order, number));
            match block.versions.first() {
                Some((moment, _)) => {
                    block.order = *moment;
                    self.by_order.insert((block.order, number));
                }
                None => empty.push(number),
            }
        }
        for number in empty {
            self.blocks.remove(&number);
        }
        freed
    }

    /// Protects the versions of `range` from before `bound` from being lost at a power cut.
    pub fn protect(&mut self, range: Range<u64>, bound: u64) {
        for (_, block) in self.blocks.range_mut(range) {
            block.floor = block.floor.max(bound);
        }
    }

    /// Moves the blocks of `range` to the end of the eviction order after their write failed, so
    /// that other blocks are written first.
    pub fn requeue(&mut self, range: Range<u64>, now: u64) {
        for (&number, block) in self.blocks.range_mut(range) {
            self.by_order.remove(&(block.order, number));
            block.order = now;
            self.by_order.insert((now, number));
        }
    }

    /// Removes and returns all unflushed blocks.
    pub fn take(&mut self) -> BTreeMap<u64, Block> {
        self.by_order.clear();
        std::mem::take(&mut self.blocks)
    }
}
