//! Tests of the allocation of blocks.

use proptest::prelude::*;

use super::*;

/// Number of blocks in a map small enough that one search covers all groups.
const SMALL_BLOCKS: u64 = (LOOK_GROUPS as u64 - 1) * GROUP_BLOCKS;

/// A block allocator together with a trivial reference implementation.
struct Pair {
    space: Space,
    used: Vec<bool>,
    held: Vec<Run>,
}

impl Pair {
    fn new(blocks: u64) -> Self {
        Self { space: Space::new(blocks).unwrap(), used: vec![false; blocks as usize], held: Vec::new() }
    }

    fn longest_free(&self) -> usize {
        self.used.split(|&used| used).map(<[bool]>::len).max().unwrap_or(0)
    }

    fn free(&self) -> usize {
        self.used.iter().filter(|&&used| !used).count()
    }

    fn take(&mut self, want: u32) {
        let longest = self.longest_free() as u32;
        match self.space.take(want) {
            None => assert_eq!(longest, 0, "blocks are free"),
            Some(run) => {
                assert!(run.blocks <= want, "{run:?} for {want}");
                // The cursor may split the longest run, so half of that run is enough.
                assert!(run.blocks >= want.min(longest.div_ceil(2)), "{run:?} for {want} of {longest}");
                for used in &mut self.used[run.start as usize..][..run.blocks as usize] {
                    assert!(!std::mem::replace(used, true), "{run:?} is handed out twice");
                }
                self.held.push(run);
            }
        }
        self.check();
    }

    /// Frees `blocks` blocks of an allocated run, from `skip` blocks after its start on.
    fn give(&mut self, index: usize, skip: u32, blocks: u32) {
        if self.held.is_empty() {
            return;
        }
        let index = index % self.held.len();
        let run = self.held.swap_remove(index);
        let skip = skip % run.blocks;
        let blocks = blocks.clamp(1, run.blocks - skip);
        let start = run.start + u64::from(skip);
        self.space.free_run(start, blocks);
        self.used[start as usize..][..blocks as usize].fill(false);
        let end = start + u64::from(blocks);
        let rest = run.blocks - skip - blocks;
        let left = [Run { start: run.start, blocks: skip }, Run { start: end, blocks: rest }];
        self.held.extend(left.into_iter().filter(|run| run.blocks > 0));
        self.check();
    }

    fn check(&self) {
        assert_eq!(self.space.free(), self.free() as u64);
        assert_eq!(self.space.used() + self.space.free(), self.space.blocks());
    }

    fn give_all_and_take_all(mut self) {
        while let Some(run) = self.held.pop() {
            self.space.free_run(run.start, run.blocks);
            self.used[run.start as usize..][..run.blocks as usize].fill(false);
        }
        self.check();
        assert_eq!(self.space.used(), 0, "everything comes back");
        while self.space.free() > 0 {
            self.take(u32::MAX);
        }
        assert!(self.held.len() <= 2, "the free space is whole again but for the cursor: {:?}", self.held);
        assert_eq!(self.space.take(1), None);
    }
}

fn any_blocks() -> impl Strategy<Value = u64> {
    let edges = [1, 2, 63, 64, 65, 4095, 4096, 4097, 3 * GROUP_BLOCKS, SMALL_BLOCKS];
    prop_oneof![proptest::sample::select(edges.to_vec()), 1..3 * GROUP_BLOCKS]
}

fn any_want() -> impl Strategy<Value = u32> {
    prop_oneof![1..4_u32, 1..200_u32, 1..6000_u32]
}

proptest! {
    #[test]
    fn space_allocates_each_block_once(
        blocks in any_blocks(),
        // Initial free blocks: one block in `stride` stays allocated.
        stride in proptest::option::of(1..200_usize),
        steps in proptest::collection::vec(
            prop_oneof![
                3 => any_want().prop_map(|want| (Some(want), 0, 0, 0)),
                2 => (any::<usize>(), any::<u32>(), any_want()).prop_map(|(i, s, b)| (None, i, s, b)),
            ],
            1..80,
        ),
    ) {
        let mut pair = Pair::new(blocks);
        if let Some(stride) = stride {
            let whole = pair.space.take(u32::MAX).unwrap();
            prop_assert_eq!(whole, Run { start: 0, blocks: blocks as u32 });
            for block in 0..blocks {
                if (block as usize).is_multiple_of(stride) {
                    pair.used[block as usize] = true;
                    pair.held.push(Run { start: block, blocks: 1 });
                } else {
                    pair.space.free_run(block, 1);
                }
            }
        }
        for (want, index, skip, give) in steps {
            match want {
                Some(want) => pair.take(want),
                None => pair.give(index, skip, give),
            }
        }
        pair.give_all_and_take_all();
    }

    #[test]
    fn lowest_run_matches_reference(word: u64, holes: u64, len in 1..70_u32) {
        let word = word | holes;
        let plain = (0..64).find(|&at| {
            at + len <= 64 && (at..at + len).all(|bit| word & 1 << bit != 0)
        });
        prop_assert_eq!(lowest_run(word, len), plain);
    }
}

