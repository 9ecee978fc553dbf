//! Every variant excludes whom it has to, and nobody else. The choice is process-wide, so the locks
//! are tested below it.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::*;

/// The lock of the whole table is one for all tests.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn one_at_a_time() -> impl Drop {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn others() -> impl Iterator<Item = Lock> {
    Lock::ALL.into_iter().filter(|lock| !matches!(lock, Lock::Ours | Lock::Outer))
}

fn take(lock: Lock, intent: Intent, slot: &AtomicU64) -> SlotGuard<'_> {
    SlotGuard(Guard::Other(Held::lock(lock, intent, slot)))
}

/// In one mapping, as in a leaf: neighbours have locks of their own.
fn slots<const N: usize>() -> [AtomicU64; N] {
    std::array::from_fn(|_| AtomicU64::new(Word::same(0).bits()))
}

/// Whether another thread gets the lock within a while; it waits for it to the end.
fn gets_it(lock: Lock, intent: Intent, slot: &AtomicU64, meanwhile: impl FnOnce(bool)) {
    let got = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let guard = take(lock, intent, slot);
            got.store(true, Ordering::SeqCst);
            drop(guard);
        });
        for _ in 0..100 {
            std::thread::sleep(Duration::from_millis(1));
            if got.load(Ordering::SeqCst) {
                break;
            }
        }
        meanwhile(got.load(Ordering::SeqCst));
    });
    assert!(got.load(Ordering::SeqCst), "{lock:?} was never let go");
}

#[test]
fn writers_of_a_slot_exclude_each_other() {
    const THREADS: u64 = 6;
    const ROUNDS: u64 = 20_000;
    let _one = one_at_a_time();
    for lock in others() {
        let slots = slots::<3>();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let slots = &slots;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let guard = take(lock, Intent::Write, &slots[((thread + round) % 3) as usize]);
                        let count = guard.word().location();
                        if round % 512 == 0 {
                            // The holder does not run for a while.
                            std::thread::yield_now();
                        }
                        guard.publish(Word::same(count as u32 + 1));
                    }
                });
            }
        });
        let words = slots.map(|slot| Word::from_bits(slot.into_inner()));
        let sum: u64 = words.iter().map(|word| word.location()).sum();
        assert_eq!(sum, THREADS * ROUNDS, "{lock:?}: an update was lost");
    }
}

#[test]
fn a_slot_is_locked_alone_but_under_the_lock_of_the_table() {
    let _one = one_at_a_time();
    for lock in others() {
        let slots = slots::<2>();
        let mut held = Some(take(lock, Intent::Write, &slots[0]));
        gets_it(lock, Intent::Write, &slots[1], |got| {
            assert_eq!(got, lock != Lock::Table, "{lock:?}");
            held = None;
        });
        assert!(held.is_none());
        let mut held = Some(take(lock, Intent::Write, &slots[0]));
        gets_it(lock, Intent::Write, &slots[0], |got| {
            assert!(!got, "{lock:?}: two hold one slot");
            held = None;
        });
        assert!(held.is_none());
    }
}

#[test]
fn readers_share_a_read_write_lock_and_nothing_else() {
    let _one = one_at_a_time();
    for lock in others() {
        let slots = slots::<1>();
        let shares = matches!(lock, Lock::Table | Lock::ReadWrite);
        for (first, second) in
            [(Intent::Read, Intent::Read), (Intent::Read, Intent::Write), (Intent::Write, Intent::Read)]
        {
            let mut held = Some(take(lock, first, &slots[0]));
            gets_it(lock, second, &slots[0], |got| {
                let both_read = (first, second) == (Intent::Read, Intent::Read);
                assert_eq!(got, shares && both_read, "{lock:?}: {first:?}, then {second:?}");
                held = None;
            });
            assert!(held.is_none());
        }
    }
}

#[test]
fn of_two_readers_that_share_a_slot_the_first_one_notes_the_age() {
    let _one = one_at_a_time();
    let word = Word::compressed(77, 100, 0);
    for lock in [Lock::Table, Lock::ReadWrite] {
        let slot = AtomicU64::new(word.bits());
        let (first, second) = (take(lock, Intent::Read, &slot), take(lock, Intent::Read, &slot));
        first.publish(word.touched(5));
        second.publish(word.touched(6));
        assert_eq!(Word::from_bits(slot.load(Ordering::SeqCst)), word.touched(5));
        drop(take(lock, Intent::Write, &slot));
        assert_eq!(Word::from_bits(slot.load(Ordering::SeqCst)), word.touched(5), "dropped without a change");
    }
}

#[test]
#[should_panic(expected = "only reads")]
fn a_reader_that_changes_a_slot_is_caught() {
    let slot = AtomicU64::new(Word::compressed(77, 100, 0).bits());
    take(Lock::ReadWrite, Intent::Read, &slot).publish(Word::compressed(78, 100, 0));
}

#[test]
fn the_time_under_the_lock_is_taken() {
    let slot = AtomicU64::new(Word::EMPTY.bits());
    variants::held();
    let guard = take(Lock::Timed, Intent::Write, &slot);
    std::thread::sleep(Duration::from_millis(5));
    guard.publish(Word::same(1));
    drop(take(Lock::Timed, Intent::Write, &slot));
    let (time, count) = variants::held();
    assert!(time >= Duration::from_millis(5) && count == 2, "{time:?} {count}");
    assert_eq!(variants::held(), (Duration::ZERO, 0));
}
