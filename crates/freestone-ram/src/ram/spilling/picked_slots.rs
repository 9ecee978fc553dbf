//! The pages of a batch: slots are picked when their pages are copied to the batch, and published
//! or unpicked when its write has ended. See [`evict_batches`](super::evict_batches) for the
//! protocol. [`grouped_pages`](super::grouped_pages) has the pages of groups.

use super::batch::{Batch, Content, Entry, EvictionCounts, PageEntry, PickError, StoredObject};
use super::evict_batches::Eviction;
use crate::pool::{BackRef, Pool};
use crate::ram::memory::layer::Layer;
use crate::ram::memory::page_search::{has_own_object, is_spillable};
use freestone_core::PAGE_BYTES;
use freestone_core::device;
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::mutants::{self, Mutant};
use freestone_core::slot::{Kind, SlotGuard, Word};
use freestone_spill::blocks::BLOCK_UNITS;
use freestone_spill::clean_copies::CopyContent;
use freestone_spill::space::BLOCK_BYTES;

impl Eviction<'_> {
    /// Copies a page into the batch and picks its slot. Returns the bytes for which the page is charged
    /// in memory.
    pub(super) fn copy(
        &self,
        batch: &mut Batch,
        layer: usize,
        slot: u64,
        wanted: &impl Fn(u64, Word) -> bool,
    ) -> Result<u64, PickError> {
        if self.layers[layer].table().leaf(slot).is_some_and(|leaf| leaf.peek(slot).is_shared()) {
            return self.copy_shared(batch, layer, slot, wanted);
        }
        // Only the plain layout needs a copy of the object, to decompress it after the slot is
        // unlocked.
        let mut object = if self.store.is_packed() { None } else { Some([0; PAGE_BYTES]) };
        let object = object.as_mut().map_or(&mut [][..], |object| &mut object[..]);
        let word = self.pick(batch, layer, slot, wanted, object)?;
        if let (Content::Plain { buffer, blocks }, Some(Entry::Page(entry))) =
            (&mut batch.content, batch.entries.last())
        {
            // Decompress without the slot's lock, as that takes long.
            let at = (*blocks as usize - 1) * BLOCK_BYTES;
            let page = &mut buffer[at..at + BLOCK_BYTES];
            if self.pages.unpack(word, &object[..word.stored_bytes()], page).is_err() {
                // The object is damaged: leave the page in memory, where its readers report the
                // error.
                page.fill(0);
                self.unpick_page(batch.tag, entry);
                return Err(PickError::Unwanted);
            }
        }
        Ok(Pool::charged_bytes(word.stored_bytes()))
    }

    /// Evicts a page whose object is on the device already, as a [clean
    /// copy](freestone_spill::clean_copies), without a write. Returns the bytes for which the page was
    /// charged in memory; `None` if the page has no such copy or is not wanted.
    pub(super) fn evict_clean(
        &self,
        layer: usize,
        slot: u64,
        wanted: &impl Fn(u64, Word) -> bool,
    ) -> Option<u64> {
        let layer = &self.layers[layer];
        let guard = lock_evictable(layer, slot, wanted)?;
        let word = guard.word();
        let object = self.pages.pool.object(&guard);
        let header_owner = layer.header_owner(slot);
        let content = CopyContent { header_owner, algorithm: word.algorithm() as u8, object };
        let unit = self.store.take_copy((layer.id(), slot), content)?;
        guard.publish(word.spilled_to(unit, false));
        self.pages.release(word);
        layer.account_spilled(&self.pages.layers, word);
        self.store.count_written_back(1, word.stored_bytes() as u64);
        Some(Pool::charged_bytes(word.stored_bytes()))
    }

    /// Picks a slot and adds its page to the batch: the part of [`copy`](Self::copy) under the
    /// slot's lock. For the plain layout, only copies the object to `object`.
    fn pick(
        &self,
        batch: &mut Batch,
        at: usize,
        slot: u64,
        wanted: &impl Fn(u64, Word) -> bool,
        object: &mut [u8],
    ) -> Result<Word, PickError> {
        let layer = &self.layers[at];
        let guard = lock_evictable(layer, slot, wanted).ok_or(PickError::Unwanted)?;
        let word = guard.word();
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
    pub(super) fn pick_spilled(
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
        let algorithm = word.algorithm() as u8;
        let stored = stored as u32;
        let entry = PageEntry { layer, slot, unit, stored, algorithm, age: word.age() };
        batch.entries.push(Entry::Page(entry));
        guard.publish(word.picked(batch.tag));
    }

    /// Adds a picked page whose object is not that of its slot. The packed layout stores the object
    /// (its algorithm and bytes), the plain one the page, which `unpack` writes. If the page does not
    /// fit, or is damaged, unpicks its slot.
    pub(super) fn add_copied(
        &self,
        batch: &mut Batch,
        mut entry: PageEntry,
        (algorithm, object): (u8, &[u8]),
        unpack: impl FnOnce(&mut [u8]) -> device::Result<()>,
    ) -> Result<(), PickError> {
        let placed = match &mut batch.content {
            Content::Packed(packer) => {
                entry.algorithm = algorithm;
                let owner = self.layers[entry.layer].header_owner(entry.slot);
                let unit = packer.push(owner, algorithm, object);
                unit.map(|unit| (unit, object.len())).ok_or(PickError::BatchFull)
            }
            Content::Plain { buffer, blocks } if *blocks < batch.run.blocks => {
                let (block, unit) = (*blocks as usize, (batch.run.start + u64::from(*blocks)) * BLOCK_UNITS);
                match unpack(&mut buffer[block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES]) {
                    Ok(()) => {
                        *blocks += 1;
                        Ok((unit, PAGE_BYTES))
                    }
                    // The object is damaged: leave the page in memory, where its readers report the
                    // error.
                    Err(_) => Err(PickError::Unwanted),
                }
            }
            Content::Plain { .. } | Content::Submitted => Err(PickError::BatchFull),
        };
        let (unit, stored) = placed.inspect_err(|_| self.unpick_page(batch.tag, &entry))?;
        self.store.place(unit, stored);
        (entry.unit, entry.stored) = (unit, stored as u32);
        batch.entries.push(Entry::Page(entry));
        Ok(())
    }

    /// Publishes an object of a written batch.
    pub(super) fn publish(&self, tag: u8, entry: Entry, left: &mut EvictionCounts) {
        match entry {
            Entry::Page(entry) => self.publish_page(tag, &entry, left),
            Entry::Group(entry) => self.publish_group(tag, entry, left),
            Entry::MovedGroup(entry) => self.publish_moved_group(entry),
        }
    }

    /// Marks a page of a written batch as written back and frees its object in memory. If the page
    /// was changed meanwhile, frees its space on the device instead.
    fn publish_page(&self, tag: u8, entry: &PageEntry, left: &mut EvictionCounts) {
        let layer = &self.layers[entry.layer];
        let Some(guard) = layer.table().leaf(entry.slot).map(|leaf| leaf.lock(entry.slot)) else { return };
        let old = guard.word();
        let stays = mutants::on(Mutant::SpillsChangedPages) && old.stored_bytes() == entry.stored as usize;
        if !old.is_picked_by(tag) && !stays {
            drop(guard);
            return self.store.free_object(entry.unit, entry.stored as usize);
        }
        guard.publish(if old.kind() == Kind::Grouped {
            let size = if entry.stored as usize == PAGE_BYTES { 0 } else { entry.stored };
            Word::spilled(entry.unit, size, entry.algorithm)
        } else {
            old.spilled_to(entry.unit, !self.store.is_packed())
        });
        kill_points::pass(KillPoint::PageWrittenBack);
        self.pages.release(old);
        layer.account_spilled(&self.pages.layers, old);
        left.pages += 1;
        left.from_memory += u64::from(is_spillable(old));
        left.stored += u64::from(entry.stored);
    }

    /// Clears the mark of a picked slot: the page stays in memory.
    pub(super) fn unpick_slot(&self, tag: u8, layer: usize, slot: u64, age: u8) {
        let Some(guard) = self.layers[layer].table().leaf(slot).map(|leaf| leaf.lock(slot)) else { return };
        let word = guard.word();
        if word.is_picked_by(tag) {
            guard.publish(word.unpicked(age));
        }
    }

    pub(super) fn unpick_page(&self, tag: u8, entry: &PageEntry) {
        self.unpick_slot(tag, entry.layer, entry.slot, entry.age);
    }

    /// Unpicks all slots of a batch. Newest first: a page can be in the batch twice, and its newest
    /// entry has its age.
    pub(super) fn unpick_all(&self, tag: u8, entries: Vec<Entry>) {
        for entry in entries.into_iter().rev() {
            match entry {
                Entry::Page(entry) => self.unpick_page(tag, &entry),
                Entry::Group(entry) => self.unpick_group(tag, entry),
                Entry::MovedGroup(entry) => self.release_hold(entry.hold),
            }
        }
    }
}

/// Locks a slot whose page has an object of its own to evict and whose word is `wanted`; otherwise returns
/// `None`.
fn lock_evictable<'l>(
    layer: &'l Layer,
    slot: u64,
    wanted: &impl Fn(u64, Word) -> bool,
) -> Option<SlotGuard<'l>> {
    let fits = |word: Word| has_own_object(word) && !word.is_picked() && wanted(slot, word);
    let leaf = layer.table().leaf(slot)?;
    // Check without the lock first: most slots are skipped.
    if layer.is_retired() || !fits(leaf.peek(slot)) {
        return None;
    }
    let guard = leaf.lock(slot);
    fits(guard.word()).then_some(guard)
}
