//! States of a disk's pages, as in the kernel's `block_state` file.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::ram::device::Ram;
use crate::ram::geometry::PAGE;
use freestone_core::PAGE_BYTES;
use freestone_core::clock::now_ms;
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};

/// Maximum slot table leaves visited per call: 8 GiB of a disk, which takes some milliseconds.
const TRY_LEAVES: u32 = 4096;

/// State of a page that the device stores itself.
#[expect(clippy::struct_excessive_bools, reason = "the kernel's six flags")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockState {
    /// Number of the page in the device.
    pub index: u64,
    /// Time of the last access, since boot, rounded up to the end of the page's age epoch. `None`
    /// if the page is on the backing device or being written there, as its age is then unknown.
    pub accessed: Option<Duration>,
    /// The page repeats one pattern of 32 or 64 bits.
    pub same: bool,
    /// The page is on the backing device, or being read from there.
    pub written_back: bool,
    /// The page is stored uncompressed because it does not compress.
    pub huge: bool,
    /// The page was marked idle and was not accessed since.
    pub idle: bool,
    /// A secondary algorithm compressed the page, or the page is compressed in a group.
    pub recompressed: bool,
    /// No configured algorithm could compress the page.
    pub incompressible: bool,
}

impl BlockState {
    /// Returns the kernel's six flag letters (`swhirn`), with a dot for each flag that is not set.
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
        let is_whole = kind == Kind::Spilled
            && packed
            && !word.is_spilled_in_group()
            && word.spilled_bytes() == PAGE_BYTES;
        Self {
            index,
            accessed,
            same: matches!(kind, Kind::Same | Kind::Pattern),
            written_back: matches!(kind, Kind::Spilled | Kind::InFlight),
            huge: kind == Kind::Huge || is_whole,
            idle: word.is_idle(),
            recompressed: kind == Kind::Grouped && !word.is_shared() || word.algorithm() > 0,
            incompressible: word.is_incompressible(),
        }
    }
}

impl Ram {
    /// Passes the device's own pages among the pages `[first, end)` to `row` in order, until `row`
    /// returns false or the call has visited 4096 leaves. Returns the page at which to continue, or
    /// `end` (clipped to the device) if nothing is left. Each page is shown as of some moment
    /// during the call. No lock is held while `row` runs.
    pub fn block_state(&self, first: u64, end: u64, row: &mut dyn FnMut(BlockState) -> bool) -> u64 {
        let end = end.min(self.0.size().div_ceil(PAGE));
        let layer = self.0.layer();
        let packed = self.0.family.config.backing.as_ref().is_some_and(|b| b.compressed_writeback);
        let now = now_ms();
        let ends = self.0.pages.ages.epoch_ends(now);
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
