//! Tests that every variant excludes exactly the threads that it must. The selection of a variant
//! is process-wide, so the tests call the variants' locks directly.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::*;

/// The lock of the whole table is shared by all tests, so they run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn one_at_a_time() -> impl Drop {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn others() -> impl Iterator<Item = Lock> {
    Lock::ALL.into_iter().filter(|lock| !matches!(lock, Lock::Ours | Lock::Outer))
}

fn lock_slot(lock: Lock, intent: Intent, slot: &AtomicU64) -> SlotGuard<'_> {
    SlotGuard(Guard::Other(VariantGuard::lock(lock, intent, slot)))
}

/// Slots in one array, as in a leaf: neighbours have different locks.
fn slots<const N: usize>() -> [AtomicU64; N] {
    std::array::from_fn(|_| AtomicU64::new(Word::same(0).bits()))
}

/// Calls `meanwhile` with true if another thread locked the slot within 100 ms. Then waits until
/// that thread has locked the slot.
fn try_from_other_thread(lock: Lock, intent: Intent, slot: &AtomicU64, meanwhile: impl FnOnce(bool)) {
    let got = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let guard = lock_slot(lock, intent, slot);
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
    assert!(got.load(Ordering::SeqCst), "{lock:?} was never released");
}

#[test]
fn writers_of_a_slot_are_exclusive() {
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
                        let guard = lock_slot(lock, Intent::Write, &slots[((thread + round) % 3) as usize]);
                        let count = guard.word().location();
                        if round % 512 == 0 {
                            // Simulates a preempted holder.
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
fn only_table_lock_covers_other_slots() {
    let _one = one_at_a_time();
    for lock in others() {
        let slots = slots::<2>();
        let mut guard = Some(lock_slot(lock, Intent::Write, &slots[0]));
        try_from_other_thread(lock, Intent::Write, &slots[1], |got| {
            assert_eq!(got, lock != Lock::Table, "{lock:?}");
            guard = None;
        });
        assert!(guard.is_none());
        let mut guard = Some(lock_slot(lock, Intent::Write, &slots[0]));
        try_from_other_thread(lock, Intent::Write, &slots[0], |got| {
            assert!(!got, "{lock:?}: two hold one slot");
            guard = None;
        });
        assert!(guard.is_none());
    }
}

#[test]
fn readers_share_only_read_write_locks() {
    let _one = one_at_a_time();
    for lock in others() {
        let slots = slots::<1>();
        let shares = matches!(lock, Lock::Table | Lock::ReadWrite);
        for (first, second) in
            [(Intent::Read, Intent::Read), (Intent::Read, Intent::Write), (Intent::Write, Intent::Read)]
        {
            let mut guard = Some(lock_slot(lock, first, &slots[0]));
            try_from_other_thread(lock, second, &slots[0], |got| {
                let both_read = (first, second) == (Intent::Read, Intent::Read);
                assert_eq!(got, shares && both_read, "{lock:?}: {first:?}, then {second:?}");
                guard = None;
            });
            assert!(guard.is_none());
        }
    }
}

#[test]
fn first_of_two_readers_updates_age() {
    let _one = one_at_a_time();
    let word = Word::compressed(77, 100, 0);
    for lock in [Lock::Table, Lock::ReadWrite] {
        let slot = AtomicU64::new(word.bits());
        let (first, second) = (lock_slot(lock, Intent::Read, &slot), lock_slot(lock, Intent::Read, &slot));
        first.publish(word.touched(5));
        second.publish(word.touched(6));
        assert_eq!(Word::from_bits(slot.load(Ordering::SeqCst)), word.touched(5));
        drop(lock_slot(lock, Intent::Write, &slot));
        assert_eq!(Word::from_bits(slot.load(Ordering::SeqCst)), word.touched(5), "dropped without a change");
    }
}

#[test]
#[should_panic(expected = "only reads")]
fn reader_that_changes_slot_panics() {
    let slot = AtomicU64::new(Word::compressed(77, 100, 0).bits());
    lock_slot(Lock::ReadWrite, Intent::Read, &slot).publish(Word::compressed(78, 100, 0));
}

#[test]
fn timed_lock_records_hold_time() {
    let slot = AtomicU64::new(Word::EMPTY.bits());
    variants::take_hold_time();
    let guard = lock_slot(Lock::Timed, Intent::Write, &slot);
    std::thread::sleep(Duration::from_millis(5));
    guard.publish(Word::same(1));
    drop(lock_slot(Lock::Timed, Intent::Write, &slot));
    let (time, count) = variants::take_hold_time();
    assert!(time >= Duration::from_millis(5) && count == 2, "{time:?} {count}");
    assert_eq!(variants::take_hold_time(), (Duration::ZERO, 0));
}
