//! An eviction moves pages of a family (devices that share a memory pool) from memory to the
//! backing device. Each write has many pages, and several writes are in flight.
//!
//! # Protocol
//! * A page that is added to a batch stays in memory, and is read and written as before. Under its
//!   slot's lock its bytes are copied to the batch, and the slot is *picked*: marked with the
//!   batch's tag. A change of the page clears this mark; a read does not.
//! * When the batch is on the device, each slot that still has the mark becomes `Spilled` under its
//!   lock, and its object is freed. A slot without the mark keeps its content, and the page's space
//!   on the device is freed.
//! * Batches in flight have distinct tags, and a batch whose write timed out never changes a slot
//!   later. The mark of an earlier batch is therefore never mistaken for that of a later one, so
//!   stale bytes never become a page.
//!
//! [`grouped_pages`](super::grouped_pages) extends the protocol to pages of groups.
//!
//! A page with a [clean copy](freestone_spill::clean_copies) on the device leaves memory at once.
//!
//! Evictions are serialised by [`Pages::background`].

use std::collections::VecDeque;
use std::sync::Arc;

use super::batch::{Batch, Content, EvictionCounts, PickError, StoredObject};
use crate::ram::memory::layer::Layer;
use crate::ram::memory::outcome::{WritebackError, WritebackReport};
use crate::ram::memory::pages::Pages;
use freestone_core::device::{Error, IoBuf};
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::slot::Word;
use freestone_spill::layout::Packer;
use freestone_spill::space::BLOCK_BYTES;
use freestone_spill::store::{Store, WRITE_BLOCKS_MAX, WRITES_MAX};
use freestone_spill::writes::{Refused, Write, WriteOutcome};

/// Number of pages that leave memory without a write before requests that wait for memory are woken.
const WAKE_PAGES: u64 = 64;
/// Minimum length in blocks of a run of packed objects. Shorter runs would waste more space, as the
/// end of each run stays unused.
const PACKED_RUN_BLOCKS_MIN: u32 = 8;

/// Result of offering a page to an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfferOutcome {
    /// The page was added to a batch, alone or with its group, or has left memory. The bytes for which
    /// these pages were charged in memory; 0 if they were already written back.
    Taken(u64),
    /// The page is not wanted, or was changed meanwhile.
    Skipped,
}

/// An eviction in progress: moves pages from memory to the backing device, or within the device, in
/// batches.
pub(super) struct Eviction<'a> {
    pub(super) pages: &'a Pages,
    pub(super) store: &'a Arc<Store>,
    /// Layers of the pages in batches; entries refer to them by index.
    pub(super) layers: Vec<Arc<Layer>>,
    /// Maximum blocks per write, and the maximum number of writes in flight.
    write_blocks: u32,
    writes_max: usize,
    open: Option<Batch>,
    in_flight: VecDeque<(Batch, Write)>,
    /// Number of blocks of the device that must stay free.
    reserve: u64,
    tags_in_use: u64,
    spare: Vec<IoBuf>,
    done: WritebackReport,
    /// Number of pages that left memory without a write.
    clean: u64,
    /// Takes all pages of a group of which half are wanted.
    pub(super) takes_whole_groups: bool,
    /// Buffer for the object of a group.
    pub(super) group_object: Vec<u8>,
    failed: Option<Error>,
    /// No further write starts, as the device hangs or is full.
    stopped: bool,
}

impl<'a> Eviction<'a> {
    /// Creates an eviction. The caller must hold [`Pages::background`].
    pub fn new(pages: &'a Pages, store: &'a Arc<Store>) -> Self {
        let batch = store.batch_blocks();
        let least = if store.is_packed() { PACKED_RUN_BLOCKS_MIN } else { 1 };
        let write_blocks = (batch / WRITES_MAX as u32).clamp(least, WRITE_BLOCKS_MAX);
        Self {
            pages,
            store,
            layers: Vec::new(),
            write_blocks,
            writes_max: ((batch / write_blocks) as usize).clamp(1, WRITES_MAX),
            open: None,
            in_flight: VecDeque::new(),
            reserve: store.reserve(),
            tags_in_use: 0,
            spare: Vec::new(),
            done: WritebackReport::default(),
            clean: 0,
            takes_whole_groups: false,
            group_object: Vec::new(),
            failed: None,
            stopped: false,
        }
    }

    /// Creates an eviction of cold pages. Such an eviction takes groups as a whole.
    pub fn of_cold_pages(pages: &'a Pages, store: &'a Arc<Store>) -> Self {
        let mut eviction = Self::new(pages, store);
        eviction.takes_whole_groups = true;
        eviction
    }

