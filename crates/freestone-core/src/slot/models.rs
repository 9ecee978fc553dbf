//! loom models of the slot protocols, which check every interleaving of small cases.
//!
//! Run with `cargo xtask test --only models`.

use loom::cell::UnsafeCell;
use loom::thread;

use super::lock::lock;
use super::{Common, FlightId, Flights, Kind, Table, Word};
use crate::parking::Parking;
use crate::sync::{Arc, AtomicU32, AtomicU64, Ordering};

/// A slot, the data that it guards, and its parking table.
struct Shared {
    slot: AtomicU64,
    parking: Parking,
    inside: UnsafeCell<u32>,
}

fn shared() -> Arc<Shared> {
    Arc::new(Shared { slot: AtomicU64::new(0), parking: Parking::default(), inside: UnsafeCell::new(0) })
}

/// Checks every interleaving of three threads with at most three preemptions, which is known to find nearly
/// all faults.
fn bounded(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(body);
}

/// Checks mutual exclusion and wake-ups: loom reports a concurrent access to the cell, and a thread that
/// sleeps forever.
fn threads_take_turns(threads: u32, rounds: u32) {
    let shared = shared();
    let work = {
        let shared = Arc::clone(&shared);
        move || {
            for _ in 0..rounds {
                let guard = lock(&shared.slot, &shared.parking);
                shared.inside.with_mut(|inside| cell::add_one(inside));
                let word = guard.word();
                guard.publish(Word::same(word.location() as u32 + 1));
            }
        }
    };
    let handles: Vec<_> = (1..threads).map(|_| thread::spawn(work.clone())).collect();
    work();
    for handle in handles {
        handle.join().unwrap();
    }
    let guard = lock(&shared.slot, &shared.parking);
    assert_eq!(guard.word(), Word::same(threads * rounds));
    drop(guard);
    assert_eq!(shared.slot.load(Ordering::SeqCst) & 3, 0, "lock or waiter bit left behind");
}

mod cell {
    #![expect(unsafe_code)]
    // UNSAFETY: accesses the modelled data through loom's raw cells.
    pub fn add_one(inside: *mut u32) {
        // SAFETY: loom has checked that the access is exclusive.
        unsafe { *inside += 1 };
    }
    pub fn get(inside: *const u32) -> u32 {
        // SAFETY: loom has checked that no thread writes.
        unsafe { *inside }
    }
    pub fn set(inside: *mut u32, value: u32) {
        // SAFETY: loom has checked that the access is exclusive.
        unsafe { *inside = value };
    }
}

#[test]
fn two_threads_take_turns() {
    loom::model(|| threads_take_turns(2, 2));
}

#[test]
fn three_threads_take_turns() {
    bounded(|| threads_take_turns(3, 1));
}

/// Two slots share a parking bucket. A wake-up for one slot is not lost because of the other slot's waiters.
#[test]
fn slots_share_a_bucket() {
    bounded(|| {
        let shared = Arc::new(([AtomicU64::new(0), AtomicU64::new(0)], Parking::default()));
        let handles: Vec<_> = (0..2)
            .map(|slot| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    lock(&shared.0[slot], &shared.1).publish(Word::same(1));
                })
            })
            .collect();
        for slot in &shared.0 {
            drop(lock(slot, &shared.1));
        }
        for handle in handles {
            handle.join().unwrap();
        }
        assert!(shared.0.iter().all(|slot| lock(slot, &shared.1).word() == Word::same(1)));
    });
}

