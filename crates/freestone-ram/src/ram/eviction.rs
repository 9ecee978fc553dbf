//! An eviction: pages leave memory for the backing device, many in one write, several writes at a time.
//!
//! # Protocol
//! * A page that is taken on stays where it is, and is read and written as before. Under its slot's
//!   lock its bytes are copied into the batch, and the slot is *picked* with the batch's tag.
//!   Whoever changes the page takes that mark away; a read does not.
//! * When the batch is on the device, each slot that still has the mark becomes `Spilled`, under
//!   its lock, and its old object is freed. A slot without it keeps what it has, and the page's
//!   place on the device is free again.
//! * Tags are distinct among the batches in flight, and a batch that was given up looks at no slot
//!   any more. So the mark of an earlier batch is never taken for that of a later one, and stale
//!   bytes never become a page.
//!
//! Evictions run one after the other ([`Pages::background`]).

use std::collections::VecDeque;
use std::sync::Arc;

use super::candidates::is_spillable;
use super::layer::Layer;
use super::outcome::{WritebackError, Written};
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

/// A packed run is not shorter by choice: what is left at its end is lost.
const PACKED_RUN_BLOCKS_MIN: u32 = 8;

/// What became of a page that was offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Offered {
    /// It is on its way; its object takes so many bytes of memory.
    Taken(usize),
    /// It is not what is wanted, or no more.
    Passed,
}

/// Takes pages out of memory, or moves them on the backing device, in batches.
pub(super) struct Eviction<'a> {
    pages: &'a Pages,
    store: &'a Arc<Store>,
    /// Those that entries name.
    layers: Vec<Arc<Layer>>,
    /// Blocks of a write, and how many writes fly at once.
    write_blocks: u32,
    writes_max: usize,
    open: Option<Batch>,
    flying: VecDeque<(Batch, Write)>,
    /// Blocks of the device that are left to others.
    reserve: u64,
    tags_in_use: u64,
    spare: Vec<IoBuf>,
    done: Written,
    /// The latest failure of the device.
    failed: Option<Error>,
    /// The device does not answer, or has no room: nothing more is begun.
    stopped: bool,
}

/// Pages that go out in one write.
struct Batch {
    tag: u8,
    run: Run,
    charge: Charge,
    content: Content,
    entries: Vec<Entry>,
}

enum Content {
    Packed(Packer),
    Plain {
        buffer: IoBuf,
        blocks: u32,
    },
    /// Handed to the device.
    Gone,
}

/// An object as it was read from the device.
pub(super) struct Found<'b> {
    /// Whose it is, by its header.
    pub owner: u64,
    /// Where its header begins.
    pub unit: u64,
    /// The generation of that block, before it was read.
    pub generation: u32,
    /// The object.
    pub bytes: &'b [u8],
}

/// Why a page was not picked.
enum Not {
    /// It is not what is wanted.
    Wanted,
    /// The batch has no room for it.
    NoRoom,
}

/// What left memory with a batch: counted once, not page by page.
#[derive(Default)]
struct Left {
    pages: u64,
    /// Bytes on the device.
    stored: u64,
    /// Of the pages those that were in memory; others were only moved on the device.
    from_memory: u64,
}

struct Entry {
    /// Place among [`Eviction::layers`].
    layer: usize,
    slot: u64,
    unit: u64,
    /// Bytes of the object on the device.
    stored: u32,
    age: u8,
}