    /// Creates an eviction that moves written-back pages within the device. Such an eviction may
    /// use the reserved blocks.
    pub fn to_move(pages: &'a Pages, store: &'a Arc<Store>) -> Self {
        let mut eviction = Self::new(pages, store);
        eviction.reserve = 0;
        eviction
    }

    /// Adds a page in memory to a batch, if its slot holds an object, shares one or is in a group, and the slot and
    /// its word are `wanted`. May add other pages of the group, too.
    ///
    /// # Errors
    /// Fails if no more pages can be written; the caller must then end the eviction.
    pub fn offer(
        &mut self,
        layer: &Arc<Layer>,
        slot: u64,
        wanted: impl Fn(u64, Word) -> bool,
    ) -> Result<OfferOutcome, WritebackError> {
        let at = self.layer_index(layer);
        let is_grouped = layer.table().leaf(slot).is_some_and(|leaf| leaf.peek(slot).is_grouped());
        if !self.stopped && !is_grouped {
            if let Some(charged) = self.evict_clean(at, slot, &wanted) {
                self.count_clean(1);
                return Ok(OfferOutcome::Taken(charged));
            }
        } else if !self.stopped
            && self.store.is_packed()
            && let Some(outcome) = self.offer_group(at, slot, &wanted)
        {
            return Ok(outcome);
        }
        self.add_to_batch(|eviction, batch| {
            if is_grouped {
                eviction.copy_grouped(batch, at, slot, &wanted)
            } else {
                eviction.copy(batch, at, slot, &wanted)
            }
        })
    }

    /// Counts pages that have left memory without a write.
    pub(super) fn count_clean(&mut self, pages: u64) {
        self.done.pages += pages;
        let before = self.clean;
        self.clean += pages;
        if self.clean / WAKE_PAGES > before / WAKE_PAGES {
            self.pages.wake_memory_waiters();
        }
    }

    /// Adds a written-back page to a batch, which moves it to another place on the device. `object`
    /// is the page's object as read. Skips the page if its slot in `layer` does not refer to the
    /// place that was read.
    pub fn relocate(
        &mut self,
        layer: &Arc<Layer>,
        object: &StoredObject<'_>,
    ) -> Result<OfferOutcome, WritebackError> {
        let at = self.layer_index(layer);
        self.add_to_batch(|eviction, batch| eviction.pick_spilled(batch, at, object).map(|_| 0))
    }

    fn layer_index(&mut self, layer: &Arc<Layer>) -> usize {
        // Search from the end: successive pages are usually of the same layer.
        if let Some(at) = self.layers.iter().rposition(|known| Arc::ptr_eq(known, layer)) {
            return at;
        }
        self.layers.push(Arc::clone(layer));
        self.layers.len() - 1
    }

    /// Calls `put` to add a page to the open batch. If the batch is full, sends it and retries with
    /// a new one.
    pub(super) fn add_to_batch(
        &mut self,
        put: impl Fn(&Self, &mut Batch) -> Result<u64, PickError>,
    ) -> Result<OfferOutcome, WritebackError> {
        if self.stopped {
            return Err(self.failure());
        }
        loop {
            let mut batch = match self.open.take() {
                Some(batch) => batch,
                None => self.begin_batch()?,
            };
            let put = put(self, &mut batch);
            let fresh = batch.entries.is_empty();
            self.open = Some(batch);
            match put {
                Ok(charged) => return Ok(OfferOutcome::Taken(charged)),
                Err(PickError::Unwanted) => return Ok(OfferOutcome::Skipped),
                // The object does not fit even in an empty batch: few blocks are left on the device or
                // in the budget. For a page, fewer than two.
                Err(PickError::BatchFull) if fresh => {
                    let budget = self.store.budget().get();
                    let last = budget.enabled && budget.left < 2;
                    return Err(if last { WritebackError::Limit } else { WritebackError::NoSpace });
                }
                Err(PickError::BatchFull) => self.send()?,
            }
        }
    }

    fn begin_batch(&mut self) -> Result<Batch, WritebackError> {
        // Do not start more writes on a hanging device: each abandoned write holds a buffer until
        // the device completes it.
        if self.store.abandoned() > 0 {
            return Err(WritebackError::Device(Error::Media));
        }
        self.store.free_copies_if_short();
        let (run, charge) =
            self.store.open_run(self.write_blocks, self.reserve).map_err(|refused| match refused {
                Refused::Limit => WritebackError::Limit,
                Refused::Full => WritebackError::NoSpace,
            })?;
        let bytes = run.blocks as usize * BLOCK_BYTES;
        let buffer = match self.spare.pop() {
            Some(mut buffer) => {
                buffer.set_len(bytes);
                if buffer.len() == bytes { Ok(buffer) } else { IoBuf::zeroed(bytes) }
            }
            None => IoBuf::zeroed(bytes),
        };
        let buffer = match buffer {
            Ok(buffer) => buffer,
            Err(error) => {
                self.store.trim_run(run, charge, 0);
                return Err(WritebackError::Device(error));
            }
        };
        let content = if self.store.is_packed() {
            Content::Packed(Packer::new(buffer, run))
        } else {
            Content::Plain { buffer, blocks: 0 }
        };
        let tag = (!self.tags_in_use).trailing_zeros() as u8;
        self.tags_in_use |= 1 << tag;
        Ok(Batch { tag, run, charge, content, entries: Vec::new() })
    }

