//! The end of the record of exceptions: where the next entries go, and from where a merge takes the
//! last ones.
//!
//! Only the block with the last entries is kept in memory, and only blocks that change are written,
//! whatever the size of a chunk is. That gives the same bytes on disk as the kernel's writes of
//! whole areas, because behind the last entry an area holds zeroes on disk already.

use std::ops::Range;
use std::sync::Arc;

use super::config::Damage;
use super::format::{BLOCK_BYTES, BLOCK_ENTRIES, ENTRY_BYTES, Entry, Layout};
use super::store_answers::{MergeError, Run};
use freestone_core::device::{Blocking, Device, Error, Flags, IoBuf, Result};
use freestone_core::mutants::{self, Mutant};

/// Most entries of a run that is merged at once: so much is read back at most, and so many chunks
/// may have to wait.
pub const RUN_ENTRIES_MAX: u64 = 1024;

/// A block of metadata.
pub type Block = [u8; BLOCK_BYTES];

/// The end of the record. Blocks in every call: it belongs to the store's thread and to a merge.
pub struct Area {
    layout: Layout,
    device: Arc<dyn Device>,
    origin_size: u64,
    end: End,
    /// The last run of exceptions, as a merge got it.
    last: Option<Last>,
}

/// Where the record ends. On disk there are zeroes from there to the end of the area.
pub struct End {
    /// Number of the area in which the next entry goes.
    pub area: u64,
    /// Entries in it, less than it can hold.
    pub committed: u64,
    /// The block in which the next entry goes: the entries before that, then zeroes.
    pub block: Box<Block>,
}

/// The last run of exceptions, with all that is needed to remove it again.
struct Last {
    run: Run,
    /// The area it is in.
    area: u64,
    /// Its entries there.
    entries: Range<u64>,
    /// The block in which its first entry is.
    head: Box<Block>,
    /// A write that was to remove entries from this one on failed, so it is not known whether they
    /// are on disk. All of them are written again, by the next removal or by putting them back,
    /// before anything else is.
    torn: Option<u64>,
}

impl End {
    /// The end of an empty record.
    pub fn empty() -> Self {
        Self { area: 0, committed: 0, block: Box::new([0; BLOCK_BYTES]) }
    }
}

impl Last {
    /// The blocks from the one with entry `from` of the run to its end, without the entries from
    /// `cut` on.
    fn blocks(&self, from: u64, cut: u64) -> Result<IoBuf> {
        let Range { start, end } = self.entries;
        let first = from / BLOCK_ENTRIES;
        let mut blocks = blocks_for(first, end)?;
        // What stays: entries before the run as they are, those of the run by counting on from its
        // first one.
        let base = first * BLOCK_ENTRIES;
        let before = (start.saturating_sub(base)) as usize * ENTRY_BYTES;
        blocks[..before].copy_from_slice(&self.head[..before]);
        for at in start.max(base)..cut {
            let (old, new) = (self.run.old + (at - start), self.run.new + (at - start));
            Entry::new(old, new).put(&mut blocks, (at - base) as usize);
        }
        Ok(blocks)
    }
}

impl Area {
    /// The end of a record that was loaded.
    pub fn new(layout: Layout, device: Arc<dyn Device>, origin_size: u64, end: End) -> Self {
        Self { layout, device, origin_size, end, last: None }
    }

    /// Number of the area in which the next entry goes, and the number of entries in it.
    pub fn position(&self) -> (u64, u64) {
        (self.end.area, self.end.committed)
    }

    /// How many entries the record has, and the origin's chunk of the first one; `None` where there
    /// is none.
    pub fn first(&mut self) -> std::result::Result<Option<(u64, u64)>, MergeError> {
        let entries = self.end.area * self.layout.entries() + self.end.committed;
        if entries == 0 {
            return Ok(None);
        }
        let block = self.read(0, 0)?;
        Ok(Some((entries, self.entry(&block, 0, 0)?.0)))
    }

    /// How many entries can be appended at once; at least one.
    pub fn room(&self) -> usize {
        (self.layout.entries() - self.end.committed) as usize
    }

    // ---- exceptions come ------------------------------------------------------------------------

    /// Appends entries, at most [`room`](Self::room), and makes them durable. All that was written
    /// to the device before is durable before they are. After an error it is unknown which of them
    /// are on disk.
    pub fn append(&mut self, entries: &[Entry]) -> Result<()> {
        assert!(entries.len() <= self.room(), "more entries than there is room for in an area");
        if entries.is_empty() {
            return Ok(());
        }
        if self.is_torn() {
            return Err(Error::Media);
        }
        // What is appended comes after that run.
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
            // A full area says that the next one is to be read.
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

    // ---- exceptions go --------------------------------------------------------------------------

    /// The exceptions at the end of the record whose chunks follow each other on both devices,
    /// within one area.
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
        let mut head = self.read(area, first / BLOCK_ENTRIES)?;
        let (old, new) = self.entry(&head, area, first)?;
        let mut run = Run { old, new, count: 1 };
        while first > 0 && run.count < RUN_ENTRIES_MAX {
            let before = first - 1;
            let other = if first.is_multiple_of(BLOCK_ENTRIES) {
                Some(self.read(area, before / BLOCK_ENTRIES)?)
            } else {
                None
            };
            let (old, new) = self.entry(other.as_ref().unwrap_or(&head), area, before)?;
            if (old + 1, new + 1) != (run.old, run.new) {
                break;
            }
            run = Run { old, new, count: run.count + 1 };
            first = before;
            head = other.unwrap_or(head);
        }
        self.last = Some(Last { run, area, entries: first..end, head, torn: None });
        Ok(Some(run))
    }

    /// Whether it is not known which entries of the last run are on disk.
    pub fn is_torn(&self) -> bool {
        self.last.as_ref().is_some_and(|last| last.torn.is_some())
    }

    /// Removes the last `count` entries of the last run durably. After an error they are still
    /// there for this store; whether they are on disk, [`is_torn`](Self::is_torn) tells.
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

    /// Writes the entries again that a removal that failed may have taken from the disk. Does
    /// nothing where that is known.
    pub fn put_back(&mut self) -> Result<()> {
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

/// Zeroes for the blocks from block `first` to the one with the last entry before `end`.
fn blocks_for(first: u64, end: u64) -> Result<IoBuf> {
    let blocks = end.div_ceil(BLOCK_ENTRIES) - first;
    IoBuf::zeroed(blocks as usize * BLOCK_BYTES)
}
