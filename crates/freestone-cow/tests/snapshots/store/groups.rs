//! Group commit: many exceptions share each flush of a disk whose flushes take 1 to 5 ms.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Instant;

use freestone_core::device::Device;
use freestone_cow::cow::store::Store;

use super::disk::{Disk, Slow};
use super::{CHUNK, commit, open};

const FLUSH_MICROS: std::ops::Range<u64> = 1000..5000;

fn slow_store(seed: u64) -> Arc<Store> {
    let disk = Disk::slow(vec![0; 8192 * CHUNK as usize], FLUSH_MICROS, seed);
    open(Arc::new(Slow(disk)) as Arc<dyn Device>).0
}

/// Each worker waits for its own exception before it commits the next one, like a client with queue
/// depth 1.
#[test]
fn waiting_workers_share_flushes() {
    const EACH: u64 = 60;
    for (workers, least) in [(1, 0.9), (8, 3.0), (32, 10.0)] {
        let store = slow_store(workers);
        let next = Arc::new(AtomicU64::new(0));
        let start = Instant::now();
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                let (store, next) = (Arc::clone(&store), Arc::clone(&next));
                thread::spawn(move || {
                    for _ in 0..EACH {
                        let place = store.allocate().unwrap();
                        let old = next.fetch_add(1, Ordering::SeqCst);
                        assert_eq!(commit(&store, place, old).recv(), Ok(Ok(())));
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        let stats = store.stats();
        let ratio = stats.exceptions as f64 / stats.groups as f64;
        println!(
            "{workers} workers: {} exceptions in {} groups ({ratio:.1} each, largest {}), {:?}",
            stats.exceptions,
            stats.groups,
            stats.largest_group,
            start.elapsed()
        );
        assert_eq!(stats.exceptions, workers * EACH);
        assert!(ratio >= least, "{ratio} exceptions a group with {workers} workers");
    }
}

/// A single caller has many copies in flight, like an export with a deep queue. Each completion
/// starts the next copy.
#[test]
fn deep_queue_shares_flushes() {
    const DEPTH: u64 = 64;
    const ALL: u64 = 4000;
    let store = slow_store(64);
    let room = Arc::new((Mutex::new(DEPTH), Condvar::new()));
    for old in 0..ALL {
        let mut left = room.1.wait_while(room.0.lock().unwrap(), |left| *left == 0).unwrap();
        *left -= 1;
        drop(left);
        let place = store.allocate().unwrap();
        let room = Arc::clone(&room);
        store.commit(place, old, Ok(()), move |outcome| {
            assert_eq!(outcome, Ok(()));
            *room.0.lock().unwrap() += 1;
            room.1.notify_one();
        });
    }
    drop(room.1.wait_while(room.0.lock().unwrap(), |left| *left < DEPTH).unwrap());
    let stats = store.stats();
    let ratio = stats.exceptions as f64 / stats.groups as f64;
    println!("depth {DEPTH}: {ratio:.1} exceptions a group, largest {}", stats.largest_group);
    assert_eq!(stats.exceptions, ALL);
    assert!(ratio >= 16.0, "{ratio} exceptions a group at depth {DEPTH}");
    assert!(stats.largest_group <= DEPTH);
}
