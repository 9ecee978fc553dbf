//! With the same seed the same requests fail, in whatever order the threads run.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use freestone_core::device::{Blocking, Device, Flags};
use freestone_drive::faults::Faults;
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng, effort};

use crate::faults::support::rules;

const OFFSETS: u64 = 300;
const ROUNDS: u64 = 12;
const OPERATIONS: [&str; 3] = ["read", "write", "zeroes"];
const RULES: &str = "read error=EIO chance=10%; write error=EIO chance=1/7; zeroes error=EIO nth=5; \
                     write error=ENOSPC chance=5% at=0+16K; all error=EIO chance=0.01";

/// Failed requests, by operation, offset, and number of the request at that offset.
type Failed = BTreeSet<(usize, u64, u64)>;

fn device(seed: u64, text: &str) -> Faults {
    let model = Arc::new(Model::new(OFFSETS as usize * 512, 512));
    let inner = Arc::new(DeferringDevice::new(model, DeferPolicy::Sometimes(30), seed));
    Faults::new(inner, rules(text), seed).unwrap()
}

fn fails(device: &dyn Device, operation: usize, offset: u64) -> bool {
    let outcome = match OPERATIONS[operation] {
        "read" => device.read_at(offset * 512, &mut [0; 512]),
        "write" => device.write_at(offset * 512, &[1; 512], Flags::empty()),
        _ => device.write_zeroes(offset * 512, 512, Flags::empty()),
    };
    outcome.is_err()
}

/// Runs all operations at `offsets` offsets on `threads` threads, in an order that depends on
/// `order`. Each offset belongs to one thread. Returns the failed requests.
fn run(offsets: u64, seed: u64, threads: u64, order: u64) -> Failed {
    let device = device(seed, RULES);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|me| {
                let device = &device;
                scope.spawn(move || {
                    let mut rng = Rng::new(order ^ me);
                    let mut left: Vec<(usize, u64, u64)> = (0..offsets)
                        .filter(|offset| offset % threads == me)
                        .flat_map(|offset| (0..OPERATIONS.len()).map(move |operation| (operation, offset, 0)))
                        .collect();
                    let mut failed = Failed::new();
                    while !left.is_empty() {
                        let at = rng.below(left.len() as u64) as usize;
                        let (operation, offset, time) = &mut left[at];
                        *time += 1;
                        if fails(device, *operation, *offset) {
                            failed.insert((*operation, *offset, *time));
                        }
                        if *time == ROUNDS {
                            left.swap_remove(at);
                        }
                    }
                    failed
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn same_requests_fail_with_one_and_four_threads() {
    let offsets = effort(100, OFFSETS);
    for seed in [0xdead_beef, 1, u64::MAX].into_iter().take(effort(1, 3)) {
        let alone = run(offsets, seed, 1, 1);
        let requests = offsets * ROUNDS * 3;
        assert!(alone.len() as u64 > requests / 20 && (alone.len() as u64) < requests / 4, "{}", alone.len());
        for order in 2..effort(3, 5) {
            assert_eq!(run(offsets, seed, 4, order), alone, "seed {seed}");
        }
    }
}

#[test]
fn other_seed_makes_other_requests_fail() {
    let (one, other) = (run(60, 1, 1, 1), run(60, 2, 1, 1));
    let both = one.intersection(&other).count();
    assert!(both < one.len() / 2, "{both} of {} fail with both", one.len());
}

/// The effect of a seed must not change: later versions must be able to repeat a run.
#[test]
fn seed_has_its_documented_effect() {
    let failed = run(4, 1, 1, 1);
    let of = |operation| failed.iter().filter(move |(o, offset, _)| *o == operation && *offset < 4);
    let shown: Vec<(u64, u64)> = of(0).map(|(_, offset, time)| (*offset, *time)).collect();
    assert_eq!(shown, EXPECTED_READS);
}

const EXPECTED_READS: [(u64, u64); 7] = [(0, 6), (1, 4), (2, 8), (2, 10), (2, 12), (3, 4), (3, 9)];

/// If threads share an offset, one rule fires there as often as with a single thread. With two
/// rules for writes, the sum may differ. Each rule may count concurrent requests in a different
/// order, so both may fire at one request.
#[test]
fn threads_at_one_offset_share_its_sequence_of_rules() {
    let alone = write_together(1, "write error=EIO chance=1/7").0;
    assert!(alone.iter().sum::<u64>() > 20);
    for _ in 0..5 {
        assert_eq!(write_together(4, "write error=EIO chance=1/7").0, alone);
    }
    let each_rule = write_together(1, RULES).1;
    assert!(each_rule.iter().sum::<u64>() > 20);
    for _ in 0..5 {
        assert_eq!(write_together(4, RULES).1, each_rule);
    }
}

/// Returns the number of failed writes at each offset, and how often each rule fired.
fn write_together(threads: u64, rules: &str) -> (Vec<u64>, Vec<u64>) {
    let device = device(9, rules);
    let failed: Vec<AtomicU64> = (0..40).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        for me in 0..threads {
            let (device, failed) = (&device, &failed);
            scope.spawn(move || {
                for at in (0..ROUNDS * 40 / threads).map(|at| (at + me * 7) % 40) {
                    if fails(device, 1, at) {
                        failed[at as usize].fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
        }
    });
    let fired = device.counts().iter().map(|rule| rule.fired).collect();
    (failed.iter().map(|count| count.load(Ordering::SeqCst)).collect(), fired)
}
