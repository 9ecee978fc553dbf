//! An eviction: moves pages from memory to the backing device, many per write, with several writes
//! in flight.
//!
//! # Protocol
//! * A page that is taken into a batch stays in memory, and is read and written as before. Under
//!   its slot's lock its bytes are copied to the batch, and the slot is *picked* with the batch's
//!   tag. A change of the page clears the mark; a read does not.
//! * When the batch is on the device, each slot that still has the mark becomes `Spilled` under its
//!   lock, and its object is freed. A slot without the mark keeps its content, and the page's space
//!   on the device is freed.
//! * Tags of the batches in flight are distinct, and an abandoned batch visits no slot any more.
//!   The mark of an earlier batch is therefore never mistaken for that of a later one, and stale
//!   bytes never become a page.
//!
//! Evictions are serialised by [`Pages::background`].

use std::collections::VecDeque;
use std::sync::Arc;

use super::layer::Layer;
use super::outcome::{WritebackError, Written};
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

/// Minimum length of a packed run: the unused end of each run is lost.
const PACKED_RUN_BLOCKS_MIN: u32 = 8;

/// Result of offering a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Offered {
    /// The page is in a batch; its object takes this many bytes of memory.
    Taken(usize),
    /// The page is not selected, or no longer.
    Passed,
}

/// Moves pages out of memory, or within the backing device, in batches.
pub(super) struct Eviction<'a> {
    pages: &'a Pages,
    store: &'a Arc<Store>,
    /// The layers referred to by entries.
    layers: Vec<Arc<Layer>>,
    /// Blocks per write, followed by the maximum number of writes in flight.
    write_blocks: u32,
    writes_max: usize,
    open: Option<Batch>,
    in_flight: VecDeque<(Batch, Write)>,
    /// Blocks of the device that must stay free.
    reserve: u64,
    tags_in_use: u64,
    spare: Vec<IoBuf>,
    done: Written,
    failed: Option<Error>,
    /// The device hangs or is full: no further write starts.
    stopped: bool,
}

/// The pages of one write.
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

/// An object as read from the device.
pub(super) struct Found<'b> {
    /// Owner in the object's header.
    pub owner: u64,
    /// Unit at which the header begins.
    pub unit: u64,
    /// Generation of that block before the read.
    pub generation: u32,
    pub bytes: &'b [u8],
}

/// Why a page was not picked.
enum NotPicked {
    Unwanted,
    BatchFull,
}

/// Pages of a batch that left memory: counted together, not one by one.
#[derive(Default)]
struct EvictedCounts {
    pages: u64,
    /// Bytes on the device.
    stored: u64,
    /// Pages that were in memory; the others only moved on the device.
    from_memory: u64,
}

