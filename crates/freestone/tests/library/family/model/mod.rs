//! Random operations on families (RAM disks, forks and snapshots that share memory), compared with a model. The
//! model has a map of pages for each device, and after each step all devices must match.
//!
//! `FREESTONE_SEED` runs a single seed; a failure prints its seed. `FREESTONE_MODEL_SECONDS` sets the run time of
//! each test; without it a quick run uses only the first seeds.

mod expected;
mod world;

use std::time::{Duration, Instant};

use freestone_testkit::{DeferPolicy, effort};

use world::World;

const PAGE: usize = 4096;
/// Parts of a device that the test uses, as first page and number of pages. The parts cover the start and end of
/// leaves of the page map, and the end of the base.
const HOT: [(u64, u64); 4] = [(0, 10), (507, 10), (1020, 14), (1034, 6)];
/// Parameters of the family that a test runs with.
#[derive(Debug, Clone, Copy)]
struct Setup {
    backing: Option<bool>,
    mem_limit: u64,
    /// How the base defers requests. None if the base is in memory and completes all requests inline.
    deferred: Option<DeferPolicy>,
    forks: bool,
}

/// Number of seeds that every run executes, over a base that completes inline and over one that does not.
const SEEDS_MIN: [u64; 2] = [2, 1];

/// Returns the duration in which a test starts further seeds.
fn run_time() -> Duration {
    let given = std::env::var("FREESTONE_MODEL_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(given.unwrap_or(effort(0, 4)))
}

/// Runs at least `SEEDS_MIN` seeds, and further ones until the run time has passed. If `FREESTONE_SEED` is set, runs
/// only that seed.
fn run(name: &str, setup: Setup) {
    const STEPS: usize = 250;
    let given = std::env::var("FREESTONE_SEED").ok().and_then(|text| text.parse().ok());
    let seeds_min = SEEDS_MIN[usize::from(setup.deferred.is_some())];
    let began = Instant::now();
    for round in 0.. {
        let seed = given.unwrap_or(0x5eed_0000 + round);
        let mut world = World::new(setup, seed);
        let walked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..STEPS {
                world.step();
                world.check();
            }
        }));
        if let Err(panic) = walked {
            let from = world.log.len().saturating_sub(40);
            eprintln!("{name}: FREESTONE_SEED={seed}, step {}: {:#?}", world.log.len(), &world.log[from..]);
            std::panic::resume_unwind(panic);
        }
        let log = std::mem::take(&mut world.log);
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.end()));
        if let Err(panic) = ended {
            eprintln!("{name}: FREESTONE_SEED={seed}, in the end, after {} steps", log.len());
            std::panic::resume_unwind(panic);
        }
        if given.is_some() || (round + 1 >= seeds_min && began.elapsed() > run_time()) {
            return;
        }
    }
}

const PLAIN: Setup = Setup { backing: None, mem_limit: 0, deferred: None, forks: false };

#[test]
fn disks() {
    run("disks", PLAIN);
}

#[test]
fn disks_with_a_limit() {
    run("disks with a limit", Setup { mem_limit: 512 << 10, ..PLAIN });
}

#[test]
fn forks() {
    run("forks", Setup { forks: true, ..PLAIN });
}

#[test]
fn forks_of_a_slow_base() {
    run("slow base", Setup { forks: true, deferred: Some(DeferPolicy::Always), ..PLAIN });
    run("half slow base", Setup { forks: true, deferred: Some(DeferPolicy::Sometimes(50)), ..PLAIN });
}

#[test]
fn spilling_in_the_packed_layout() {
    run("packed", Setup { backing: Some(true), ..PLAIN });
    run(
        "packed forks",
        Setup { backing: Some(true), forks: true, deferred: Some(DeferPolicy::Always), ..PLAIN },
    );
}

#[test]
fn spilling_in_the_kernels_layout() {
    run("plain", Setup { backing: Some(false), ..PLAIN });
    run("plain forks", Setup { backing: Some(false), forks: true, ..PLAIN });
}

#[test]
fn spilling_under_a_limit() {
    let limited = Setup { mem_limit: 512 << 10, ..PLAIN };
    run("limited", Setup { backing: Some(true), forks: true, ..limited });
    run("limited plain", Setup { backing: Some(false), ..limited });
}
