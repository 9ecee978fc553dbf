//! End of the list of exceptions on the COW device: commits append entries, and merges remove the
//! last entries.
//!
//! With any chunk size, memory holds only the block with the last entries, and only changed blocks
//! are written. The result on disk equals the kernel's writes of whole areas, since an area holds
//! zeroes after its last entry.

use std::ops::Range;
use std::sync::Arc;

use super::format::{BLOCK_BYTES, BLOCK_ENTRIES, ENTRY_BYTES, Entry, Layout};
use super::types::{MergeError, Run};
use crate::cow::config::Damage;
use freestone_core::device::{Blocking, Device, Error, Flags, IoBuf, Result};
use freestone_core::mutants::{self, Mutant};

/// Maximum number of entries in a merged run. Limits the metadata read for a run, and the number of
/// chunks whose writes wait for the merge.
pub const RUN_ENTRIES_MAX: u64 = 1024;

pub type Block = [u8; BLOCK_BYTES];

/// End of the list of exceptions. All methods block. Used by the store's thread and by a merge.
pub struct Area {
    layout: Layout,
    device: Arc<dyn Device>,
    origin_size: u64,
    end: End,
    /// Last run of exceptions, as returned to a merge by [`last_run`](Area::last_run).
    last: Option<LastRun>,
}

/// Position at which the list of exceptions ends. The rest of the area on disk holds zeroes.
pub struct End {
    /// Number of the area to which the next entry is written.
    pub area: u64,
    /// Number of entries in the area, less than its capacity.
    pub committed: u64,
    /// Copy of the block to which the next entry is written: earlier entries, then zeroes.
    pub block: Box<Block>,
}

/// Last run of exceptions, with the data to remove or restore it.
struct LastRun {
    run: Run,
    area: u64,
    entries: Range<u64>,
    first_block: Box<Block>,
    /// After a failed removal, the first entry whose state on disk is unknown. The next removal or
    /// [`Area::restore_entries`] rewrites all entries from this one on, before any other write.
    torn: Option<u64>,
}

impl End {
    pub fn empty() -> Self {
        Self { area: 0, committed: 0, block: Box::new([0; BLOCK_BYTES]) }
    }
}

impl LastRun {
    /// Returns the metadata blocks from the block with entry `from` to the end of the run, with
    /// zeroes instead of the entries from `cut` on.
    fn blocks(&self, from: u64, cut: u64) -> Result<IoBuf> {
        let Range { start, end } = self.entries;
        let first = from / BLOCK_ENTRIES;
        let mut blocks = blocks_for(first, end)?;
        // Entries before the run are copied from the first block of the run. The chunk numbers of
        // the run's own entries increase by one from entry to entry.
        let base = first * BLOCK_ENTRIES;
        let before = (start.saturating_sub(base)) as usize * ENTRY_BYTES;
        blocks[..before].copy_from_slice(&self.first_block[..before]);
        for at in start.max(base)..cut {
            let (old, new) = (self.run.old + (at - start), self.run.new + (at - start));
            Entry::new(old, new).put(&mut blocks, (at - base) as usize);
        }
        Ok(blocks)
    }
}

impl Area {
    pub fn new(layout: Layout, device: Arc<dyn Device>, origin_size: u64, end: End) -> Self {
        Self { layout, device, origin_size, end, last: None }
    }

    /// Returns the number of the area for the next entry, and the number of entries in this area.
    pub fn position(&self) -> (u64, u64) {
        (self.end.area, self.end.committed)
    }

    /// Returns the number of entries in the list and the origin chunk of the first entry, or `None`
    /// if the list is empty.
    pub fn first_entry(&mut self) -> std::result::Result<Option<(u64, u64)>, MergeError> {
        let entries = self.end.area * self.layout.entries() + self.end.committed;
        if entries == 0 {
            return Ok(None);
        }
        let block = self.read(0, 0)?;
        Ok(Some((entries, self.entry(&block, 0, 0)?.0)))
    }

    /// Returns the maximum number of entries for one append, at least 1.
    pub fn free_entries(&self) -> usize {
        (self.layout.entries() - self.end.committed) as usize
    }

    // ---- adding exceptions ----------------------------------------------------------------------

    /// Appends at most [`free_entries`](Self::free_entries) entries and makes them durable, after a
    /// flush of all earlier writes. After an error it is unknown which entries are on disk.
    pub fn append(&mut self, entries: &[Entry]) -> Result<()> {
        assert!(entries.len() <= self.free_entries(), "append of {} entries exceeds the area", entries.len());
        if entries.is_empty() {
            return Ok(());
        }
        if self.is_torn() {
            return Err(Error::Media);
        }
        // The new entries follow the last run, which therefore is not the last any more.
        self.last = None;
        let End { area, committed, .. } = self.end;
        let end = committed + entries.len() as u64;
        let first = committed / BLOCK_ENTRIES;
        let mut blocks = blocks_for(first, end)?;
        blocks[..BLOCK_BYTES].copy_from_slice(&*self.end.block);
        for (at, entry) in (committed - first * BLOCK_ENTRIES..).zip(entries) {
            entry.put(&mut blocks, at as usize);
        }
        let full = end == self.layout.entries();
        if full {
            // After a full area, readers of the list continue with the next area, so this must be
            // zeroed first.
            let next = self.layout.area_byte(area + 1);
            self.device.write_zeroes(next, self.layout.chunk(), Flags::MAY_FREE)?;
        }
        if !mutants::on(Mutant::ExceptionsBeforeCopies) {
            self.device.flush()?;
        }
        self.write(area, first, &blocks)?;
        if full {
            self.end = End { area: area + 1, ..End::empty() };
        } else {
            self.end.committed = end;
            match blocks.rchunks_exact(BLOCK_BYTES).next() {
                Some(block) if !end.is_multiple_of(BLOCK_ENTRIES) => self.end.block.copy_from_slice(block),
                _ => self.end.block.fill(0),
            }
        }
        Ok(())
    }

