//! One shard of the unflushed blocks: their versions, their age, and what is being written below.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// What a block holds.
#[derive(Debug, PartialEq, Eq)]
pub enum Content {
    /// One block of data.
    Bytes(Box<[u8]>),
    /// Zeroes.
    Zeroes {
        /// They may become a hole.
        free: bool,
    },
}

/// What is written below together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Bytes,
    Zeroes,
    Hole,
}

/// Bytes that a block of zeroes costs: about what its place in the maps takes.
pub const ZERO_COST_BYTES: u64 = 64;

impl Content {
    /// Bytes of the capacity that it takes.
    pub fn cost(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Zeroes { .. } => ZERO_COST_BYTES,
        }
    }

    /// Puts it into `out`, one block.
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

/// A block with content that the device below does not have. Never without a version.
#[derive(Debug)]
pub struct Block {
    /// Its place in the order of eviction: the moment when it came, or of the last failure to write
    /// it below. Never later than a flush that has to write it.
    order: u64,
    /// No version from before this moment can be lost: another part of the unit, as it was then, is
    /// below.
    pub floor: u64,
    /// The moment of each version and what was written, oldest first; moments grow.
    pub versions: Vec<(u64, Content)>,
}

impl Block {
    pub fn newest(&self) -> &Content {
        &self.versions[self.versions.len() - 1].1
    }
}

/// A range of blocks that is being written below. Nobody else writes any of them there meanwhile,
/// so nothing older comes after something newer.
#[derive(Debug)]
struct Claim {
    id: u64,
    blocks: Range<u64>,
}

/// A shard. Its lock is held for looks at the maps and copies of at most one region, never across a
/// call of the device below.
#[derive(Debug, Default)]
pub struct Shard {
    blocks: BTreeMap<u64, Block>,
    /// (`order`, block) of every block.
    by_order: BTreeSet<(u64, u64)>,
    claims: Vec<Claim>,
}

impl Shard {
    /// Adds a version, as of `now`, which is later than every version before.
    pub fn push(&mut self, block: u64, now: u64, content: Content) {
        let entry = self.blocks.entry(block).or_insert_with(|| {
            self.by_order.insert((now, block));
            Block { order: now, floor: 0, versions: Vec::with_capacity(1) }
        });
        entry.versions.push((now, content));
    }

    /// The unflushed blocks of `range`, in order.
    pub fn range(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &Block)> {
        self.blocks.range(range).map(|(block, held)| (*block, held))
    }

    /// The order of the oldest block.
    pub fn oldest(&self) -> Option<u64> {
        self.by_order.first().map(|(order, _)| *order)
    }

    /// Whether a part of `range` is being written below.
    pub fn is_claimed(&self, range: &Range<u64>) -> bool {
        self.claims.iter().any(|claim| claim.blocks.start < range.end && range.start < claim.blocks.end)
    }

    pub fn claim(&mut self, id: u64, blocks: Range<u64>) {
        self.claims.push(Claim { id, blocks });
    }

    pub fn release(&mut self, id: u64) {
        self.claims.retain(|claim| claim.id != id);
    }

    /// The oldest block that is not claimed, with its unclaimed neighbours of one kind within
    /// `region` blocks, if its order is before `bound`.
    pub fn oldest_run(&self, bound: u64, region: u64) -> Option<Range<u64>> {
        let before = self.by_order.range(..(bound, 0));
        let (_, block) = before.into_iter().find(|(_, block)| !self.is_claimed(&(*block..block + 1)))?;
        Some(self.run_around(*block, region))
    }

    /// The first unclaimed block of `range` that was unflushed at `bound`, with its neighbours in
    /// `range`.
    pub fn first_run(&self, range: Range<u64>, bound: u64, region: u64) -> Option<Range<u64>> {
        let wanted =
            |block: &(&u64, &Block)| block.1.order < bound && !self.is_claimed(&(*block.0..block.0 + 1));
        let (block, _) = self.blocks.range(range.clone()).find(wanted)?;
        let run = self.run_around(*block, region);
        Some(run.start.max(range.start)..run.end.min(range.end))
    }

    /// Whether something of `range` was unflushed at `bound` and still is.
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

    /// Forgets what of `range` is older than `bound`: the device below has it, or something newer.
    /// Returns the bytes of capacity that came free.
    pub fn settle(&mut self, range: Range<u64>, bound: u64) -> u64 {
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

    /// From now on no cut loses what is older than `bound` of the blocks of `range`.
    pub fn secure(&mut self, range: Range<u64>, bound: u64) {
        for (_, block) in self.blocks.range_mut(range) {
            block.floor = block.floor.max(bound);
        }
    }

    /// Moves the blocks of `range` to the end of the order: they could not be written below, others
    /// get their turn.
    pub fn put_off(&mut self, range: Range<u64>, now: u64) {
        for (&number, block) in self.blocks.range_mut(range) {
            self.by_order.remove(&(block.order, number));
            block.order = now;
            self.by_order.insert((now, number));
        }
    }

    /// Takes everything out.
    pub fn take(&mut self) -> BTreeMap<u64, Block> {
        self.by_order.clear();
        std::mem::take(&mut self.blocks)
    }
}