    /// Submits the open batch to the device, and waits for the oldest write if too many are in
    /// flight.
    fn send(&mut self) -> Result<(), WritebackError> {
        let Some(mut batch) = self.open.take() else { return Ok(()) };
        let (mut buffer, used) = match std::mem::replace(&mut batch.content, Content::Submitted) {
            Content::Packed(packer) => packer.finish(),
            Content::Plain { buffer, blocks } => (buffer, blocks),
            Content::Submitted => return Ok(()),
        };
        let all = batch.run;
        batch.run = self.store.trim_run(batch.run, batch.charge, used);
        if used == 0 {
            self.release(batch.tag);
            buffer.set_len(all.blocks as usize * BLOCK_BYTES);
            self.spare.push(buffer);
            return Ok(());
        }
        buffer.set_len(used as usize * BLOCK_BYTES);
        let write = self.store.write(batch.run, batch.charge, buffer);
        self.in_flight.push_back((batch, write));
        while self.in_flight.len() >= self.writes_max {
            self.finish_oldest_write();
        }
        if self.stopped { Err(self.failure()) } else { Ok(()) }
    }

    /// Waits for the oldest write in flight, and marks its pages as written back, or unpicks them
    /// if the write failed.
    fn finish_oldest_write(&mut self) {
        let Some((batch, write)) = self.in_flight.pop_front() else { return };
        match self.store.finish(write) {
            WriteOutcome::Done(mut buffer) => {
                kill_points::pass(KillPoint::PagesWritten);
                self.done.blocks += u64::from(batch.run.blocks);
                let mut left = EvictionCounts::default();
                // Newest first: a page that was changed and added again is in the batch twice, and
                // only the newer copy is valid.
                for entry in batch.entries.into_iter().rev() {
                    self.publish(batch.tag, entry, &mut left);
                }
                self.store.count_written_back(left.pages, left.stored);
                self.done.pages += left.pages + left.grouped;
                buffer.set_len(usize::MAX);
                self.spare.push(buffer);
                // Do not wake requests if no page left memory: they would retry, wait again and
                // start the next round, endlessly.
                if left.from_memory + left.grouped > 0 {
                    self.pages.wake_memory_waiters();
                }
            }
            WriteOutcome::Failed(error) => {
                self.failed = Some(error);
                // Stop if the device's file system is full, as it stays full. An I/O error may
                // concern one place of the device only: continue, as the kernel does.
                self.stopped |= error != Error::Media;
                self.unpick_all(batch.tag, batch.entries);
            }
            WriteOutcome::TimedOut => {
                self.failed = Some(Error::Media);
                self.stopped = true;
                self.unpick_all(batch.tag, batch.entries);
            }
        }
        self.release(batch.tag);
    }

    fn release(&mut self, tag: u8) {
        self.tags_in_use &= !(1 << tag);
    }

    fn failure(&self) -> WritebackError {
        match self.failed {
            Some(Error::NoSpace) | None => WritebackError::NoSpace,
            Some(error) => WritebackError::Device(error),
        }
    }

    /// Sends the open batch and waits for all writes. Returns the pages and blocks written, and the
    /// last failure as the result.
    pub fn end(mut self) -> (WritebackReport, Result<(), WritebackError>) {
        if !self.clean.is_multiple_of(WAKE_PAGES) {
            self.pages.wake_memory_waiters();
        }
        let sent = self.send();
        while !self.in_flight.is_empty() {
            self.finish_oldest_write();
        }
        let outcome = if self.failed.is_some() { Err(self.failure()) } else { sent };
        (std::mem::take(&mut self.done), outcome)
    }
}

impl Drop for Eviction<'_> {
    /// Cleans up if [`end`](Self::end) was not called: unpicks slots, frees the blocks of the open
    /// batch, and waits for writes in flight.
    fn drop(&mut self) {
        if let Some(batch) = self.open.take() {
            self.unpick_all(batch.tag, batch.entries);
            self.store.trim_run(batch.run, batch.charge, 0);
        }
        while !self.in_flight.is_empty() {
            self.finish_oldest_write();
        }
    }
}