/// A reader under the lock never sees a new word without its object, and two writers never leak an object.
#[test]
fn word_and_object_are_published_together() {
    bounded(|| {
        let shared = Arc::new((shared(), [UnsafeCell::new(0_u32), UnsafeCell::new(0)], AtomicU32::new(0)));
        let write = |object: usize| {
            let shared = Arc::clone(&shared);
            move || {
                shared.1[object].with_mut(|bytes| cell::set(bytes, object as u32 + 7));
                let guard = lock(&shared.0.slot, &shared.0.parking);
                let old = guard.word();
                guard.publish(Word::huge(object as u64));
                if old != Word::EMPTY {
                    // The object is freed here. loom would report a later read as a use after free.
                    shared.1[old.location() as usize].with_mut(|bytes| cell::set(bytes, 0));
                    shared.2.fetch_add(1, Ordering::SeqCst);
                }
            }
        };
        let writers = [thread::spawn(write(0)), thread::spawn(write(1))];
        {
            let guard = lock(&shared.0.slot, &shared.0.parking);
            if guard.word() != Word::EMPTY {
                let object = guard.word().location() as usize;
                assert_eq!(shared.1[object].with(|bytes| cell::get(bytes)), object as u32 + 7);
            }
        }
        for writer in writers {
            writer.join().unwrap();
        }
        assert_eq!(shared.2.load(Ordering::SeqCst), 1, "one object is live, one was freed");
    });
}

/// A request that finds a slot in flight is completed when the flight ends. A later request sees the new
/// word.
#[test]
fn late_request_does_not_wait_for_landed_flight() {
    loom::model(|| {
        let shared = Arc::new((shared(), Flights::<Arc<AtomicU32>>::default(), Arc::new(AtomicU32::new(0))));
        let (s, flights, answered) = (&shared.0, &shared.1, &shared.2);
        lock(&s.slot, &s.parking).publish(Word::spilled(3, 0, 0));
        let flight = flights.depart(lock(&s.slot, &s.parking), 9, Vec::new());
        let request = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let guard = lock(&shared.0.slot, &shared.0.parking);
                if guard.word().kind() == Kind::InFlight {
                    shared.1.wait(&guard, Arc::clone(&shared.2));
                } else {
                    assert_eq!(guard.word(), Word::same(5));
                    shared.2.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        assert_eq!(flights.owner(flight), Some(9));
        let landed = flights.land(lock(&s.slot, &s.parking), |_| Word::same(5));
        assert_eq!(landed.held, Word::spilled(3, 0, 0));
        for waiter in landed.waiting {
            waiter.fetch_add(1, Ordering::SeqCst);
        }
        request.join().unwrap();
        assert_eq!(answered.load(Ordering::SeqCst), 1);
    });
}

/// The disk's completion and the deadline race to end the flight of a slot with a waiter. The flight ends
/// once, and the waiter is notified once. A late completion of the first flight does not end the second
/// flight.
#[test]
fn flight_lands_once() {
    bounded(|| {
        let shared = Arc::new((shared(), Flights::<u32>::default(), AtomicU32::new(0)));
        let s = &shared.0;
        lock(&s.slot, &s.parking).publish(Word::spilled(3, 0, 0));
        let first = shared.1.depart(lock(&s.slot, &s.parking), 0, vec![1]);
        let land = |shared: &(_, Flights<u32>, AtomicU32), flight: FlightId, new: Option<Word>| {
            let (s, flights, notified): (&Arc<Shared>, _, _) = (&shared.0, &shared.1, &shared.2);
            let guard = lock(&s.slot, &s.parking);
            if flights.is_in(&guard, flight) {
                let landed = flights.land(guard, |held| new.unwrap_or(held));
                notified.fetch_add(landed.waiting.len() as u32, Ordering::SeqCst);
            }
        };
        let late = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                land(&shared, first, None);
                let guard = lock(&shared.0.slot, &shared.0.parking);
                if guard.word().kind() == Kind::Spilled {
                    let second = shared.1.depart(guard, 0, vec![2]);
                    land(&shared, second, Some(Word::same(7)));
                }
            })
        };
        land(&shared, first, Some(Word::same(5)));
        late.join().unwrap();
        let word = lock(&s.slot, &s.parking).word();
        assert!(word == Word::same(5) || word == Word::same(7), "{word:?}");
        let notified = if word == Word::same(5) { 1 } else { 2 };
        assert_eq!(shared.2.load(Ordering::SeqCst), notified, "each waiter is notified once");
        assert!(shared.1.is_empty(), "a flight is left open");
    });
}

