//! The state of each page, as the kernel's `block_state` has it.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::{PAGE, Ram};
use crate::clock::now_ms;
use freestone_core::PAGE_BYTES;
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};

/// Leaves that one call looks at: 8 GiB of a disk, some milliseconds.
const TRY_LEAVES: u32 = 4096;

/// A page that holds something.
#[expect(clippy::struct_excessive_bools, reason = "the kernel's six flags")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockState {
    /// Its number.
    pub index: u64,
    /// When it was last accessed, since the machine was booted: the end of that epoch. `None` for
    /// one whose age is not known: it lies on the backing device, or is just going there.
    pub accessed: Option<Duration>,
    /// It repeats one pattern.
    pub same: bool,
    /// It lies on the backing device, or is on its way from there.
    pub written_back: bool,
    /// It is stored uncompressed because it does not compress.
    pub huge: bool,
    /// It was marked, and not touched since.
    pub idle: bool,
    /// A secondary algorithm compressed it.
    pub recompressed: bool,
    /// Every algorithm failed on it.
    pub incompressible: bool,
}

impl BlockState {
    /// The kernel's letters, each one or a dot.
    pub fn flags(&self) -> String {
        let flags = [
            (self.same, 's'),
            (self.written_back, 'w'),
            (self.huge, 'h'),
            (self.idle, 'i'),
            (self.recompressed, 'r'),
            (self.incompressible, 'n'),
        ];
        flags.map(|(is, letter)| if is { letter } else { '.' }).iter().collect()
    }

    fn of(index: u64, word: Word, packed: bool, accessed: Option<Duration>) -> Self {
        let kind = word.kind();
        Self {
            index,
            accessed,
            same: matches!(kind, Kind::Same | Kind::Pattern),
            written_back: matches!(kind, Kind::Spilled | Kind::InFlight),
            huge: kind == Kind::Huge || kind == Kind::Spilled && packed && word.spilled_bytes() == PAGE_BYTES,
            idle: word.is_idle(),
            recompressed: word.algorithm() > 0,
            incompressible: word.is_incompressible(),
        }
    }
}

impl Ram {
    /// Shows the pages of `[first, end)` that the device holds itself, in order, until `row` says
    /// that it is enough or much was looked at. Returns the page where it goes on, `end` where
    /// nothing is left. Each page is as at some moment of the call; nothing is held meanwhile.
    pub fn block_state(&self, first: u64, end: u64, row: &mut dyn FnMut(BlockState) -> bool) -> u64 {
        let end = end.min(self.0.size().div_ceil(PAGE));
        let layer = self.0.layer();
        let packed = self.0.family.config.backing.as_ref().is_some_and(|b| b.compressed_writeback);
        let now = now_ms();
        let ends = self.0.pages.ages.ends(now);
        let boot = clock_gettime(ClockId::Boottime);
        let boot = Duration::new(boot.tv_sec.unsigned_abs(), boot.tv_nsec.unsigned_abs() as u32);
        let accessed = |word: Word| {
            if word.is_picked() || matches!(word.kind(), Kind::Spilled | Kind::InFlight) {
                return None;
            }
            let at = ends[usize::from(word.age())]?;
            Some(boot.saturating_sub(Duration::from_millis(now.saturating_sub(at))))
        };
        let mut at = first;
        for _ in 0..TRY_LEAVES {
            let Some(present) = layer.table().next_present(at, end).filter(|at| *at < end) else {
                return end;
            };
            let stop = (present / LEAF_SLOTS + 1) * LEAF_SLOTS;
            at = stop;
            let Some(leaf) = layer.table().leaf(present) else { continue };
            for index in present..stop.min(end) {
                let word = leaf.peek(index);
                if matches!(word.kind(), Kind::Empty | Kind::Base) {
                    continue;
                }
                if !row(BlockState::of(index, word, packed, accessed(word))) {
                    return index + 1;
                }
            }
        }
        at.min(end)
    }
}
