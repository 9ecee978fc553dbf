//! Fault rules are replaced while threads write and read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use freestone_core::device::{Blocking, Device, Error, Flags};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng, effort};

use crate::faults::support::{faults, rules};

const THREADS: u64 = 4;
const REGION_BLOCKS: u64 = 64;
const CHANGES: [usize; 2] = [150, 700];
const RULES: [&str; 7] = [
    "",
    "write error=EIO",
    "all delay=20us",
    "write error=ENOSPC chance=50%; read error=EIO chance=50%",
    "read stale nth=16777214",
    "write hang",
    "read delay=1us; write error=EIO nth=2; flush error=EIO",
];

/// Every request completes with a result that one of the rules allows. Failed writes have no
/// effect, and successful writes have their effect.
fn threads_and_rules(inner: Arc<dyn Device>) {
    let faults = faults(inner, "");
    let (running, over) = (AtomicU64::new(THREADS), AtomicBool::new(false));
    let failed = AtomicU64::new(0);
    thread::scope(|scope| {
        for me in 0..THREADS {
            let (faults, running, over, failed) = (&faults, &running, &over, &failed);
            scope.spawn(move || {
                let mut rng = Rng::new(me);
                let mut written = [0; REGION_BLOCKS as usize];
                for round in 0_u64.. {
                    if over.load(Ordering::SeqCst) {
                        break;
                    }
                    let block = rng.below(REGION_BLOCKS);
                    let (offset, byte) = ((me * REGION_BLOCKS + block) * 512, round as u8);
                    let outcome = match rng.below(10) {
                        0..5 => {
                            let outcome = faults.write_at(offset, &[byte; 512], Flags::empty());
                            if outcome.is_ok() {
                                written[block as usize] = byte;
                            }
                            outcome
                        }
                        5..9 => {
                            let mut found = [0xee; 512];
                            let outcome = faults.read_at(offset, &mut found);
                            if outcome.is_ok() {
                                assert_eq!(found, [written[block as usize]; 512], "round {round}");
                            }
                            outcome
                        }
                        _ => faults.flush(),
                    };
                    if let Err(error) = outcome {
                        assert!(matches!(error, Error::Media | Error::NoSpace), "{error}");
                        failed.fetch_add(1, Ordering::SeqCst);
                    }
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        for change in 0..effort(CHANGES[0], CHANGES[1]) {
            faults.set(rules(RULES[change % RULES.len()]), Some(change as u64));
            thread::sleep(Duration::from_micros(500));
            faults.release();
            // Counters can be read while requests run, and are consistent.
            assert!(faults.counts().iter().all(|count| count.fired <= count.matched));
        }
        faults.set(rules(""), None);
        over.store(true, Ordering::SeqCst);
        while running.load(Ordering::SeqCst) > 0 {
            faults.release();
            thread::yield_now();
        }
    });
    assert_eq!(faults.hung_requests(), 0);
    assert!(failed.load(Ordering::SeqCst) > 0, "no rule ever fired");
}

#[test]
fn inline() {
    threads_and_rules(Arc::new(Model::new(1 << 20, 512)));
}

#[test]
fn deferred() {
    let model = Arc::new(Model::new(1 << 20, 512));
    threads_and_rules(Arc::new(DeferringDevice::new(model, DeferPolicy::Sometimes(20), 1)));
}
