//! Evictions of pages that share an object. On the backing device each of them has an object of its
//! own. The memory is free when the last of them has left, so a round for the family's memory limit
//! evicts all pages of the objects that it chooses.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::batch::{Batch, PageEntry, PickError};
use super::evict_batches::Eviction;
use super::evict_rounds::Evict;
use crate::pool::Pool;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::outcome::WritebackError;
use freestone_core::PAGE_BYTES;
use freestone_core::slot::{MAX_SLOTS, Word};

/// Maximum number of objects that a round chooses from. The list takes some MiB of memory.
const OBJECTS_MAX: usize = 1 << 16;

impl Evict {
    /// Evicts all pages of shared objects, about `need` bytes of objects: first of those whose pages
    /// in `layers` are all cold. Returns the bytes of the objects, and the error that ended the round.
    pub(super) fn spill_shared(
        &self,
        eviction: &mut Eviction<'_>,
        layers: &[(Arc<Layer>, u64)],
        is_cold: &impl Fn(Word) -> bool,
        need: u64,
    ) -> (u64, Result<(), WritebackError>) {
        let Some(shared) = self.pages.shared() else { return (0, Ok(())) };
        // Cold pages and charged bytes of each object.
        let mut objects: HashMap<u64, (u32, u64)> = HashMap::new();
        let is_wanted = |word: Word| word.is_shared() && !word.is_picked() && is_cold(word);
        for (layer, _) in layers {
            layer.for_each_candidate(&[0..=MAX_SLOTS - 1], &is_wanted, |_, word| {
                let number = word.shared_number();
                if objects.len() < OBJECTS_MAX || objects.contains_key(&number) {
                    let bytes = Pool::charged_bytes(word.memory_bytes());
                    objects.entry(number).or_insert((0, bytes)).0 += 1;
                }
                true
            });
        }
        let mut order: Vec<_> =
            objects.iter().map(|(&number, &(cold, bytes))| (number, cold, bytes)).collect();
        order.sort_unstable_by_key(|&(number, cold, _)| (cold < shared.users(number), number));
        let (mut bytes, mut chosen) = (0, HashSet::new());
        for (number, _, object_bytes) in order {
            if bytes >= need {
                break;
            }
            bytes += object_bytes;
            chosen.insert(number);
        }
        let is_chosen = |word: Word| word.is_shared() && chosen.contains(&word.shared_number());
        let mut outcome = Ok(());
        for (layer, _) in layers {
            layer.for_each_candidate(&[0..=MAX_SLOTS - 1], &is_chosen, |slot, _| {
                outcome = eviction.offer(layer, slot, |_, word| is_chosen(word)).map(drop);
                outcome.is_ok()
            });
            if outcome.is_err() {
                break;
            }
        }
        (bytes, outcome)
    }
}

impl Eviction<'_> {
    /// As [`copy`](Self::copy), for a page that shares its object. Returns the bytes that the page is
    /// charged for.
    pub(super) fn copy_shared(
        &self,
        batch: &mut Batch,
        at: usize,
        slot: u64,
        wanted: &impl Fn(u64, Word) -> bool,
    ) -> Result<u64, PickError> {
        let layer = &self.layers[at];
        let guard = layer.table().leaf(slot).ok_or(PickError::Unwanted)?.lock(slot);
        let word = guard.word();
        if layer.is_retired() || !word.is_shared() || word.is_picked() || !wanted(slot, word) {
            return Err(PickError::Unwanted);
        }
        let mut copy = [0; PAGE_BYTES];
        let object = self.pages.copy_shared(word, &mut copy).map_err(|_| PickError::Unwanted)?;
        let bytes = &copy[..object.stored_bytes()];
        guard.publish(word.picked(batch.tag));
        let entry = PageEntry { layer: at, slot, unit: 0, stored: 0, algorithm: 0, age: word.age() };
        let form = (object.algorithm() as u8, bytes);
        self.add_copied(batch, entry, form, |page| self.pages.unpack(object, bytes, page))?;
        Ok(Pool::charged_bytes(word.memory_bytes()))
    }
}