impl<'a> Eviction<'a> {
    /// Begins; the caller holds [`Pages::background`].
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
            flying: VecDeque::new(),
            reserve: store.reserve(),
            tags_in_use: 0,
            spare: Vec::new(),
            done: Written::default(),
            failed: None,
            stopped: false,
        }
    }

    /// Begins to move what is spilled; the blocks that are kept for that can be used.
    pub fn to_move(pages: &'a Pages, store: &'a Arc<Store>) -> Self {
        let mut eviction = Self::new(pages, store);
        eviction.reserve = 0;
        eviction
    }

    /// Takes a page on if its slot holds an object and is what is `wanted`.
    ///
    /// # Errors
    /// Nothing more can be written: the eviction should end.
    pub fn offer(
        &mut self,
        layer: &Arc<Layer>,
        slot: u64,
        wanted: impl Fn(Word) -> bool,
    ) -> Result<Offered, WritebackError> {
        let at = self.place_of(layer);
        self.put(|eviction, batch| eviction.copy(batch, at, slot, &wanted))
    }

    /// Takes a page on that is spilled already, to another place: `object` is what was read from
    /// where it lies, and the slot of the layer may hold it.
    ///
    /// # Errors
    /// As [`offer`](Self::offer).
    pub fn relocate(&mut self, layer: &Arc<Layer>, object: &Found<'_>) -> Result<Offered, WritebackError> {
        let at = self.place_of(layer);
        self.put(|eviction, batch| eviction.pick_spilled(batch, at, object).map(Word::spilled_bytes))
    }

    fn place_of(&mut self, layer: &Arc<Layer>) -> usize {
        // Pages of one layer come one after the other.
        if let Some(at) = self.layers.iter().rposition(|known| Arc::ptr_eq(known, layer)) {
            return at;
        }
        self.layers.push(Arc::clone(layer));
        self.layers.len() - 1
    }

    /// Has `put` add a page to the open batch, or to the next where that is full.
    fn put(
        &mut self,
        put: impl Fn(&Self, &mut Batch) -> Result<usize, Not>,
    ) -> Result<Offered, WritebackError> {
        if self.stopped {
            return Err(self.failure());
        }
        loop {
            let mut batch = match self.open.take() {
                Some(batch) => batch,
                None => self.begin()?,
            };
            let put = put(self, &mut batch);
            let fresh = batch.entries.is_empty();
            self.open = Some(batch);
            match put {
                Ok(stored) => return Ok(Offered::Taken(stored)),
                Err(Not::Wanted) => return Ok(Offered::Passed),
                // Not even an empty run has room for it: what is left is less than two blocks.
                Err(Not::NoRoom) if fresh => {
                    let budget = self.store.budget().get();
                    let last = budget.enabled && budget.left < 2;
                    return Err(if last { WritebackError::Limit } else { WritebackError::NoSpace });
                }
                Err(Not::NoRoom) => self.send()?,
            }
        }
    }

    /// Copies a page into the batch and picks its slot. Returns the bytes of its object.
    fn copy(
        &self,
        batch: &mut Batch,
        layer: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
    ) -> Result<usize, Not> {
        // The packed layout needs no copy on the way: it is zeroed for the plain one only.
        let mut object = if self.store.is_packed() { None } else { Some([0; PAGE_BYTES]) };
        let object = object.as_mut().map_or(&mut [][..], |object| &mut object[..]);
        let word = self.pick(batch, layer, slot, wanted, object)?;
        if let (Content::Plain { buffer, blocks }, Some(entry)) = (&mut batch.content, batch.entries.last()) {
            // Outside of the slot's lock: it takes a while.
            let at = (*blocks as usize - 1) * BLOCK_BYTES;
            let page = &mut buffer[at..at + BLOCK_BYTES];
            if self.pages.unpack(word, &object[..word.stored_bytes()], page).is_err() {
                // Damaged in memory: it stays there, where its readers learn of it.
                page.fill(0);
                self.give_back(batch.tag, entry);
                return Err(Not::Wanted);
            }
        }
        Ok(word.stored_bytes())
    }

    /// The part of [`copy`](Self::copy) that is done under the slot's lock. The plain layout's
    /// object goes to `object`.
    fn pick(
        &self,
        batch: &mut Batch,
        at: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
        object: &mut [u8],
    ) -> Result<Word, Not> {
        let layer = &self.layers[at];
        let leaf = layer.table().leaf(slot).ok_or(Not::Wanted)?;
        let fits = |word: Word| is_spillable(word) && !word.is_picked() && wanted(word);
        // Most are passed over: without their lock.
        if layer.is_retired() || !fits(leaf.peek(slot)) {
            return Err(Not::Wanted);
        }
        let guard = leaf.lock(slot);
        let word = guard.word();
        if !fits(word) {
            return Err(Not::Wanted);
        }
        let bytes = self.pages.pool.object(&guard);
        let (unit, stored) = match &mut batch.content {
            Content::Packed(packer) => {
                let owner = layer.header_owner(slot);
                let unit = packer.push(owner, word.algorithm() as u8, bytes).ok_or(Not::NoRoom)?;
                (unit, bytes.len())
            }
            Content::Plain { blocks, .. } if *blocks < batch.run.blocks => {
                object[..bytes.len()].copy_from_slice(bytes);
                *blocks += 1;
                ((batch.run.start + u64::from(*blocks) - 1) * BLOCK_UNITS, PAGE_BYTES)
            }
            Content::Plain { .. } | Content::Gone => return Err(Not::NoRoom),
        };
        self.enter(batch, at, slot, guard, unit, stored);
        Ok(word)
    }

    /// As [`pick`](Self::pick), for a page that is spilled.
    fn pick_spilled(&self, batch: &mut Batch, at: usize, object: &Found<'_>) -> Result<Word, Not> {
        let Content::Packed(packer) = &mut batch.content else { return Err(Not::Wanted) };
        let layer = &self.layers[at];
        let slot = BackRef::from_bits(object.owner).slot();
        let guard = layer.table().leaf(slot).ok_or(Not::Wanted)?.lock(slot);
        let word = guard.word();
        let is_it = word.kind() == Kind::Spilled
            && word.location() == object.unit
            && word.spilled_bytes() == object.bytes.len()
            && !word.is_picked()
            && !layer.is_retired()
            // The place was not used anew since it was read.
            && self.store.map().generation(object.unit / BLOCK_UNITS) == object.generation;
        if !is_it {
            return Err(Not::Wanted);
        }
        let unit = packer.push(object.owner, word.algorithm() as u8, object.bytes).ok_or(Not::NoRoom)?;
        self.enter(batch, at, slot, guard, unit, object.bytes.len());
        Ok(word)
    }

    /// Enters a page into the batch, which has its bytes, and picks its slot.
    fn enter(
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

    fn begin(&mut self) -> Result<Batch, WritebackError> {
        // Each write that a silent device is given holds a buffer until it answers.
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

    /// Hands the open batch to the device.
    fn send(&mut self) -> Result<(), WritebackError> {
        let Some(mut batch) = self.open.take() else { return Ok(()) };
        let (mut buffer, used) = match std::mem::replace(&mut batch.content, Content::Gone) {
            Content::Packed(packer) => packer.finish(),
            Content::Plain { buffer, blocks } => (buffer, blocks),
            Content::Gone => return Ok(()),
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
        self.flying.push_back((batch, write));
        while self.flying.len() >= self.writes_max {
            self.reap();
        }
        if self.stopped { Err(self.failure()) } else { Ok(()) }
    }

    /// Waits for the write that was begun first.
    fn reap(&mut self) {
        let Some((batch, write)) = self.flying.pop_front() else { return };
        match self.store.finish(write) {
            store::Written::Done(mut buffer) => {
                self.done.blocks += u64::from(batch.run.blocks);
                let mut left = Left::default();
                // The newest first: a page that was changed and taken on again is twice in the
                // batch.
                for entry in batch.entries.iter().rev() {
                    self.publish(batch.tag, entry, &mut left);
                }
                self.store.took(left.pages, left.stored);
                self.done.pages += left.pages;
                buffer.show(usize::MAX);
                self.spare.push(buffer);
                // Who is told so in vain tries again, waits again, and has the next round begin:
                // without an end.
                if left.from_memory > 0 {
                    self.pages.memory_freed();
                }
            }
            store::Written::Failed(error) => {
                self.failed = Some(error);
                // A full file system stays full; other errors may be of this place alone, and the
                // kernel goes on, too.
                self.stopped |= error != Error::Media;
                self.give_all_back(&batch);
            }
            store::Written::Unanswered => {
                self.failed = Some(Error::Media);
                self.stopped = true;
                self.give_all_back(&batch);
            }
        }
        self.release(batch.tag);
    }

    fn release(&mut self, tag: u8) {
        self.tags_in_use &= !(1 << tag);
    }

    /// The page is on the device: its slot says so, unless somebody changed it meanwhile.
    fn publish(&self, tag: u8, entry: &Entry, left: &mut Left) {
        let layer = &self.layers[entry.layer];
        let Some(guard) = layer.table().leaf(entry.slot).map(|leaf| leaf.lock(entry.slot)) else { return };
        let old = guard.word();
        let stays = mutants::on(Mutant::SpillsChangedPages) && old.stored_bytes() == entry.stored as usize;
        if !old.is_picked_by(tag) && !stays {
            drop(guard);
            return self.store.abandon(entry.unit, entry.stored as usize);
        }
        guard.publish(old.spilled_to(entry.unit, !self.store.is_packed()));
        self.pages.release(old);
        layer.account_spilled(&self.pages.layers, old);
        left.pages += 1;
        left.from_memory += u64::from(is_spillable(old));
        left.stored += u64::from(entry.stored);
    }

    /// The page stays where it is.
    fn give_back(&self, tag: u8, entry: &Entry) {
        let layer = &self.layers[entry.layer];
        let Some(guard) = layer.table().leaf(entry.slot).map(|leaf| leaf.lock(entry.slot)) else { return };
        let word = guard.word();
        if word.is_picked_by(tag) {
            guard.publish(word.unpicked(entry.age));
        }
    }

    /// All pages of a batch stay where they are; the newest first: one can be in it twice.
    fn give_all_back(&self, batch: &Batch) {
        batch.entries.iter().rev().for_each(|entry| self.give_back(batch.tag, entry));
    }

    fn failure(&self) -> WritebackError {
        match self.failed {
            Some(Error::NoSpace) | None => WritebackError::NoSpace,
            Some(error) => WritebackError::Device(error),
        }
    }

    /// Writes what is left, waits for everything, and says what was done and what failed last.
    pub fn end(mut self) -> (Written, Result<(), WritebackError>) {
        let sent = self.send();
        while !self.flying.is_empty() {
            self.reap();
        }
        let outcome = if self.failed.is_some() { Err(self.failure()) } else { sent };
        (std::mem::take(&mut self.done), outcome)
    }
}

impl Drop for Eviction<'_> {
    /// An eviction that is not ended in peace leaves no page picked and no block taken.
    fn drop(&mut self) {
        if let Some(batch) = self.open.take() {
            self.give_all_back(&batch);
            self.store.trim_run(batch.run, batch.charge, 0);
        }
        while !self.flying.is_empty() {
            self.reap();
        }
    }
}
