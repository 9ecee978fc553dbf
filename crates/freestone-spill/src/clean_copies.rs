//! Clean copies: objects on the backing device whose pages are in memory again.
//!
//! A page that is read back keeps its object on the device, as a clean page of the kernel's swap
//! cache does. If the page is evicted unchanged, its slot refers to that object again, and nothing
//! is written.
//!
//! A slot has no room for a second location, so the copies are in a table of their own, by owner
//! (slot table and slot). Writes do not touch the table. An eviction compares the object in memory
//! with a fingerprint of the copy instead: 128 bits of XXH3 with a random seed. A copy of a changed
//! page is freed by that eviction, or by a [sweep](CleanCopies::sweep).
//!
//! A group of pages that is read back keeps its object in the same way. The slot of the copy is the
//! group's header.
//!
//! Each object on the device belongs to one slot or to one entry of this table, never to both.
//!
//! Lock order: `state` is a leaf lock.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};

use xxhash_rust::xxh3::xxh3_128_with_seed;

use freestone_core::mutants::{self, Mutant};
use freestone_core::sync::Mutex;

/// Least number of copies that are kept, however small the pool is.
const COPIES_MIN: u64 = 1024;

/// An object on the device that belongs to no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CleanCopy {
    /// Unit (of 16 bytes) of the device at which the object's header begins.
    pub unit: u64,
    /// Size of the object in bytes.
    pub stored: u32,
    /// Number of pages in the object: 1, or those of a group.
    pub pages: u32,
}

/// Content that a slot needs from a copy: the object's bytes, and what its header must say.
#[derive(Clone, Copy)]
pub struct CopyContent<'b> {
    /// Owner (table and slot) in the header of the object.
    pub header_owner: u64,
    pub algorithm: u8,
    pub object: &'b [u8],
}

/// The clean copies of a backing device.
pub struct CleanCopies {
    state: Mutex<CopyTable>,
    seed: u64,
}

#[derive(Default)]
struct CopyTable {
    /// Copies by slot table and slot.
    tables: HashMap<u32, HashMap<u64, Entry>>,
    /// The entries, oldest first. An age without an entry is skipped.
    ages: VecDeque<Age>,
    len: u64,
    next_stamp: u64,
}

/// Slot table, slot and stamp of an entry.
type Age = (u32, u64, u64);

struct Entry {
    copy: CleanCopy,
    algorithm: u8,
    stamp: u64,
    fingerprint: u128,
}

impl Default for CleanCopies {
    fn default() -> Self {
        Self { state: Mutex::default(), seed: RandomState::new().hash_one(0_u64) }
    }
}

impl CleanCopies {
    fn fingerprint(&self, content: CopyContent<'_>) -> u128 {
        xxh3_128_with_seed(content.object, self.seed ^ content.header_owner)
    }

    /// Adds the copy of a page that was read back into the slot `slot` of the table `table`. Returns
    /// copies that the caller must free: a former one of this slot, and the oldest ones above the
    /// maximum, which is twice the number of pages in the pool.
    pub fn insert(
        &self,
        (table, slot): (u32, u64),
        copy: CleanCopy,
        content: CopyContent<'_>,
        pool_pages: u64,
    ) -> Vec<CleanCopy> {
        let fingerprint = self.fingerprint(content);
        let mut state = self.state.lock();
        let stamp = state.next_stamp;
        state.next_stamp += 1;
        let entry = Entry { copy, algorithm: content.algorithm, stamp, fingerprint };
        let mut freed = Vec::new();
        match state.tables.entry(table).or_default().insert(slot, entry) {
            Some(former) => freed.push(former.copy),
            None => state.len += 1,
        }
        state.ages.push_back((table, slot, stamp));
        while state.len > (2 * pool_pages).max(COPIES_MIN)
            && let Some(oldest) = state.pop_oldest()
        {
            freed.push(oldest);
        }
        state.drop_stale_ages();
        freed
    }