struct Entry {
    /// Index into [`Eviction::layers`].
    layer: usize,
    slot: u64,
    unit: u64,
    /// Size of the object on the device in bytes.
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
            done: Written::default(),
            failed: None,
            stopped: false,
        }
    }

    /// Creates an eviction that moves written-back pages; it may use the reserved blocks.
    pub fn to_move(pages: &'a Pages, store: &'a Arc<Store>) -> Self {
        let mut eviction = Self::new(pages, store);
        eviction.reserve = 0;
        eviction
    }

    /// Takes a page if its slot holds an object and its word is `wanted`.
    ///
    /// # Errors
    /// Fails if nothing more can be written: the caller must end the eviction.
    pub fn offer(
        &mut self,
        layer: &Arc<Layer>,
        slot: u64,
        wanted: impl Fn(Word) -> bool,
    ) -> Result<Offered, WritebackError> {
        let at = self.layer_index(layer);
        self.add_to_batch(|eviction, batch| eviction.copy(batch, at, slot, &wanted))
    }

    /// Moves a written-back page on the device. `object` was read from its place, and the layer's
    /// slot may still refer to it.
    ///
    /// # Errors
    /// As [`offer`](Self::offer).
    pub fn relocate(&mut self, layer: &Arc<Layer>, object: &Found<'_>) -> Result<Offered, WritebackError> {
        let at = self.layer_index(layer);
        self.add_to_batch(|eviction, batch| eviction.pick_spilled(batch, at, object).map(Word::spilled_bytes))
    }

    fn layer_index(&mut self, layer: &Arc<Layer>) -> usize {
        // Successive pages are usually of the same layer.
        if let Some(at) = self.layers.iter().rposition(|known| Arc::ptr_eq(known, layer)) {
            return at;
        }
        self.layers.push(Arc::clone(layer));
        self.layers.len() - 1
    }

    /// Calls `put` to add a page to the open batch, or to a new one if that is full.
    fn add_to_batch(
        &mut self,
        put: impl Fn(&Self, &mut Batch) -> Result<usize, NotPicked>,
    ) -> Result<Offered, WritebackError> {
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
                Ok(stored) => return Ok(Offered::Taken(stored)),
                Err(NotPicked::Unwanted) => return Ok(Offered::Passed),
                // Even an empty run is too small: less than two blocks are left.
                Err(NotPicked::BatchFull) if fresh => {
                    let budget = self.store.budget().get();
                    let last = budget.enabled && budget.left < 2;
                    return Err(if last { WritebackError::Limit } else { WritebackError::NoSpace });
                }
                Err(NotPicked::BatchFull) => self.send()?,
            }
        }
    }

    /// Copies a page into the batch and picks its slot. Returns the size of its object in memory.
    fn copy(
        &self,
        batch: &mut Batch,
        layer: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
    ) -> Result<usize, NotPicked> {
        // Only the plain layout needs a copy of the object (to decompress it).
        let mut object = if self.store.is_packed() { None } else { Some([0; PAGE_BYTES]) };
        let object = object.as_mut().map_or(&mut [][..], |object| &mut object[..]);
        let word = self.pick(batch, layer, slot, wanted, object)?;
        if let (Content::Plain { buffer, blocks }, Some(entry)) = (&mut batch.content, batch.entries.last()) {
            // Decompress outside the slot's lock: it takes long.
            let at = (*blocks as usize - 1) * BLOCK_BYTES;
            let page = &mut buffer[at..at + BLOCK_BYTES];
            if self.pages.unpack(word, &object[..word.stored_bytes()], page).is_err() {
                // The object is damaged: leave it in memory, and report it to its readers.
                page.fill(0);
                self.unpick_entry(batch.tag, entry);
                return Err(NotPicked::Unwanted);
            }
        }
        Ok(word.stored_bytes())
    }

    /// The part of [`copy`](Self::copy) under the slot's lock. For the plain layout, copies the
    /// object to `object`.
    fn pick(
        &self,
        batch: &mut Batch,
        at: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
        object: &mut [u8],
    ) -> Result<Word, NotPicked> {
        let layer = &self.layers[at];
        let leaf = layer.table().leaf(slot).ok_or(NotPicked::Unwanted)?;
        let fits = |word: Word| is_spillable(word) && !word.is_picked() && wanted(word);
        // Most slots are skipped without taking their lock.
        if layer.is_retired() || !fits(leaf.peek(slot)) {
            return Err(NotPicked::Unwanted);
        }
        let guard = leaf.lock(slot);
        let word = guard.word();
        if !fits(word) {
            return Err(NotPicked::Unwanted);
        }
        let bytes = self.pages.pool.object(&guard);
        let (unit, stored) = match &mut batch.content {
            Content::Packed(packer) => {
                let owner = layer.header_owner(slot);
                let unit = packer.push(owner, word.algorithm() as u8, bytes).ok_or(NotPicked::BatchFull)?;
                (unit, bytes.len())
            }
            Content::Plain { blocks, .. } if *blocks < batch.run.blocks => {
                object[..bytes.len()].copy_from_slice(bytes);
                *blocks += 1;
                ((batch.run.start + u64::from(*blocks) - 1) * BLOCK_UNITS, PAGE_BYTES)
            }
            Content::Plain { .. } | Content::Submitted => return Err(NotPicked::BatchFull),
        };
        self.add_entry(batch, at, slot, guard, unit, stored);
        Ok(word)
    }

    /// As [`pick`](Self::pick), for a written-back page.
    fn pick_spilled(&self, batch: &mut Batch, at: usize, object: &Found<'_>) -> Result<Word, NotPicked> {
        let Content::Packed(packer) = &mut batch.content else { return Err(NotPicked::Unwanted) };
        let layer = &self.layers[at];
        let slot = BackRef::from_bits(object.owner).slot();
        let guard = layer.table().leaf(slot).ok_or(NotPicked::Unwanted)?.lock(slot);
        let word = guard.word();
        let is_it = word.kind() == Kind::Spilled
            && word.location() == object.unit
            && word.spilled_bytes() == object.bytes.len()
            && !word.is_picked()
            && !layer.is_retired()
            // The block was not reused since it was read.
            && self.store.map().generation(object.unit / BLOCK_UNITS) == object.generation;
        if !is_it {
            return Err(NotPicked::Unwanted);
        }
        let unit =
            packer.push(object.owner, word.algorithm() as u8, object.bytes).ok_or(NotPicked::BatchFull)?;
        self.add_entry(batch, at, slot, guard, unit, object.bytes.len());
        Ok(word)
    }

    /// Adds a page, whose bytes are in the batch, and picks its slot.
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
        // Each write that a hanging device has not completed holds a buffer.
        if self.store.unanswered() > 0 {
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
                buffer.show(bytes);
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

    /// Submits the open batch to the device.
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
            buffer.show(all.blocks as usize * BLOCK_BYTES);
            self.spare.push(buffer);
            return Ok(());
        }
        buffer.show(used as usize * BLOCK_BYTES);
        let write = self.store.write(batch.run, batch.charge, buffer);
        self.in_flight.push_back((batch, write));
        while self.in_flight.len() >= self.writes_max {
            self.finish_oldest_write();
        }
        if self.stopped { Err(self.failure()) } else { Ok(()) }
    }

    /// Waits for the oldest write in flight.
    fn finish_oldest_write(&mut self) {
        let Some((batch, write)) = self.in_flight.pop_front() else { return };
        match self.store.finish(write) {
            store::Written::Done(mut buffer) => {
                self.done.blocks += u64::from(batch.run.blocks);
                let mut left = EvictedCounts::default();
                // Newest first: a page that was changed and taken again is in the batch twice.
                for entry in batch.entries.iter().rev() {
                    self.publish(batch.tag, entry, &mut left);
                }
                self.store.count_written_back(left.pages, left.stored);
                self.done.pages += left.pages;
                buffer.show(usize::MAX);
                self.spare.push(buffer);
                // Do not wake waiters if nothing left memory: they would retry, wait again and
                // start the next round, endlessly.
                if left.from_memory > 0 {
                    self.pages.memory_freed();
                }
            }
            store::Written::Failed(error) => {
                self.failed = Some(error);
                // A full file system stays full. Other errors may concern this place only, and the
                // kernel continues too.
                self.stopped |= error != Error::Media;
                self.unpick_all(&batch);
            }
            store::Written::Unanswered => {
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

    /// Marks the page as written back, unless it was changed meanwhile.
    fn publish(&self, tag: u8, entry: &Entry, left: &mut EvictedCounts) {
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

    /// Unpicks a slot: the page stays in memory.
    fn unpick_entry(&self, tag: u8, entry: &Entry) {
        let layer = &self.layers[entry.layer];
        let Some(guard) = layer.table().leaf(entry.slot).map(|leaf| leaf.lock(entry.slot)) else { return };
        let word = guard.word();
        if word.is_picked_by(tag) {
            guard.publish(word.unpicked(entry.age));
        }
    }

    /// Unpicks all slots of a batch, newest first: a page can be in the batch twice.
    fn unpick_all(&self, batch: &Batch) {
        batch.entries.iter().rev().for_each(|entry| self.unpick_entry(batch.tag, entry));
    }

    fn failure(&self) -> WritebackError {
        match self.failed {
            Some(Error::NoSpace) | None => WritebackError::NoSpace,
            Some(error) => WritebackError::Device(error),
        }
    }

    /// Writes the rest and waits for all writes. Returns the totals and the last failure.
    pub fn end(mut self) -> (Written, Result<(), WritebackError>) {
        let sent = self.send();
        while !self.in_flight.is_empty() {
            self.finish_oldest_write();
        }
        let outcome = if self.failed.is_some() { Err(self.failure()) } else { sent };
        (std::mem::take(&mut self.done), outcome)
    }
}

impl Drop for Eviction<'_> {
    /// Leaves no slot picked and no block allocated if the eviction is not ended normally.
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
