//! The steps of a run on a zoned device, drawn from a seed.

use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

use super::ZONES;
use crate::disk::{FaultRates, Plan};

/// A step of a run on a zoned device. Zone numbers are taken modulo the number of zones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// Writes to a zone at its write pointer.
    Write {
        zone: u8,
        blocks: u8,
        fua: bool,
    },
    Append {
        zone: u8,
        blocks: u8,
        fua: bool,
    },
    Reset {
        zone: u8,
    },
    Finish {
        zone: u8,
    },
    Open {
        zone: u8,
    },
    Close {
        zone: u8,
    },
    Flush,
    /// Reads all of a zone and checks the content.
    Check {
        zone: u8,
    },
    /// Sets the fault probabilities of the state disk if `state` is set, otherwise of the data
    /// disk.
    Plan {
        state: bool,
        plan: Plan,
    },
    Heal,
    /// Kills the user of both disks; with `power`, also cuts the power of both.
    Crash {
        power: bool,
        seed: u64,
    },
}

/// Draws `count` steps of a run. The same seed gives the same steps.
pub fn draw(seed: u64, count: usize) -> Vec<Step> {
    let mut rng = Rng::new(seed);
    (0..count)
        .map(|_| {
            let zone = rng.below(u64::from(ZONES)) as u8;
            let blocks = 1 + rng.below(10) as u8;
            let fua = rng.chance(20);
            match rng.below(100) {
                0..30 => Step::Write { zone, blocks, fua },
                30..40 => Step::Append { zone, blocks, fua },
                40..50 => Step::Reset { zone },
                50..53 => Step::Finish { zone },
                53..56 => Step::Open { zone },
                56..59 => Step::Close { zone },
                59..69 => Step::Flush,
                69..79 => Step::Check { zone },
                79..87 => Step::Plan { state: rng.chance(70), plan: plan(&mut rng) },
                87..92 => Step::Heal,
                _ => Step::Crash { power: rng.chance(60), seed: rng.word() },
            }
        })
        .collect()
}

fn plan(rng: &mut Rng) -> Plan {
    let mut draw = || if rng.chance(50) { rng.below(300) as u16 } else { 0 };
    let chances =
        FaultRates { fail: draw(), fail_done: draw(), fail_partly: draw(), ..FaultRates::default() };
    let flush = FaultRates { fail: draw(), fail_done: draw(), ..FaultRates::default() };
    Plan { write: chances, flush, clear: chances, ..Plan::default() }
}