    /// Removes the copy of a slot. Returns the copy if its content is that of the page in memory,
    /// for the slot to refer to; otherwise returns the copy as an error, and the caller must free it.
    pub fn take(
        &self,
        (table, slot): (u32, u64),
        content: CopyContent<'_>,
    ) -> Option<Result<CleanCopy, CleanCopy>> {
        let entry = self.state.lock().remove(table, slot)?;
        let is_same = entry.algorithm == content.algorithm
            && entry.copy.stored as usize == content.object.len()
            && (entry.fingerprint == self.fingerprint(content) || mutants::on(Mutant::StaleCopy));
        Some(if is_same { Ok(entry.copy) } else { Err(entry.copy) })
    }

    /// Removes the copy of a slot, whatever its content is. The caller must free the copy.
    pub fn take_any(&self, (table, slot): (u32, u64)) -> Option<CleanCopy> {
        self.state.lock().remove(table, slot).map(|entry| entry.copy)
    }

    /// Removes up to `count` of the oldest copies, which the caller must free.
    pub fn take_oldest(&self, count: usize) -> Vec<CleanCopy> {
        let mut state = self.state.lock();
        std::iter::from_fn(|| state.pop_oldest()).take(count).collect()
    }

    /// Removes the copies of a slot table, which the caller must free.
    pub fn take_table(&self, table: u32) -> impl Iterator<Item = CleanCopy> + use<> {
        let mut state = self.state.lock();
        let copies = state.tables.remove(&table).unwrap_or_default();
        state.len -= copies.len() as u64;
        copies.into_values().map(|entry| entry.copy)
    }

    /// Looks at up to `count` of the oldest copies. Keeps those for which `is_valid` returns true, as
    /// the youngest, and removes the others, which the caller must free. `is_valid` receives slot
    /// table, slot and object size, and is called without a lock.
    pub fn sweep(&self, count: usize, is_valid: impl Fn(u32, u64, u32) -> bool) -> Vec<CleanCopy> {
        let seen = self.state.lock().take_ages(count);
        let (valid, outdated): (Vec<_>, Vec<_>) =
            seen.into_iter().partition(|&((table, slot, _), stored)| is_valid(table, slot, stored));
        let mut state = self.state.lock();
        state.ages.extend(valid.into_iter().map(|(age, _)| age));
        outdated.into_iter().filter_map(|(age, _)| state.remove_if(age)).collect()
    }

    /// Returns the approximate memory of the table in bytes.
    pub fn bytes(&self) -> u64 {
        let state = self.state.lock();
        let entries: usize = state.tables.values().map(HashMap::capacity).sum();
        (entries * size_of::<(u64, Entry)>() + state.ages.capacity() * size_of::<Age>()) as u64
    }
}

impl CopyTable {
    fn remove(&mut self, table: u32, slot: u64) -> Option<Entry> {
        let slots = self.tables.get_mut(&table)?;
        let entry = slots.remove(&slot)?;
        if slots.is_empty() {
            self.tables.remove(&table);
        }
        self.len -= 1;
        Some(entry)
    }

    fn remove_if(&mut self, age: Age) -> Option<CleanCopy> {
        self.get_if(age)?;
        self.remove(age.0, age.1).map(|entry| entry.copy)
    }

    fn get_if(&self, (table, slot, stamp): Age) -> Option<&Entry> {
        self.tables.get(&table)?.get(&slot).filter(|entry| entry.stamp == stamp)
    }

    /// Takes the ages of up to `count` of the oldest entries, with their object sizes.
    fn take_ages(&mut self, count: usize) -> Vec<(Age, u32)> {
        let taken: Vec<_> = self.ages.drain(..count.min(self.ages.len())).collect();
        let known = |&age: &Age| Some((age, self.get_if(age)?.copy.stored));
        taken.iter().filter_map(known).collect()
    }

    fn pop_oldest(&mut self) -> Option<CleanCopy> {
        while let Some(age) = self.ages.pop_front() {
            if let Some(copy) = self.remove_if(age) {
                return Some(copy);
            }
        }
        None
    }

    /// Bounds the list of ages: pages that are read back and evicted again and again leave stale
    /// ages in it.
    fn drop_stale_ages(&mut self) {
        if self.ages.len() as u64 > 2 * self.len + COPIES_MIN {
            let mut ages = std::mem::take(&mut self.ages);
            ages.retain(|&age| self.get_if(age).is_some());
            self.ages = ages;
        }
    }
}

#[cfg(test)]
#[path = "clean_copies_tests.rs"]
mod tests;