/// Allocates all blocks and returns their number. Several calls of `take` are needed, as each
/// visits only a few groups.
fn exhaust(space: &Space) -> u64 {
    std::iter::from_fn(|| space.take(u32::MAX)).map(|run| u64::from(run.blocks)).sum()
}

#[test]
fn space_successive_runs_are_contiguous() {
    let space = Space::new(10_000).unwrap();
    for start in (0..9000).step_by(300) {
        assert_eq!(space.take(300), Some(Run { start, blocks: 300 }));
        if start.is_multiple_of(900) {
            // Free blocks behind the cursor do not move the cursor back.
            space.free_run(start, 300);
        }
    }
    assert_eq!(space.take(2000), Some(Run { start: 9000, blocks: 1000 }), "the longest, at the end");
    assert_eq!(space.take(300), Some(Run { start: 0, blocks: 300 }), "and once around");
}

#[test]
fn space_run_crosses_words_and_groups() {
    let space = Space::new(3 * GROUP_BLOCKS).unwrap();
    let whole = space.take(u32::MAX).unwrap();
    assert_eq!(whole.blocks, 3 * GROUP_BLOCKS as u32);
    space.free_run(GROUP_BLOCKS - 100, 1);
    space.free_run(GROUP_BLOCKS - 70, 200);
    assert_eq!(space.take(200), Some(Run { start: GROUP_BLOCKS - 70, blocks: 200 }));
    assert_eq!(space.take(200), Some(Run { start: GROUP_BLOCKS - 100, blocks: 1 }));
    assert_eq!(space.take(200), None);
}

#[test]
fn space_run_stops_at_full_group() {
    let space = Space::new(3 * GROUP_BLOCKS).unwrap();
    assert_eq!(exhaust(&space), 3 * GROUP_BLOCKS);
    space.free_run(GROUP_BLOCKS - 50, 50);
    space.free_run(2 * GROUP_BLOCKS, 50);
    assert_eq!(space.take(100), Some(Run { start: GROUP_BLOCKS - 50, blocks: 50 }));
    assert_eq!(space.take(100), Some(Run { start: 2 * GROUP_BLOCKS, blocks: 50 }));
}

#[test]
fn space_search_is_bounded() {
    let groups = 40;
    let space = Space::new(groups * GROUP_BLOCKS).unwrap();
    exhaust(&space);
    for group in 0..groups {
        space.free_run(group * GROUP_BLOCKS + 7, 1);
    }
    // The only long run is far from the cursor; near the cursor are single blocks.
    space.free_run(30 * GROUP_BLOCKS, 7);
    let mut starts = Vec::new();
    while let Some(run) = space.take(8) {
        starts.push(run);
    }
    assert_eq!(starts[0], Run { start: 7, blocks: 1 }, "content with what is near");
    assert!(starts.contains(&Run { start: 30 * GROUP_BLOCKS, blocks: 8 }), "found when it comes near");
    assert_eq!(starts.iter().map(|run| run.blocks).sum::<u32>(), groups as u32 + 7, "nothing is left over");
}

#[test]
fn space_finds_single_free_block() {
    for blocks in [1, 64, GROUP_BLOCKS, 100 * GROUP_BLOCKS + 1] {
        let space = Space::new(blocks).unwrap();
        assert_eq!(exhaust(&space), blocks);
        assert_eq!((space.take(1), space.free()), (None, 0));
        for block in [0, blocks / 2, blocks - 1] {
            space.free_run(block, 1);
            assert_eq!(space.take(9), Some(Run { start: block, blocks: 1 }), "of {blocks}");
        }
    }
}

#[test]
fn space_minimum_and_maximum_size() {
    let none = Space::new(0).unwrap();
    assert_eq!((none.take(1), none.blocks(), none.free()), (None, 0, 0));
    let most = Space::new(MAX_BLOCKS).unwrap();
    assert_eq!(most.take(0), None);
    assert_eq!(exhaust(&most), MAX_BLOCKS);
    most.free_run(MAX_BLOCKS - 1, 1);
    assert_eq!(most.take(2), Some(Run { start: MAX_BLOCKS - 1, blocks: 1 }));
    assert_eq!(Space::new(MAX_BLOCKS + 1).err(), Some(Error::OutOfRange));
}

#[test]
#[cfg(debug_assertions)]
#[should_panic = "were free before"]
fn space_double_free_panics() {
    let space = Space::new(100).unwrap();
    let run = space.take(10).unwrap();
    space.free_run(run.start, 5);
    space.free_run(run.start + 4, 2);
}
