//! Page table tests with more threads than CPUs.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::{Common, LEAF_SLOTS, MAX_SLOTS, Table, Word};
use crate::sync::Arc;

fn table() -> Table {
    Table::new(3, Arc::new(Common::new().unwrap())).unwrap()
}

/// The holder of a slot lock sleeps until all other threads have finished their first part. Threads that use
/// other slots, also of the same leaf, are not delayed. Threads that need the held slot lock it afterwards.
#[test]
fn descheduled_holder_delays_only_its_slot() {
    for threads in [8, 16, 32] {
        let table = table();
        let start = Barrier::new(threads + 1);
        let (finished, acquired) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for thread in 0..threads as u64 {
                let (table, start, finished, acquired) = (&table, &start, &finished, &acquired);
                scope.spawn(move || {
                    start.wait();
                    for round in 0..2000 {
                        // The threads share all slots of two leaves except slot 0.
                        let slot = 1 + (thread * 7 + round) % (2 * LEAF_SLOTS - 1);
                        let guard = table.leaf_or_new(slot).unwrap().lock(slot);
                        let count = guard.word().location() as u32;
                        guard.publish(Word::same(count + 1));
                    }
                    finished.fetch_add(1, Ordering::SeqCst);
                    if thread % 2 == 0 {
                        let guard = table.leaf(0).unwrap().lock(0);
                        assert_eq!(
                            finished.load(Ordering::SeqCst) as usize,
                            threads,
                            "the slot was not held"
                        );
                        let count = guard.word().location() as u32;
                        guard.publish(Word::same(count + 1));
                        acquired.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            let held = table.leaf_or_new(0).unwrap().lock(0);
            start.wait();
            while (finished.load(Ordering::SeqCst) as usize) < threads {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(acquired.load(Ordering::SeqCst), 0);
            drop(held);
        });
        let waiters = threads as u32 / 2;
        assert_eq!(
            (acquired.load(Ordering::SeqCst), table.leaf(0).unwrap().peek(0)),
            (waiters, Word::same(waiters))
        );
        let sum: u64 = (1..2 * LEAF_SLOTS).map(|slot| table.leaf(slot).unwrap().peek(slot).location()).sum();
        assert_eq!(sum, threads as u64 * 2000, "an update was lost");
    }
}

/// Threads that wait for a held slot sleep and use almost no CPU time.
#[test]
fn waiters_sleep_without_cpu_time() {
    fn cpu_time() -> Duration {
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
    }
    let table = table();
    let held = table.leaf_or_new(9).unwrap().lock(9);
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..16)
            .map(|_| {
                scope.spawn(|| {
                    let before = cpu_time();
                    drop(table.leaf(9).unwrap().lock(9));
                    cpu_time().saturating_sub(before)
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        drop(held);
        let spent: Duration = waiters.into_iter().map(|w| w.join().unwrap()).sum();
        assert!(spent < Duration::from_millis(150), "16 waiters burnt {spent:?} in 300 ms");
    });
}

#[test]
fn lookups_allocate_nothing_and_walks_skip_gaps() {
    let common = Arc::new(Common::new().unwrap());
    let table = Table::new(1, Arc::clone(&common)).unwrap();
    assert!(table.leaf(MAX_SLOTS - 1).is_none());
    assert_eq!(table.next_present(0, MAX_SLOTS), None);
    assert_eq!(common.nodes.bytes(), 0);
    let far = 5 * LEAF_SLOTS * LEAF_SLOTS + 17;
    table.leaf_or_new(far).unwrap().lock(far).publish(Word::same(1));
    assert_eq!(common.nodes.bytes(), 8192, "one directory node and one leaf");
    assert_eq!(table.next_present(0, MAX_SLOTS), Some(far & !(LEAF_SLOTS - 1)));
    assert_eq!(table.next_present(far, MAX_SLOTS), Some(far));
    assert_eq!(table.next_present(0, far - 17), None);
    assert_eq!(table.next_present(far + LEAF_SLOTS, MAX_SLOTS), None);
    assert_eq!(table.leaf(far).unwrap().peek(far), Word::same(1));
    drop(table);
    assert_eq!(common.nodes.bytes(), 0);
}
