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
//! Evictions are serialised by [`Pages::background`].

use std::collections::VecDeque;
use std::sync::Arc;

use super::layer::Layer;
use super::outcome::{WritebackError, WritebackReport};
use super::page_search::is_spillable;
use super::pages::Pages;
use crate::pool::BackRef;
use crate::spill::blocks::BLOCK_UNITS;
use crate::spill::layout::Packer;
use crate::spill::space::{BLOCK_BYTES, Run};
use crate::spill::store::{self, Charge, Refused, Store, WRITE_BLOCKS_MAX, WRITES_MAX, Write};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, IoBuf};
use freestone_core::mutants::{self, Mutant};
use freestone_core::slot::{Kind, SlotGuard, Word};

/// Minimum length in blocks of a run of packed objects. Shorter runs would waste more space, as the
/// end of each run stays unused.
const PACKED_RUN_BLOCKS_MIN: u32 = 8;

/// Result of offering a page to an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfferOutcome {
    /// The page was added to a batch. The size of its object in bytes: in memory, or on the device
    /// if the page was already written back.
    Taken(usize),
    /// The page is not wanted, or was changed meanwhile.
    Skipped,
}

/// An eviction in progress: moves pages from memory to the backing device, or within the device, in
/// batches.
pub(super) struct Eviction<'a> {
    pages: &'a Pages,
    store: &'a Arc<Store>,
    /// Layers of the pages in batches; entries refer to them by index.
    layers: Vec<Arc<Layer>>,
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
    failed: Option<Error>,
    /// No further write starts, as the device hangs or is full.
    stopped: bool,
}

/// A batch: the pages of one write to the backing device.
struct Batch {
    tag: u8,
    run: Run,
    charge: Charge,
    content: Content,
    entries: Vec<Entry>,
}

enum Content {
    Packed(Packer),
    Plain { buffer: IoBuf, blocks: u32 },
    Submitted,
}

/// An object that was read from the backing device.
pub(super) struct StoredObject<'b> {
    /// Owner of the object as in its header: table id and slot.
    pub owner: u64,
    /// Unit (of 16 bytes) of the device at which the header begins.
    pub unit: u64,
    /// Generation of the header's block before the read: how often the block was reused.
    pub generation: u32,
    pub bytes: &'b [u8],
}

/// Reason why a page was not picked.
enum PickError {
    Unwanted,
    BatchFull,
}

/// Counts of the pages of a finished batch, added to the shared counters once per batch.
#[derive(Default)]
struct EvictionCounts {
    pages: u64,
    /// Bytes of the pages' objects on the device.
    stored: u64,
    /// Number of pages that were in memory before; the others only moved within the device.
    from_memory: u64,
}

