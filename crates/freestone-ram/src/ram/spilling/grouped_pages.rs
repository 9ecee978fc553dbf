//! Pages of groups in an eviction. In the packed layout, a [group](crate::ram::memory::groups) leaves
//! memory as a whole: one object with all of its pages.
//!
//! # Protocol
//! * The group is held, and its object is copied to the batch. The pages that leave memory, its
//!   *members*, are picked. A page that is written leaves the group, as always.
//! * When the batch is on the device, the group has a place there. Each member that still has the mark
//!   gets a word of the spilled group. When the hold is released, the pieces are freed if no page needs
//!   them, and the object on the device is freed if no page refers to it.
//! * A group that is on the device already is not written again: its members leave memory at once. That
//!   is a group whose other pages were evicted before, or one with a
//!   [clean copy](freestone_spill::clean_copies).
//!
//! A group whose members are less than half of its pages is not written: these pages leave the group,
//! and are stored alone. In the plain layout, which has the kernel's format, every page is stored alone.
//!
//! An eviction of cold pages takes a group as a whole if half of its pages are cold, since the memory
//! of a group is free only if all pages have left. A writeback on request takes the selected pages.

use std::cell::Cell;

use super::batch::{
    Batch, Content, Entry, EvictionCounts, GroupEntry, MovedGroup, PageEntry, PickError, StoredObject,
};
use super::evict_batches::{Eviction, OfferOutcome};
use crate::codec::{GROUP_PAGES, Scratch};
use crate::pool::{BackRef, Pool};
use crate::ram::memory::groups::device::Hold;
use crate::ram::memory::groups::{Groups, OBJECT_BYTES_MAX};
use crate::ram::memory::outcome::WritebackError;
use freestone_core::PAGE_BYTES;
use freestone_core::slot::Word;
use freestone_spill::blocks::BLOCK_UNITS;
use freestone_spill::layout::GROUP_ALGORITHM;

/// A group whose object was added to a batch.
struct PickedGroup {
    /// Unit of the device at which the object's header begins.
    unit: u64,
    /// Slots of the picked members, with their ages.
    members: Vec<(u64, u8)>,
    /// Bytes for which the members are charged in memory.
    charged: u64,
}

