//! The pages of a batch: slots are picked when their pages are copied to the batch, and published
//! or unpicked when its write has ended. See [`evict_batches`](super::evict_batches) for the
//! protocol.

use super::batch::{Batch, Content, Entry, EvictionCounts, PickError, StoredObject};
use super::evict_batches::Eviction;
use crate::codec::Scratch;
use crate::pool::BackRef;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::page_search::{has_own_object, is_spillable};
use freestone_core::PAGE_BYTES;
use freestone_core::mutants::{self, Mutant};
use freestone_core::slot::{Kind, Leaf, SlotGuard, Word};
use freestone_spill::blocks::BLOCK_UNITS;
use freestone_spill::clean_copies::CopyContent;
use freestone_spill::space::BLOCK_BYTES;

impl Eviction<'_> {
    /// Copies a page into the batch and picks its slot. Returns the size in bytes of the page's
    /// object in memory.
    pub(super) fn copy(
        &self,
        batch: &mut Batch,
        layer: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
    ) -> Result<usize, PickError> {
        let is_grouped = |leaf: Leaf<'_>| leaf.peek(slot).kind() == Kind::Grouped;
        if self.layers[layer].table().leaf(slot).is_some_and(is_grouped) {
            return self.copy_grouped(batch, layer, slot, wanted);
        }
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

    /// Evicts a page whose object is on the device already, as a [clean
    /// copy](freestone_spill::clean_copies), without a write. Returns the size of the object in bytes;
    /// `None` if the page has no such copy or is not wanted.
    pub(super) fn evict_clean(
        &self,
        layer: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
    ) -> Option<usize> {
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
        Some(word.stored_bytes())
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

    /// As [`copy`](Self::copy), for a page in a group: on the device the page has an object of its
    /// own. Returns the page's share of the group in bytes.
    fn copy_grouped(
        &self,
        batch: &mut Batch,
        at: usize,
        slot: u64,
        wanted: &impl Fn(Word) -> bool,
    ) -> Result<usize, PickError> {
        let layer = &self.layers[at];
        let leaf = layer.table().leaf(slot).ok_or(PickError::Unwanted)?;
        let guard = leaf.lock(slot);
        let word = guard.word();
        let fits = word.kind() == Kind::Grouped && !word.is_picked() && wanted(word);
        let mut page = [0; PAGE_BYTES];
        // Readers of a damaged page report the damage.
        if layer.is_retired() || !fits || self.pages.load(&guard, &mut page).is_err() {
            return Err(PickError::Unwanted);
        }
        let mut entry = Entry { layer: at, slot, unit: 0, stored: 0, algorithm: 0, age: word.age() };
        guard.publish(word.picked(batch.tag));
        // Compress without the slot's lock, as that takes long.
        let mut scratch = Scratch::new();
        let placed = match &mut batch.content {
            Content::Packed(packer) => {
                let (priority, streams) = self.pages.codecs.strongest();
                let (algorithm, object) = match streams.compress(&page, &mut scratch) {
                    Some(object) => (priority as u8, object),
                    None => (0, &page[..]),
                };
                let unit = packer.push(layer.header_owner(slot), algorithm, object);
                unit.map(|unit| (unit, object.len(), algorithm))
            }
            Content::Plain { buffer, blocks } if *blocks < batch.run.blocks => {
                let block = *blocks as usize * BLOCK_BYTES;
                buffer[block..block + BLOCK_BYTES].copy_from_slice(&page);
                *blocks += 1;
                Some(((batch.run.start + u64::from(*blocks) - 1) * BLOCK_UNITS, PAGE_BYTES, 0))
            }
            Content::Plain { .. } | Content::Submitted => None,
        };
        let Some((unit, stored, algorithm)) = placed else {
            self.unpick_entry(batch.tag, &entry);
            return Err(PickError::BatchFull);
        };
        self.store.place(unit, stored);
        (entry.unit, entry.stored, entry.algorithm) = (unit, stored as u32, algorithm);
        batch.entries.push(entry);
        Ok(word.memory_bytes())
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
        batch.entries.push(Entry { layer, slot, unit, stored: stored as u32, algorithm, age: word.age() });
        guard.publish(word.picked(batch.tag));
    }

    /// Marks a page of a written batch as written back and frees its object in memory. If the page
    /// was changed meanwhile, frees its space on the device instead.
    pub(super) fn publish(&self, tag: u8, entry: &Entry, left: &mut EvictionCounts) {
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
    pub(super) fn unpick_all(&self, batch: &Batch) {
        batch.entries.iter().rev().for_each(|entry| self.unpick_entry(batch.tag, entry));
    }
}

/// Locks a slot whose page has an object of its own to evict and whose word is `wanted`; otherwise returns
/// `None`.
fn lock_evictable<'l>(layer: &'l Layer, slot: u64, wanted: &impl Fn(Word) -> bool) -> Option<SlotGuard<'l>> {
    let fits = |word: Word| has_own_object(word) && !word.is_picked() && wanted(word);
    let leaf = layer.table().leaf(slot)?;
    // Check without the lock first: most slots are skipped.
    if layer.is_retired() || !fits(leaf.peek(slot)) {
        return None;
    }
    let guard = leaf.lock(slot);
    fits(guard.word()).then_some(guard)
}
