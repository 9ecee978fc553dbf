//! The table of fingerprints, by which pages with the same content are found.
//!
//! A fingerprint is a hash of 64 bits (XXH3 with a random seed) of a page's object as it is stored,
//! and of the algorithm. Equal objects mean equal content, so nothing is decompressed. More bits
//! would gain nothing: objects are compared byte by byte before pages share one.
//!
//! The table has 8 entries in each bucket, of 16 bytes each. A new entry replaces another one if
//! its bucket is full, an entry of a page rather than one of a shared object. Entries are hints:
//! nothing removes the entry of a page that has changed, and a lost entry loses a page to share with.

use std::hash::{BuildHasher, RandomState};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::pool::BackRef;
use crate::ram::memory::shared::number_of;
use freestone_core::device::{Error, Result};
use freestone_core::mutants::{self, Mutant};
use freestone_core::slot::Word;

/// Number of entries of a bucket: two cache lines.
const WAYS: usize = 8;
/// Least and greatest number of buckets: 16 KiB and 64 MiB.
const BUCKETS_MIN: u64 = 128;
const BUCKETS_MAX: u64 = 1 << 19;
const _: () = assert!(BUCKETS_MAX * size_of::<Bucket>() as u64 == 64 << 20);

type Bucket = [Entry; WAYS];

/// A fingerprint, 0 if the entry is unused, and the owner of the object.
#[derive(Clone, Copy, Default)]
struct Entry {
    key: u64,
    place: u64,
}

/// Fingerprints of pages that are alone, and of shared objects.
pub(super) struct Fingerprints {
    buckets: Vec<Bucket>,
    seed: u64,
    /// Index of the entry that is replaced next in a full bucket.
    victim: usize,
}

impl Default for Fingerprints {
    fn default() -> Self {
        Self { buckets: Vec::new(), seed: RandomState::new().hash_one(0_u64), victim: 0 }
    }
}

impl Fingerprints {
    /// Makes the table fit the fingerprints of `pages` pages: at least 12 entries for 8 pages, up to
    /// the greatest size. Entries stay.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if memory is short. The table is unchanged then.
    pub fn fit(&mut self, pages: u64) -> Result<()> {
        let wanted = (pages.saturating_mul(3) / 2).div_ceil(WAYS as u64).clamp(BUCKETS_MIN, BUCKETS_MAX);
        let present = self.buckets.len() as u64;
        if (wanted..=4 * wanted).contains(&present) {
            return Ok(());
        }
        // A fourth more, so that a table that grows steadily is not moved in every pass.
        let len = (wanted + wanted / 4).min(BUCKETS_MAX) as usize;
        let mut buckets = Vec::new();
        buckets.try_reserve_exact(len).map_err(|_| Error::NoMemory)?;
        buckets.resize(len, Bucket::default());
        let former = std::mem::replace(&mut self.buckets, buckets);
        for entry in former.into_iter().flatten().filter(|entry| entry.key != 0) {
            self.insert(entry.key, BackRef::from_bits(entry.place));
        }
        Ok(())
    }

    /// Removes the entries of pages that are alone, and those of shared objects for which `exists`
    /// returns false.
    pub fn retain_shared(&mut self, exists: impl Fn(u64) -> bool) {
        for entry in self.buckets.iter_mut().flatten() {
            if !number_of(BackRef::from_bits(entry.place)).is_some_and(&exists) {
                *entry = Entry::default();
            }
        }
    }

    /// Returns the fingerprint of an object with this word.
    pub fn key(&self, word: Word, object: &[u8]) -> u64 {
        let key = xxh3_64_with_seed(object, self.seed ^ word.algorithm() as u64);
        let key = if mutants::on(Mutant::DedupBelievesFingerprint) { key >> 60 << 60 } else { key };
        key.max(1)
    }

    /// Returns the owner of an object that had this fingerprint when it was added.
    pub fn find(&self, key: u64) -> Option<BackRef> {
        let entry = self.buckets.get(self.bucket_of(key))?.iter().find(|entry| entry.key == key)?;
        Some(BackRef::from_bits(entry.place))
    }

