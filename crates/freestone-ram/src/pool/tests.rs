//! Tests of the pool alone: allocation, memory, limits, threads, and compaction with a slot table.

use std::collections::HashMap;

use super::class::HUGE_LINE_BYTES;
use super::compact::Owners;
use super::rebuild::RebuildError;
use super::*;
use crate::effort::effort;
use freestone_core::slot::{Common, SlotGuard, Table, Word};
use freestone_core::sync::Arc;

const OWNER: BackRef = BackRef::new(0, 0);

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (i % 57)) as u8 ^ i as u8).collect()
}

mod raw {
    #![expect(unsafe_code)]
    // UNSAFETY: tests read objects that no slot holds.

    /// Returns a copy of an object that belongs to the caller.
    pub fn view(pool: &super::Pool, location: u64, len: usize) -> Vec<u8> {
        // SAFETY: the caller stored this many bytes there and frees them later.
        unsafe { pool.view(location, len) }.to_vec()
    }
}
use raw::view;

/// Checks by types that a slice from `object` excludes `overwrite`: `object` borrows the guard, and
/// `overwrite` needs exclusive access to the guard.
#[test]
fn object_borrow_excludes_overwrite() {
    let object: for<'p, 's> fn(&'p Pool, &'p SlotGuard<'s>) -> &'p [u8] = Pool::object;
    let overwrite: for<'p, 'g, 's, 'd> fn(&'p Pool, &'g mut SlotGuard<'s>, &'d [u8]) = Pool::overwrite;
    let pool = Pool::new().unwrap();
    let table = OneTable(Table::new(1, Arc::new(Common::new().unwrap())).unwrap());
    table.put(&pool, 3, 700);
    let mut guard = table.0.leaf(3).unwrap().lock(3);
    assert!(object(&pool, &guard) == bytes(3, 700));
    overwrite(&pool, &mut guard, &bytes(4, 700));
    assert!(pool.object(&guard) == bytes(4, 700));
}

/// A word that is read without the slot's lock may refer to memory that is not mapped yet in this
/// thread's view.
#[test]
fn prefetch_unmapped_location_is_ignored() {
    let pool = Pool::new().unwrap();
    for word in [Word::huge(7), Word::compressed((1 << freestone_core::slot::LOCATION_BITS) - 1, 900, 0)] {
        pool.prefetch_for_read(word);
        pool.prefetch_for_write(word);
    }
}

#[test]
fn objects_of_all_sizes_do_not_overlap() {
    let pool = Pool::new().unwrap();
    let stored: Vec<_> =
        (1..=PAGE_BYTES).map(|len| (pool.store(&bytes(len as u64, len), OWNER, 0).unwrap(), len)).collect();
    for &(location, len) in &stored {
        assert!(view(&pool, location, len) == bytes(len as u64, len), "{len} bytes at {location:#x}");
    }
    for (location, _) in stored {
        pool.free(location);
    }
    pool.release_empties();
    assert_eq!((pool.pages(), pool.backrefs_bytes()), (0, 0), "every span went back");
}

#[test]
fn store_fills_holes_before_growing() {
    let pool = Pool::new().unwrap();
    let mut live: Vec<u64> = (0..2000).map(|n| pool.store(&bytes(n, 1000), OWNER, 0).unwrap()).collect();
    let pages = pool.pages();
    assert!(pages * PAGE_BYTES as u64 <= 2000 * 1008 * 102 / 100, "{pages} pages");
    for round in 0..10 {
        for n in (round % 3..live.len()).step_by(3) {
            pool.free(live[n]);
            live[n] = pool.store(&bytes(n as u64, 995), OWNER, 0).unwrap();
        }
    }
    // A thread may move to another CPU and start a span there, once per CPU.
    let begun = (percpu::cpus() * class::SPAN_PAGES) as u64;
    assert!(pool.pages() <= pages + begun, "{} pages, {pages} at first", pool.pages());
}

#[test]
fn limit_counts_resident_pages() {
    let pool = Pool::new().unwrap();
    pool.store(&bytes(1, 40), OWNER, 0).unwrap();
    assert_eq!(pool.pages(), 1, "a span is not brought in whole");
    pool.set_limit_pages(2);
    pool.store(&bytes(1, HUGE_LINE_BYTES - 100), OWNER, 0).unwrap();
    assert_eq!(pool.pages(), 2, "equal to the limit is allowed");
    assert_eq!(pool.store(&bytes(1, 2000), OWNER, 0), Err(Error::NoSpace));
    assert_eq!((pool.pages(), pool.pages_max()), (2, 3));
    pool.store(&bytes(2, 40), OWNER, 0).unwrap();
    pool.set_limit_pages(1);
    assert_eq!(
        pool.store(&bytes(2, 40), OWNER, 0),
        Err(Error::NoSpace),
        "over the limit even a hole is refused"
    );
    pool.reset_pages_max();
    assert_eq!(pool.pages_max(), 2);
}

#[test]
fn limit_releases_cached_empty_spans() {
    let pool = Pool::new().unwrap();
    pool.set_limit_pages(40);
    let first: Vec<u64> = (0..40).map(|n| pool.store(&bytes(n, PAGE_BYTES), OWNER, 0).unwrap()).collect();
    for location in first {
        pool.free(location);
    }
    assert!(pool.pages() > 0, "empties keep their memory for a while");
    for n in 0..40 * 256 {
        pool.store(&bytes(n, 8), OWNER, 0).unwrap_or_else(|e| panic!("{e} at {n}: {} pages", pool.pages()));
    }
    assert!(pool.pages() <= 40);
}

#[test]
fn reused_span_releases_excess_memory() {
    let pool = Pool::new().unwrap();
    let all: Vec<u64> = (0..320).map(|n| pool.store(&bytes(n, PAGE_BYTES), OWNER, 0).unwrap()).collect();
    for location in all {
        pool.free(location);
    }
    assert!(pool.pages() > 100, "empties are kept");
    pool.set_limit_pages(100);
    let one = pool.store(&bytes(1, 100), OWNER, 0).unwrap();
    pool.free(one);
    // Now allocate one page per class, from spans that were full of whole pages before.
    pool.set_limit_pages(512);
    let all: Vec<u64> = (0..512).map(|n| pool.store(&bytes(n, PAGE_BYTES), OWNER, 0).unwrap()).collect();
    for location in all {
        pool.free(location);
    }
    for class in 0..CLASSES {
        pool.store(&bytes(7, (class + 1) * CLASS_STEP_BYTES), OWNER, 0).unwrap();
    }
    assert!(pool.pages() <= CLASSES as u64 + 16 * 32, "{} pages", pool.pages());
}

/// The high-water mark exceeds the limit only if a write fails.
#[test]
fn hole_at_limit_keeps_high_water_mark() {
    let pool = Pool::new().unwrap();
    let all: Vec<u64> = (0..33).map(|n| pool.store(&bytes(n, PAGE_BYTES), OWNER, 0).unwrap()).collect();
    pool.free(all[3]);
    pool.set_limit_pages(33);
    pool.store(&bytes(1, PAGE_BYTES), OWNER, 0).unwrap();
    assert_eq!((pool.pages(), pool.pages_max()), (33, 33));
    assert_eq!(pool.store(&bytes(1, PAGE_BYTES), OWNER, 0), Err(Error::NoSpace));
    assert_eq!((pool.pages(), pool.pages_max()), (33, 34));
}

/// Free objects that are not at the front of the current span are found, too.
#[test]
fn limit_uses_holes_behind_front() {
    let pool = Pool::new().unwrap();
    pool.set_limit_pages(40);
    let all: Vec<u64> = (0..40).map(|n| pool.store(&bytes(n, PAGE_BYTES), OWNER, 0).unwrap()).collect();
    for &location in &all[..20] {
        pool.free(location);
    }
    for n in 0..20 {
        pool.store(&bytes(n, PAGE_BYTES), OWNER, 0).unwrap();
    }
    assert_eq!(pool.store(&bytes(1, PAGE_BYTES), OWNER, 0), Err(Error::NoSpace));
}

/// At the limit, every free resident object can be used.
#[test]
fn limit_uses_every_resident_hole() {
    let pool = Pool::new().unwrap();
    pool.set_limit_pages(100);
    let mut live = Vec::new();
    while let Ok(location) = pool.store(&bytes(1, 2000), OWNER, 0) {
        live.push(location);
    }
    // If the thread moves to another CPU, the end of one more span may be too short for an object.
    let most = 100 * PAGE_BYTES / 2000;
    assert!((most - 4..=most).contains(&live.len()) && pool.pages() == 100, "{}", live.len());
    // Make free places in every span; some of the spans are current spans of other CPUs.
    std::thread::scope(|scope| {
        for part in live.chunks(live.len() / 8) {
            scope.spawn(|| {
                let mut mine = part[0];
                for round in 0..200 {
                    pool.free(mine);
                    mine = pool.store(&bytes(round, 1999), OWNER, 0).unwrap();
                    assert!(view(&pool, mine, 1999) == bytes(round, 1999));
                }
            });
        }
    });
    assert_eq!(pool.store(&bytes(1, 2000), OWNER, 0), Err(Error::NoSpace));
    assert_eq!(pool.pages(), 100);
}

/// Threads allocate, check and free objects at random, and pass objects to other threads to free.
#[test]
fn threads_alloc_and_free_without_corruption() {
    let pool = Pool::new().unwrap();
    let exchange: Mutex<Vec<(u64, u64, usize)>> = Mutex::default();
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let (pool, exchange) = (&pool, &exchange);
            scope.spawn(move || {
                let mut live: Vec<(u64, u64, usize)> = Vec::new();
                let mut state = thread + 1;
                for step in 0..effort(2000_u64, 8000) {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // Use few classes, for contention between the threads.
                    let len = 16 * (1 + (state >> 40) % 12) as usize * 20;
                    let seed = thread << 32 | step;
                    live.push((pool.store(&bytes(seed, len), BackRef::new(1, seed), 0).unwrap(), seed, len));
                    if state >> 63 == 1 || live.len() > 200 {
                        let mut shared = exchange.lock();
                        shared.extend(live.drain(..live.len() / 2));
                        let theirs = shared.len().min(40);
                        let take = shared.drain(..theirs).collect::<Vec<_>>();
                        drop(shared);
                        for (location, seed, len) in take {
                            assert!(
                                view(pool, location, len) == bytes(seed, len),
                                "an object was overwritten"
                            );
                            pool.free(location);
                        }
                    }
                }
                for (location, seed, len) in live {
                    assert!(view(pool, location, len) == bytes(seed, len), "an object was overwritten");
                    pool.free(location);
                }
            });
        }
    });
    for (location, ..) in exchange.lock().drain(..) {
        pool.free(location);
    }
    for class in 0..CLASSES {
        pool.list_currents(class);
    }
    pool.release_empties();
    assert_eq!((pool.pages(), pool.backrefs_bytes()), (0, 0));
}