    // ---- removing exceptions --------------------------------------------------------------------

    /// Returns the exceptions at the end of the list whose chunks are contiguous on both devices,
    /// within one area. Returns `None` if the list is empty.
    pub fn last_run(&mut self) -> std::result::Result<Option<Run>, MergeError> {
        if let Some(last) = &self.last {
            return Ok(Some(last.run));
        }
        let End { area, committed, .. } = self.end;
        let (area, end) = match (area, committed) {
            (0, 0) => return Ok(None),
            (_, 0) => (area - 1, self.layout.entries()),
            _ => (area, committed),
        };
        let mut first = end - 1;
        let mut first_block = self.read(area, first / BLOCK_ENTRIES)?;
        let (old, new) = self.entry(&first_block, area, first)?;
        let mut run = Run { old, new, count: 1 };
        while first > 0 && run.count < RUN_ENTRIES_MAX {
            let before = first - 1;
            let block = if first.is_multiple_of(BLOCK_ENTRIES) {
                Some(self.read(area, before / BLOCK_ENTRIES)?)
            } else {
                None
            };
            let (old, new) = self.entry(block.as_ref().unwrap_or(&first_block), area, before)?;
            if (old + 1, new + 1) != (run.old, run.new) {
                break;
            }
            run = Run { old, new, count: run.count + 1 };
            first = before;
            first_block = block.unwrap_or(first_block);
        }
        self.last = Some(LastRun { run, area, entries: first..end, first_block, torn: None });
        Ok(Some(run))
    }

    /// Returns true if it is unknown which entries of the last run are on disk.
    pub fn is_torn(&self) -> bool {
        self.last.as_ref().is_some_and(|last| last.torn.is_some())
    }

    /// Removes the last `count` entries of the last run durably. After an error the entries still
    /// exist in memory; [`is_torn`](Self::is_torn) reports whether their state on disk is unknown.
    pub fn remove(&mut self, run: &Run, count: u64) -> std::result::Result<(), MergeError> {
        let Some(last) = self.last.as_ref().filter(|last| last.run == *run) else {
            return Err(MergeError::NotLast);
        };
        if !(1..=run.count).contains(&count) {
            return Err(MergeError::NotLast);
        }
        let (area, cut) = (last.area, last.entries.end - count);
        let from = last.torn.map_or(cut, |torn| torn.min(cut));
        let blocks = last.blocks(from, cut)?;
        self.device.flush()?;
        if let Some(last) = &mut self.last {
            last.torn = Some(from);
        }
        let first = from / BLOCK_ENTRIES;
        self.write(area, first, &blocks)?;
        self.last = None;
        self.end.area = area;
        self.end.committed = cut;
        let kept = (cut / BLOCK_ENTRIES - first) as usize * BLOCK_BYTES;
        self.end.block.copy_from_slice(&blocks[kept..kept + BLOCK_BYTES]);
        Ok(())
    }

    /// Rewrites the entries that a failed removal may have removed from disk. Does nothing if the
    /// state on disk is known.
    pub fn restore_entries(&mut self) -> Result<()> {
        let Some(last) = &self.last else { return Ok(()) };
        let Some(from) = last.torn else { return Ok(()) };
        let (area, blocks) = (last.area, last.blocks(from, last.entries.end)?);
        if !mutants::on(Mutant::MergeBelievesFailure) {
            self.write(area, from / BLOCK_ENTRIES, &blocks)?;
        }
        if let Some(last) = &mut self.last {
            last.torn = None;
        }
        Ok(())
    }

    fn entry(&self, block: &Block, area: u64, at: u64) -> std::result::Result<(u64, u64), MergeError> {
        let number = area * self.layout.entries() + at;
        let found = Entry::all(block).nth((at % BLOCK_ENTRIES) as usize).filter(|entry| !entry.is_end());
        let entry = found.ok_or(MergeError::Damaged(Damage::Gap { entry: number }))?;
        let cow_size = self.device.geometry().size;
        self.layout.check(number, entry, self.origin_size, cow_size).map_err(MergeError::Damaged)?;
        Ok(entry.get())
    }

    // ---- the device -----------------------------------------------------------------------------

    fn read(&self, area: u64, block: u64) -> Result<Box<Block>> {
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        if area == self.end.area && block == self.end.committed / BLOCK_ENTRIES {
            bytes.copy_from_slice(&*self.end.block);
        } else {
            let at = self.layout.area_byte(area) + block * BLOCK_BYTES as u64;
            self.device.read_at(at, &mut *bytes)?;
        }
        Ok(bytes)
    }

    fn write(&self, area: u64, block: u64, blocks: &[u8]) -> Result<()> {
        let at = self.layout.area_byte(area) + block * BLOCK_BYTES as u64;
        self.device.write_at(at, blocks, Flags::FUA)
    }
}

/// Allocates a buffer of zeroes for the metadata blocks from block `first` to the block with entry
/// `end - 1`.
fn blocks_for(first: u64, end: u64) -> Result<IoBuf> {
    let blocks = end.div_ceil(BLOCK_ENTRIES) - first;
    IoBuf::zeroed(blocks as usize * BLOCK_BYTES)
}