    /// Adds an object, in place of a former one with this fingerprint. Does nothing before
    /// [`fit`](Self::fit).
    pub fn insert(&mut self, key: u64, owner: BackRef) {
        let at = self.bucket_of(key);
        let Some(bucket) = self.buckets.get_mut(at) else { return };
        let known = bucket.iter().position(|entry| entry.key == key);
        let place = known.or_else(|| bucket.iter().position(|entry| entry.key == 0)).unwrap_or_else(|| {
            self.victim += 1;
            let mut ways = (self.victim..self.victim + WAYS).map(|way| way % WAYS);
            let is_page = |&way: &usize| number_of(BackRef::from_bits(bucket[way].place)).is_none();
            ways.find(is_page).unwrap_or(self.victim % WAYS)
        });
        bucket[place] = Entry { key, place: owner.bits() };
    }

    /// Returns the memory of the table in bytes.
    pub fn bytes(&self) -> u64 {
        (self.buckets.capacity() * size_of::<Bucket>()) as u64
    }

    fn bucket_of(&self, key: u64) -> usize {
        ((u128::from(key) * self.buckets.len() as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::memory::shared::owner_of;

    fn keys(count: u64) -> impl Iterator<Item = u64> {
        (1..=count).map(|n| n.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn found(table: &Fingerprints, count: u64) -> usize {
        keys(count).zip(0..).filter(|&(key, slot)| table.find(key) == Some(BackRef::new(7, slot))).count()
    }

    #[test]
    fn table_finds_nearly_all_of_the_pages_it_fits() {
        let (mut table, pages) = (Fingerprints::default(), 100_000);
        table.insert(5, BackRef::new(0, 0));
        assert_eq!((table.find(5), table.bytes()), (None, 0), "a table without buckets");
        table.fit(pages).unwrap();
        assert!((24..=30).contains(&(table.bytes() / pages)), "{} bytes", table.bytes());
        keys(pages).zip(0..).for_each(|(key, slot)| table.insert(key, BackRef::new(7, slot)));
        assert!(found(&table, pages) > 97_000, "{}", found(&table, pages));
        // More pages, or fewer pages: entries stay.
        table.fit(2 * pages).unwrap();
        let (bytes, many) = (table.bytes(), found(&table, pages));
        assert!(many > 97_000);
        table.fit(pages).unwrap();
        assert_eq!((table.bytes(), found(&table, pages)), (bytes, many), "a table of twice the size stays");
        table.fit(u64::MAX).unwrap();
        assert_eq!(table.bytes(), 64 << 20);
        table.fit(0).unwrap();
        assert!(table.bytes() < 32 << 10 && found(&table, pages) > 500);
    }

    #[test]
    fn full_bucket_keeps_shared_objects() {
        let mut table = Fingerprints::default();
        table.fit(0).unwrap();
        let few = 300;
        keys(few).zip(0..).for_each(|(key, number)| table.insert(key, owner_of(number)));
        keys(100_000).skip(few as usize).for_each(|key| table.insert(key, BackRef::new(7, key >> 28)));
        let is_kept = |(key, number)| table.find(key) == Some(owner_of(number));
        assert!(keys(few).zip(0..).all(is_kept));
        // A key that is known has one entry.
        let key = keys(1).next().unwrap();
        table.insert(key, BackRef::new(3, 9));
        assert_eq!(table.find(key), Some(BackRef::new(3, 9)));
        table.retain_shared(|number| number != 5);
        let kept = keys(100_000).filter(|&key| table.find(key).is_some()).count();
        assert_eq!(kept as u64, few - 2);
    }

    #[test]
    fn fingerprint_depends_on_content_and_algorithm() {
        let table = Fingerprints::default();
        let key = |algorithm, bytes: &[u8]| table.key(Word::compressed(1, 3, algorithm), bytes);
        assert_eq!(key(0, b"abc"), key(0, b"abc"));
        assert!(key(0, b"abc") != key(1, b"abc") && key(0, b"abc") != key(0, b"abd"));
        assert_ne!(key(0, b"abc"), Fingerprints::default().key(Word::compressed(1, 3, 0), b"abc"));
    }
}