/// A page is written back while it is overwritten, and is picked by a second pass. In the end the slot refers
/// to the last content, in memory or on disk.
#[test]
fn stale_bytes_never_become_a_page() {
    bounded(|| {
        // The slot's word is `same(content)`. The flag is set when the write has completed.
        let shared = Arc::new((shared(), AtomicU32::new(0)));
        let s = &shared.0;
        lock(&s.slot, &s.parking).publish(Word::same(1));
        let pick = |s: &Shared, tag: u8| {
            let guard = lock(&s.slot, &s.parking);
            let word = guard.word();
            // Only pages in memory that no pass works on can be picked.
            if word.kind() != Kind::Same || word.is_picked() {
                return None;
            }
            guard.publish(word.picked(tag));
            Some(word.location())
        };
        let publish = |s: &Shared, tag: u8, copied: u64| {
            let guard = lock(&s.slot, &s.parking);
            if guard.word().is_picked_by(tag) {
                guard.publish(Word::spilled(copied, 0, 0));
            }
        };
        let writer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                lock(&shared.0.slot, &shared.0.parking).publish(Word::same(2));
                shared.1.store(1, Ordering::SeqCst);
            })
        };
        let first = pick(s, 1);
        // The writeback of the first batch is still in flight.
        let second = pick(s, 2);
        if let Some(copied) = second {
            publish(s, 2, copied);
        }
        if let Some(copied) = first {
            publish(s, 1, copied);
        }
        let written = shared.1.load(Ordering::SeqCst) == 1;
        writer.join().unwrap();
        let word = lock(&s.slot, &s.parking).word();
        assert_eq!(
            word.location(),
            2,
            "not the last written content: {word:?}, write completed before: {written}"
        );
    });
}

/// Two threads that need the same leaf receive the same one. A concurrent lookup returns this leaf or `None`,
/// and no node leaks.
#[test]
fn leaf_is_allocated_once() {
    bounded(|| {
        let common = Arc::new(Common::new().unwrap());
        let before = common.nodes.left();
        let table = Arc::new(Table::new(1, Arc::clone(&common)).unwrap());
        let makers: Vec<_> = (0..2)
            .map(|slot| {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    table.leaf_or_new(slot).unwrap().lock(slot).publish(Word::same(slot as u32 + 1))
                })
            })
            .collect();
        if let Some(slot) = table.next_present(0, 8) {
            assert!(table.leaf(slot).is_some());
        }
        for maker in makers {
            maker.join().unwrap();
        }
        for slot in 0..2 {
            assert_eq!(table.leaf(slot).unwrap().peek(slot), Word::same(slot as u32 + 1));
        }
        drop(table);
        assert_eq!(common.nodes.left(), before);
    });
}

/// A change replaces a directory while pinned requests use it. No thread uses the old directory after it is
/// freed.
#[test]
fn swapped_directory_is_not_accessed() {
    use crate::pin::{Swap, pinned};
    loom::model(|| {
        // The cell models the directory's memory. loom reports an access that overlaps the free.
        let swap = Arc::new(Swap::new(Box::new(UnsafeCell::new(1_u32))));
        let request = {
            let swap = Arc::clone(&swap);
            thread::spawn(move || {
                for _ in 0..2 {
                    let seen = pinned(|pin| swap.load(pin).with(|directory| cell::get(directory)));
                    assert!(seen == 1 || seen == 2, "a freed directory is in use");
                }
            })
        };
        let old = swap.replace(Box::new(UnsafeCell::new(2)));
        old.with_mut(|directory| cell::set(directory, 0));
        drop(old);
        request.join().unwrap();
    });
}