impl Eviction<'_> {
    /// Evicts the group of a page. Returns `None` if the page is not evicted with its group: it may be
    /// evicted alone.
    pub(super) fn offer_group(
        &mut self,
        at: usize,
        slot: u64,
        wanted: &impl Fn(u64, Word) -> bool,
    ) -> Option<OfferOutcome> {
        let (mut hold, members) = self.hold_group(at, slot, wanted)?;
        if hold.is_on_device() {
            return Some(self.spill_members(at, hold, &members));
        }
        let mut object = std::mem::take(&mut self.group_object);
        if object.is_empty() && object.try_reserve_exact(OBJECT_BYTES_MAX).is_ok() {
            object.resize(OBJECT_BYTES_MAX, 0);
        }
        let outcome = match self.find_copy(&mut hold, &mut object) {
            Some(_) if hold.is_on_device() => Some(self.spill_members(at, hold, &members)),
            Some(bytes) => self.add_group(at, hold, &members, &object[..bytes]),
            None => {
                self.release_hold(hold);
                None
            }
        };
        self.group_object = object;
        outcome
    }

    /// Holds the group of a page that is wanted, if the group can be evicted. Returns the slots of the
    /// pages that leave memory.
    fn hold_group(
        &self,
        at: usize,
        slot: u64,
        wanted: &impl Fn(u64, Word) -> bool,
    ) -> Option<(Hold, Vec<u64>)> {
        let (layer, groups) = (&self.layers[at], self.pages.groups()?);
        let leaf = layer.table().leaf(slot)?;
        let guard = leaf.lock(slot);
        let word = guard.word();
        if !word.is_grouped() || word.is_picked() || !wanted(slot, word) || layer.is_retired() {
            return None;
        }
        let hold = groups.hold(word);
        drop(guard);
        let first = slot - slot % GROUP_PAGES as u64;
        let mut members: Vec<u64> = (first..first + GROUP_PAGES as u64)
            .filter(|&slot| hold.has(leaf.peek(slot)) && !leaf.peek(slot).is_picked())
            .collect();
        let is_wanted = |slot: &u64| wanted(*slot, leaf.peek(*slot));
        let is_half = |count: usize| count * 2 >= hold.pages();
        if !(self.takes_whole_groups && is_half(members.iter().filter(|slot| is_wanted(slot)).count())) {
            members.retain(is_wanted);
        }
        if hold.is_on_device() || is_half(members.len()) {
            return Some((hold, members));
        }
        groups.release(&self.pages.pool, hold);
        None
    }

    /// Copies the object of a held group. If the object is on the device as a clean copy, puts the group
    /// there. Returns the size of the object in bytes; `None` if memory is short or the group is damaged.
    fn find_copy(&self, hold: &mut Hold, object: &mut [u8]) -> Option<usize> {
        let groups = self.pages.groups()?;
        let bytes = groups.copy_object(&self.pages.pool, hold, object)?;
        groups.prepare_place(hold).ok()?;
        let (slot, content) = hold.clean_copy(&object[..bytes]);
        if let Some(unit) = self.store.take_copy(slot, content) {
            self.put_on_device(groups, hold, unit, bytes);
        }
        Some(bytes)
    }

    fn put_on_device(&self, groups: &Groups, hold: &mut Hold, unit: u64, bytes: usize) {
        if !groups.put_on_device(hold, unit, bytes) {
            self.store.free_object(unit, bytes);
        }
    }

    /// Moves the members of a group that is on the device out of memory.
    fn spill_members(&mut self, at: usize, hold: Hold, members: &[u64]) -> OfferOutcome {
        let (mut count, mut charged) = (0, 0);
        for &slot in members {
            if let Some(bytes) = self.spill_member(at, slot, &hold, |word| !word.is_picked()) {
                count += 1;
                charged += bytes;
            }
        }
        self.release_hold(hold);
        self.count_clean(count);
        if count > 0 { OfferOutcome::Taken(charged) } else { OfferOutcome::Skipped }
    }

    /// Moves a page of a held group, which is on the device, out of memory if its word `fits`. Returns
    /// the bytes for which the page was charged.
    fn spill_member(
        &self,
        at: usize,
        slot: u64,
        hold: &Hold,
        fits: impl FnOnce(Word) -> bool,
    ) -> Option<u64> {
        let (layer, groups) = (&self.layers[at], self.pages.groups()?);
        let guard = layer.table().leaf(slot)?.lock(slot);
        let old = guard.word();
        if !hold.has(old) || !fits(old) {
            return None;
        }
        guard.publish(groups.spill(hold, old));
        layer.account_spilled(&self.pages.layers, old);
        Some(Pool::charged_bytes(old.memory_bytes()))
    }

    /// Adds a group to a batch. Returns `None` if there is no run of blocks for it.
    fn add_group(&mut self, at: usize, hold: Hold, members: &[u64], object: &[u8]) -> Option<OfferOutcome> {
        let unused = Cell::new(Some(hold));
        let added = self.add_to_batch(|eviction, batch| {
            let Some(hold) = unused.take() else { return Err(PickError::Unwanted) };
            match eviction.pick_group(batch, at, &hold, members, object) {
                Ok(PickedGroup { unit, members, charged }) => {
                    let bytes = object.len();
                    batch.entries.push(Entry::Group(GroupEntry { hold, layer: at, unit, bytes, members }));
                    Ok(charged)
                }
                Err(error) => {
                    unused.set(Some(hold));
                    Err(error)
                }
            }
        });
        if let Some(hold) = unused.take() {
            self.release_hold(hold);
        }
        added.ok()
    }

    /// Picks the members of a held group and adds the group's object to the batch.
    fn pick_group(
        &self,
        batch: &mut Batch,
        at: usize,
        hold: &Hold,
        members: &[u64],
        object: &[u8],
    ) -> Result<PickedGroup, PickError> {
        let Content::Packed(packer) = &mut batch.content else { return Err(PickError::Unwanted) };
        let leaf = members.first().and_then(|&slot| self.layers[at].table().leaf(slot));
        let leaf = leaf.ok_or(PickError::Unwanted)?;
        let (mut picked, mut charged) = (Vec::with_capacity(members.len()), 0);
        for &slot in members {
            let guard = leaf.lock(slot);
            let word = guard.word();
            if hold.has(word) && !word.is_picked() {
                guard.publish(word.picked(batch.tag));
                picked.push((slot, word.age()));
                charged += Pool::charged_bytes(word.memory_bytes());
            }
        }
        if picked.is_empty() {
            return Err(PickError::Unwanted);
        }
        let Some(unit) = packer.push(hold.header().bits(), GROUP_ALGORITHM, object) else {
            self.unpick_members(batch.tag, at, &picked);
            return Err(PickError::BatchFull);
        };
        self.store.place(unit, object.len());
        Ok(PickedGroup { unit, members: picked, charged })
    }

    fn unpick_members(&self, tag: u8, at: usize, members: &[(u64, u8)]) {
        for &(slot, age) in members {
            self.unpick_slot(tag, at, slot, age);
        }
    }

    /// Unpicks the members of a group: they stay in memory.
    pub(super) fn unpick_group(&self, tag: u8, entry: GroupEntry) {
        self.unpick_members(tag, entry.layer, &entry.members);
        self.release_hold(entry.hold);
    }

    /// Moves the picked members of a group out of memory, as the group's object is on the device.
    pub(super) fn publish_group(&self, tag: u8, entry: GroupEntry, left: &mut EvictionCounts) {
        let GroupEntry { mut hold, layer, unit, bytes, members } = entry;
        if let Some(groups) = self.pages.groups() {
            self.put_on_device(groups, &mut hold, unit, bytes);
        }
        for (slot, _) in members {
            let moved = self.spill_member(layer, slot, &hold, |word| word.is_picked_by(tag));
            left.grouped += u64::from(moved.is_some());
        }
        self.release_hold(hold);
    }

    pub(super) fn release_hold(&self, hold: Hold) {
        if let Some(groups) = self.pages.groups() {
            groups.release(&self.pages.pool, hold);
        }
    }

    // ---- reclaim ----------------------------------------------------------------------------------

    /// Adds a group on the device to a batch, which moves the group to another place. `object` is the
    /// group's object as read. Skips a group that is not at the place that was read.
    pub(super) fn relocate_group(
        &mut self,
        object: &StoredObject<'_>,
    ) -> Result<OfferOutcome, WritebackError> {
        let header = BackRef::from_bits(object.owner);
        let hold = self.pages.groups().and_then(|groups| groups.hold_at(header, object.unit));
        let Some(hold) = hold else { return Ok(OfferOutcome::Skipped) };
        // The block must not have been reused since before the read.
        if self.store.map().generation(object.unit / BLOCK_UNITS) != object.generation {
            self.release_hold(hold);
            return Ok(OfferOutcome::Skipped);
        }
        let unused = Cell::new(Some(hold));
        let moved = self.add_to_batch(|eviction, batch| {
            let Content::Packed(packer) = &mut batch.content else { return Err(PickError::Unwanted) };
            let Some(unit) = packer.push(object.owner, GROUP_ALGORITHM, object.bytes) else {
                return Err(PickError::BatchFull);
            };
            eviction.store.place(unit, object.bytes.len());
            if let Some(hold) = unused.take() {
                batch.entries.push(Entry::MovedGroup(MovedGroup { hold, unit }));
            }
            Ok(0)
        });
        if let Some(hold) = unused.take() {
            self.release_hold(hold);
        }
        match moved {
            // There is no run of blocks for a group. Pages may fit still.
            Err(WritebackError::NoSpace) => Ok(OfferOutcome::Skipped),
            moved => moved,
        }
    }

    /// Records the new place of a group, and frees the former one.
    pub(super) fn publish_moved_group(&self, MovedGroup { hold, unit }: MovedGroup) {
        let former = self.pages.groups().and_then(|groups| groups.move_on_device(&hold, unit));
        if let Some(former) = former {
            self.store.free_object(former.unit, former.stored as usize);
        }
        self.release_hold(hold);
    }

    // ---- pages that leave their group -------------------------------------------------------------

    /// As [`copy`](Self::copy), for a page that leaves its group: on the device the page has an object
    /// of its own. Returns the page's share of the group in bytes.
    pub(super) fn copy_grouped(
        &self,
        batch: &mut Batch,
        at: usize,
        slot: u64,
        wanted: &impl Fn(u64, Word) -> bool,
    ) -> Result<u64, PickError> {
        let layer = &self.layers[at];
        let leaf = layer.table().leaf(slot).ok_or(PickError::Unwanted)?;
        let guard = leaf.lock(slot);
        let word = guard.word();
        let fits = word.is_grouped() && !word.is_picked() && wanted(slot, word);
        let mut page = [0; PAGE_BYTES];
        // Readers of a damaged page report the damage.
        if layer.is_retired() || !fits || self.pages.load(&guard, &mut page).is_err() {
            return Err(PickError::Unwanted);
        }
        let entry = PageEntry { layer: at, slot, unit: 0, stored: 0, algorithm: 0, age: word.age() };
        guard.publish(word.picked(batch.tag));
        // Compress without the slot's lock, as that takes long.
        let mut scratch = Scratch::new();
        let (priority, streams) = self.pages.codecs.strongest();
        let compressed = if self.store.is_packed() { streams.compress(&page, &mut scratch) } else { None };
        let form = compressed.map_or((0, &page[..]), |object| (priority as u8, object));
        self.add_copied(batch, entry, form, |into| {
            into.copy_from_slice(&page);
            Ok(())
        })?;
        Ok(Pool::charged_bytes(word.memory_bytes()))
    }
}