struct OneTable(Table);

impl Owners for OneTable {
    fn with_slot(&self, owner: BackRef, work: &mut dyn FnMut(SlotGuard<'_>)) {
        if owner.table() == self.0.id()
            && let Some(leaf) = self.0.leaf(owner.slot())
        {
            work(leaf.lock(owner.slot()));
        }
    }
}

impl OneTable {
    fn put(&self, pool: &Pool, slot: u64, len: usize) {
        let location = pool.store(&bytes(slot, len), BackRef::new(self.0.id(), slot), 0).unwrap();
        self.0.leaf_or_new(slot).unwrap().lock(slot).publish(Word::compressed(location, len as u32, 0));
    }

    fn remove(&self, pool: &Pool, slot: u64) {
        let guard = self.0.leaf(slot).unwrap().lock(slot);
        let old = guard.word();
        guard.publish(Word::EMPTY);
        pool.free(old.object().unwrap());
    }

    fn check(&self, pool: &Pool, slots: impl Iterator<Item = u64>, len: impl Fn(u64) -> usize) {
        for slot in slots {
            let guard = self.0.leaf(slot).unwrap().lock(slot);
            assert!(pool.object(&guard) == bytes(slot, len(slot)), "slot {slot}");
        }
    }
}

#[test]
fn compact_packs_classes() {
    let pool = Pool::new().unwrap();
    let table = OneTable(Table::new(1, Arc::new(Common::new().unwrap())).unwrap());
    let len = |slot: u64| 500 + (slot % 40) as usize * 80;
    for slot in 0..20_000 {
        table.put(&pool, slot, len(slot));
    }
    // An allocated object that no slot holds yet must stay in place.
    let unpublished = pool.store(&bytes(99, 700), BackRef::new(1, 5), 0).unwrap();
    for slot in (0..20_000).filter(|s| s % 4 != 1) {
        table.remove(&pool, slot);
    }
    let live: u64 = (0..20_000).filter(|s| s % 4 == 1).map(|s| len(s) as u64).sum();
    let before = pool.pages();
    let freed = pool.compact(&table, &mut |_, _| true);
    assert_eq!(freed, before - pool.pages());
    assert!(pool.pages() * PAGE_BYTES as u64 <= live * 104 / 100, "{} pages for {live} bytes", pool.pages());
    table.check(&pool, (0..20_000).filter(|s| s % 4 == 1), len);
    assert!(view(&pool, unpublished, 700) == bytes(99, 700));
    assert_eq!(pool.compact(&table, &mut |_, _| true), 0, "nothing is left to do");
}

#[test]
fn compact_cancelled_keeps_objects() {
    let pool = Pool::new().unwrap();
    let table = OneTable(Table::new(1, Arc::new(Common::new().unwrap())).unwrap());
    let len = |slot: u64| 500 + (slot % 4) as usize * 80;
    for slot in 0..20_000 {
        table.put(&pool, slot, len(slot));
    }
    for slot in (0..20_000).filter(|s| s % 4 != s / 4 % 4) {
        table.remove(&pool, slot);
    }
    let mut reports = Vec::new();
    let some = pool.compact(&table, &mut |done, all| {
        reports.push((done, all));
        reports.len() < 20
    });
    assert_eq!(reports.len(), 20);
    assert!(
        reports.is_sorted_by_key(|(done, _)| *done) && reports.iter().all(|(done, all)| done <= all),
        "{reports:?}"
    );
    table.check(&pool, (0..20_000).filter(|s| s % 4 == s / 4 % 4), len);
    let mut last = (0, 0);
    let rest = pool.compact(&table, &mut |done, all| {
        last = (done, all);
        true
    });
    assert!(some > 0 && rest > some, "{some} pages, then {rest}");
    assert!(last.0 > last.1 / 2, "{last:?}");
    table.check(&pool, (0..20_000).filter(|s| s % 4 == s / 4 % 4), len);
}

#[test]
fn rebuild_restores_free_state() {
    let mut pool = Pool::new().unwrap();
    let table = OneTable(Table::new(1, Arc::new(Common::new().unwrap())).unwrap());
    let len = |slot: u64| 1 + (slot * 37 % 3900) as usize;
    for slot in 0..5000 {
        table.put(&pool, slot, len(slot));
    }
    for slot in (0..5000).filter(|s| s % 3 == 0) {
        table.remove(&pool, slot);
    }
    // A leaked object is allocated, but in no table. The rebuild must free it.
    let leaked = pool.store(&bytes(1, 3000), BackRef::new(1, 7), 0).unwrap();
    let words: HashMap<u64, Word> = (0..5000).map(|s| (s, table.0.leaf(s).unwrap().peek(s))).collect();
    let slots = || words.iter().map(|(&slot, &word)| (BackRef::new(1, slot), word));
    let pages = pool.pages();
    pool.rebuild(slots()).unwrap();
    assert!(pool.pages() <= pages);
    table.check(&pool, (0..5000).filter(|s| s % 3 != 0), len);
    // After the rebuild, new objects must fill the free places without damage, and compaction must
    // find all back-references.
    for slot in (0..5000).filter(|s| s % 3 == 0) {
        table.put(&pool, slot, len(slot));
    }
    pool.compact(&table, &mut |_, _| true);
    table.check(&pool, 0..5000, len);
    for slot in 0..5000 {
        table.remove(&pool, slot);
    }
    pool.compact(&table, &mut |_, _| true);
    assert_eq!(pool.pages(), 0);
    // Tables that contradict each other are refused.
    let word = Word::compressed(leaked, 3000, 0);
    assert_eq!(
        pool.rebuild([(BackRef::new(1, 1), word), (BackRef::new(1, 2), word)].into_iter()),
        Err(RebuildError::Overlap(leaked))
    );
    let off = Word::compressed(leaked + 1, 3000, 0);
    assert_eq!(
        pool.rebuild([(BackRef::new(1, 1), off)].into_iter()),
        Err(RebuildError::Impossible(leaked + 1, 3000))
    );
}