struct Entry {
    /// Index into [`Eviction::layers`].
    layer: usize,
    slot: u64,
    unit: u64,
    /// Size in bytes of the object on the device.
    stored: u32,
    age: u8,
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
            failed: None,
            stopped: false,
        }
    }

    /// Creates an eviction that moves written-back pages within the device. Such an eviction may
    /// use the reserved blocks.
    pub fn to_move(pages: &'a Pages, store: &'a Arc<Store>) -> Self {
        let mut eviction = Self::new(pages, store);
        eviction.reserve = 0;
        eviction
    }

    /// Adds a page in memory to a batch, if its slot holds an object and the slot's word is
    /// `wanted`.
    ///
    /// # Errors
    /// Fails if no more pages can be written; the caller must then end the eviction.
    pub fn offer(
        &mut self,
        layer: &Arc<Layer>,
        slot: u64,
        wanted: impl Fn(Word) -> bool,
    ) -> Result<OfferOutcome, WritebackError> {
        let at = self.layer_index(layer);
        self.add_to_batch(|eviction, batch| eviction.copy(batch, at, slot, &wanted))
    }

    /// Adds a written-back page to a batch, which moves it to another place on the device. `object`
    /// is the page's object as read. Skips the page if its slot in `layer` does not refer to the
    /// place that was read.
    ///
    /// # Errors
    /// As [`offer`](Self::offer).
    pub fn relocate(
        &mut self,
        layer: &Arc<Layer>,
        object: &StoredObject<'_>,
    ) -> Result<OfferOutcome, WritebackError> {
        let at = self.layer_index(layer);
        self.add_to_batch(|eviction, batch| eviction.pick_spilled(batch, at, object).map(Word::spilled_bytes))
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
    fn add_to_batch(
        &mut self,
        put: impl Fn(&Self, &mut Batch) -> Result<usize, PickError>,
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
                Ok(stored) => return Ok(OfferOutcome::Taken(stored)),
                Err(PickError::Unwanted) => return Ok(OfferOutcome::Skipped),
                // The page does not fit even in an empty batch: less than two blocks are left on
                // the device or in the budget.
                Err(PickError::BatchFull) if fresh => {
                    let budget = self.store.budget().get();
                    let last = budget.enabled && budget.left < 2;
                    return Err(if last { WritebackError::Limit } else { WritebackError::NoSpace });
                }
                Err(PickError::BatchFull) => self.send()?,
            }
        }
    }

    /// Copies a page into the batch and picks its slot. Returns the size in bytes of the page's
    /// object in memory.
    fn copy(
        &self,
        batch: &mut Batch,
        layer: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
    ) -> Result<usize, PickError> {
        // Only the plain layout needs a copy of the object, to decompress it after the slot is
        // unlocked.
        let mut object = if self.store.is_packed() { None } else { Some([0; PAGE_BYTES]) };
        let object = object.as_mut().map_or(&mut [][..], |object| &mut object[..]);
        let word = self.pick(batch, layer, slot, wanted, object)?;
        if let (Content::Plain { buffer, blocks }, Some(entry)) = (&mut batch.content, batch.entries.last()) {
            // Decompress without the slot's lock, as that takes long.
            let at = (*blocks as usize - 1) * BLOCK_BYTES;
            let page = &mut buffer[at..at + BLOCK_BYTES];
            if self.pages.unpack(word, &object[..word.stored_bytes()], page).is_err() {
                // The object is damaged: leave the page in memory, where its readers report the
                // error.
                page.fill(0);
                self.unpick_entry(batch.tag, entry);
                return Err(PickError::Unwanted);
            }
        }
        Ok(word.stored_bytes())
    }

    /// Picks a slot and adds its page to the batch: the part of [`copy`](Self::copy) under the
    /// slot's lock. For the plain layout, only copies the object to `object`.
    fn pick(
        &self,
        batch: &mut Batch,
        at: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
        object: &mut [u8],
    ) -> Result<Word, PickError> {
        let layer = &self.layers[at];
        let leaf = layer.table().leaf(slot).ok_or(PickError::Unwanted)?;
        let fits = |word: Word| is_spillable(word) && !word.is_picked() && wanted(word);
        // Check without the lock first: most slots are skipped.
        if layer.is_retired() || !fits(leaf.peek(slot)) {
            return Err(PickError::Unwanted);
        }
        let guard = leaf.lock(slot);
        let word = guard.word();
        if !fits(word) {
            return Err(PickError::Unwanted);
        }
        let bytes = self.pages.pool.object(&guard);
        let (unit, stored) = match &mut batch.content {
            Content::Packed(packer) => {
                let owner = layer.header_owner(slot);
                let unit = packer.push(owner, word.algorithm() as u8, bytes).ok_or(PickError::BatchFull)?;
                (unit, bytes.len())
            }
            Content::Plain { blocks, .. } if *blocks < batch.run.blocks => {
                object[..bytes.len()].copy_from_slice(bytes);
                *blocks += 1;
                ((batch.run.start + u64::from(*blocks) - 1) * BLOCK_UNITS, PAGE_BYTES)
            }
            Content::Plain { .. } | Content::Submitted => return Err(PickError::BatchFull),
        };
        self.add_entry(batch, at, slot, guard, unit, stored);
        Ok(word)
    }

    /// As [`pick`](Self::pick), for a written-back page whose object was read from the device.
    fn pick_spilled(
        &self,
        batch: &mut Batch,
        at: usize,
        object: &StoredObject<'_>,
    ) -> Result<Word, PickError> {
        let Content::Packed(packer) = &mut batch.content else { return Err(PickError::Unwanted) };
        let layer = &self.layers[at];
        let slot = BackRef::from_bits(object.owner).slot();
        let guard = layer.table().leaf(slot).ok_or(PickError::Unwanted)?.lock(slot);
        let word = guard.word();
        let is_it = word.kind() == Kind::Spilled
            && word.location() == object.unit
            && word.spilled_bytes() == object.bytes.len()
            && !word.is_picked()
            && !layer.is_retired()
            // The block was not reused since before the read.
            && self.store.map().generation(object.unit / BLOCK_UNITS) == object.generation;
        if !is_it {
            return Err(PickError::Unwanted);
        }
        let unit =
            packer.push(object.owner, word.algorithm() as u8, object.bytes).ok_or(PickError::BatchFull)?;
        self.add_entry(batch, at, slot, guard, unit, object.bytes.len());
        Ok(word)
    }

    /// Adds an entry for a page whose bytes are already in the batch, and picks the page's slot.
    fn add_entry(
        &self,
        batch: &mut Batch,
        layer: usize,
        slot: u64,
        guard: SlotGuard<'_>,
        unit: u64,
        stored: usize,
    ) {
        let word = guard.word();
        self.store.place(unit, stored);
        batch.entries.push(Entry { layer, slot, unit, stored: stored as u32, age: word.age() });
        guard.publish(word.picked(batch.tag));
    }

    fn begin_batch(&mut self) -> Result<Batch, WritebackError> {
        // Do not start more writes on a hanging device: each abandoned write holds a buffer until
        // the device completes it.
        if self.store.abandoned() > 0 {
            return Err(WritebackError::Device(Error::Media));
        }
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
            store::WriteOutcome::Done(mut buffer) => {
                self.done.blocks += u64::from(batch.run.blocks);
                let mut left = EvictionCounts::default();
                // Newest first: a page that was changed and added again is in the batch twice, and
                // only the newer copy is valid.
                for entry in batch.entries.iter().rev() {
                    self.publish(batch.tag, entry, &mut left);
                }
                self.store.count_written_back(left.pages, left.stored);
                self.done.pages += left.pages;
                buffer.set_len(usize::MAX);
                self.spare.push(buffer);
                // Do not wake requests if no page left memory: they would retry, wait again and
                // start the next round, endlessly.
                if left.from_memory > 0 {
                    self.pages.wake_memory_waiters();
                }
            }
            store::WriteOutcome::Failed(error) => {
                self.failed = Some(error);
                // Stop if the device's file system is full, as it stays full. An I/O error may
                // concern one place of the device only: continue, as the kernel does.
                self.stopped |= error != Error::Media;
                self.unpick_all(&batch);
            }
            store::WriteOutcome::TimedOut => {
                self.failed = Some(Error::Media);
                self.stopped = true;
                self.unpick_all(&batch);
            }
        }
        self.release(batch.tag);
    }

    fn release(&mut self, tag: u8) {
        self.tags_in_use &= !(1 << tag);
    }

    /// Marks a page of a written batch as written back and frees its object in memory. If the page
    /// was changed meanwhile, frees its space on the device instead.
    fn publish(&self, tag: u8, entry: &Entry, left: &mut EvictionCounts) {
        let layer = &self.layers[entry.layer];
        let Some(guard) = layer.table().leaf(entry.slot).map(|leaf| leaf.lock(entry.slot)) else { return };
        let old = guard.word();
        let stays = mutants::on(Mutant::SpillsChangedPages) && old.stored_bytes() == entry.stored as usize;
        if !old.is_picked_by(tag) && !stays {
            drop(guard);
            return self.store.free_object(entry.unit, entry.stored as usize);
        }
        guard.publish(old.spilled_to(entry.unit, !self.store.is_packed()));
        self.pages.release(old);
        layer.account_spilled(&self.pages.layers, old);
        left.pages += 1;
        left.from_memory += u64::from(is_spillable(old));
        left.stored += u64::from(entry.stored);
    }

    /// Clears the mark of a picked slot: the page stays in memory.
    fn unpick_entry(&self, tag: u8, entry: &Entry) {
        let layer = &self.layers[entry.layer];
        let Some(guard) = layer.table().leaf(entry.slot).map(|leaf| leaf.lock(entry.slot)) else { return };
        let word = guard.word();
        if word.is_picked_by(tag) {
            guard.publish(word.unpicked(entry.age));
        }
    }

    /// Unpicks all slots of a batch. Newest first: a page can be in the batch twice, and its newest
    /// entry has its age.
    fn unpick_all(&self, batch: &Batch) {
        batch.entries.iter().rev().for_each(|entry| self.unpick_entry(batch.tag, entry));
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
            self.unpick_all(&batch);
            self.store.trim_run(batch.run, batch.charge, 0);
        }
        while !self.in_flight.is_empty() {
            self.finish_oldest_write();
        }
    }
}
